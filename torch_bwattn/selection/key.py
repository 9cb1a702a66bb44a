"""What problems share a measurement: their kind, which shapes the kernels' code, and their sizes in buckets.

Forward and backward have keys, measurements and choices of their own. That is a choice of the pair all the same: every
backend takes what any other leaves (``out``, natural-log ``lse``, the counter of dropout), so the best pair is the best
forward and the best backward.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..problem import Problem

_FEWEST = 16
_WIDTHS = (32, 64, 96, 128, 192, 256)


def bucket(size: int) -> int:
    """The bucket of a size: the next power of two, at least 16.

    What decides between two kernels changes with tiles and with the programs on an SM, of which both are counted in
    powers of two: the least tile has 16 queries, and the winners of the tables change at 64, 256 and 1024. Within a
    bucket times differ by up to two, and the order of kernels, measured at the buckets' ends, by a few per cent.
    """
    return max(_FEWEST, 1 << (size - 1).bit_length()) if size > 1 else _FEWEST


def width_bucket(width: int) -> int:
    """The width, from 32 to 256, that tiles of a head width are made for."""
    return next((most for most in _WIDTHS if width <= most), width)


class Key(NamedTuple):
    """A kind of problem, and buckets of (batch times heads, Sq, Skv)."""

    kind: str
    sizes: tuple[int, int, int]

    def __str__(self) -> str:
        heads, q_len, kv_len = self.sizes
        return f"{self.kind} | BH{heads} S{q_len}/{kv_len}"

    def distance(self, other: Key) -> float:
        """How many doublings lie between the sizes of two keys of one kind; infinite between kinds."""
        if self.kind != other.kind:
            return math.inf
        return sum(abs(math.log2(a / b)) for a, b in zip(self.sizes, other.sizes, strict=True))


def kind_of(problem: Problem) -> str:
    """Everything but the sizes that decides which kernels there are and how they compare, as a line of words."""
    words = [
        "backward" if problem.backward else "forward",
        problem.target,
        _name(problem.dtype),
        f"D{width_bucket(problem.head_dim)}/{width_bucket(problem.value_dim)}",
    ]
    if problem.kv_heads and problem.heads > problem.kv_heads:
        words.append(f"group{1 << (problem.heads // problem.kv_heads - 1).bit_length()}")
    if problem.low_diagonal is not None:
        words.append("window" if problem.diagonal is not None else "left-window")
    elif problem.diagonal is not None:
        words.append("causal")
    if problem.mask_dtype is not None:
        words.append(f"mask-{_name(problem.mask_dtype)}")
    flags = {
        "mask-grad": problem.mask_grad,
        "dropout": problem.dropout_p > 0.0,
        "softcap": problem.softcap is not None,
        "sink": problem.sink_dtype is not None,
        "lse-grad": problem.lse_grad,
        "deterministic": problem.deterministic and problem.backward,
        "unaligned": not problem.bulk_copies,
    }
    return " ".join([*words, *(name for name, holds in flags.items() if holds)])


def key_of(problem: Problem) -> Key:
    """The key under which a problem's measurements are kept."""
    heads = problem.batch * problem.heads
    return Key(kind_of(problem), (bucket(heads), bucket(problem.q_len), bucket(problem.kv_len)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

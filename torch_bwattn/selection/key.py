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
    """Everything but the sizes that decides how kernels compare, as a line of words.

    The two 16-bit dtypes share their kernels' shapes and rates, and so do all groups of heads. A sink is one more term
    of a row, whichever kernel adds it.
    """
    half = problem.dtype in (torch.bfloat16, torch.float16)
    dtype = "16-bit" if half else _name(problem.dtype)
    mask = None
    if problem.mask_dtype is not None:
        mask = "bool-mask" if problem.mask_dtype == torch.bool else "additive-mask"
    return " ".join(_words(problem, dtype, mask, "grouped" if problem.heads > problem.kv_heads else None))


def features_of(problem: Problem) -> str:
    """Everything but the sizes that decides the kernels' code and whether it is right, as a line of words."""
    mask = None if problem.mask_dtype is None else f"mask-{_name(problem.mask_dtype)}"
    group = problem.heads // problem.kv_heads if problem.kv_heads else 0
    words = _words(problem, _name(problem.dtype), mask, f"group{group}" if group > 1 else None)
    sink = None if problem.sink_dtype is None else f"sink-{_name(problem.sink_dtype)}"
    widths = f"{problem.head_dim}/{problem.value_dim}"
    return " ".join(word for word in (*words, sink, widths) if word)


def _words(problem: Problem, dtype: str, mask: str | None, group: str | None) -> list[str]:
    direction = "backward" if problem.backward else "forward"
    widths = f"D{width_bucket(problem.head_dim)}/{width_bucket(problem.value_dim)}"
    shown = None
    if problem.low_diagonal is not None:
        shown = "window" if problem.diagonal is not None else "left-window"
    elif problem.diagonal is not None:
        shown = "causal"
    flags = {
        "mask-grad": problem.mask_grad,
        "dropout": problem.dropout_p > 0.0,
        "softcap": problem.softcap is not None,
        "lse-grad": problem.lse_grad,
        "deterministic": problem.deterministic and problem.backward,
        "unaligned": not problem.bulk_copies,
    }
    named = (direction, problem.target, dtype, widths, group, shown, mask)
    return [*(word for word in named if word), *(name for name, holds in flags.items() if holds)]


def key_of(problem: Problem) -> Key:
    """The key under which a problem's measurements are kept."""
    heads = problem.batch * problem.heads
    return Key(kind_of(problem), (bucket(heads), bucket(problem.q_len), bucket(problem.kv_len)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

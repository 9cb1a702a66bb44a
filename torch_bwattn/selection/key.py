"""What problems share a measurement: their kind, which shapes the kernels' code, and their sizes in buckets.

Forward and backward have keys, measurements and choices of their own. That is a choice of the pair all the same: every
backend takes what any other leaves (``out``, natural-log ``lse``, the counter of dropout), so the best pair is the best
forward and the best backward.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ..backends.helion.forms import WHOLE_KEYS, WIDEST, has_tcgen05
from ..problem import Problem, dtype_name

_FEWEST = 16
_WIDTHS = (32, 64, 96, 128, 192, 256)


def bucket(size: int) -> int:
    """The bucket of a size: the next power of two, at least 16.

    What decides between two kernels changes with tiles and with the programs on an SM, both powers of two: the least
    tile has 16 queries, and the chosen configs change at 64, 256 and 1024.
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

    @property
    def programs(self) -> int:
        """Tiles of 64 queries, as far as they matter: with :data:`_ENOUGH` every SM has some."""
        heads, q_len, _ = self.sizes
        return min(heads * max(1, q_len // _TILE), _ENOUGH)

    def distance(self, other: Key) -> float:
        """How little a measurement for one key says of the other: doublings of what decides, and a price of the kinds.

        The number of programs decides, up to a few for each SM, and the number of queries; each counts twice as much as
        that of keys. With each size of 318 entries measured on the H200 left out in turn, 90 % of the choices are
        within 5 % of the best and 94 % within 15 %; nearly all others are few heads beside many keys, three doublings
        from what was measured, up to twice the best. Near entries averaged by distance choose no better.
        """
        price = _between_kinds(self.kind, other.kind)
        if price == math.inf:  # most of a table
            return price
        pairs = ((2, self.programs, other.programs), *zip((2, 1), self.sizes[1:], other.sizes[1:], strict=True))
        return price + sum(weight * abs(math.log2(a / b)) for weight, a, b in pairs)


_TILE, _ENOUGH = 64, 512

_PRICES = {"grouped": 1.0, "lse-grad": 1.0, "causal": 2.0, "window": 2.0, "left-window": 2.0, "softcap": 2.0}
"""Of what one kind has and the other has not. Whatever is not here has other kernels, and no common order."""


@functools.lru_cache(maxsize=4096)
def _between_kinds(one: str, other: str) -> float:
    if one == other:
        return 0.0
    (widths, words), (other_widths, other_words) = _parsed(one), _parsed(other)
    price = sum(_PRICES.get(word, math.inf) for word in words ^ other_words)
    if widths != other_widths:
        price += 1.0 + sum(abs(math.log2(a / b)) for a, b in zip(widths, other_widths, strict=True))
    return price


def _parsed(kind: str) -> tuple[tuple[int, ...], frozenset[str]]:
    """A kind's widths and its other words."""
    words = kind.split()
    widths = next((word for word in words if word[0] == "D" and "/" in word), "D1/1")
    return tuple(map(int, widths[1:].split("/"))), frozenset(words) - {widths}


def kind_of(problem: Problem) -> str:
    """Everything but the sizes that decides how kernels compare, as a line of words.

    The two 16-bit dtypes share their kernels' shapes and rates, and so do all groups of heads. A sink is one more term
    of a row, whichever kernel adds it.
    """
    half = problem.dtype in (torch.bfloat16, torch.float16)
    dtype = "16-bit" if half else dtype_name(problem.dtype)
    mask = None
    if problem.mask_dtype is not None:
        mask = "bool-mask" if problem.mask_dtype == torch.bool else "additive-mask"
    return " ".join(_words(problem, dtype, mask, "grouped" if problem.heads > problem.kv_heads else None))


FEW_QUERIES = 64
"""Up to so many, configs depend on the number itself: heads share a tile, and tiles shrink."""


def features_of(problem: Problem) -> str:
    """What decides the kernels' code and whether it is right, as a line of words: everything but how large it is."""
    group = problem.heads // problem.kv_heads if problem.kv_heads else 0
    words = _words(problem, dtype_name(problem.dtype), _mask(problem), f"group{group}" if group > 1 else None)
    more = {
        f"sink-{dtype_name(problem.sink_dtype)}" if problem.sink_dtype is not None else "": True,
        f"{problem.head_dim}/{problem.value_dim}": True,
        f"q{problem.q_len}": problem.q_len <= FEW_QUERIES,
        "equal-lengths": problem.q_len == problem.kv_len,
        "blind-rows": problem.diagonal is not None and problem.diagonal < 0,
        "scale<=0": problem.scale <= 0.0,
        "whole-keys": has_whole_keys(problem),
        "rows-apart": problem.mask_rows_apart,
    }
    return " ".join([*words, *(word for word, holds in more.items() if word and holds)])


def has_whole_keys(problem: Problem) -> bool:
    """Whether a problem on Blackwell has keys in whole tiles, none hidden: some kernels take no other, if none is."""
    if not has_tcgen05(problem.target) or not (problem.backward or problem.head_dim > WIDEST):
        return False
    return problem.diagonal is None and problem.low_diagonal is None and problem.kv_len % WHOLE_KEYS == 0


def _mask(problem: Problem) -> str | None:
    """The mask's dtype, and which of its dimensions are broadcast."""
    if problem.mask_dtype is None:
        return None
    broadcast = "".join("1" if size == 1 else "n" for size in problem.mask_sizes or ())
    return f"mask-{dtype_name(problem.mask_dtype)}-{broadcast}"


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

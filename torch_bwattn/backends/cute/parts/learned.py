"""Gradients of captured tensors, summed over a warp's part of a tile before they are added in memory.

A warp has 16 keys by 8 n queries of transposed scores. Lane 4 g + c has keys g and g + 8 and of every eight queries
2 c and 2 c + 1: its element (r, 2 j + e) is key g + 8 r and query 2 c + e + 8 j, from the warp's first. What a value
that was read differs by (:mod:`....mods.dependence`) says what is summed: all, each key's, each query's, or each
distance's, a diagonal:

    distance of (r, 2 j + e) = (2 c - g) + e + 8 (j - r)

so a lane's own elements with the same e and j - r are one sum, and with 2 c - g = 8 w + rho, 0 <= rho < 8, lanes of
the same rho have the same distances rho + e + 8 t, t = j - r + w. Those are the four lanes (c, (2 c - rho) mod 8), and
the sums of e = 1 are those of e = 0 and rho + 1. A diagonal's sum is then at each lane of its rho, of which lane c
adds those t that are c modulo 4.

Functions take lanes' values of any kind that adds up, so that they can be tried without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROWS = 2
Part = Mapping[tuple[int, int], Any]
"""A lane's elements by (row, column)."""
Shuffle = Callable[[Any, Any], Any]
"""Takes a value and a lane, and gives that lane's value."""
Choose = Callable[[Any, Any, Any], Any]
"""Takes a condition, and what is given if it holds, and else."""


def _exchanged(value: Any, lane: Any, masks: Sequence[int], shuffle: Shuffle) -> Any:
    """The sum over lanes whose numbers differ in some bits."""
    for mask in masks:
        value = value + shuffle(value, lane ^ mask)
    return value


def _total(values: Sequence[Any]) -> Any:
    found = values[0]
    for value in values[1:]:
        found = found + value
    return found


def over_all(part: Part, columns: int, lane: Any, shuffle: Shuffle) -> Any:
    """The sum of a warp's elements, at every lane."""
    own = _total([part[r, j] for r in range(ROWS) for j in range(columns)])
    return _exchanged(own, lane, (1, 2, 4, 8, 16), shuffle)


def by_keys(part: Part, columns: int, lane: Any, shuffle: Shuffle) -> list[Any]:
    """Sums of a lane's keys, at each of a key's four lanes."""
    return [_exchanged(_total([part[r, j] for j in range(columns)]), lane, (1, 2), shuffle) for r in range(ROWS)]


def by_queries(part: Part, columns: int, lane: Any, shuffle: Shuffle) -> list[Any]:
    """Sums of a lane's queries, at each of a query's eight lanes."""
    return [_exchanged(part[0, j] + part[1, j], lane, (4, 8, 16), shuffle) for j in range(columns)]


def by_distances(
    part: Part, columns: int, lane: Any, shuffle: Shuffle, choose: Choose, zero: Any
) -> tuple[Any, list[Any]]:
    """``(rho, sums)``: the sums of distances ``rho + 8 (number - 2)``, at each of the four lanes of a rho."""
    n = columns // 2
    c, g = lane & 3, lane >> 2
    rho, wraps = (2 * c - g) & 7, 2 * c < g

    def own(e: int, t: int) -> Any:
        some = [part[r, 2 * (t + r) + e] for r in range(ROWS) if 0 <= t + r < n]
        return _total(some) if some else zero

    def partner(other_c: Any, other_rho: Any) -> Any:
        return 4 * ((2 * other_c - other_rho) & 7) + other_c

    sums: list[list[Any]] = []
    for e in range(2):
        of_lane = [choose(wraps, own(e, t + 1), own(e, t)) for t in range(-2, n)]
        for mask in (1, 2):
            of_lane = [value + shuffle(value, partner(c ^ mask, rho)) for value in of_lane]
        sums.append(of_lane)
    even, odd = [*sums[0], zero], [*sums[1], zero]
    shifted = [choose(rho == 7, odd[t - 1] if t else zero, odd[t]) for t in range(n + 3)]
    before = partner(c, (rho - 1) & 7)
    return rho, [one + shuffle(other, before) for one, other in zip(even, shifted, strict=True)]

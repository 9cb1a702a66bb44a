"""Which keys a tile of queries sees, in elements and in tiles of keys.

Query i sees key j when ``i - left <= j <= i + right`` and ``j < Skv``; causality and windows are both of this form,
with the alignment (top left or bottom right) already in ``left`` and ``right``. For the rows [first, last] of a tile:

    seen by some row     [first - left, last + right]     the tiles that are loaded        [begin, end)
    seen by every row    [last - left,  first + right]    the tiles that need no mask      [whole_begin, whole_end)

The masked tiles are visited first: those at the end, those at the beginning (windows only), then the whole ones; each
kind from its last tile to its first. One loop with a mask and one without are all the code there is.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute


class KeyTiles(NamedTuple):
    """Bounds in tiles of keys, ``begin <= whole_begin <= whole_end <= end``, unless ``end <= begin``: no tile."""

    begin: Int32
    whole_begin: Int32
    whole_end: Int32
    end: Int32

    @property
    def count(self) -> Int32:
        """How many tiles are visited."""
        return self.end - self.begin

    @property
    def masked(self) -> Int32:
        """How many of them need a mask: the first ones visited."""
        return self.end - self.whole_end + self.whole_begin - self.begin


@cute.jit
def visited(tiles: KeyTiles, i: Int32, windowed: cutlass.Constexpr) -> Int32:
    """The i-th tile visited, i in [0, count)."""
    n = tiles.end - 1 - i
    if const_expr(windowed):
        at_end, at_begin = tiles.end - tiles.whole_end, tiles.whole_begin - tiles.begin
        if i >= at_end:
            n = tiles.whole_begin - 1 - (i - at_end)
        if i >= at_end + at_begin:
            n = tiles.whole_end - 1 - (i - at_end - at_begin)
    return n


def key_tiles(
    first: Int32,
    tile_m: int,
    tile_n: int,
    q_len: Int32,
    kv_len: Int32,
    right: Int32 | None,
    left: Int32 | None,
    packed: int,
) -> KeyTiles:
    """The tiles of keys for the ``tile_m`` rows from ``first`` on.

    ``right`` and ``left`` are None where there is no limit. A query has ``packed`` rows, one for each head.
    """
    last = (cutlass.min(first + tile_m, q_len * packed) - 1) // packed
    first = first // packed
    end_key, whole_end_key = kv_len, kv_len
    if const_expr(right is not None):
        end_key = cutlass.min(kv_len, last + right + 1)
        whole_end_key = cutlass.min(kv_len, first + right + 1)
    end = (cutlass.max(end_key, 0) + (tile_n - 1)) // tile_n
    whole_end = cutlass.min(cutlass.max(whole_end_key, 0) // tile_n, end)
    if const_expr(left is None):
        return KeyTiles(Int32(0), Int32(0), whole_end, end)
    begin = cutlass.max(first - left, 0) // tile_n
    whole_begin = (cutlass.max(last - left, 0) + (tile_n - 1)) // tile_n
    whole_begin = cutlass.max(cutlass.min(whole_begin, end), begin)
    return KeyTiles(begin, whole_begin, cutlass.max(whole_end, whole_begin), end)


@cute.jit
def hide_keys(
    scores: cute.Tensor,
    coords: cute.Tensor,
    first_row: Int32,
    first_key: Int32,
    kv_len: Int32,
    right: Int32 | None,
    left: Int32 | None,
    packed: cutlass.Constexpr,
) -> None:
    """Sets to -inf what is not seen.

    ``scores`` and ``coords`` are (rows, columns) views of one thread's part of a tile; ``coords`` holds each element's
    (row, column) in the tile.
    """
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        row = (first_row + coords[r, 0][0]) // packed
        stop = kv_len - first_key
        if const_expr(right is not None):
            stop = cutlass.min(stop, row + right + 1 - first_key)
        if const_expr(left is not None):
            start = row - left - first_key
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            column = coords[0, c][1]
            seen = column < stop
            if const_expr(left is not None):
                seen = seen and column >= start
            scores[r, c] = scores[r, c] if seen else -Float32.inf

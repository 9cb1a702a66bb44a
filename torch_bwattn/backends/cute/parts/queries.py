"""Which queries see a tile of keys, in elements and in tiles of queries: :mod:`.keys` from the other side.

Query i sees key j when ``i - left <= j <= i + right`` and ``j < Skv``, so key j is seen by
``j - right <= i <= j + left``.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute


class QueryTiles(NamedTuple):
    """Tiles of queries ``[begin, end)`` that see a key of the tile; none if ``end <= begin``."""

    begin: Int32
    end: Int32


def query_tiles(
    first_key: Int32,
    tile_m: int,
    tile_n: int,
    q_len: Int32,
    kv_len: Int32,
    right: Int32 | None,
    left: Int32 | None,
) -> QueryTiles:
    """The tiles of queries for the ``tile_n`` keys from ``first_key`` on; None is no limit."""
    last_key = cutlass.min(first_key + tile_n, kv_len) - 1
    begin, end = Int32(0), q_len
    if const_expr(right is not None):
        begin = cutlass.max(first_key - right, 0) // tile_m
    if const_expr(left is not None):
        end = cutlass.min(q_len, last_key + left + 1)
    return QueryTiles(begin, (cutlass.max(end, 0) + (tile_m - 1)) // tile_m)


def tiles_before(
    first_query: Int32, tile_m: int, n: Int32, tile_n: int, kv_len: Int32, right: Int32 | None, left: Int32 | None
) -> Int32:
    """How many tiles of keys add to a tile of queries before tile ``n`` does (:mod:`.sums`)."""
    if const_expr(right is not None):
        return cutlass.min(first_query + tile_m - 1 + right, kv_len - 1) // tile_n - n
    if const_expr(left is not None):
        return n - cutlass.max(first_query - left, 0) // tile_n
    return n


@cute.jit
def all_seen(
    first_query: Int32,
    first_key: Int32,
    tile_m: cutlass.Constexpr,
    tile_n: cutlass.Constexpr,
    kv_len: Int32,
    right: Int32 | None,
    left: Int32 | None,
) -> Boolean:
    """Whether every query of a tile sees every key of a tile."""
    seen = first_key + tile_n <= kv_len
    if const_expr(right is not None):
        seen = seen and first_key + tile_n - 1 <= first_query + right
    if const_expr(left is not None):
        seen = seen and first_key >= first_query + tile_m - 1 - left
    return seen


@cute.jit
def hide_keys(
    scores: cute.Tensor,
    coords: cute.Tensor,
    first_query: Int32,
    first_key: Int32,
    kv_len: Int32,
    right: Int32 | None,
    left: Int32 | None,
) -> None:
    """Sets to -inf what is not seen.

    ``scores`` and ``coords`` are (keys, queries) views of a thread's part of a matrix product, whose columns are two of
    every eight. So for a key the queries that see it are a range of the thread's columns, by their distances from the
    first.
    """
    beyond = 8 * cute.size(scores, mode=[1])
    own = first_query + coords[0, 0][1]
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        key = first_key + coords[r, 0][0]
        start, end = Int32(0), Int32(beyond)
        if const_expr(right is not None):
            start = key - right - own
        if const_expr(left is not None):
            end = key + left - own
        start = start if key < kv_len else Int32(beyond)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            distance = 8 * (c // 2) + c % 2
            seen = distance >= start
            if const_expr(left is not None):
                seen = seen and distance <= end
            scores[r, c] = scores[r, c] if seen else -Float32.inf

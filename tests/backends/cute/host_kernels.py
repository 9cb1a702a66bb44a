"""Index arithmetic of the kernels as functions that run on the CPU. Imports cutlass: import this inside tests only."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from torch_bwattn.backends.cute.parts import keys, schedule


@cute.jit
def visited_tiles(
    out: cute.Tensor,
    first: Int32,
    q_len: Int32,
    kv_len: Int32,
    right: Int32,
    left: Int32,
    tile_m: cutlass.Constexpr,
    tile_n: cutlass.Constexpr,
    packed: cutlass.Constexpr,
    has_right: cutlass.Constexpr,
    has_left: cutlass.Constexpr,
) -> None:
    """Writes how many tiles of keys are visited, how many of them masked, and which, in order."""
    high = right if const_expr(has_right) else None
    low = left if const_expr(has_left) else None
    tiles = keys.key_tiles(first, tile_m, tile_n, q_len, kv_len, high, low, packed)
    out[0] = tiles.count
    out[1] = tiles.masked
    for i in cutlass.range(tiles.count, unroll=1):
        out[2 + i] = keys.visited(tiles, i, has_left)


@cute.jit
def query_tile(
    out: cute.Tensor, index: Int32, m_tiles: Int32, heads: Int32, kv_heads: Int32, batch: Int32, kv_len: Int32
) -> None:
    """Writes how many tiles of queries there are, and the index-th: m, batch, head, key head."""
    order = schedule.make_order(m_tiles, heads, kv_heads, batch, Int64(kv_len) * 512)
    tile = schedule.tile_at(order, index)
    out[0] = order.total
    out[1] = tile.m_index
    out[2] = tile.batch
    out[3] = tile.head
    out[4] = tile.kv_head

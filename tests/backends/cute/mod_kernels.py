"""Mods for the host: one value for each position. Imports cutlass: import this inside tests only."""

from __future__ import annotations

import cutlass
import torch
from cutlass import Float32, Int32, cute

from torch_bwattn.backends.cute.flex_forward_sm90 import Flex
from torch_bwattn.backends.cute.parts import mods, schedule


@cute.jit
def on_grid(
    out: cute.Tensor,
    scores: cute.Tensor,
    b: Int32,
    h: Int32,
    t0: cute.Tensor | None,
    t1: cute.Tensor | None,
    t2: cute.Tensor | None,
    text: cutlass.Constexpr,
    dtypes: cutlass.Constexpr,
) -> None:
    """Writes what a mod gives, a mask's as 0 or 1."""
    for i in cutlass.range(out.shape[0], unroll=1):
        for j in cutlass.range(out.shape[1], unroll=1):
            inputs = mods.position(b, h, Int32(i), Int32(j))
            inputs["score"] = mods.Value(scores[i, j], torch.float32)
            found = mods.evaluated(text, inputs, (t0, t1, t2), dtypes, ())
            out[i, j] = mods.cast(found, torch.float32).number.to(Float32)


@cute.jit
def visited_in_lists(
    out: cute.Tensor,
    part_count: cute.Tensor,
    part_index: cute.Tensor,
    full_count: cute.Tensor | None,
    full_index: cute.Tensor | None,
    m_index: Int32,
    b: Int32,
    h: Int32,
    down: Int32,
    across: Int32,
    i: Int32,
    kernel: cutlass.Constexpr,
) -> None:
    """Writes how many tiles of keys a tile of queries visits, how many of them masked, and the i-th."""
    kernel.flex = Flex(part_count, part_index, full_count, full_index, (), (), down, across, Float32(1.0))
    tile = schedule.Tile(m_index, b, h, h)
    tiles = kernel.key_tiles(tile, None)
    out[0] = tiles.count
    out[1] = tiles.masked
    out[2] = kernel.visited(tile, tiles, i, False)

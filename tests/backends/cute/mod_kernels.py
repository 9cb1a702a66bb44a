"""Mods for the host: one value for each position. Imports cutlass: import this inside tests only."""

from __future__ import annotations

import cutlass
import torch
from cutlass import Float32, Int32, cute

from torch_bwattn.backends.cute.backward_sm90 import Tile
from torch_bwattn.backends.cute.parts import mods, schedule
from torch_bwattn.backends.cute.parts.flex import Flex, Mods
from torch_bwattn.mods.program import parsed


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
            inputs = mods.position(b, h, (Int32(i) - 1, 1), (Int32(j) + 2, -2))
            inputs["score"] = mods.Value(scores[i, j], torch.float32)
            program = parsed(text)
            (found,) = mods.evaluated(program.steps, [program.result], inputs, (t0, t1, t2), dtypes, ())
            out[i, j] = mods.cast(found, torch.float32).number.to(Float32)


@cute.jit
def slopes_on_grid(
    out: cute.Tensor,
    slopes: cute.Tensor,
    scores: cute.Tensor,
    b: Int32,
    h: Int32,
    t0: cute.Tensor | None,
    t1: cute.Tensor | None,
    t2: cute.Tensor | None,
    features: cutlass.Constexpr,
) -> None:
    """Writes what a score mod gives, and its derivative."""
    flex = Flex(None, None, None, None, (t0, t1, t2), (), Int32(1), Int32(1), Float32(1.0))
    for i in cutlass.range(out.shape[0], unroll=1):
        for j in cutlass.range(out.shape[1], unroll=1):
            at = mods.position(b, h, (Int32(i) - 1, 1), (Int32(j) + 2, -2))
            out[i, j], slopes[i, j] = Mods(features, flex).modified_with_slope(scores[i, j], at)


@cute.jit
def visited_in_columns(
    out: cute.Tensor,
    part_count: cute.Tensor,
    part_index: cute.Tensor,
    full_count: cute.Tensor | None,
    full_index: cute.Tensor | None,
    n: Int32,
    head: Int32,
    m_tiles: Int32,
    down: Int32,
    across: Int32,
    i: Int32,
    kernel: cutlass.Constexpr,
) -> None:
    """Writes how many tiles of queries of a head a tile of keys visits, the i-th, and whether it is masked."""
    kernel.more = Flex(part_count, part_index, full_count, full_index, (), (), down, across, Float32(1.0))
    tile = Tile(n, Int32(0), head, Int32(0), m_tiles, Int32(0))
    of_head = kernel.of_head(tile, head)
    out[0] = of_head.count
    m, masked = kernel.visited(tile, head, of_head, i)
    out[1] = m
    out[2] = Int32(masked)


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
    kernel.more = Flex(part_count, part_index, full_count, full_index, (), (), down, across, Float32(1.0))
    tile = schedule.Tile(m_index, b, h, h)
    tiles = kernel.key_tiles(tile, None)
    out[0] = tiles.count
    out[1] = tiles.masked
    out[2] = kernel.visited(tile, tiles, i, False)

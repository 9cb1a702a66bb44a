"""The order in which tiles of queries are visited.

Tiles of all heads and batches are numbered in sections. A section is a few (batch, head) pairs whose keys and values
stay in the L2 cache together; within it the tile of queries is the slow index, from the last to the first (under
causality the later tiles have more keys, and long work goes first), and the pair the fast one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute

L2_BYTES = 32 * 2**20
"""Of keys and values that a section may hold. The H200's L2 has 50 MB, which queries and outputs pass through too."""


@dataclass(frozen=True)
class TileOrder:
    """Sizes of the numbering, made on the host and passed to the kernel."""

    section: cute.FastDivmodDivisorV2  # pairs of a section
    rest: cute.FastDivmodDivisorV2  # pairs of the last, shorter one
    section_tiles: cute.FastDivmodDivisorV2  # tiles of a whole section
    heads: cute.FastDivmodDivisorV2
    group: cute.FastDivmodDivisorV2  # query heads of a key head
    m_tiles: Int32
    sections: Int32  # whole ones
    total: Int32


class Tile(NamedTuple):
    """One tile of queries."""

    m_index: Int32
    batch: Int32
    head: Int32
    kv_head: Int32


def make_order(m_tiles: Int32, heads: Int32, kv_heads: Int32, batch: Int32, kv_bytes_of_head: Int64) -> TileOrder:
    """The order for a problem. ``kv_bytes_of_head``: keys and values of one head, in bytes."""
    group, pairs = heads // kv_heads, heads * batch
    fitting = Int32(cutlass.min(Int64(L2_BYTES) // cutlass.max(kv_bytes_of_head, Int64(1)), Int64(pairs)))
    section = cutlass.min(cutlass.max(fitting, 1) * group, pairs)
    sections = pairs // section
    rest = cutlass.max(pairs - sections * section, 1)
    divisor = cute.FastDivmodDivisorV2
    return TileOrder(
        divisor(section),
        divisor(rest),
        divisor(section * m_tiles),
        divisor(heads),
        divisor(group),
        m_tiles,
        sections,
        m_tiles * pairs,
    )


@cute.jit
def tile_at(order: TileOrder, index: Int32) -> Tile:
    """The tile of a number in [0, total)."""
    section, within = divmod(index, order.section_tiles)
    m, pair = divmod(within, order.section)
    if section >= order.sections:
        m, pair = divmod(within, order.rest)
    batch, head = divmod(section * order.section.divisor + pair, order.heads)
    kv_head, _ = divmod(head, order.group)
    return Tile(order.m_tiles - 1 - m, batch, head, kv_head)


@cute.jit
def claim(counter: cute.Pointer) -> Int32:
    """The first number that no program has taken, for a whole warp. ``counter`` is 0 before the kernel runs."""
    taken = Int32(0)
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(taken, 0)


@cute.jit
def next_index(index: Int32, programs: Int32, counter: cute.Tensor | None, counts: Int32) -> Int32:
    """The number of a program's next tile, for a whole warp: ``programs`` on, or the first that no program has taken.

    The latter if ``counts`` is not 0. ``counter`` is 0 before the kernel runs; programs take their first tile by their
    own number.
    """
    following = index + programs
    if const_expr(counter is not None):  # noqa: SIM102 (joined, the two would be one that is decided when run)
        if counts != 0:
            following = programs + claim(counter.iterator)
    return following

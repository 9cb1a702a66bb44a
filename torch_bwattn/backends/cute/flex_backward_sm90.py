"""Attention backward for Hopper with mods and lists of blocks: :mod:`.backward_sm90` with other tiles and scores.

    S = score_mod(scale * Q K^T, b, h, i, j), -inf where (i, j) is not shown      P = exp2(log2(e) * (S - lse))
    dS = P * (dP - delta) * d score_mod / d score, 0 where P is

A tile of keys visits, for each query head, the tiles of queries in the blocks that its column of blocks lists, those
of which ``mask_mod`` decides first. Blocks are multiples of tiles both ways, and lists are in order. Without lists it
visits all tiles, masked if there is a ``mask_mod``. What of a tile lies beyond the last key or query is hidden.

Only the producer reads lists: it leaves with each Q which it is, and with K how many visits there are. The derivative
is computed with the scores, when dP's registers are free; a mod that only adds to scores has none. What such a mod
reads of learned tables gets gradients, dS times what it was multiplied by, summed first over what of a warp's scores
has read the same (:mod:`.parts.learned`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, pipeline
from cutlass.cutlass_dsl import select_

from ...mods.dependence import Along, differs_by
from .backward_sm90 import APART, Backward, OfHead, Tile, Values, Visit
from .configs import BackwardConfig, BackwardFeatures
from .forward_sm90 import LOG2_E, Limits
from .parts import learned, mods, queries, schedule, wgmma
from .parts.flex import (
    At,
    Change,
    Flex,
    Mods,
    add_unless_0,
    derivative_of,
    fake_arguments,
    fake_grads,
    given,
    is_sloped,
    up_to,
)


def _shuffle(value: Float32, lane: Int32) -> Float32:
    return cute.arch.shuffle_sync(value, lane)


def _choose(condition: Boolean, one: Float32, other: Float32) -> Float32:
    return Float32(select_(condition, one, other))


def _chosen(number: Int32, values: Sequence[Float32], zero: Float32) -> Float32:
    """The value of a number that only the lane knows; 0 beyond the last."""
    found = zero
    for own, value in enumerate(values):
        found = _choose(number == own, value, found)
    return found


class FlexBackward(Backward):
    """The kernel for one config and one set of features, which have mods."""

    def __init__(self, features: BackwardFeatures, config: BackwardConfig) -> None:
        super().__init__(features, config)
        self.mods = given(features.mods)
        self.counted = self.mods.lists
        self.sloped = is_sloped(self.mods)

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments of any sizes and strides, for the compiler."""
        *operands, scale, _, _, _, programs, stream = super().fake_arguments()
        mods = self.mods
        return *operands, scale, *fake_arguments(mods), *fake_grads(mods), programs, stream

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dq: cute.Tensor,
        scale: Float32,
        part_count: cute.Tensor | None,
        part_index: cute.Tensor | None,
        full_count: cute.Tensor | None,
        full_index: cute.Tensor | None,
        t0: cute.Tensor | None,
        t1: cute.Tensor | None,
        t2: cute.Tensor | None,
        t3: cute.Tensor | None,
        t4: cute.Tensor | None,
        t5: cute.Tensor | None,
        t6: cute.Tensor | None,
        t7: cute.Tensor | None,
        n0: Int32 | None,
        n1: Int32 | None,
        n2: Int32 | None,
        n3: Int32 | None,
        down: Int32,
        across: Int32,
        g0: cute.Tensor | None,
        g1: cute.Tensor | None,
        g2: cute.Tensor | None,
        g3: cute.Tensor | None,
        g4: cute.Tensor | None,
        g5: cute.Tensor | None,
        g6: cute.Tensor | None,
        g7: cute.Tensor | None,
        programs: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel; lists, tables and numbers as :class:`.Flex` has them, the rest as :class:`.Backward`."""
        c = scale * LOG2_E
        if const_expr(self.mods.score_mod is not None):
            c = Float32(LOG2_E)
        tables, numbers = (t0, t1, t2, t3, t4, t5, t6, t7), (n0, n1, n2, n3)
        grads = (g0, g1, g2, g3, g4, g5, g6, g7)
        flex = Flex(part_count, part_index, full_count, full_index, tables, numbers, down, across, scale, grads)
        self.start(q, k, v, do, lse, delta, dk, dv, dq, scale, c, None, None, None, programs, stream, flex)

    # ---------------------------------------------------------------------------------------------- what is visited

    def tile_of(self, order: schedule.TileOrder, index: Int32, limits: Limits) -> Tile:
        """A program's tile of keys by its number; the first keys go first, which under causality have most queries."""
        tile = schedule.tile_at(order, index)
        m_tiles = cute.ceil_div(limits.q_len, self.tile_m)
        return Tile(order.m_tiles - 1 - tile.m_index, tile.batch, tile.kv_head, Int32(0), m_tiles, Int32(0))

    def visits_of(self, tile: Tile, next_tile: cute.Tensor, group: Int32) -> Int32:
        """What the producer has counted."""
        return self.number(next_tile, 1)

    @cute.jit
    def counted_visits(self, tile: Tile, group: Int32) -> Int32:
        """The visits of a tile, of all heads."""
        total = Int32(0)
        for g in cutlass.range(group, unroll=1):
            total = total + self.of_head(tile, tile.kv_head * group + g).count
        return total

    def of_head(self, tile: Tile, head: Int32) -> OfHead:
        """How many tiles of queries of a head are visited, and of how many ``mask_mod`` decides."""
        if not self.mods.lists:
            return OfHead(tile.end, tile.end if self.mods.mask_mod is not None else Int32(0))
        flex = self.more
        part = self.tiles_in(flex.part_count, flex.part_index, tile, head)
        full = self.tiles_in(flex.full_count, flex.full_index, tile, head) if self.mods.full else Int32(0)
        return OfHead(part + full, part)

    @cute.jit
    def tiles_in(self, counts: cute.Tensor, index: cute.Tensor, tile: Tile, head: Int32) -> Int32:
        """Tiles of one list, without those of its last block beyond the last query."""
        down, line = self.more.down, tile.n // self.more.across
        blocks = counts[tile.batch, head, line]
        tiles = blocks * down
        if blocks > 0:
            last = index[tile.batch, head, line, blocks - 1]
            beyond = (last + 1) * down - tile.end
            if beyond > 0:
                tiles -= beyond
        return tiles

    @cute.jit
    def visited(self, tile: Tile, head: Int32, of_head: OfHead, i: Int32) -> tuple[Int32, Boolean]:
        """The i-th tile of queries of a head, and whether ``mask_mod`` decides of it.

        Where there are few, each program begins at another one (:meth:`.Backward.tile_of`).
        """
        count, part = of_head
        place = i
        if count <= APART:
            place = (i + tile.n * self.tile_n // self.tile_m) % cutlass.max(count, 1)
        m, masked = place, place < part
        if const_expr(self.mods.lists and self.mods.full):
            if masked:
                m = self.listed(self.more.part_index, tile, head, place)
            else:
                m = self.listed(self.more.full_index, tile, head, place - part)
        elif const_expr(self.mods.lists):
            m = self.listed(self.more.part_index, tile, head, place)
        return m, masked

    def listed(self, index: cute.Tensor, tile: Tile, head: Int32, i: Int32) -> Int32:
        """The i-th tile of queries of one list."""
        down = self.more.down
        return index[tile.batch, head, tile.n // self.more.across, i // down] * down + i % down

    @cute.jit
    def leave_visit(
        self, visits: cute.Tensor, order: schedule.TileOrder, tile: Tile, group: Int32, head: Int32, m: Int32,
        masked: Boolean, q_pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState,
    ) -> None:  # fmt: skip
        """Leaves a visit for the consumers, once they are done with the Q before in its stage."""
        q_pipe.sync_object_empty.wait(state.index, state.phase)
        if cute.arch.lane_idx() == 0:
            visits[0, state.index] = 2 * m + Int32(masked)
            visits[1, state.index] = tile.batch * order.heads.divisor * group + head
            visits[2, state.index] = tile.batch
            visits[3, state.index] = head
        cute.arch.sync_warp()

    def following(self, tile: Tile, m: Int32, pair: Int32) -> tuple[Int32, Int32]:
        """Not known before Q has come."""
        return m, pair

    def visit_in(self, visits: cute.Tensor, stage: Int32, m: Int32, pair: Int32, first_key: Int32) -> Visit:
        """The visit whose Q is in a stage, which has come."""
        found, pair, batch, head = (visits[word, stage] for word in range(4))
        return Visit(found // 2, pair, first_key, batch, head, found % 2 != 0)

    # -------------------------------------------------------------------------------------------------- the scores

    @cute.jit
    def prepare(
        self, mma: cute.TiledMma, values: Values, cap: Float32 | None, limits: Limits, at: Visit, thread: Int32
    ) -> None:
        """What happens to scores before the exponentials: ``score_mod``, then ``mask_mod``, then the ends."""
        first_query = at.m * self.tile_m
        if const_expr(self.mods.score_mod is not None):
            self.modify(mma, values, at, thread)
        if const_expr(self.mods.mask_mod is not None):  # noqa: SIM102 (the second is decided when run)
            if at.masked:
                self.each_score(mma, values, at, thread, Mods(self.mods, self.more).masked)
        if at.first_key + self.tile_n > limits.kv_len:
            scores, coords = wgmma.rows_view(values.s), self.coords(mma, thread, at)
            queries.hide_keys(scores, coords, first_query, at.first_key, limits.kv_len, None, None)
        if const_expr(self.mods.score_mod is not None):  # noqa: SIM102
            # The last queries' lse is +inf, which a finite score does not survive; any other has to be hidden.
            if first_query + self.tile_m > limits.q_len:
                self.each_score(mma, values, at, thread, up_to(limits.q_len))

    def each_score(self, mma: cute.TiledMma, values: Values, at: Visit, thread: Int32, change: Change) -> None:
        """Changes each of a thread's scores."""
        scores = wgmma.rows_view(values.s)
        for place, position in self.positions(mma, at, thread):
            scores[place] = change(scores[place], position)

    def modify(self, mma: cute.TiledMma, values: Values, at: Visit, thread: Int32) -> None:
        """Scores after ``score_mod``, and the derivative in dP's registers where there is one."""
        of = Mods(self.mods, self.more)
        if not self.sloped:
            self.each_score(mma, values, at, thread, of.modified)
            return
        scores, slopes = wgmma.rows_view(values.s), wgmma.rows_view(values.dp)
        for place, position in self.positions(mma, at, thread):
            scores[place], slopes[place] = of.modified_with_slope(scores[place], position)

    def positions(self, mma: cute.TiledMma, at: Visit, thread: Int32) -> Iterator[tuple[tuple[int, int], At]]:
        """Of each of a thread's scores, where it is among these, and its position."""
        coords = self.coords(mma, thread, at)
        key, query = coords[0, 0]
        first = at.m * self.tile_m + query, at.first_key + key
        for r in range(2):
            for j in range(cute.size(coords, mode=[1])):
                pairs = (first[0], wgmma.column_offset(j)), (first[1], wgmma.ROW_STEP * r)
                yield (r, j), mods.position(at.batch, at.head, *pairs)

    # ------------------------------------------------------------------------------------------- what else is learned

    def learn(self, mma: cute.TiledMma, values: Values, at: Visit, thread: Int32) -> None:
        """Adds the gradients of what was read of learned tables, summed over a warp's scores first; 0 where dS is.

        No product is under way here; beside them the registers do not suffice, and each would be waited for. A table of
        distances, B4 H16 S8192 D128: 13.1 ms, without it 11.6 ms; added at the end of the visit 15.2 ms.
        """
        if not self.mods.learned:
            return
        of, ds = Mods(self.mods, self.more), wgmma.rows_view(values.dp)
        rule = derivative_of(self.mods)
        places = dict(self.positions(mma, at, thread))
        for load in rule.loads:
            part = {
                place: _choose(ds[place] == 0.0, Float32(0.0), of.learned(load, ds[place], position))
                for place, position in places.items()
            }
            for position, value in self.sums_of(differs_by(rule.steps, load.index), part, places):
                add_unless_0(self.more.grads[load.captured].iterator, of.offset(load, position), value)

    def sums_of(
        self, kind: Along, part: learned.Part, places: Mapping[tuple[int, int], At]
    ) -> Iterator[tuple[At, Float32]]:
        """What a lane has to add, and where; 0 where another has, and of what does not exist."""
        lane = cute.arch.lane_idx()
        c, g, columns, zero = lane & 3, lane >> 2, len(part) // learned.ROWS, Float32(0.0)
        at = {name: value.number for name, value in places[0, 0].items()}

        def place(query: Int32, key: Int32) -> At:
            return mods.position(at["b"], at["h"], (query, 0), (key, 0))

        if kind is Along.NOTHING:
            total = learned.over_all(part, columns, lane, _shuffle)
            yield places[0, 0], _choose(lane == 0, total, zero)
        elif kind is Along.KEYS:
            of_keys = learned.by_keys(part, columns, lane, _shuffle)
            value = _chosen(c, of_keys, zero)
            yield place(at["q_idx"], at["kv_idx"] + wgmma.ROW_STEP * c), value
        elif kind is Along.QUERIES:
            of_queries = learned.by_queries(part, columns, lane, _shuffle)
            for first in range(0, columns, 16):  # two of every eight queries, eight of these
                for e in range(2):
                    value = _chosen(g, of_queries[first + e : first + 16 : 2], zero)
                    query = at["q_idx"] + wgmma.column_offset(first + e) + 8 * g
                    yield place(query, at["kv_idx"]), value
        elif kind is Along.DISTANCE:
            rho, of_distances = learned.by_distances(part, columns, lane, _shuffle, _choose, zero)
            distance = at["q_idx"] - at["kv_idx"] - (2 * c - g) + rho  # of the warp's first query and key, and rho
            for number in range(0, len(of_distances), 4):
                value = _chosen(c, of_distances[number : number + 4], zero)
                yield place(at["kv_idx"] + distance + 8 * (number + c - 2), at["kv_idx"]), value
        else:
            for one, value in part.items():
                yield places[one], value

    def weighed(self, p: Float32, slope: Float32) -> Float32:
        """P times the derivative, 0 where P is: the derivative may be no number there."""
        return _choose(p == 0.0, Float32(0.0), p * slope)

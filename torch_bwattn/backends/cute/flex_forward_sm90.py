"""Attention forward for Hopper with mods and lists of blocks: :mod:`.forward_sm90` with other tiles and scores.

    S = score_mod(scale * Q K^T, b, h, i, j), -inf where (i, j) is not shown      x = log2(e) * S

A tile of queries visits the tiles of keys in the blocks that its row of blocks lists: first those of which ``mask_mod``
decides, then the whole ones. Blocks are multiples of tiles both ways. Without lists it visits all tiles, masked if
there is a ``mask_mod``. What of a tile lies beyond the last key is hidden in any case.

Mods are emitted for each score that a thread holds (:mod:`.parts.mods`); what only the row decides, the compiler takes
out. ``finfo.min`` in S becomes -inf in base 2.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, pipeline

from .configs import SLAB, ForwardConfig, ForwardFeatures
from .forward_sm90 import LOG2_E, Forward, Limits, Operands, Place, Rows
from .parts import keys, mods, schedule, wgmma
from .parts.flex import Change, Flex, Mods, fake_arguments, given, up_to


class FlexForward(Forward):
    """The kernel for one config and one set of features, which have mods.

    Only the producer reads lists: it leaves with each K which it is, and with Q how many there are.
    """

    def __init__(self, features: ForwardFeatures, config: ForwardConfig) -> None:
        super().__init__(features, config)
        self.mods = given(features.mods)
        self.leaves_visits = self.mods.lists

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments of any sizes and strides, for the compiler."""
        features = self.mods
        q, k, v, o, lse, scale, *_, programs, stream = super().fake_arguments()
        counter = cute.runtime.make_fake_tensor(Int32, (1,), (1,), assumed_align=4) if features.lists else None
        return q, k, v, o, lse, scale, *fake_arguments(features), counter, programs, stream

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
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
        counter: cute.Tensor | None,
        programs: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel; lists, tables and numbers as in :class:`.Flex`, the rest as :class:`.Forward` has it.

        With lists, ``counter`` is 0: tiles differ in their keys.
        """
        c = scale * LOG2_E
        if const_expr(self.mods.score_mod is not None):
            c = Float32(LOG2_E)
        tables, numbers = (t0, t1, t2, t3, t4, t5, t6, t7), (n0, n1, n2, n3)
        flex = Flex(part_count, part_index, full_count, full_index, tables, numbers, down, across, scale)
        self.start(q, k, v, o, lse, c, None, None, None, None, counter, Int32(1), programs, stream, flex)

    def line(self, tile: schedule.Tile) -> Int32:
        """The row of blocks that a tile of queries is in."""
        return self.m_index(tile) // self.more.down

    def key_tiles(self, tile: schedule.Tile, limits: Limits) -> keys.KeyTiles:
        """As many tiles as are listed, those of which the mask decides first; which they are, :meth:`visited` says."""
        features, flex = self.mods, self.more
        if not features.lists:
            tiles = super().key_tiles(tile, limits)
            return tiles if features.mask_mod is None else tiles._replace(whole_end=tiles.begin)
        line = self.line(tile)
        part = flex.part_count[tile.batch, tile.head, line] * flex.across
        full = flex.full_count[tile.batch, tile.head, line] * flex.across if features.full else Int32(0)
        return keys.KeyTiles(Int32(0), Int32(0), full, part + full)

    @cute.jit
    def visited(self, tile: schedule.Tile, tiles: keys.KeyTiles, i: Int32, windowed: cutlass.Constexpr) -> Int32:
        """The i-th tile of keys in listed blocks."""
        n = keys.visited(tiles, i, windowed)
        if const_expr(self.mods.lists):
            part = tiles.masked
            if const_expr(self.mods.full):
                if i < part:
                    n = self.listed(self.more.part_index, tile, i)
                else:
                    n = self.listed(self.more.full_index, tile, i - part)
            else:
                n = self.listed(self.more.part_index, tile, i)
        return n

    def listed(self, index: cute.Tensor, tile: schedule.Tile, i: Int32) -> Int32:
        """The i-th tile of keys of one list."""
        across = self.more.across
        return index[tile.batch, tile.head, self.line(tile), i // across] * across + i % across

    @cute.jit
    def leave_visit(
        self, visits: cute.Tensor, n: Int32, k_pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState
    ) -> None:
        """Leaves which tile of keys comes next, once the consumers are done with the K before in its stage."""
        if const_expr(self.leaves_visits):
            k_pipe.sync_object_empty.wait(state.index, state.phase)
            if cute.arch.lane_idx() == 0:
                visits[state.index] = n
            cute.arch.sync_warp()

    def awaited_keys(
        self, tile: schedule.Tile, limits: Limits, next_tiles: cute.Tensor, q_state: pipeline.PipelineState
    ) -> keys.KeyTiles:
        """As many tiles as the producer has counted."""
        if not self.leaves_visits:
            return self.key_tiles(tile, limits)
        count, masked = (self.word(next_tiles, word, q_state) for word in (1, 2))
        return keys.KeyTiles(Int32(0), Int32(0), count - masked, count)

    def expected(self, tile: schedule.Tile, tiles: keys.KeyTiles, i: Int32, windowed: bool) -> Int32:
        """Not known in lists before K has come."""
        return Int32(0) if self.leaves_visits else self.visited(tile, tiles, i, windowed)

    @cute.jit
    def arrived(self, operands: Operands, n: Int32, state: pipeline.PipelineState) -> Int32:
        """The tile of keys whose K has come."""
        found = n
        if const_expr(self.leaves_visits):
            if cute.arch.lane_idx() == 0:  # the lane that frees the place
                found = operands.visits[state.index]
            found = cute.arch.shuffle_sync(found, 0)
        return found

    def prepare_whole(
        self, rows: Rows, cap: Float32 | None, limits: Limits, place: Place, n: Int32, stage: Int32
    ) -> None:
        """What happens to scores of a tile that ``mask_mod`` does not decide of."""
        self.prepare(rows, cap, limits, place, n, False, stage)

    @cute.jit
    def prepare(
        self,
        rows: Rows,
        cap: Float32 | None,
        limits: Limits,
        place: Place,
        n: Int32,
        masked: Boolean | bool,
        stage: Int32,
    ) -> None:
        """What happens to scores before the softmax: ``score_mod``, then ``mask_mod``, then the ends.

        Queries beyond the last one count for nothing, but what a mod makes of them might be no number.
        """
        first_key = n * self.tile_n
        of = Mods(self.mods, self.more)
        if const_expr(self.mods.score_mod is not None):
            self.each_score(rows, place, first_key, of.modified)
        if const_expr(self.mods.mask_mod is not None):  # noqa: SIM102 (the second is decided when run)
            if masked:
                self.each_score(rows, place, first_key, of.masked)
        if first_key + self.tile_n > limits.kv_len:
            keys.hide_keys(rows.scores, rows.coords, place.first_row, first_key, limits.kv_len, None, None, 1)
        if const_expr(self.mods.score_mod is not None):  # noqa: SIM102
            if place.first_row + SLAB > limits.q_len:
                self.each_score(rows, place, first_key, up_to(limits.q_len))

    def each_score(self, rows: Rows, place: Place, first_key: Int32, change: Change) -> None:
        """Changes each of a thread's scores."""
        row, column = rows.coords[0, 0]
        first = place.first_row + row, first_key + column
        for r in range(2):
            for j in range(cute.size(rows.scores, mode=[1])):
                pairs = (first[0], wgmma.ROW_STEP * r), (first[1], wgmma.column_offset(j))
                at = mods.position(place.batch, place.head, *pairs)
                rows.scores[r, j] = change(rows.scores[r, j], at)

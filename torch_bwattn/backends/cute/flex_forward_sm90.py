"""Attention forward for Hopper with mods and lists of blocks: :mod:`.forward_sm90` with other tiles and scores.

    S = score_mod(scale * Q K^T, b, h, i, j), -inf where (i, j) is not shown      x = log2(e) * S

A tile of queries visits the tiles of keys in the blocks that its row of blocks lists: first those of which ``mask_mod``
decides, then the whole ones. Blocks are multiples of tiles both ways. Without lists it visits all tiles, masked if
there is a ``mask_mod``. What of a tile lies beyond the last key is hidden in any case.

Mods are emitted for each score that a thread holds (:mod:`.parts.mods`); what only the row decides, the compiler takes
out. ``finfo.min`` in S becomes -inf in base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Boolean, Float32, Int32, const_expr, cute

from ..flex_inputs import MOST_NUMBERS, MOST_TENSORS
from .forward_sm90 import LOG2_E, Forward, Limits, Place, Rows
from .parts import keys, mods, schedule

_HELD = {
    "bool": cutlass.Uint8, "uint8": cutlass.Uint8, "int8": cutlass.Int8, "int32": cutlass.Int32,
    "int64": cutlass.Int64, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32,
    "float64": cutlass.Float64,
}  # fmt: skip
"""How captured tensors come, by PyTorch's names."""


class Flex(NamedTuple):
    """What of mods and lists is not code.

    Lists are Int32 [B, Hq, R] and [B, Hq, R, C]; a block has ``down`` tiles of queries and ``across`` tiles of keys.
    """

    part_count: cute.Tensor | None
    part_index: cute.Tensor | None
    full_count: cute.Tensor | None
    full_index: cute.Tensor | None
    tables: tuple[cute.Tensor | None, ...]
    numbers: tuple[Int32 | None, ...]
    down: Int32
    across: Int32
    scale: Float32


class FlexForward(Forward):
    """The kernel for one config and one set of features, which have mods."""

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments of any sizes and strides, for the compiler."""
        features = self.features.mods
        q, k, v, o, lse, scale, *_, programs, stream = super().fake_arguments()

        def tensor(kind: Any, rank: int) -> cute.Tensor:
            sizes = tuple(cute.sym_int() for _ in range(rank))
            strides = tuple(cute.sym_int64() for _ in range(rank))
            return cute.runtime.make_fake_tensor(kind, sizes, strides, assumed_align=kind.width // 8)

        lists = [tensor(Int32, rank) if features.lists else None for rank in (3, 4)]
        lists += [tensor(Int32, rank) if features.full else None for rank in (3, 4)]
        tables = [tensor(_HELD[name], rank) for name, rank in features.tables]
        tables += [None] * (MOST_TENSORS - len(tables))
        numbers = [Int32(0)] * features.numbers + [None] * (MOST_NUMBERS - features.numbers)
        return q, k, v, o, lse, scale, *lists, *tables, *numbers, Int32(1), Int32(1), programs, stream

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
        programs: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel; lists, tables and numbers as in :class:`Flex`, the rest as :class:`.Forward` has it."""
        c = scale * LOG2_E
        if const_expr(self.features.mods.score_mod is not None):
            c = Float32(LOG2_E)
        tables, numbers = (t0, t1, t2, t3, t4, t5, t6, t7), (n0, n1, n2, n3)
        flex = Flex(part_count, part_index, full_count, full_index, tables, numbers, down, across, scale)
        self.start(q, k, v, o, lse, c, None, None, None, None, None, Int32(0), programs, stream, flex)

    def line(self, tile: schedule.Tile) -> Int32:
        """The row of blocks that a tile of queries is in."""
        return self.m_index(tile) // self.flex.down

    def key_tiles(self, tile: schedule.Tile, limits: Limits) -> keys.KeyTiles:
        """As many tiles as are listed, those of which the mask decides first; which they are, :meth:`visited` says."""
        features, flex = self.features.mods, self.flex
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
        if const_expr(self.features.mods.lists):
            part = tiles.masked
            if const_expr(self.features.mods.full):
                if i < part:
                    n = self.listed(self.flex.part_index, tile, i)
                else:
                    n = self.listed(self.flex.full_index, tile, i - part)
            else:
                n = self.listed(self.flex.part_index, tile, i)
        return n

    def listed(self, index: cute.Tensor, tile: schedule.Tile, i: Int32) -> Int32:
        """The i-th tile of keys of one list."""
        across = self.flex.across
        return index[tile.batch, tile.head, self.line(tile), i // across] * across + i % across

    @cute.jit
    def prepare(
        self, rows: Rows, cap: Float32 | None, limits: Limits, place: Place, n: Int32, masked: Boolean | bool
    ) -> None:
        """What happens to scores before the softmax: ``score_mod``, then ``mask_mod``, then the end of the keys."""
        first_key = n * self.tile_n
        if const_expr(self.features.mods.score_mod is not None):
            self.each_score(rows, limits, place, first_key, self.modified)
        if const_expr(self.features.mods.mask_mod is not None):  # noqa: SIM102 (the second is decided when run)
            if masked:
                self.each_score(rows, limits, place, first_key, self.masked)
        if first_key + self.tile_n > limits.kv_len:
            keys.hide_keys(rows.scores, rows.coords, place.first_row, first_key, limits.kv_len, None, None, 1)

    @cute.jit
    def each_score(self, rows: Rows, limits: Limits, place: Place, first_key: Int32, change: cutlass.Constexpr) -> None:
        """Changes each of a thread's scores; positions beyond the ends become the last ones, which tables have."""
        for r in cutlass.range_constexpr(2):
            i = cutlass.min(place.first_row + rows.coords[r, 0][0], limits.q_len - 1)
            for j in cutlass.range_constexpr(cute.size(rows.scores, mode=[1])):
                key = cutlass.min(first_key + rows.coords[0, j][1], limits.kv_len - 1)
                rows.scores[r, j] = change(rows.scores[r, j], mods.position(place.batch, place.head, i, key))

    def modified(self, score: Float32, at: dict[str, mods.Value]) -> Float32:
        """A score after ``score_mod``."""
        inputs = {"score": mods.Value(score * self.flex.scale, torch.float32), **at}
        return mods.cast(self.evaluated(self.features.mods.score_mod, inputs), torch.float32).number

    def masked(self, score: Float32, at: dict[str, mods.Value]) -> Float32:
        """A score, or -inf where ``mask_mod`` hides it."""
        shown = self.evaluated(self.features.mods.mask_mod, at)
        hidden = mods.Value(Float32(-Float32.inf), torch.float32)
        return mods.chosen(shown.number, mods.Value(score, torch.float32), hidden).number

    def evaluated(self, text: str, inputs: dict[str, mods.Value]) -> mods.Value:
        """What a mod's program gives."""
        dtypes = [getattr(torch, name) for name, _ in self.features.mods.tables]
        return mods.evaluated(text, inputs, self.flex.tables, dtypes, self.flex.numbers)

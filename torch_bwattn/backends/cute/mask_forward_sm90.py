"""Attention forward for Hopper with a mask in memory: :mod:`.forward_sm90` with tiles of the mask beside those of K.

    S = scale * Q K^T, or capped, + mask, or -inf where a bool mask is False

The mask is [B, Hq, Sq, Skv], with strides of 0 where it is broadcast, in the dtype of Q or as bytes. Its rows are 16
bytes apart or a multiple of that, so that TMA moves it:

    shared memory   for each tile of K in the ring, a tile (64, tile_n) for each consumer group, which come together;
                    where all rows have the same, one row of tile_n

A consumer reads what is of its own scores: numbers by matrix loads, which have the accumulator's order, bytes and what
is of one row in pairs.
What lies beyond the last key is hidden in any case. Numbers are added in natural units (:mod:`.parts.softmax`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.utils import LayoutEnum

from .configs import SLAB, ForwardConfig, ForwardFeatures
from .forward_sm90 import LOG2_E, Forward, Moved, Rows
from .parts import schedule, wgmma

APART = 128
"""Bytes from one row that comes alone to the next: TMA writes to multiples of so many."""


class Mask(NamedTuple):
    """The mask [S, N, H, B], or [N, H, B] of one row, as TMA moves it.

    ``factor`` turns a product of Q and K, or a capped one, into a score.
    """

    moved: Moved
    factor: Float32


class Part(NamedTuple):
    """A thread's part of a group's tiles of the mask in shared memory, and how it is read if not as one row."""

    tiles: cute.Tensor
    group: Int32
    copy: Any


class MaskForward(Forward):
    """The kernel for one config and one set of features, which have a mask."""

    def __init__(self, features: ForwardFeatures, config: ForwardConfig) -> None:
        super().__init__(features, config)
        self.held = self.dtype if features.mask == "added" else cutlass.Uint8
        self.one_row = features.mask_row
        rows = 1 if self.one_row else self.groups * SLAB
        self.mask_tile = (self.tile_n,) if self.one_row else (SLAB, self.tile_n)
        self.beside_keys = rows * self.tile_n * self.held.width // 8
        self.beside_stage = -(-self.beside_keys // APART) * APART

    def mask_layout(self) -> Any:
        """In shared memory: the groups' tiles of a stage one after another, or a stage's row."""
        if self.one_row:
            stride = (1, self.beside_stage * 8 // self.held.width)
            return cute.make_layout((self.tile_n, self.stages), stride=stride)
        return sm90.make_smem_layout_epi(self.held, LayoutEnum.ROW_MAJOR, self.mask_tile, self.stages * self.groups)

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments of any sizes and strides, for the compiler."""
        q, k, v, *others = super().fake_arguments()
        sizes = tuple(cute.sym_int() for _ in range(4))
        strides = (*(cute.sym_int64(divisibility=128 // self.held.width) for _ in range(3)), 1)
        mask = cute.runtime.make_fake_tensor(self.held, sizes, strides, assumed_align=16)
        return q, k, v, mask, *others

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        mask: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        scale: Float32,
        softcap: Float32 | None,
        sink: cute.Tensor | None,
        right: Int32 | None,
        left: Int32 | None,
        counter: cute.Tensor | None,
        counts: Int32,
        programs: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel; the mask as above, the rest as :class:`.Forward` has it."""
        factor, cap = self.factors(scale, softcap)
        c = Float32(LOG2_E) if const_expr(self.natural) else factor * LOG2_E
        more = Mask(self.moved_mask(mask, k.shape[1]), factor)
        self.start(q, k, v, o, lse, c, cap, sink, right, left, counter, counts, programs, stream, more)

    def factors(self, scale: Float32, softcap: Float32 | None) -> tuple[Float32, Float32 | None]:
        """What turns a product, or a capped one, into a score, and what a cap takes a product by."""
        return (scale, None) if softcap is None else (softcap, 2.0 * scale * LOG2_E / softcap)

    def moved_mask(self, mask: cute.Tensor, kv_heads: Int32) -> Moved:
        """The mask with its TMA descriptor."""
        read = cpasync.CopyBulkTensorTileG2SOp()
        if self.one_row:
            row = cute.make_tensor(mask.iterator, cute.select(mask.layout, mode=[3, 1, 0]))
            return Moved(*cpasync.make_tiled_tma_atom(read, row, cute.make_layout(self.tile_n), self.mask_tile))
        layout = cute.select(self.mask_layout(), mode=[0, 1])
        return Moved(*cpasync.make_tiled_tma_atom(read, self.rows_of(mask, kv_heads), layout, self.mask_tile))

    def beside_views(self, memory: Any) -> cute.Tensor:
        """The tiles in shared memory [row, column, stage and group], or [column, stage]."""
        layout = self.mask_layout()
        if self.one_row:
            return cute.make_tensor(cute.recast_ptr(memory.data_ptr(), dtype=self.held), layout)
        return cute.make_tensor(cute.recast_ptr(memory.data_ptr(), layout.inner, self.held), layout.outer)

    def fetch_beside(self, tile: schedule.Tile, n: Int32, stage: Int32, barrier: cute.Pointer) -> None:
        """Loads each group's tile of the mask, or the row of all."""
        atom, tensor = self.more.moved
        if self.one_row:
            head = tile.head * self.packed
            rows = cute.local_tile(tensor[None, head, tile.batch], self.mask_tile, (None,))
            s_part, g_part = cpasync.tma_partition(atom, 0, cute.make_layout(1), self.beside, rows)
            cute.copy(atom, g_part[None, n], s_part[None, stage], tma_bar_ptr=barrier)
            return
        tiles = cute.local_tile(tensor[None, None, tile.head, tile.batch], self.mask_tile, (None, None))
        grouped = cute.group_modes(self.beside, 0, 2), cute.group_modes(tiles, 0, 2)
        s_part, g_part = cpasync.tma_partition(atom, 0, cute.make_layout(1), *grouped)
        for group in range(self.groups):
            source = g_part[None, self.m_index(tile) * self.groups + group, n]
            cute.copy(atom, source, s_part[None, stage * self.groups + group], tma_bar_ptr=barrier)

    def beside_parts(self, qk: cute.TiledMma, thread: Int32, group: Int32) -> Part:
        """A thread's part of its group's tiles: what belongs to its scores."""
        if self.one_row:
            (columns, stages), (_, apart) = self.beside.layout.shape, self.beside.layout.stride
            layout = cute.make_layout((SLAB, columns, stages), stride=(0, 1, apart))
            rows = cute.make_tensor(self.beside.iterator, layout)
            return Part(qk.get_slice(thread).partition_C(rows), group, None)
        if self.natural:
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.held)
        else:
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.held, num_bits_per_copy=16)
        copy = cute.make_tiled_copy_C(atom, qk).get_slice(thread)
        return Part(copy.partition_S(self.beside), group, copy)

    @cute.jit
    def apply_mask(self, rows: Rows, stage: Int32) -> None:
        """Adds the mask to scores, or hides what it hides."""
        tiles, group, copy = self.of_thread
        if const_expr(self.one_row):
            part = tiles[None, None, None, stage]
            held = cute.make_rmem_tensor_like(part)
            cute.autovec_copy(part, held)
        else:
            held = cute.make_rmem_tensor(rows.acc_s.layout, self.held)
            cute.copy(copy, tiles[None, None, None, stage * self.groups + group], copy.retile(held))
        values = wgmma.rows_view(held)
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(cute.size(values, mode=[1])):
                if const_expr(self.natural):
                    rows.scores[r, j] = rows.scores[r, j] * self.more.factor + values[r, j].to(Float32)
                else:
                    rows.scores[r, j] = rows.scores[r, j] if values[r, j] != 0 else -Float32.inf

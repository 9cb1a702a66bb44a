"""Attention backward for Hopper with a mask in memory: :mod:`.backward_sm90` with tiles of the mask beside Q's.

    S = scale * Q K^T, or capped, + mask      P = exp2(log2(e) * (S - lse) - excess)
    or S = -inf where a bool mask is False    P as without

The mask is as the forward takes it (:mod:`.mask_forward_sm90`). With numbers, lse comes in natural units, and with what
it has lost beside large ones (:mod:`.mask_excess_sm90`).

    shared memory   for each tile of Q in the ring, a tile (tile_m, tile_n) of the mask, or, where all queries have the
                    same, one row of tile_n; with numbers the excess of its queries

Scores are transposed. Of numbers, matrix loads that transpose have the accumulator's order. Of bytes, a thread has two
keys of every eight queries: single ones, far apart. TMA swizzles a row's pieces of 16 bytes by the row, which keeps the
lanes of a warp in banks of their own, and by rows modulo eight only, so that a thread has two places to compute, one
for each of a pair of queries; all others are at fixed distances.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from .backward_sm90 import STAGES, Backward, Parts, Values
from .configs import BackwardConfig, BackwardFeatures
from .forward_sm90 import LOG2_E, Moved
from .mask_forward_sm90 import APART
from .parts import wgmma

_PIECE = 16  # bytes that are swizzled as one
_ROWS = 8  # after so many the swizzle repeats, and so do a thread's columns of an accumulator


class Beside(NamedTuple):
    """The mask [S, N, H, B], or [N, H, B] of one row, and the excess [S, H, B], as TMA moves them.

    ``factor`` turns a product of Q and K, or a capped one, into a score.
    """

    mask: Moved
    excess: Moved | None
    factor: Float32


class MaskBackward(Backward):
    """The kernel for one config and one set of features, which have a mask."""

    def __init__(self, features: BackwardFeatures, config: BackwardConfig) -> None:
        super().__init__(features, config)
        self.added = features.mask == "added"
        self.held = self.dtype if self.added else cutlass.Uint8
        self.one_row = features.mask_row
        self.mask_tile = (self.tile_n,) if self.one_row else (self.tile_m, self.tile_n)
        rows = 1 if self.one_row else self.tile_m
        mask_bytes, excess_bytes = rows * self.tile_n * self.held.width // 8, 4 * self.tile_m if self.added else 0
        self.mask_stage = -(-mask_bytes // APART) * APART
        self.beside_queries = mask_bytes + excess_bytes
        self.beside_bytes = STAGES * (self.mask_stage + excess_bytes)

    def mask_layout(self) -> Any:
        """In shared memory, with the ring's stages as last mode."""
        if self.one_row:
            return cute.make_layout((self.tile_n, STAGES), stride=(1, self.mask_stage * 8 // self.held.width))
        kinds = warpgroup.SmemLayoutAtomKind
        kind = kinds.K_SW128 if self.tile_n * self.held.width >= 1024 else kinds.K_SW64
        atom = warpgroup.make_smem_layout_atom(kind, self.held)
        return cute.tile_to_shape(atom, (*self.mask_tile, STAGES), order=(0, 1, 2))

    def in_shared(self) -> cute.Tensor:
        """The mask's ring."""
        layout = self.mask_layout()
        if self.one_row:
            return cute.make_tensor(cute.recast_ptr(self.beside.data_ptr(), dtype=self.held), layout)
        return cute.make_tensor(cute.recast_ptr(self.beside.data_ptr(), layout.inner, self.held), layout.outer)

    def excess_in_shared(self) -> cute.Tensor:
        """The ring of the queries' excess."""
        place = cute.recast_ptr(self.beside.data_ptr() + STAGES * self.mask_stage, dtype=Float32)
        return cute.make_tensor(place, cute.make_layout((self.tile_m, STAGES)))

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments of any sizes and strides, for the compiler."""
        q, k, v, do, lse, *others = super().fake_arguments()
        sizes = tuple(cute.sym_int() for _ in range(4))
        strides = (*(cute.sym_int64(divisibility=128 // self.held.width) for _ in range(3)), 1)
        mask = cute.runtime.make_fake_tensor(self.held, sizes, strides, assumed_align=16)
        return q, k, v, mask, lse if self.added else None, do, lse, *others

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        mask: cute.Tensor,
        excess: cute.Tensor | None,
        do: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dq: cute.Tensor,
        scale: Float32,
        softcap: Float32 | None,
        right: Int32 | None,
        left: Int32 | None,
        programs: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel; the mask as above, ``excess`` as ``lse`` is, the rest as :class:`.Backward` has it."""
        factor, cap = scale, None
        if const_expr(softcap is not None):
            factor, cap = softcap, 2.0 * scale * LOG2_E / softcap
        mode, layout = [3, 1, 0] if self.one_row else [2, 3, 1, 0], self.mask_layout()
        tensor = cute.make_tensor(mask.iterator, cute.select(mask.layout, mode=mode))
        layout = cute.select(layout, mode=[*range(len(self.mask_tile))])
        read, moved_excess = cpasync.CopyBulkTensorTileG2SOp(), None
        moved = Moved(*cpasync.make_tiled_tma_atom(read, tensor, layout, self.mask_tile))
        if const_expr(excess is not None):
            moved_excess = self.moved_rows(excess)
        more = Beside(moved, moved_excess, factor)
        c = Float32(LOG2_E) if self.added else factor * LOG2_E
        self.start(q, k, v, do, lse, delta, dk, dv, dq, scale, c, cap, right, left, programs, stream, more)

    def load_beside(self, head: Int32, batch: Int32, n: Int32, m: Int32, barrier: cute.Pointer, stage: Int32) -> None:
        """Loads a visit's tile of the mask, and its excess."""
        atom, tensor = self.more.mask
        shared = self.in_shared()
        if self.one_row:
            tile = cute.local_tile(tensor[None, head, batch], self.mask_tile, (n,))
        else:
            tile = cute.group_modes(cute.local_tile(tensor[None, None, head, batch], self.mask_tile, (m, n)), 0, 2)
            shared = cute.group_modes(shared, 0, 2)
        s_part, g_part = cpasync.tma_partition(atom, 0, cute.make_layout(1), shared, tile)
        cute.copy(atom, g_part, s_part[None, stage], tma_bar_ptr=barrier)
        if self.added:
            excess = self.more.excess
            s_part, g_part = self.row_views(excess, self.excess_in_shared(), head, batch)
            cute.copy(excess.atom, g_part[None, m], s_part[None, stage], tma_bar_ptr=barrier)

    @cute.jit
    def apply_mask(self, mma: cute.TiledMma, values: Values, stage: Int32, thread: Int32) -> None:
        """Adds the mask to scores, or hides what it hides."""
        scores = wgmma.rows_view(values.s)
        if const_expr(self.added):
            held = self.numbers(mma, values, stage, wgmma.anchored(thread, stage))
            for r in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                    scores[r, j] = scores[r, j] * self.more.factor + held[r, j].to(Float32)
        else:
            places = self.places(mma, wgmma.anchored(thread, stage))
            first = cute.recast_ptr(self.beside.data_ptr(), dtype=cutlass.Uint8) + stage * self.mask_stage
            for r in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                    if const_expr(self.one_row):
                        offset = places[0]
                    else:
                        offset = places[j % 2] + (wgmma.column_offset(j) - j % 2) * self.tile_n
                    shown = (first + offset + wgmma.ROW_STEP * r).load()
                    scores[r, j] = scores[r, j] if shown != 0 else -Float32.inf

    def numbers(self, mma: cute.TiledMma, values: Values, stage: Int32, thread: Int32) -> cute.Tensor:
        """What is added to a thread's scores."""
        held = self.in_shared()
        if self.one_row:
            layout = cute.make_layout((*self.s_tile, STAGES), stride=(1, 0, held.layout.stride[1]))
            part = mma.get_slice(thread).partition_C(cute.make_tensor(held.iterator, layout))[None, None, None, stage]
            loaded = cute.make_rmem_tensor_like(part)
            cute.autovec_copy(part, loaded)
            return wgmma.rows_view(loaded)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), self.held)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        tiles = copy.partition_S(cute.make_tensor(held.iterator, cute.select(held.layout, mode=[1, 0, 2])))
        loaded = cute.make_rmem_tensor(values.s.layout, self.held)
        cute.copy(copy, tiles[None, None, None, stage], copy.retile(loaded))
        return wgmma.rows_view(loaded)

    def places(self, mma: cute.TiledMma, thread: Int32) -> tuple[Int32, ...]:
        """Where in a stage a thread's first bytes are: of its first query and of the next, or of its keys.

        Kept in registers, they would cost more than to compute them where they are used.
        """
        coords = wgmma.rows_view(mma.get_slice(thread).partition_C(cute.make_identity_tensor(self.s_tile)))
        if self.one_row:
            return (coords[0, 0][0],)
        places = []
        for column in range(2):
            key, query = coords[0, column]
            turn = query % _ROWS * self.tile_n // 128  # by the 128 bytes that banks are of
            places.append(query * self.tile_n + (key ^ (turn * _PIECE)))
        return tuple(places)

    @cute.jit
    def powers(self, mma: cute.TiledMma, values: Values, parts: Parts, stage: Int32, c: Float32, thread: Int32) -> None:
        """P of scores; with numbers by S - lse first, which is exact where they are large."""
        if const_expr(not self.added):
            super().powers(mma, values, parts, stage, c, thread)
        else:
            scores, lses = wgmma.rows_view(values.s), self.of_columns(parts.lse, stage)
            by_column = cute.make_layout((self.tile_n, self.tile_m, STAGES), stride=(0, 1, self.tile_m))
            of_queries = cute.make_tensor(self.excess_in_shared().iterator, by_column)
            of_thread = mma.get_slice(wgmma.anchored(thread, stage))
            excess = self.of_columns(of_thread.partition_C(of_queries), stage)
            for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                for r in cutlass.range_constexpr(2):
                    power = (scores[r, j] - lses[0, j]) * c - excess[0, j]
                    scores[r, j] = cute.math.exp2(power, fastmath=True)

"""Finishes dQ: from the fp32 accumulator of a backward kernel to 16 bits, times the softmax scale.

    dq[query, d] = scale * acc(query, d)

The accumulator holds, for each tile of queries, the registers of the product that made it (:mod:`.parts.accumulators`),
of 128 threads after 128 threads, or of a warp after a warp, four floats of a thread side by side. So a thread reads its
own values in the order in which they were written, 16 bytes at a time and next to its neighbours'. They go through
shared memory, transposed where the product was, to rows that are stored 16 bytes at a time.

The backward ends with the last heads, which are in the L2 cache and go first here.

Batches of several lengths: ``cu_seqlens_q`` has the first row of each sequence in ``dq``, whose batch is then 1, and
sequence b starts in the accumulator at row ``(cu_seqlens_q[b] + b * tile_m) // tile_m * tile_m``. ``seqused_q`` gives
lengths that are less than what ``cu_seqlens_q`` leaves room for.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from .configs import PostprocessConfig, why_no_postprocess
from .forward_sm90 import DTYPES
from .parts import wgmma

_PITCH = 8  # elements between a row's end and the next row in shared memory, against bank conflicts


class Postprocess:
    """The kernel for one config, one head_dim and one dtype."""

    def __init__(self, dtype: str, head_dim: int, config: PostprocessConfig, varlen: bool, used: bool) -> None:
        reason = why_no_postprocess(dtype, head_dim, config)
        if reason is not None:
            raise ValueError(reason)
        self.dtype, self.head_dim, self.config = DTYPES[dtype], head_dim, config
        self.varlen, self.used = varlen, used
        self.threads, self.tile_m, self.width = config.threads, config.tile_m, config.width

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments of any sizes and strides, for the compiler."""
        batch, heads, length, sequences, others = (cute.sym_int() for _ in range(5))
        strides = [cute.sym_int64(divisibility=8) for _ in range(3)]
        shape = (batch, heads, length, self.head_dim)

        def vector(kind: Any, size: Any, align: int) -> cute.Tensor:
            return cute.runtime.make_fake_tensor(kind, (size,), (1,), assumed_align=align)

        return (
            vector(Float32, cute.sym_int64(), 16),
            cute.runtime.make_fake_tensor(self.dtype, shape, (*strides, 1), assumed_align=16),
            Int64(0),
            Int64(0),
            Float32(1.0),
            vector(Int32, sequences, 4) if self.varlen else None,
            vector(Int32, others, 4) if self.used else None,
            Int32(0),
            Int32(0),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        acc: cute.Tensor,
        dq: cute.Tensor,
        batch_step: Int64,
        head_step: Int64,
        scale: Float32,
        cu_seqlens_q: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        sequences: Int32,
        longest: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel.

        ``dq`` is ``[B, H, S, D]``; the steps count floats of the accumulator; ``sequences`` and ``longest`` are B and S
        unless lengths vary.
        """
        tiles = cute.ceil_div(longest, self.tile_m)
        pitch = self.width + _PITCH

        @cute.struct
        class Storage:
            rows: cute.struct.Align[cute.struct.MemRange[self.dtype, self.tile_m * pitch], 128]

        self.storage = Storage
        self.kernel(
            acc, dq, batch_step, head_step, scale, cu_seqlens_q, seqused_q,
            cute.FastDivmodDivisorV2(tiles), cute.FastDivmodDivisorV2(dq.shape[1]),
        ).launch(
            grid=(tiles * dq.shape[1] * sequences, 1, 1), block=(self.threads, 1, 1), stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        acc: cute.Tensor,
        dq: cute.Tensor,
        batch_step: Int64,
        head_step: Int64,
        scale: Float32,
        cu_seqlens_q: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        tiles: cute.FastDivmodDivisorV2,
        heads: cute.FastDivmodDivisorV2,
    ) -> None:
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        pitch = self.width + _PITCH
        rows = storage.rows.get_tensor(cute.make_layout((self.tile_m, pitch), stride=(pitch, 1)))
        thread = cute.arch.thread_idx()[0]
        pair, m = divmod(cute.arch.grid_dim()[0] - 1 - cute.arch.block_idx()[0], tiles)
        sequence, head = divmod(pair, heads)
        first, length, start, batch = Int32(0), dq.shape[2], Int64(sequence) * batch_step, sequence
        if const_expr(cu_seqlens_q is not None):
            first, batch = cu_seqlens_q[sequence], Int32(0)
            length = cu_seqlens_q[sequence + 1] - first
            start = Int64((first + sequence * self.tile_m) // self.tile_m * self.tile_m) * self.width
        if const_expr(seqused_q is not None):
            length = seqused_q[sequence]
        if m * self.tile_m < length:
            start += Int64(head) * head_step + Int64(m) * (self.tile_m * self.width)
            self.to_shared(acc, start, rows, thread, scale)
            cute.arch.sync_threads()
            self.store(rows, dq, batch, head, first, m, length, thread)

    @cute.jit
    def to_shared(self, acc: cute.Tensor, start: Int64, rows: cute.Tensor, thread: Int32, scale: Float32) -> None:
        """A thread's values, scaled and converted, to their places."""
        accumulator = self.config.accumulator
        values = accumulator.values
        together = self.config.side_by_side
        offset = start + (thread // together) * (values * together) + (thread % together) * 4
        own = acc.iterator + cute.assume(offset, divby=4)
        wide = cute.make_rmem_tensor(cute.make_layout((4, values // 4)), Float32)
        for i in cutlass.range_constexpr(values // 4):
            four = cute.make_tensor(own + 4 * together * i, cute.make_layout(4))
            cute.autovec_copy(four, wide[None, i])
        for i in cutlass.range_constexpr(values // 4):
            for j in cutlass.range_constexpr(4):
                wide[j, i] = wide[j, i] * scale
        low = cute.make_rmem_tensor(wide.layout, self.dtype)
        wgmma.to_operand(low, wide, self.dtype)
        for i in cutlass.range_constexpr(values // 4):
            for j in cutlass.range_constexpr(4):
                row, column = accumulator.coordinates(thread, 4 * i + j)
                if const_expr(self.config.swapped):
                    row, column = column, row
                rows[row, column] = low[j, i]

    @cute.jit
    def store(
        self,
        rows: cute.Tensor,
        dq: cute.Tensor,
        batch: Int32,
        head: Int32,
        first: Int32,
        m: Int32,
        length: Int32,
        thread: Int32,
    ) -> None:
        """The tile's rows, 8 elements of a row to a thread, as far as there are queries and columns."""
        across = self.head_dim // 8
        for i in cutlass.range(thread, self.tile_m * across, self.threads, unroll=1):
            row, part = i // across, i % across
            query = m * self.tile_m + row
            if query < length:
                source = cute.local_tile(rows[row, None], (8,), (part,))
                target = cute.local_tile(dq[batch, head, first + query, None], (8,), (part,))
                cute.autovec_copy(source, target)

"""Prepares what the backward reads of each query, in fp32.

    delta = sum_d O_d dO_d - dlse        norm = log2(e) * lse, or lse, or +inf where the query sees no key

Both are padded to whole tiles of queries, delta with 0 and norm with +inf, so that P and dS of what is no query are 0.
What the backward adds to is set to 0 on the way, by each program a part.
A few lanes of a warp have a row: eight elements each, where rows are contiguous and aligned one load of 16 bytes.
The backward begins with the first heads, so these go last here, and are in the L2 cache when it comes to them.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, const_expr, cute

from .forward_sm90 import DTYPES, LOG2_E

_THREADS = 256


class Preprocess:
    """The kernel for one width and dtype.

    ``wide`` where rows of O and dO are contiguous and 16-byte aligned, ``natural`` where lse stays in its own units.
    """

    def __init__(self, dtype: str, value_dim: int, wide: bool, with_lse_grad: bool, natural: bool) -> None:
        self.factor = 1.0 if natural else LOG2_E
        self.dtype, self.value_dim, self.wide, self.with_lse_grad = DTYPES[dtype], value_dim, wide, with_lse_grad
        parts = -(-value_dim // 8)
        self.lanes = 1 << (parts - 1).bit_length()  # of a row
        self.rows = _THREADS // self.lanes  # of a program

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments of any sizes and strides, for the compiler."""
        batch, heads, length, padded = (cute.sym_int() for _ in range(4))

        def operand() -> cute.Tensor:
            strides = [cute.sym_int64(divisibility=8 if self.wide else 1) for _ in range(3)]
            last = 1 if self.wide else cute.sym_int64()
            shape, align = (batch, heads, length, self.value_dim), 16 if self.wide else 2
            return cute.runtime.make_fake_tensor(self.dtype, shape, (*strides, last), assumed_align=align)

        def rows(size: Any) -> cute.Tensor:
            strides = [cute.sym_int64() for _ in range(3)]
            return cute.runtime.make_fake_tensor(Float32, (batch, heads, size), tuple(strides), assumed_align=4)

        return (
            operand(),
            operand(),
            rows(length),
            rows(length) if self.with_lse_grad else None,
            rows(padded),
            rows(padded),
            cute.runtime.make_fake_tensor(Float32, (cute.sym_int64(divisibility=4),), (1,), assumed_align=16),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        norm: cute.Tensor,
        delta: cute.Tensor,
        zeros: cute.Tensor,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel: ``[B, H, S, Dv]``, ``[B, H, S]``, the results ``[B, H, S padded]``, what becomes 0."""
        blocks = cute.ceil_div(delta.shape[2], self.rows)
        divisors = cute.FastDivmodDivisorV2(blocks), cute.FastDivmodDivisorV2(o.shape[1])
        self.kernel(o, do, lse, dlse, norm, delta, zeros, *divisors).launch(
            grid=(blocks * o.shape[1] * o.shape[0], 1, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        norm: cute.Tensor,
        delta: cute.Tensor,
        zeros: cute.Tensor,
        blocks: cute.FastDivmodDivisorV2,
        heads: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, number = cute.arch.thread_idx()[0], cute.arch.grid_dim()[0] - 1 - cute.arch.block_idx()[0]
        self.clear(zeros, thread, number)
        pair, block = divmod(number, blocks)
        batch, head = divmod(pair, heads)
        row, part = block * self.rows + thread // self.lanes, thread % self.lanes
        total, power = Float32(0.0), Float32.inf
        if row < o.shape[2]:  # noqa: SIM102 (joined, the product would be evaluated on both sides)
            if part * 8 < self.value_dim:
                total = self.product(o[batch, head, row, None], do[batch, head, row, None], part)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=self.lanes)
        if part == 0:
            if row < o.shape[2]:
                if const_expr(dlse is not None):
                    total = total - dlse[batch, head, row]
                power = lse[batch, head, row] * self.factor
                power = Float32.inf if power == -Float32.inf else power
            if row < delta.shape[2]:
                delta[batch, head, row] = total
                norm[batch, head, row] = power

    @cute.jit
    def clear(self, zeros: cute.Tensor, thread: Int32, number: Int32) -> None:
        """The program's part of what becomes 0, 16 bytes a thread at a time."""
        quads = Int32(zeros.shape[0] // 4)
        share = cute.ceil_div(quads, cute.arch.grid_dim()[0])
        first = number * share
        four = cute.make_rmem_tensor((4,), Float32)
        four.fill(0.0)
        for i in cutlass.range(first + thread, cutlass.min(first + share, quads), _THREADS, unroll=1):
            cute.autovec_copy(four, cute.local_tile(zeros, (4,), (i,)))

    @cute.jit
    def product(self, o: cute.Tensor, do: cute.Tensor, part: Int32) -> Float32:
        """The sum over a part of a row."""
        total = Float32(0.0)
        if const_expr(self.wide):
            left, right = (cute.make_rmem_tensor((8,), self.dtype) for _ in range(2))
            cute.autovec_copy(cute.local_tile(o, (8,), (part,)), left)
            cute.autovec_copy(cute.local_tile(do, (8,), (part,)), right)
            for i in cutlass.range_constexpr(8):
                total = total + left[i].to(Float32) * right[i].to(Float32)
        else:
            for i in cutlass.range_constexpr(8):
                column = part * 8 + i
                if column < self.value_dim:
                    total = total + o[column].to(Float32) * do[column].to(Float32)
        return total

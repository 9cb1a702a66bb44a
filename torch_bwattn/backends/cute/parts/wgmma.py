"""Warp-group matrix products and the register layouts between them."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, const_expr, cute
from cutlass.cute.nvgpu import warpgroup


def rows_view(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2, V), M, N) as (rows, columns): a thread has two rows of each 64-row block."""
    (pair, eight, blocks), m, n = acc.layout.shape
    (pair_d, eight_d, blocks_d), m_d, n_d = acc.layout.stride
    layout = cute.make_layout(((eight, m), (pair, blocks, n)), stride=((eight_d, m_d), (pair_d, blocks_d, n_d)))
    return cute.make_tensor(acc.iterator, layout)


@cute.jit
def issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Boolean) -> None:
    """Issues ``acc (+)= a b`` and commits it as one group; ``accumulate`` False overwrites ``acc``."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


ROW_STEP = 8
"""From a thread's first row of an accumulator to its second."""


def column_offset(column: int) -> int:
    """From a thread's first column of an accumulator to another: it has two of every eight."""
    return column // 2 * 8 + column % 2


@cute.jit
def to_operand(p: cute.Tensor, scores: cute.Tensor, dtype: cutlass.Constexpr) -> None:
    """Converts an fp32 accumulator into the register operand of the next product, pair by pair.

    The operand's registers have the accumulator's order, so no value changes lanes. Pairs are converted by the packed
    instruction: a conversion of the whole fragment leaves unpacked conversions and a wait on every matrix instruction
    at most widths.
    """
    packed = cute.recast_tensor(p, Int32)
    name = "bf16x2" if const_expr(dtype is cutlass.BFloat16) else "f16x2"
    few = 2 if const_expr(cute.size(packed) % 4) else 4
    for k in cutlass.range_constexpr(cute.size(packed) // few):
        for i in cutlass.range_constexpr(few * k, few * k + few):
            packed[i] = cute.arch.inline_ptx(
                f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
                write_only_types=[Int32],
                read_only_args=[scores[2 * i], scores[2 * i + 1]],
            )


@cute.jit
def anchored(value: Int32, place: Int32) -> Int32:
    """The value, as if it depended on ``place``: what follows from it is not computed earlier and kept in registers."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value, place])

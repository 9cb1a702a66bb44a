"""The online softmax of one warp group's rows, in registers.

For each row, over the tiles so far, with c = scale * log2(e) > 0:

    x_j = c * s_j      l = sum_j exp2(x_j - shift)      O = sum_j exp2(x_j - shift) v_j      lse = ln2 (shift + log2 l)

``shift`` need not be the maximum of x: any value works as long as l and O use the same one and nothing overflows. So
it is only raised, and l and O are only rescaled by exp2(old - new), when a row of the warp has grown past it by more
than ``SLACK``. P is then at most 2 ** SLACK, and O / l is what it would have been.

Where there is a mask, :func:`step` looks for the maximum first. Elsewhere :func:`hopeful_step` does not: it takes the
exponentials by the shift at hand, and their sum, which is needed anyway, tells whether one of them has grown too large.
Mostly none has, and the maximum, its way through the lanes and all waiting for it are saved. Else :func:`settle`
multiplies P by a power of two, or, where too little is left of the scores for that (:func:`overflown`), they have to be
computed again.

With ``natural`` the shift is one of s, not of x, and P = exp2(c * (s - shift)), lse = shift + ln2 log2 l: an operation
more for each score. For scores as large as those of an additive mask can be it must be so: rows of ``finfo.min`` have
an x beyond float32, and of others c * s is off by more than 1, where s - shift is exact.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

LN2 = 0.6931471805599453
SLACK = 8.0
"""In powers of two. P <= 256 keeps fp16 and the fp32 sums far from their ends, and rescales become rare."""


@cute.jit
def row_maximum(scores: cute.Tensor, row: cutlass.Constexpr) -> Float32:
    """The maximum of a row, or NaN if it holds one: over a thread's part of it, then over the row's four threads."""
    parts = [scores[row, 0], scores[row, 1], scores[row, 2], scores[row, 3]]
    for j in cutlass.range_constexpr(4, cute.size(scores, mode=[1])):
        parts[j % 4] = cute.arch.fmax(parts[j % 4], scores[row, j], nan=True)
    m = cute.arch.fmax(parts[0], parts[1], nan=True)
    m = cute.arch.fmax(m, cute.arch.fmax(parts[2], parts[3], nan=True), nan=True)
    for offset in cutlass.range_constexpr(1, 3):
        m = cute.arch.fmax(m, cute.arch.shuffle_sync_bfly(m, offset=offset), nan=True)
    return m


@cute.jit
def cap_scores(scores: cute.Tensor, cap: Float32) -> None:
    """``tanh(t)`` of every score s, ``cap = 2 log2(e) t / s``, to about 4e-7 of its value.

    tanh(t) = 1 - 2 / (exp(2 t) + 1), whose error is absolute, and near 0, where that is no use, a series.
    """
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            doubled = scores[r, j] * cap
            far = 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(doubled, fastmath=True) + 1.0)
            t = doubled * (LN2 / 2.0)
            u = t * t
            near = t * (1.0 + u * (-1.0 / 3.0 + u * (2.0 / 15.0 - u * (17.0 / 315.0))))
            scores[r, j] = near if u < 0.0625 else far


@cute.jit
def cap_slopes(capped: cute.Tensor, slopes: cute.Tensor) -> None:
    """``1 - t ** 2`` of every capped score t."""
    for i in cutlass.range_constexpr(cute.size(capped) // 2):
        for j in cutlass.range_constexpr(2 * i, 2 * i + 2):
            slopes[j] = 1.0 - capped[j] * capped[j]


@cute.jit
def rescale(out: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiplies each row of O by its factor."""
    for r in cutlass.range_constexpr(cute.size(out, mode=[0])):
        for block in cutlass.range_constexpr(cute.size(out, mode=[1]) // 2):
            for j in cutlass.range_constexpr(2 * block, 2 * block + 2):
                out[r, j] = out[r, j] * factors[r]


def log2_of(s: Float32, c: Float32, shift: Float32, natural: bool) -> Float32:
    """The exponent of a score, or of a shift beside another."""
    return (s - shift) * c if natural else s * c - shift


@cute.jit
def row_shift(scores: cute.Tensor, row: cutlass.Constexpr, c: Float32, natural: cutlass.Constexpr) -> Float32:
    """The shift by which a row's largest P is 1."""
    largest = row_maximum(scores, row)
    return largest if const_expr(natural) else largest * c


@cute.jit
def factor_between(old: Float32, new: Float32, c: Float32, natural: cutlass.Constexpr) -> Float32:
    """What turns sums by one shift into sums by another, which is finite."""
    return cute.math.exp2((old - new) * c if const_expr(natural) else old - new, fastmath=True)


@cute.jit
def exponentials(
    scores: cute.Tensor, row: cutlass.Constexpr, c: Float32, shift: Float32, natural: cutlass.Constexpr
) -> Float32:
    """Overwrites a row of scores by P and returns the thread's sum of them."""
    sums = [Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        p = cute.math.exp2(log2_of(scores[row, j], c, shift, natural), fastmath=True)
        scores[row, j] = p
        sums[j % 4] = sums[j % 4] + p
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


@cute.jit
def finite_shift(shift: Float32) -> Float32:
    """What is subtracted: 0 for a row that has seen no key yet, so that its -inf scores give 0 and not NaN."""
    return Float32(0.0) if shift == -Float32.inf else shift


@cute.jit
def first_step(
    scores: cute.Tensor, shifts: cute.Tensor, sums: cute.Tensor, c: Float32, natural: cutlass.Constexpr
) -> None:
    """Turns the first tile of scores into P and starts the rows' shifts and sums. The tile may be masked."""
    for r in cutlass.range_constexpr(cute.size(shifts)):
        shifts[r] = row_shift(scores, r, c, natural)
        sums[r] = exponentials(scores, r, c, finite_shift(shifts[r]), natural)


@cute.jit
def step(
    scores: cute.Tensor,
    shifts: cute.Tensor,
    sums: cute.Tensor,
    factors: cute.Tensor,
    c: Float32,
    natural: cutlass.Constexpr,
) -> Boolean:
    """Turns a tile of scores into P and adds it to the rows' sums.

    Returns:
        Whether O has to be multiplied by ``factors``, for a whole warp alike.
    """
    fits = Boolean(True)
    for r in cutlass.range_constexpr(cute.size(shifts)):
        factors[r] = row_shift(scores, r, c, natural)
        growth = factors[r] - shifts[r]
        if const_expr(natural):
            growth = growth * c
        fits = fits and (growth <= SLACK)  # False for NaN, which has to spread
    grown = cute.arch.vote_any_sync(not fits)
    for r in cutlass.range_constexpr(cute.size(shifts)):
        shift = shifts[r]
        if grown:
            shift = cute.arch.fmax(shift, factors[r], nan=True)
        factors[r] = factor_between(shifts[r], finite_shift(shift), c, natural) if grown else Float32(1.0)
        shifts[r] = shift
        sums[r] = sums[r] * factors[r] + exponentials(scores, r, c, finite_shift(shift), natural)
    return grown


@cute.jit
def start_rows(scores: cute.Tensor, shifts: cute.Tensor, c: Float32, natural: cutlass.Constexpr) -> None:
    """Gives rows that have seen no key yet the shift of this tile, so that there is something to hope for."""
    empty = Boolean(False)
    for r in cutlass.range_constexpr(cute.size(shifts)):
        empty = empty or (shifts[r] == -Float32.inf)
    if cute.arch.vote_any_sync(empty):
        for r in cutlass.range_constexpr(cute.size(shifts)):
            own = row_shift(scores, r, c, natural)
            shifts[r] = own if shifts[r] == -Float32.inf else shifts[r]


@cute.jit
def hopeful_step(
    scores: cute.Tensor,
    shifts: cute.Tensor,
    parts: cute.Tensor,
    c: Float32,
    may_hide: cutlass.Constexpr,
    natural: cutlass.Constexpr,
) -> Boolean:
    """Turns a tile of scores into P by the shifts at hand; ``parts`` become the thread's sums of each row.

    With ``may_hide`` a row may see no key of a whole tile, nor of those before.

    Returns:
        Whether a P may be above 2 ** SLACK, or is NaN, for a whole warp alike.
    """
    fits = Boolean(True)
    for r in cutlass.range_constexpr(cute.size(shifts)):
        shift = finite_shift(shifts[r]) if const_expr(may_hide) else shifts[r]
        parts[r] = exponentials(scores, r, c, shift, natural)
        fits = fits and (parts[r] <= 2.0**SLACK)
    return cute.arch.vote_any_sync(not fits)


@cute.jit
def overflown(parts: cute.Tensor) -> Boolean:
    """Whether a row's P has grown too large, or is NaN, for the scores to be had back from it, for a whole warp alike.

    The factor that brings a P down again must not be so small that it becomes 0.
    """
    fits = Boolean(True)
    for r in cutlass.range_constexpr(cute.size(parts)):
        fits = fits and (parts[r] < 2.0**100)
    return cute.arch.vote_any_sync(not fits)


@cute.jit
def settle(
    scores: cute.Tensor,
    shifts: cute.Tensor,
    sums: cute.Tensor,
    parts: cute.Tensor,
    factors: cute.Tensor,
    c: Float32,
    natural: cutlass.Constexpr,
) -> None:
    """Raises the shifts of rows whose P is above 1 by a whole number, and multiplies what depends on them.

    ``scores`` hold P, which is finite. O has to be multiplied by ``factors``.
    """
    for r in cutlass.range_constexpr(cute.size(shifts)):
        largest = cute.arch.fmax(row_maximum(scores, r), Float32(0.5))
        growth = Float32(Int32(cute.math.log2(largest, fastmath=True) + 1.0))
        if const_expr(natural):
            old = finite_shift(shifts[r])
            raised = old + growth * LN2
            factors[r] = factor_between(old, raised, c, True)  # by as much as large shifts have been raised
            shifts[r] = shifts[r] if shifts[r] == -Float32.inf else raised
        else:
            factors[r] = cute.math.exp2(-growth, fastmath=True)
            shifts[r] = shifts[r] + growth
        sums[r] = sums[r] * factors[r]
        parts[r] = parts[r] * factors[r]
        for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, j] = scores[r, j] * factors[r]


@cute.jit
def finish(
    sums: cute.Tensor,
    shifts: cute.Tensor,
    factors: cute.Tensor,
    lse: cute.Tensor,
    sinks: cute.Tensor | None,
    c: Float32,
    natural: cutlass.Constexpr,
) -> None:
    """Adds up the rows' sums over their four threads; ``factors`` become 1 / l, or 0 for a row that saw no key.

    ``sinks``, in the shifts' units, join the rows' sums; either of sink and shift may be the larger by far.
    """
    for r in cutlass.range_constexpr(cute.size(sums)):
        total = cute.arch.warp_reduction_sum(sums[r], threads_in_group=4)
        top, own = shifts[r], Float32(1.0)
        if const_expr(sinks is not None):
            top = finite_shift(cute.arch.fmax(shifts[r], sinks[r]))
            own = factor_between(shifts[r], top, c, natural)
            total = total * own + factor_between(sinks[r], top, c, natural)
        empty = total == 0.0
        factors[r] = Float32(0.0) if empty else own * cute.arch.rcp_approx(total)
        if const_expr(natural):
            lse[r] = -Float32.inf if empty else top + cute.math.log2(total, fastmath=True) * LN2
        else:
            lse[r] = -Float32.inf if empty else (top + cute.math.log2(total, fastmath=True)) * LN2

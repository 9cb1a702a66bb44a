"""The attention backward kernels (Helion, lowered to Triton): row terms, dK and dV, dQ.

With ``c`` the scale, ``g = 1 / (1 - p_drop)``, ``keep`` the dropout mask and, in fp32,

    s_ij = cap(c * q_i . k_j) (+ mask_ij)   -inf where j is not visible to i; cap as in ``parts``
    P_ij = exp(s_ij - lse_i)                o_i = g * sum_j keep_ij P_ij v_j

the gradients for given do_i and dlse_i are (Dao et al., 2022; the dlse term because d lse_i / d s_ij = P_ij)

    dP_ij = g * keep_ij * do_i . v_j
    dS_ij = P_ij * (dP_ij - delta_i)        delta_i = do_i . o_i - dlse_i
    dv_j  = g * sum_i keep_ij P_ij do_i     dk_j = c * sum_i dS_ij q_i      dq_i = c * sum_j dS_ij k_j

With a soft cap the last two take dS_ij * (1 - tanh_ij^2). A sink is in lse, so in P, and has no other part in them; its
own gradient, :func:`..sinks.gradient`, needs the row terms alone: -sum_i exp(sink - lse_i) * delta_i.

P is recomputed from lse, nothing of size M x N is stored. The factor g is taken out of the loops: kernels work with
``dS_ij / g = P_ij * (keep_ij do_i . v_j - delta_i / g)`` and multiply their sums by g once, so "delta" below is
delta_i / g.

:data:`DELTA` turns what the forward left behind into per-row terms that cost nothing to use:

* ``delta`` as above, 0 for a row without a visible key;
* ``norm``: lse in the units of the exponents (``parts.exponent_scale``), but +inf for a row without a visible key,
  because then ``exp(s - norm)`` is 0 without a comparison for each score, and NaN instead of +inf, as softmax has it.

:data:`EXCESS` runs with an additive mask only, and writes ``excess_i = log2(sum_j exp(s_ij - lse_i))``, a sink
counted among the scores. That is 0
unless ``|lse_i|`` is so large that its rounding matters: the lse of a row of n times ``finfo.min`` is ``finfo.min``
itself, log(n) is lost in it, and ``exp(s - lse)`` is 1 where P is 1 / n. The sum is taken only in tiles that hold such
a row.

:data:`DKV` owns ``block_n`` keys of one (batch, key head) and walks over the query tiles of all query heads that share
them; :data:`DQ` owns ``block_m`` queries of one (batch, query head) and walks over key tiles. Seven products instead of
the five of a fused kernel, but no atomics: results are bitwise repeatable, no fp32 copy of a gradient exists and each
kernel fits the registers. DKV computes S and dP transposed ([block_n, block_m]), because P^T and dS^T are then the left
operands of dV and dK and stay in registers on their way there.

Loops are split as in the forward. In DKV only the diagonal needs a comparison for each score: queries past the end are
loaded as zero rows (q = do = norm = delta = 0), whose P is 1 and whose share in dk and dv is 0, and keys past the end
only spoil rows that are not stored. In DQ keys past the end do need one, as their P may overflow and infinity times
zero is NaN.

Data layout: q, dq [B, Hq, M, D]; k, dk [B, Hkv, N, D]; v, dv [B, Hkv, N, Dv]; o, do [B, Hq, M, Dv]; lse, dlse, norm,
delta, excess [B, Hq, M] fp32; mask expanded to [B, Hq, M, N]. Any strides, 0 included. Query head ``h`` reads key head
``h // (Hq // Hkv)``. P and dS are rounded to the inputs' dtype before the products that take them; sums are fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import helion.language as hl
import torch

from . import parts, runtime

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .parts import Int

# |lse| from which `excess` is computed. Below it fp32 resolves lse to 2.4e-4 or better, and P to that relative error.
_LARGE_NORM = 4096.0


def attention_delta(
    o: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    norm: torch.Tensor,
    delta: torch.Tensor,
    keep_scale: float,
    additive: hl.constexpr,
) -> None:
    """Helion kernel function: the per-row terms ``norm`` and ``delta``. Block sizes: [block_m].

    Args:
        o: The forward's output [B, Hq, M, Dv].
        do: Its gradient [B, Hq, M, Dv].
        lse: The forward's natural log-sum-exp [B, Hq, M].
        dlse: Its gradient [B, Hq, M], fp32, or None for zero.
        norm: Output [B, Hq, M].
        delta: Output [B, Hq, M].
        keep_scale: 1 / (1 - dropout_p), or 1.
        additive: Whether there is an additive mask, so that exponents are in natural units.
    """
    B, Hq, M, Dv = o.shape
    Dv = hl.specialize(Dv)
    block_m = hl.register_block_size(16, 256)
    for i, h, b in hl.grid([(M + block_m - 1) // block_m, Hq, B]):
        row = i * block_m + hl.arange(block_m)
        inside = row < M
        d_v = hl.arange(parts.padded_width(Dv))
        o_tile = parts.load_rows(o, b, h, row, d_v, M, Dv, True).to(torch.float32)
        do_tile = parts.load_rows(do, b, h, row, d_v, M, Dv, True).to(torch.float32)
        row_delta = (o_tile * do_tile).sum(-1)
        if dlse is not None:
            row_delta = row_delta - hl.load(dlse, [b, h, row], extra_mask=inside)
        row_lse = hl.load(lse, [b, h, row], extra_mask=inside)
        empty = row_lse == float("-inf")
        row_norm = row_lse * (1.0 if additive else parts.LOG2E)
        row_norm = torch.where(row_lse == float("inf"), float("nan"), row_norm)
        hl.store(norm, [b, h, row], torch.where(empty, float("inf"), row_norm), extra_mask=inside)
        hl.store(delta, [b, h, row], torch.where(empty, 0.0, row_delta / keep_scale), extra_mask=inside)


def attention_excess(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor,
    norm: torch.Tensor,
    excess: torch.Tensor,
    sink: torch.Tensor | None,
    scale: float,
    diagonal: int,
    causal: hl.constexpr,
    low_diagonal: int | None,
    softcap: float | None,
) -> None:
    """Helion kernel function: the per-row term ``excess``. Block sizes: [block_m, block_n].

    Args:
        q: Queries [B, Hq, M, D].
        k: Keys [B, Hkv, N, D].
        mask: The additive mask expanded to [B, Hq, M, N].
        norm: From :func:`attention_delta`, [B, Hq, M].
        excess: Output [B, Hq, M].
        sink: None, or the forward's [Hq].
        scale: Multiplies q . k.
        diagonal: Query i sees key j when j <= i + diagonal; not read unless ``causal``.
        causal: Whether attention is causal.
        low_diagonal: None, or query i sees key j only when j >= i + low_diagonal.
        softcap: None, or the bound of the scores before the mask.
    """
    B, Hq, M, D = q.shape
    _, Hkv, N, _ = k.shape
    D = hl.specialize(D)
    block_m = hl.register_block_size(16, 256)
    block_n = hl.register_block_size(16, 256)
    for i, h, b in hl.grid([(M + block_m - 1) // block_m, Hq, B]):
        row = i * block_m + hl.arange(block_m)
        inside = row < M
        row_norm = hl.load(norm, [b, h, row], extra_mask=inside)
        size = torch.abs(row_norm)
        large = (size > _LARGE_NORM) & (size < float("inf"))
        # Usually no row of the tile is large and the loop has no iterations.
        tiles = torch.amax(torch.where(large, 1, 0)) * ((N + block_n - 1) // block_n)
        d = hl.arange(parts.padded_width(D))
        q_tile = parts.load_rows(q, b, h, row, d, M, D, True)
        hk = h // (Hq // Hkv)
        c = parts.score_scale(scale, softcap, mask)
        total = hl.full([block_m], 0.0, dtype=torch.float32)
        if sink is not None:
            total = parts.exp_shifted(hl.load(sink, [h]).to(torch.float32), row_norm, True)
        for j in hl.grid(tiles):
            col = j * block_n + hl.arange(block_n)
            bound = col < N
            mask_tile = parts.load_mask(mask, b, h, row, col, inside[:, None] & bound[None, :])
            k_tile = parts.load_rows(k, b, hk, col, d, N, D, True)
            s = hl.dot(q_tile, k_tile.T, out_dtype=torch.float32)
            exponent = parts.exponents(parts.capped(s * c, softcap), softcap, mask)
            exponent = parts.masked_exponents(exponent, mask, mask_tile)
            p = parts.exp_shifted(exponent, row_norm[:, None], True)
            seen = parts.visible(row[:, None], col[None, :], N, diagonal, causal, low_diagonal)
            total = total + torch.where(seen, p, 0.0).sum(-1)
        hl.store(excess, [b, h, row], torch.where(large, torch.log2(total), 0.0), extra_mask=inside)


def attention_dkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    do: torch.Tensor,
    norm: torch.Tensor,
    delta: torch.Tensor,
    excess: torch.Tensor | None,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    threshold: int,
    keep_scale: float,
    diagonal: int,
    causal: hl.constexpr,
    low_diagonal: int | None,
    softcap: float | None,
    row_copies: hl.constexpr,
) -> None:
    """Helion kernel function: dK and dV. Block sizes: [block_n, block_m].

    Args:
        q: Queries [B, Hq, M, D].
        k: Keys [B, Hkv, N, D], Hq a multiple of Hkv.
        v: Values [B, Hkv, N, Dv].
        mask: None, or a view expanded to [B, Hq, M, N]: bool (True = visible) or a float dtype (added to the scores).
        rng_state: None for no dropout, else int64 [1] with the forward's seed.
        do: Gradient of the output [B, Hq, M, Dv].
        norm: From :func:`attention_delta`, [B, Hq, M].
        delta: From :func:`attention_delta`, [B, Hq, M].
        excess: From :func:`attention_excess` with an additive mask, else None.
        dk: Output [B, Hkv, N, D].
        dv: Output [B, Hkv, N, Dv].
        scale: Multiplies q . k.
        threshold: ``parts.signed_threshold(dropout_p)``; not read without ``rng_state``.
        keep_scale: 1 / (1 - dropout_p), or 1.
        diagonal: Query i sees key j when j <= i + diagonal; not read unless ``causal``.
        causal: Whether attention is causal.
        low_diagonal: None, or query i sees key j only when j >= i + low_diagonal.
        softcap: None, or the bound of the scores before the mask.
        row_copies: See :func:`row_copies_for`.
    """
    B, Hq, M, D = q.shape
    _, Hkv, N, Dv = v.shape
    D = hl.specialize(D)
    Dv = hl.specialize(Dv)
    block_n = hl.register_block_size(16, 256)
    block_m = hl.register_block_size(16, 256)
    for i, hk, b in hl.grid([(N + block_n - 1) // block_n, Hkv, B]):
        col = i * block_n + hl.arange(block_n)
        inside = col < N
        d = hl.arange(parts.value_columns(Dv, D))
        d_v = hl.arange(parts.value_columns(D, Dv))
        k_tile = parts.load_rows(k, b, hk, col, d, N, D, True)
        v_tile = parts.load_rows(v, b, hk, col, d_v, N, Dv, True)
        dk_sum = hl.zeros([block_n, parts.value_columns(Dv, D)], dtype=torch.float32)
        dv_sum = hl.zeros([block_n, parts.value_columns(D, Dv)], dtype=torch.float32)
        c = parts.score_scale(scale, softcap, mask)
        group = Hq // Hkv
        start, stop, tail, end = _edge_tiles(i * block_n, block_n, M, N, mask, diagonal, causal, low_diagonal, block_m)
        edges = end - tail + stop - start
        for g in hl.grid(group):
            h = hk * group + g

            for step in hl.grid(edges):
                row = parts.positions(_edge_tile(step, start, stop, tail, low_diagonal), hl.arange(block_m))
                bound = row < M
                mask_t = parts.load_mask(mask, b, h, row[None, :], col[:, None], bound[None, :] & inside[:, None])
                q_tile = parts.load_rows(q, b, h, row, d, M, D, True)
                s_t = hl.dot(k_tile, q_tile.T, out_dtype=torch.float32)
                row_norm = _row_values(norm, b, h, row, M, row_copies, block_m)
                row_excess = _row_values(excess, b, h, row, M, row_copies, block_m)
                x_t = parts.capped(s_t * c, softcap)
                p_t = _probabilities(parts.exponents(x_t, softcap, mask), row_norm, row_excess, mask, mask_t)
                if causal:
                    p_t = torch.where((col - diagonal)[:, None] <= row[None, :], p_t, 0.0)
                if low_diagonal is not None:
                    p_t = torch.where((col - low_diagonal)[:, None] >= row[None, :], p_t, 0.0)
                keep = _keep_t(rng_state, b * Hq + h, row, i, threshold, block_m, block_n)
                do_tile = parts.load_rows(do, b, h, row, d_v, M, Dv, True)
                dv_sum = hl.dot(_kept(p_t, keep).to(do.dtype), do_tile, acc=dv_sum)
                dp_t = _kept(hl.dot(v_tile, do_tile.T, out_dtype=torch.float32), keep)
                ds_t = p_t * (dp_t - _row_values(delta, b, h, row, M, row_copies, block_m))
                ds_t = parts.uncapped(ds_t, x_t, softcap)
                dk_sum = hl.dot(ds_t.to(q.dtype), q_tile, acc=dk_sum)

            for j in hl.grid(stop, tail):
                row = j * block_m + hl.arange(block_m)
                mask_t = _whole_mask_tile_t(mask, b, h, row, col)
                q_tile = parts.load_rows(q, b, h, row, d, M, D, False)
                s_t = hl.dot(k_tile, q_tile.T, out_dtype=torch.float32)
                row_norm = _row_values(norm, b, h, row, None, row_copies, block_m)
                row_excess = _row_values(excess, b, h, row, None, row_copies, block_m)
                x_t = parts.capped(s_t * c, softcap)
                p_t = _probabilities(parts.exponents(x_t, softcap, mask), row_norm, row_excess, mask, mask_t)
                keep = _keep_t(rng_state, b * Hq + h, row, i, threshold, block_m, block_n)
                do_tile = parts.load_rows(do, b, h, row, d_v, M, Dv, False)
                dv_sum = hl.dot(_kept(p_t, keep).to(do.dtype), do_tile, acc=dv_sum)
                dp_t = _kept(hl.dot(v_tile, do_tile.T, out_dtype=torch.float32), keep)
                ds_t = p_t * (dp_t - _row_values(delta, b, h, row, None, row_copies, block_m))
                ds_t = parts.uncapped(ds_t, x_t, softcap)
                dk_sum = hl.dot(ds_t.to(q.dtype), q_tile, acc=dk_sum)

        parts.store_rows(dk, b, hk, col, d, N, D, dk_sum * (scale * keep_scale))
        parts.store_rows(dv, b, hk, col, d_v, N, Dv, dv_sum * keep_scale)


def attention_dq(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    do: torch.Tensor,
    norm: torch.Tensor,
    delta: torch.Tensor,
    excess: torch.Tensor | None,
    dq: torch.Tensor,
    scale: float,
    threshold: int,
    keep_scale: float,
    diagonal: int,
    causal: hl.constexpr,
    low_diagonal: int | None,
    softcap: float | None,
) -> None:
    """Helion kernel function: dQ. Block sizes: [block_m, block_n].

    Args:
        q: See :func:`attention_dkv`, as for all arguments but the next.
        k: Keys.
        v: Values.
        mask: Mask view, or None.
        rng_state: Seed, or None.
        do: Gradient of the output.
        norm: From :func:`attention_delta`.
        delta: From :func:`attention_delta`.
        excess: From :func:`attention_excess`, or None.
        dq: Output [B, Hq, M, D].
        scale: Multiplies q . k.
        threshold: Dropout threshold.
        keep_scale: 1 / (1 - dropout_p), or 1.
        diagonal: Causal diagonal.
        causal: Whether attention is causal.
        low_diagonal: Diagonal of the first visible keys, or None.
        softcap: Bound of the scores, or None.
    """
    B, Hq, M, D = q.shape
    _, Hkv, N, Dv = v.shape
    D = hl.specialize(D)
    Dv = hl.specialize(Dv)
    block_m = hl.register_block_size(16, 256)
    block_n = hl.register_block_size(16, 256)
    tiles_m = (M + block_m - 1) // block_m
    for index, h, b in hl.grid([tiles_m, Hq, B]):
        tile = parts.heavy_first(index, tiles_m, causal)
        row = tile * block_m + hl.arange(block_m)
        inside = row < M
        hk = h // (Hq // Hkv)
        d = hl.arange(parts.value_columns(Dv, D))
        d_v = hl.arange(parts.value_columns(D, Dv))
        q_tile = parts.load_rows(q, b, h, row, d, M, D, True)
        do_tile = parts.load_rows(do, b, h, row, d_v, M, Dv, True)
        row_norm = _column_values(norm, b, h, row, M)
        row_delta = _column_values(delta, b, h, row, M)
        row_excess = _column_values(excess, b, h, row, M)
        dq_sum = hl.zeros([block_m, parts.value_columns(Dv, D)], dtype=torch.float32)
        c = parts.score_scale(scale, softcap, mask)
        first, full, start, stop = parts.key_tiles(
            tile * block_m, tile * block_m + block_m - 1, N, diagonal, causal, low_diagonal, block_n
        )

        for j in hl.grid(first, full):
            col = j * block_n + hl.arange(block_n)
            mask_tile = parts.load_mask(mask, b, h, row, col, inside[:, None])
            k_tile = parts.load_rows(k, b, hk, col, d, N, D, False)
            v_tile = parts.load_rows(v, b, hk, col, d_v, N, Dv, False)
            s = hl.dot(q_tile, k_tile.T, out_dtype=torch.float32)
            dp = hl.dot(do_tile, v_tile.T, out_dtype=torch.float32)
            x = parts.capped(s * c, softcap)
            p = _probabilities(parts.exponents(x, softcap, mask), row_norm, row_excess, mask, mask_tile)
            dp = _kept(dp, _keep(rng_state, b * Hq + h, row, j, threshold, block_m, block_n))
            ds = parts.uncapped(p * (dp - row_delta), x, softcap)
            dq_sum = hl.dot(ds.to(k.dtype), k_tile, acc=dq_sum)

        for step in hl.grid(start, stop):
            j = parts.edge_tile(step, first, full, low_diagonal)
            col = parts.edge_positions(j, block_n, low_diagonal)
            bound = col < N
            mask_tile = parts.load_mask(mask, b, h, row, col, inside[:, None] & bound[None, :])
            k_tile = parts.load_rows(k, b, hk, col, d, N, D, True)
            v_tile = parts.load_rows(v, b, hk, col, d_v, N, Dv, True)
            s = hl.dot(q_tile, k_tile.T, out_dtype=torch.float32)
            dp = hl.dot(do_tile, v_tile.T, out_dtype=torch.float32)
            x = parts.capped(s * c, softcap)
            p = _probabilities(parts.exponents(x, softcap, mask), row_norm, row_excess, mask, mask_tile)
            p = torch.where(parts.visible(row[:, None], col[None, :], N, diagonal, causal, low_diagonal), p, 0.0)
            dp = _kept(dp, _keep(rng_state, b * Hq + h, row, j, threshold, block_m, block_n))
            ds = parts.uncapped(p * (dp - row_delta), x, softcap)
            dq_sum = hl.dot(ds.to(k.dtype), k_tile, acc=dq_sum)

        parts.store_rows(dq, b, h, row, d, M, D, dq_sum * (scale * keep_scale))


def _edge_tiles(
    first_col: Int,
    block_n: Int,
    rows: Int,
    keys: Int,
    mask: torch.Tensor | None,
    diagonal: Int,
    causal: bool,
    low_diagonal: Int | None,
    block_m: Int,
) -> tuple[Any, Any, Any, Any]:
    """``(start, stop, tail, end)``, as integers or scalars on the device.

    A tile of keys needs bounds in the query tiles ``[start, stop)`` and ``[tail, end)``, none in ``[stop, tail)``, and
    is invisible in all others. The former lie on the diagonal, the latter on the lower one of a window. With a mask the
    former are all visible ones when the tile of keys is ragged: a bound on keys, which Triton cannot relate to the
    mask's alignment, would make it load every tile of the mask element by element.

    The ragged last tile of queries is ``[tail, end)`` where no window ends before it.
    """
    last = rows // block_m
    if not causal and mask is None and low_diagonal is None:
        return 0, 0, last, (rows + block_m - 1) // block_m
    zero = hl.full([], 0, dtype=torch.int32)
    whole = zero + last
    start: Any = zero
    stop: Any = zero
    if causal:
        start, stop, _ = parts.query_tiles(first_col, first_col + block_n - 1, rows, diagonal, causal, block_m)
        stop = torch.minimum(stop, whole)
    if low_diagonal is not None:
        # Rows up to (key - low_diagonal) see a key; see parts.key_tiles for the rounding.
        tail: Any = parts.clamped_tiles(first_col - low_diagonal + 1, rows, block_m)
        seen: Any = parts.clamped_tiles(first_col + block_n - 1 - low_diagonal + block_m, rows + block_m - 1, block_m)
        start = torch.minimum(start, seen)
        stop = torch.minimum(torch.maximum(stop, start), seen)
        tail = torch.minimum(torch.maximum(tail, stop), seen)
        if mask is not None:
            stop = torch.where(zero + (first_col + block_n) > keys, tail, stop)
        return start, stop, tail, seen
    if mask is not None:
        stop = torch.where(zero + (first_col + block_n) > keys, whole, stop)
    return start, stop, last, (rows + block_m - 1) // block_m


def _edge_tile(step: Int, start: Any, stop: Any, tail: Any, low_diagonal: Int | None) -> Any:
    """The ``step``-th of the tiles ``start .. stop - 1, tail ..``; without a window only one is left from ``tail``."""
    if low_diagonal is not None:
        source = "tl.cast(tl.where({0} < {2} - {1}, {0} + {1}, {0} - ({2} - {1}) + {3}), tl.int32)"
        return hl.inline_triton(source, (step, start, stop, tail), hl.full([], 0, dtype=torch.int32))
    if not isinstance(start, torch.Tensor):
        # `step` is 0 here; a position that visibly depends on it keeps Triton from hoisting the loads out of the loop.
        return tail + step
    source = "tl.cast(tl.where({0} < {2} - {1}, {0} + {1}, {3}), tl.int32)"
    return hl.inline_triton(source, (step, start, stop, tail), hl.full([], 0, dtype=torch.int32))


def _whole_mask_tile_t(mask: torch.Tensor | None, b: Int, h: Int, row: torch.Tensor, col: torch.Tensor) -> Any:
    """A transposed tile of the mask that needs no bounds, None without a mask.

    Loaded as it is needed: a tile transposed after its load goes through shared memory between barriers instead of
    arriving there asynchronously (bool mask, D=128: 669 instead of 494 instructions in the loop).
    """
    return None if mask is None else hl.load(mask, [b, h, row.unsqueeze(0), col.unsqueeze(1)])


def _row_values(
    values: torch.Tensor | None, b: Int, h: Int, row: torch.Tensor, rows: Int | None, copies: int, block_m: Int
) -> Any:
    """``values[b, h, row]`` as a row, 0 where ``row >= rows`` (None: nowhere), loaded ``copies`` times; None of None.

    See :func:`row_copies_for` for why.
    """
    if values is None:
        return None
    if copies == 1:
        return hl.load(values, [b, h, row], extra_mask=None if rows is None else row < rows).unsqueeze(0)
    index = row.unsqueeze(0) + torch.zeros_like(hl.arange(copies)).unsqueeze(1)
    tile = hl.load(values, [b, h, index], extra_mask=None if rows is None else index < rows).T
    while copies > 2:
        copies //= 2
        tile, _ = hl.split(tile.reshape([block_m, copies, 2]))
    return hl.split(tile)[0].unsqueeze(0)


def _column_values(values: torch.Tensor | None, b: Int, h: Int, row: torch.Tensor, rows: Int) -> Any:
    """``values[b, h, row]`` as a column, 0 where ``row >= rows``; None of None."""
    return None if values is None else hl.load(values, [b, h, row], extra_mask=row < rows).unsqueeze(1)


def _probabilities(
    exponent: torch.Tensor, norm: torch.Tensor, excess: Any, mask: torch.Tensor | None, mask_tile: Any
) -> torch.Tensor:
    """P of a tile of exponents, before the causal mask and the window.

    The tile may be transposed; so are then ``norm`` and ``excess`` (a row instead of a column) and ``mask_tile``.
    """
    if parts.additive(mask):
        return torch.exp2((exponent + mask_tile.to(torch.float32) - norm) * parts.LOG2E - excess)
    p = torch.exp2(exponent - norm)
    return p if mask is None else torch.where(mask_tile, p, 0.0)


def _keep(
    rng_state: torch.Tensor | None,
    plane: Int,
    row: torch.Tensor,
    col_tile: Int,
    threshold: int,
    block_m: Int,
    block_n: Int,
) -> torch.Tensor | None:
    """The tile of the dropout mask, None without dropout."""
    if rng_state is None:
        return None
    return parts.keep_tile(rng_state, plane, row, col_tile, threshold, block_m, block_n)


def _keep_t(
    rng_state: torch.Tensor | None,
    plane: Int,
    row: torch.Tensor,
    col_tile: Int,
    threshold: int,
    block_m: Int,
    block_n: Int,
) -> torch.Tensor | None:
    """The transposed tile of the dropout mask, None without dropout."""
    keep = _keep(rng_state, plane, row, col_tile, threshold, block_m, block_n)
    return None if keep is None else keep.T


def _kept(tile: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """``tile`` with zeros where dropout drops."""
    return tile if keep is None else torch.where(keep, tile, 0.0)


def row_copies_for(config: Mapping[str, Any]) -> int:
    """How often :func:`attention_dkv` should load its per-row vectors under a config.

    Triton (3.6) calls a load of fewer elements than the program has threads cheap and moves it into the layout of its
    use, here the columns of an accumulator, in which every thread copies 16 elements of its own: 32 asynchronous copies
    with their addresses and predicates, 250 of the loop's 611 instructions (D=128, tile 128x64, 8 warps). Loading the
    vector as a matrix of equal rows, one element for each thread, and dropping all rows but one avoids that: 1 copy for
    each thread, 370 instructions.

    Args:
        config: A Helion config of :data:`DKV`; reads ``block_sizes`` and ``num_warps``.
    """
    copies = 32 * int(config.get("num_warps", 4)) // int(config["block_sizes"][1])
    return max(1, copies)


def options(
    *,
    scale: float,
    dropout_p: float,
    causal: bool,
    diagonal: int,
    low_diagonal: int | None = None,
    softcap: float | None = None,
) -> tuple[float, int, float, int, bool, int | None, float | None]:
    """The scalars that :func:`attention_dkv` and :func:`attention_dq` take after their tensors, from what a call means.

    Args:
        scale: Any finite number.
        dropout_p: In [0, 1).
        causal: Whether attention is causal.
        diagonal: 0 for top-left and N - M for bottom-right causal attention, plus the right side of a window.
        low_diagonal: That minus the left side of a window, or None.
        softcap: Bound of the scores, or None.
    """
    keep_scale = 1.0 / (1.0 - dropout_p)
    return float(scale), parts.signed_threshold(dropout_p), keep_scale, diagonal, causal, low_diagonal, softcap


_DIMS = {
    "q": "B Hq M D",
    "k": "B Hkv N D",
    "v": "B Hkv N Dv",
    "mask": "B Hq M N",
    "rng_state": "1",
    "do": "B Hq M Dv",
    "norm": "B Hq M",
    "delta": "B Hq M",
    "excess": "B Hq M",
}

DELTA = runtime.KernelFamily(
    attention_delta,
    dims={
        "o": "B Hq M Dv",
        "do": "B Hq M Dv",
        "lse": "B Hq M",
        "dlse": "B Hq M",
        "norm": "B Hq M",
        "delta": "B Hq M",
    },
    specialized=("Dv",),
)
EXCESS = runtime.KernelFamily(
    attention_excess,
    dims={"q": "B Hq M D", "k": "B Hkv N D", "mask": "B Hq M N", "norm": "B Hq M", "excess": "B Hq M", "sink": "Hq"},
    specialized=("D",),
)
DKV = runtime.KernelFamily(attention_dkv, dims={**_DIMS, "dk": "B Hkv N D", "dv": "B Hkv N Dv"})
DQ = runtime.KernelFamily(attention_dq, dims={**_DIMS, "dq": "B Hq M D"})

"""Attention with mods and lists of blocks, backward (Helion, lowered to Triton): dK and dV, dQ and captured tensors.

In the terms of :mod:`.flex_forward`, with ``delta`` and ``norm`` from :data:`.backward.DELTA`::

    P_ij = exp(s_ij - lse_i), 0 where (i, j) is not shown      dS_ij = P_ij * (do_i . v_j - delta_i)
    dX_ij = dS_ij * d score_mod / d x_ij                       dv_j = sum_i P_ij do_i
    dk_j = c * sum_i dX_ij q_i                                 dq_i = c * sum_j dX_ij k_j
    and of a captured value, sum_ij dS_ij * d score_mod / d value

The two kernels are as those of :mod:`.backward`: :func:`flex_dkv` owns keys and walks over the blocks of queries that
visit them, by lists that are the forward's transposed, :func:`flex_dq` owns queries and walks over the forward's lists.
It adds the gradients of captured tensors too, with atomic additions (:mod:`.flex_mods`), so their last bits vary
between runs.

Data layout: as in :mod:`.flex_forward`; dq, dk, dv as q, k, v; norm, delta [B, Hq, M] fp32.
"""

from __future__ import annotations

import helion.language as hl
import torch

from . import flex_mods, parts
from .backward import _column_values, _row_values
from .flex_forward import positions, steps


def flex_dkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part_count: torch.Tensor | None,
    part_index: torch.Tensor | None,
    full_count: torch.Tensor | None,
    full_index: torch.Tensor | None,
    t0: torch.Tensor | None,
    t1: torch.Tensor | None,
    t2: torch.Tensor | None,
    t3: torch.Tensor | None,
    t4: torch.Tensor | None,
    t5: torch.Tensor | None,
    t6: torch.Tensor | None,
    t7: torch.Tensor | None,
    do: torch.Tensor,
    norm: torch.Tensor,
    delta: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    n0: int | None,
    n1: int | None,
    n2: int | None,
    n3: int | None,
    scale: float,
    tiles_across: int,
    tiles_down: int,
    score_mod: hl.constexpr,
    mask_mod: hl.constexpr,
    ragged: hl.constexpr,
    row_copies: hl.constexpr,
) -> None:
    """Helion kernel function: dK and dV. Block sizes: [block_n, block_m].

    Args:
        q: See :func:`.flex_forward.flex_forward`, as for all arguments but these.
        k: Keys.
        v: Values.
        part_count: Of each column of blocks, how many rows visit it where ``mask_mod`` says so, int32 [B, Hq, C].
        part_index: Which, int32 [B, Hq, C, R].
        full_count: How many visit it whole.
        full_index: Which.
        t0: What the mods captured.
        t1: See ``t0``.
        t2: See ``t0``.
        t3: See ``t0``.
        t4: See ``t0``.
        t5: See ``t0``.
        t6: See ``t0``.
        t7: See ``t0``.
        do: Gradient of the output [B, Hq, M, Dv].
        norm: From ``backward.attention_delta``, [B, Hq, M].
        delta: From ``backward.attention_delta``, [B, Hq, M].
        dk: Output [B, Hkv, N, D].
        dv: Output [B, Hkv, N, Dv].
        n0: Captured integers.
        n1: See ``n0``.
        n2: See ``n0``.
        n3: See ``n0``.
        scale: Multiplies q . k.
        tiles_across: How many tiles of keys are a block's.
        tiles_down: How many tiles of queries are.
        score_mod: A program's text, or None.
        mask_mod: A program's text, or None.
        ragged: Whether a tile of queries may pass the last query.
        row_copies: See ``backward.row_copies_for``.
    """
    B, Hq, M, D = q.shape
    _, Hkv, N, Dv = v.shape
    D = hl.specialize(D)
    Dv = hl.specialize(Dv)
    block_n = hl.register_block_size(16, 256)
    block_m = hl.register_block_size(16, 256)
    tables = (t0, t1, t2, t3, t4, t5, t6, t7)
    numbers = (n0, n1, n2, n3)
    for tile, hk, b in hl.grid([(N + block_n - 1) // block_n, Hkv, B]):
        col = tile * block_n + hl.arange(block_n)
        j = flex_mods.bounded(col, N, True)
        d = hl.arange(parts.value_columns(Dv, D))
        d_v = hl.arange(parts.value_columns(D, Dv))
        k_tile = parts.load_rows(k, b, hk, col, d, N, D, True)
        v_tile = parts.load_rows(v, b, hk, col, d_v, N, Dv, True)
        dk_sum = hl.zeros([block_n, parts.value_columns(Dv, D)], dtype=torch.float32)
        dv_sum = hl.zeros([block_n, parts.value_columns(D, Dv)], dtype=torch.float32)
        line = tile // tiles_across
        group = Hq // Hkv
        tiles_m = (M + block_m - 1) // block_m
        for g in hl.grid(group):
            h = hk * group + g

            if full_count is not None or (part_count is None and mask_mod is None):
                for whole in hl.grid(steps(full_count, b, h, line, tiles_down, tiles_m)):
                    row = positions(full_index, b, h, line, whole, tiles_down, block_m)
                    q_tile = parts.load_rows(q, b, h, row, d, M, D, ragged)
                    do_tile = parts.load_rows(do, b, h, row, d_v, M, Dv, ragged)
                    s_t = hl.dot(k_tile, q_tile.T, out_dtype=torch.float32)
                    dp_t = hl.dot(v_tile, do_tile.T, out_dtype=torch.float32)
                    bound = M if ragged else None
                    terms = (
                        _row_values(norm, b, h, row, bound, row_copies, block_m),
                        _row_values(delta, b, h, row, bound, row_copies, block_m),
                    )
                    at = flex_mods.position(b, h, flex_mods.bounded(row, M, ragged)[None, :], j[:, None])
                    seen = (row < M)[None, :] if ragged else None
                    p_t, dx_t = _of_scores(s_t, dp_t, terms, scale, score_mod, None, at, tables, numbers, seen, ())
                    dv_sum = hl.dot(p_t.to(do.dtype), do_tile, acc=dv_sum)
                    dk_sum = hl.dot(dx_t.to(q.dtype), q_tile, acc=dk_sum)

            if part_count is not None or mask_mod is not None:
                for partly in hl.grid(steps(part_count, b, h, line, tiles_down, tiles_m)):
                    row = positions(part_index, b, h, line, partly, tiles_down, block_m)
                    q_tile = parts.load_rows(q, b, h, row, d, M, D, ragged)
                    do_tile = parts.load_rows(do, b, h, row, d_v, M, Dv, ragged)
                    s_t = hl.dot(k_tile, q_tile.T, out_dtype=torch.float32)
                    dp_t = hl.dot(v_tile, do_tile.T, out_dtype=torch.float32)
                    bound = M if ragged else None
                    terms = (
                        _row_values(norm, b, h, row, bound, row_copies, block_m),
                        _row_values(delta, b, h, row, bound, row_copies, block_m),
                    )
                    at = flex_mods.position(b, h, flex_mods.bounded(row, M, ragged)[None, :], j[:, None])
                    seen = (row < M)[None, :] if ragged else None
                    p_t, dx_t = _of_scores(s_t, dp_t, terms, scale, score_mod, mask_mod, at, tables, numbers, seen, ())
                    dv_sum = hl.dot(p_t.to(do.dtype), do_tile, acc=dv_sum)
                    dk_sum = hl.dot(dx_t.to(q.dtype), q_tile, acc=dk_sum)

        parts.store_rows(dk, b, hk, col, d, N, D, dk_sum * scale)
        parts.store_rows(dv, b, hk, col, d_v, N, Dv, dv_sum)


def flex_dq(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part_count: torch.Tensor | None,
    part_index: torch.Tensor | None,
    full_count: torch.Tensor | None,
    full_index: torch.Tensor | None,
    t0: torch.Tensor | None,
    t1: torch.Tensor | None,
    t2: torch.Tensor | None,
    t3: torch.Tensor | None,
    t4: torch.Tensor | None,
    t5: torch.Tensor | None,
    t6: torch.Tensor | None,
    t7: torch.Tensor | None,
    do: torch.Tensor,
    norm: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    g0: torch.Tensor | None,
    g1: torch.Tensor | None,
    g2: torch.Tensor | None,
    g3: torch.Tensor | None,
    g4: torch.Tensor | None,
    g5: torch.Tensor | None,
    g6: torch.Tensor | None,
    g7: torch.Tensor | None,
    n0: int | None,
    n1: int | None,
    n2: int | None,
    n3: int | None,
    scale: float,
    tiles_down: int,
    tiles_across: int,
    score_mod: hl.constexpr,
    mask_mod: hl.constexpr,
    ragged: hl.constexpr,
) -> None:
    """Helion kernel function: dQ and the gradients of captured tensors. Block sizes: [block_m, block_n].

    Args:
        q: See :func:`.flex_forward.flex_forward`, as for all arguments but these.
        k: Keys.
        v: Values.
        part_count: Lists, as the forward's.
        part_index: See ``part_count``.
        full_count: See ``part_count``.
        full_index: See ``part_count``.
        t0: What the mods captured.
        t1: See ``t0``.
        t2: See ``t0``.
        t3: See ``t0``.
        t4: See ``t0``.
        t5: See ``t0``.
        t6: See ``t0``.
        t7: See ``t0``.
        do: Gradient of the output [B, Hq, M, Dv].
        norm: From ``backward.attention_delta``, [B, Hq, M].
        delta: From ``backward.attention_delta``, [B, Hq, M].
        dq: Output [B, Hq, M, D].
        g0: Zeros of the shape of ``t0``, to which its gradient is added; None where it needs none.
        g1: See ``g0``.
        g2: See ``g0``.
        g3: See ``g0``.
        g4: See ``g0``.
        g5: See ``g0``.
        g6: See ``g0``.
        g7: See ``g0``.
        n0: Captured integers.
        n1: See ``n0``.
        n2: See ``n0``.
        n3: See ``n0``.
        scale: Multiplies q . k.
        tiles_down: How many tiles of queries are a block's.
        tiles_across: How many tiles of keys are.
        score_mod: A program's text, or None.
        mask_mod: A program's text, or None.
        ragged: Whether a tile may pass the last query or key.
    """
    B, Hq, M, D = q.shape
    _, Hkv, N, Dv = v.shape
    D = hl.specialize(D)
    Dv = hl.specialize(Dv)
    block_m = hl.register_block_size(16, 256)
    block_n = hl.register_block_size(16, 256)
    tables = (t0, t1, t2, t3, t4, t5, t6, t7)
    grads = (g0, g1, g2, g3, g4, g5, g6, g7)
    numbers = (n0, n1, n2, n3)
    tiles_m = (M + block_m - 1) // block_m
    for index, h, b in hl.grid([tiles_m, Hq, B]):
        tile = parts.heavy_first(index, tiles_m, part_count is not None)
        row = tile * block_m + hl.arange(block_m)
        i = flex_mods.bounded(row, M, True)
        hk = h // (Hq // Hkv)
        d = hl.arange(parts.value_columns(Dv, D))
        d_v = hl.arange(parts.value_columns(D, Dv))
        q_tile = parts.load_rows(q, b, h, row, d, M, D, True)
        do_tile = parts.load_rows(do, b, h, row, d_v, M, Dv, True)
        terms = (_column_values(norm, b, h, row, M), _column_values(delta, b, h, row, M))
        dq_sum = hl.zeros([block_m, parts.value_columns(Dv, D)], dtype=torch.float32)
        line = tile // tiles_down
        tiles_n = (N + block_n - 1) // block_n

        if full_count is not None or (part_count is None and mask_mod is None):
            for whole in hl.grid(steps(full_count, b, h, line, tiles_across, tiles_n)):
                col = positions(full_index, b, h, line, whole, tiles_across, block_n)
                k_tile = parts.load_rows(k, b, hk, col, d, N, D, ragged)
                v_tile = parts.load_rows(v, b, hk, col, d_v, N, Dv, ragged)
                s = hl.dot(q_tile, k_tile.T, out_dtype=torch.float32)
                dp = hl.dot(do_tile, v_tile.T, out_dtype=torch.float32)
                at = flex_mods.position(b, h, i[:, None], flex_mods.bounded(col, N, ragged)[None, :])
                seen = (row < M)[:, None] & (col < N)[None, :] if ragged else None
                _p, dx = _of_scores(s, dp, terms, scale, score_mod, None, at, tables, numbers, seen, grads)
                dq_sum = hl.dot(dx.to(k.dtype), k_tile, acc=dq_sum)

        if part_count is not None or mask_mod is not None:
            for partly in hl.grid(steps(part_count, b, h, line, tiles_across, tiles_n)):
                col = positions(part_index, b, h, line, partly, tiles_across, block_n)
                k_tile = parts.load_rows(k, b, hk, col, d, N, D, ragged)
                v_tile = parts.load_rows(v, b, hk, col, d_v, N, Dv, ragged)
                s = hl.dot(q_tile, k_tile.T, out_dtype=torch.float32)
                dp = hl.dot(do_tile, v_tile.T, out_dtype=torch.float32)
                at = flex_mods.position(b, h, i[:, None], flex_mods.bounded(col, N, ragged)[None, :])
                seen = (row < M)[:, None] & (col < N)[None, :] if ragged else None
                _p, dx = _of_scores(s, dp, terms, scale, score_mod, mask_mod, at, tables, numbers, seen, grads)
                dq_sum = hl.dot(dx.to(k.dtype), k_tile, acc=dq_sum)

        parts.store_rows(dq, b, h, row, d, M, D, dq_sum * scale)


def _of_scores(
    s: torch.Tensor,
    dp: torch.Tensor,
    terms: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    score_mod: str | None,
    mask_mod: str | None,
    at: flex_mods.Position,
    tables: flex_mods.Tables,
    numbers: flex_mods.Numbers,
    seen: torch.Tensor | None,
    grads: flex_mods.Tables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """P and dX of a tile, which may be transposed.

    Args:
        s: Raw products q . k.
        dp: do . v.
        terms: The rows' norm and delta.
        scale: Multiplies ``s``.
        score_mod: A program's text, or None.
        mask_mod: A program's text, or None where the whole tile is shown.
        at: The tile's position.
        tables: What mods captured.
        numbers: Integers that they did.
        seen: What exists, None for all.
        grads: Of captured tensors.
    """
    norm, delta = terms
    shown = flex_mods.shown(mask_mod, at, tables, numbers)
    if seen is not None:
        shown = seen if shown is None else shown & seen

    def from_exponent(exponent: torch.Tensor, in_natural: bool) -> tuple[torch.Tensor, torch.Tensor]:
        p = parts.exp_shifted(exponent, norm, in_natural)
        if shown is not None:
            p = torch.where(shown, p, 0.0)
        return p, p * (dp - delta)

    if score_mod is None:
        return from_exponent(s * (scale * parts.LOG2E), False)
    return flex_mods.differentiated(
        score_mod, s * scale, at, tables, numbers, grads, lambda score: from_exponent(score, True)
    )

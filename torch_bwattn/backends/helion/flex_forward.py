"""Attention with mods and lists of blocks, forward (Helion, lowered to Triton).

For one batch and one query head, with ``c`` the scale::

    x_ij = c * q_i . k_j        s_ij = score_mod(x_ij, b, h, i, j), -inf where (i, j) is not shown
    lse_i = log sum_j exp(s_ij)     o_i = sum_j exp(s_ij - lse_i) v_j     max_i = max_j s_ij
    o_i = 0, lse_i = max_i = -inf of a row that nothing is shown to

by the online softmax of :mod:`.forward`. Which tiles of keys a program visits, two loops say: tiles that are shown
whole, where ``mask_mod`` is not called, then tiles of which it decides. Without lists of blocks all are of one kind.

Data layout: q [B, Hq, M, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv], o [B, Hq, M, Dv], lse, most [B, Hq, M]; any strides.
The lists are those of ``BlockMask``, expanded to [B, Hq, R] and [B, Hq, R, C]: row ``r`` of blocks visits the blocks
``index[r, :count[r]]``. A block is a multiple of the kernel's tiles in both directions (:mod:`..flex_blocks`).
Exponents are in natural units beside a ``score_mod``, which may give ``finfo.min``, and in base 2 without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import helion.language as hl
import torch

from . import flex_mods, parts
from .forward import softmax, softmax_of_raw_scores

if TYPE_CHECKING:
    from .parts import Int


def flex_forward(
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
    o: torch.Tensor,
    lse: torch.Tensor,
    most: torch.Tensor | None,
    n0: int | None,
    n1: int | None,
    n2: int | None,
    n3: int | None,
    scale: float,
    tiles_down: int,
    tiles_across: int,
    score_mod: hl.constexpr,
    mask_mod: hl.constexpr,
    nonnegative_scale: hl.constexpr,
    ragged: hl.constexpr,
    packed: hl.constexpr,
) -> None:
    """Helion kernel function. Block sizes: [block_m, block_n].

    Args:
        q: Queries [B, Hq, M, D].
        k: Keys [B, Hkv, N, D], Hq a multiple of Hkv.
        v: Values [B, Hkv, N, Dv].
        part_count: None for no lists, or int32 [B, Hq, R].
        part_index: Blocks of which ``mask_mod`` decides, int32 [B, Hq, R, C].
        full_count: None for no such blocks, or int32 [B, Hq, R].
        full_index: Blocks that are shown whole, int32 [B, Hq, R, F].
        t0: What the mods captured, as the next seven; None where there is no more.
        t1: See ``t0``.
        t2: See ``t0``.
        t3: See ``t0``.
        t4: See ``t0``.
        t5: See ``t0``.
        t6: See ``t0``.
        t7: See ``t0``.
        o: Output [B, Hq, M, Dv], written.
        lse: Natural log-sum-exp [B, Hq, M], fp32, written.
        most: None, or [B, Hq, M], fp32, written.
        n0: Integers that the mods captured, as the next three.
        n1: See ``n0``.
        n2: See ``n0``.
        n3: See ``n0``.
        scale: Multiplies q . k.
        tiles_down: How many tiles of queries are a block's.
        tiles_across: How many tiles of keys are.
        score_mod: A program's text, or None.
        mask_mod: A program's text, or None.
        nonnegative_scale: Whether scale >= 0.
        ragged: Whether a tile of keys may pass the last key.
        packed: See :mod:`.forward`.
    """
    B, Hq, M, D = q.shape
    _, Hkv, N, Dv = v.shape
    D = hl.specialize(D)
    Dv = hl.specialize(Dv)
    block_m = hl.register_block_size(16, 256)
    block_n = hl.register_block_size(16, 256)
    tables = (t0, t1, t2, t3, t4, t5, t6, t7)
    numbers = (n0, n1, n2, n3)
    tiles_m = (M + block_m - 1) // block_m
    for index, h, b in hl.grid([tiles_m, Hq, B]):
        # The last rows usually see the most keys.
        tile = parts.heavy_first(index, tiles_m, part_count is not None)
        row = tile * block_m + hl.arange(block_m)
        i = flex_mods.bounded(row, M, True)
        hk = h // (Hq // Hkv)
        d = hl.arange(parts.padded_width(D))
        dv = hl.arange(parts.value_columns(D, Dv))
        q_tile = parts.load_rows(q, b, h, row, d, M, D, True)
        m = hl.full([block_m], float("-inf"), dtype=torch.float32)
        l = hl.full([block_m], 0.0, dtype=torch.float32)
        acc = hl.zeros([block_m, parts.value_columns(D, Dv)], dtype=torch.float32)
        line = tile // tiles_down
        tiles_n = (N + block_n - 1) // block_n

        if full_count is not None or (part_count is None and mask_mod is None):
            for whole in hl.grid(steps(full_count, b, h, line, tiles_across, tiles_n)):
                col = positions(full_index, b, h, line, whole, tiles_across, block_n)
                k_tile = parts.load_rows(k, b, hk, col, d, N, D, ragged)
                s = hl.dot(q_tile, k_tile.T, out_dtype=torch.float32)
                if score_mod is None and nonnegative_scale and not ragged:
                    p, alpha, m = softmax_of_raw_scores(s, scale * parts.LOG2E, m, packed)
                else:
                    at = flex_mods.position(b, h, i[:, None], flex_mods.bounded(col, N, ragged)[None, :])
                    exponent = exponents(s, scale, score_mod, at, tables, numbers)
                    exponent = masked(exponent, None, col, N, ragged)
                    p, alpha, m = softmax(exponent, m, score_mod is not None)
                l = l * alpha + p.sum(-1)
                v_tile = parts.load_rows(v, b, hk, col, dv, N, Dv, ragged)
                acc = hl.dot(p.to(v.dtype), v_tile, acc=parts.multiply(acc, alpha[:, None], packed))

        if part_count is not None or mask_mod is not None:
            for partly in hl.grid(steps(part_count, b, h, line, tiles_across, tiles_n)):
                col = positions(part_index, b, h, line, partly, tiles_across, block_n)
                k_tile = parts.load_rows(k, b, hk, col, d, N, D, ragged)
                s = hl.dot(q_tile, k_tile.T, out_dtype=torch.float32)
                at = flex_mods.position(b, h, i[:, None], flex_mods.bounded(col, N, ragged)[None, :])
                exponent = exponents(s, scale, score_mod, at, tables, numbers)
                shown = flex_mods.shown(mask_mod, at, tables, numbers)
                exponent = masked(exponent, shown, col, N, ragged)
                p, alpha, m = softmax(exponent, m, score_mod is not None)
                l = l * alpha + p.sum(-1)
                v_tile = parts.load_rows(v, b, hk, col, dv, N, Dv, ragged)
                acc = hl.dot(p.to(v.dtype), v_tile, acc=parts.multiply(acc, alpha[:, None], packed))

        parts.store_rows(o, b, h, row, dv, M, Dv, acc / torch.where(l == 0.0, 1.0, l)[:, None])
        highest = parts.natural(m, score_mod is not None)
        hl.store(lse, [b, h, row], highest + torch.log(l), extra_mask=row < M)
        if most is not None:
            hl.store(most, [b, h, row], highest, extra_mask=row < M)


def steps(count: torch.Tensor | None, b: Int, h: Int, line: Any, tiles_across: Int, tiles: Int) -> Any:
    """How many tiles are visited: those of the listed blocks, or all where nothing is listed."""
    return tiles if count is None else hl.load(count, [b, h, line]) * tiles_across


def positions(
    index: torch.Tensor | None, b: Int, h: Int, line: Any, step: Int, tiles_across: Int, block: Int
) -> torch.Tensor:
    """Positions of the tile of a step: of the listed block that it is in, or the step's own where nothing is listed."""
    if index is None:
        return step * block + hl.arange(block)
    listed, offsets = hl.load(index, [b, h, line, step // tiles_across]), hl.arange(block)
    # In Triton source, see parts.positions.
    source = "tl.cast({0} * {2} + {1} % {2}, tl.int32) * {3}.shape[0] + {3}"
    return hl.inline_triton(source, (listed, step, tiles_across, offsets), offsets)


def exponents(
    s: torch.Tensor, scale: float, score_mod: str | None, at: flex_mods.Position, tables: flex_mods.Tables,
    numbers: flex_mods.Numbers,
) -> torch.Tensor:  # fmt: skip
    """Exponents of raw products: in base 2, or in natural units after a ``score_mod``."""
    if score_mod is None:
        return s * (scale * parts.LOG2E)
    return flex_mods.modified(score_mod, s * scale, at, tables, numbers)


def masked(
    exponent: torch.Tensor, shown: torch.Tensor | None, col: torch.Tensor, keys: Int, ragged: bool
) -> torch.Tensor:
    """-inf where nothing is shown."""
    if shown is not None:
        exponent = torch.where(shown, exponent, float("-inf"))
    return torch.where(torch.lt(col, keys).unsqueeze(0), exponent, float("-inf")) if ragged else exponent

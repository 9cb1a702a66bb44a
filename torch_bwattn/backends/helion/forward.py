"""The attention forward kernel (Helion, lowered to Triton).

For one batch and one query head, with ``c`` the scale, row ``i`` a query and ``j`` a key::

    s_ij = cap(c * q_i . k_j) (+ mask_ij)       -inf where j is not visible to i; cap as in ``parts``
    lse_i = log (exp(sink) + sum_j exp(s_ij))   -inf for a row without a visible key and without a sink
    o_i = sum_j keep_ij / (1 - p) * exp(s_ij - lse_i) * v_j         0 for a row without a visible key

No row of scores is ever stored. A program owns ``block_m`` queries of one (batch, head) and walks over tiles of
``block_n`` keys with the running maximum ``m``, the sum ``l = sum exp(s - m)`` and the unnormalized output ``acc``.
A tile with row maximum ``t`` changes them to (Milakov and Gimelshein, 2018; Dao et al., 2022)::

    m' = max(m, t)     p = exp(s - m')     l' = l * exp(m - m') + sum p     acc' = acc * exp(m - m') + dropout(p) v

and at the end ``o = acc / (l * (1 - p_drop))`` and ``lse = m + log l``. ``l`` is summed before dropout.

Cost for each score in the unmasked loop: one maximum, one fused multiply-add (``s * scale * log2(e) - m'`` with ``m``
kept in the scaled base-2 units of ``parts``), one ``ex2``, one addition and half a conversion. That needs the maximum
of unscaled scores, hence ``scale >= 0``; a negative scale takes a variant with one more multiplication.

The key loop is split in two: tiles that every query of the program sees entirely, without any comparison, then the
tiles on the causal diagonal and at the ragged end (``parts.key_tiles``). Tiles that none of the queries sees are
never visited. With causal attention the programs with the longest loops start first.

Data layout: q [B, Hq, M, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv], o [B, Hq, M, Dv], lse [B, Hq, M]; any strides.
Query head ``h`` reads key head ``h // (Hq // Hkv)``. Inside the kernel D is padded to a power of two of at least 16, Dv
to ``parts.value_columns``. Scores and sums are fp32; p is rounded to the dtype of v before the second product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import helion.language as hl
import torch

from . import parts, runtime

if TYPE_CHECKING:
    from .parts import Int


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    sink: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    threshold: int,
    keep_scale: float,
    diagonal: int,
    causal: hl.constexpr,
    low_diagonal: int | None,
    softcap: float | None,
    nonnegative_scale: hl.constexpr,
    packed: hl.constexpr,
) -> None:
    """Helion kernel function; :data:`FORWARD` prepares and launches it with what :func:`forward_arguments` gives.

    Args:
        q: Queries [B, Hq, M, D].
        k: Keys [B, Hkv, N, D], Hq a multiple of Hkv.
        v: Values [B, Hkv, N, Dv].
        mask: None, or a view expanded to [B, Hq, M, N]: bool (True = visible) or a float dtype (added to the scores).
        rng_state: None for no dropout, else int64 [1] with the seed.
        sink: None, or a logit for each query head [Hq], natural units, in the denominators of its rows.
        o: Output [B, Hq, M, Dv], written.
        lse: Natural log-sum-exp [B, Hq, M], fp32, written.
        scale: Multiplies q . k.
        threshold: ``parts.signed_threshold(dropout_p)``; not read without ``rng_state``.
        keep_scale: 1 / (1 - dropout_p), or 1.
        diagonal: Query i sees key j when j <= i + diagonal; not read unless ``causal``.
        causal: Whether attention is causal.
        low_diagonal: None, or query i sees key j only when j >= i + low_diagonal.
        softcap: None, or the bound of the scores before the mask.
        nonnegative_scale: Whether scale >= 0.
        packed: Whether two fp32 values are rescaled, or scaled and shifted, by one instruction.
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
        hk = h // (Hq // Hkv)
        c = parts.score_scale(scale, softcap, mask)
        d = hl.arange(parts.padded_width(D))
        dv = hl.arange(parts.value_columns(D, Dv))
        q_tile = parts.load_rows(q, b, h, row, d, M, D, True)
        m, l = _before_any_key(sink, h, mask, block_m)
        acc = hl.zeros([block_m, parts.value_columns(D, Dv)], dtype=torch.float32)
        first, full, start, stop = parts.key_tiles(
            tile * block_m, tile * block_m + block_m - 1, N, diagonal, causal, low_diagonal, block_n
        )

        for j in hl.grid(first, full):
            col = j * block_n + hl.arange(block_n)
            mask_tile = parts.load_mask(mask, b, h, row, col, (row < M)[:, None])
            k_tile = parts.load_rows(k, b, hk, col, d, N, D, False)
            s = hl.dot(q_tile, k_tile.T, out_dtype=torch.float32)
            if mask is None and softcap is None and nonnegative_scale:
                p, alpha, m = softmax_of_raw_scores(s, c, m, packed)
            else:
                exponent = parts.exponents(parts.capped(s * c, softcap), softcap, mask)
                exponent = parts.masked_exponents(exponent, mask, mask_tile)
                p, alpha, m = softmax(exponent, m, parts.additive(mask))
            l = l * alpha + p.sum(-1)
            p = _dropped(p, rng_state, b * Hq + h, row, j, threshold, block_m, block_n)
            v_tile = parts.load_rows(v, b, hk, col, dv, N, Dv, False)
            acc = hl.dot(p.to(v.dtype), v_tile, acc=parts.multiply(acc, alpha[:, None], packed))

        for step in hl.grid(start, stop):
            j = parts.edge_tile(step, first, full, low_diagonal)
            col = parts.edge_positions(j, block_n, low_diagonal)
            mask_tile = parts.load_mask(mask, b, h, row, col, (row < M)[:, None] & (col < N)[None, :])
            k_tile = parts.load_rows(k, b, hk, col, d, N, D, True)
            s = hl.dot(q_tile, k_tile.T, out_dtype=torch.float32)
            exponent = parts.exponents(parts.capped(s * c, softcap), softcap, mask)
            exponent = parts.masked_exponents(exponent, mask, mask_tile)
            seen = parts.visible(row[:, None], col[None, :], N, diagonal, causal, low_diagonal)
            p, alpha, m = softmax(torch.where(seen, exponent, float("-inf")), m, parts.additive(mask))
            l = l * alpha + p.sum(-1)
            p = _dropped(p, rng_state, b * Hq + h, row, j, threshold, block_m, block_n)
            v_tile = parts.load_rows(v, b, hk, col, dv, N, Dv, True)
            acc = hl.dot(p.to(v.dtype), v_tile, acc=parts.multiply(acc, alpha[:, None], packed))

        # A row without a visible key (and no sink) has l = 0 and acc = 0: output 0, lse = -inf + log(0) = -inf.
        normalizer = keep_scale / torch.where(l == 0.0, 1.0, l)
        parts.store_rows(o, b, h, row, dv, M, Dv, acc * normalizer[:, None])
        hl.store(lse, [b, h, row], parts.natural(m, parts.additive(mask)) + torch.log(l), extra_mask=row < M)


def _before_any_key(
    sink: torch.Tensor | None, h: Int, mask: torch.Tensor | None, block_m: Int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running maximum and sum of rows that have seen no key: those of nothing, or of the sink alone."""
    m = hl.full([block_m], float("-inf"), dtype=torch.float32)
    l = hl.full([block_m], 0.0, dtype=torch.float32)
    if sink is None:
        return m, l
    exponent = parts.exponent_scale(hl.load(sink, [h]).to(torch.float32), mask)
    m = torch.maximum(m, exponent)
    return m, torch.where(m == float("-inf"), 0.0, 1.0)


def softmax_of_raw_scores(
    s: torch.Tensor, c: float, m: torch.Tensor, packed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One online-softmax step over scores not yet scaled: (p, factor for the old sums, new maximum)."""
    m_next = torch.maximum(m, torch.amax(s, -1) * c)
    exponent = parts.multiply_subtract(s, c, m_next.unsqueeze(1), packed)
    return torch.exp2(exponent), torch.exp2(m - m_next), m_next


def softmax(
    exponent: torch.Tensor, m: torch.Tensor, in_natural: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One online-softmax step over exponents of which a whole row may be -inf so far."""
    m_next = torch.maximum(m, torch.amax(exponent, -1))
    # -inf minus -inf would be NaN; minus 0 it stays -inf, and the exponential 0.
    shift = torch.where(m_next == float("-inf"), 0.0, m_next)
    p = parts.exp_shifted(exponent, shift.unsqueeze(1), in_natural)
    return p, parts.exp_shifted(m, shift, in_natural), m_next


def _dropped(
    p: torch.Tensor,
    rng_state: torch.Tensor | None,
    plane: Int,
    row: torch.Tensor,
    j: Int,
    threshold: int,
    block_m: Int,
    block_n: Int,
) -> torch.Tensor:
    """P with zeros where dropout drops; the factor 1 / (1 - p_drop) is applied once, at the end."""
    if rng_state is None:
        return p
    keep = parts.keep_tile(rng_state, plane, row, j, threshold, block_m, block_n)
    return torch.where(keep, p, 0.0)


def forward_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    rng_state: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    dropout_p: float,
    causal: bool,
    diagonal: int,
    low_diagonal: int | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    packed: bool = False,
) -> tuple[Any, ...]:
    """All arguments of :func:`attention_forward`, in order, from what a call means.

    Args:
        q: See :func:`attention_forward`, as for the other tensors.
        k: Keys.
        v: Values.
        mask: Mask view expanded to [B, Hq, M, N], or None.
        rng_state: Seed, or None when ``dropout_p`` is 0.
        o: Output.
        lse: Log-sum-exp.
        scale: Any finite number.
        dropout_p: In [0, 1).
        causal: Whether attention is causal.
        diagonal: 0 for top-left and N - M for bottom-right causal attention, plus the right side of a window.
        low_diagonal: That minus the left side of a window, or None.
        softcap: Bound of the scores, or None.
        sink: Logit for each query head, or None.
        packed: See :func:`attention_forward`.
    """
    threshold = parts.signed_threshold(dropout_p)
    keep_scale = 1.0 / (1.0 - dropout_p)
    tensors = q, k, v, mask, rng_state, sink, o, lse
    return *tensors, float(scale), threshold, keep_scale, diagonal, causal, low_diagonal, softcap, scale >= 0, packed


FORWARD = runtime.KernelFamily(
    attention_forward,
    dims={
        "q": "B Hq M D",
        "k": "B Hkv N D",
        "v": "B Hkv N Dv",
        "mask": "B Hq M N",
        "rng_state": "1",
        "sink": "Hq",
        "o": "B Hq M Dv",
        "lse": "B Hq M",
    },
)

"""The gradient of an additive mask (Helion, lowered to Triton).

In the terms of :mod:`.backward`, ``d loss / d mask_ij = dS_ij``, summed over every dimension that the mask broadcasts:
for a mask of shape [Bm, Hm, Mm, Nm], each size 1 or that of the scores [B, Hq, M, N],

    dmask_bhij = sum of dS over the dimensions of size 1
    dS_ij = g * P_ij * (keep_ij * do_i . v_j - delta_i / g)

A program owns one ``block_m`` x ``block_n`` tile of dmask. It visits, in one fixed order, each (batch, head, query
tile, key tile) whose dS belongs to its tile, adds dS up in fp32 and stores once: no atomics, the same bits in each run,
and one source and one binary for every form of broadcast. A broadcast row (Mm = 1) or column (Nm = 1) is a tile whose
rows or columns are added up before the store.

A small mask makes few programs with long loops: :func:`partial_shape` tells which dimensions to keep in an fp32 buffer
that ``torch.sum`` reduces afterwards, in a fixed order too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import helion.language as hl
import torch

from . import parts, runtime
from .backward import _column_values, _keep, _kept, _probabilities

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .parts import Int

# Enough programs to keep every SM of a large GPU busy.
_ENOUGH_PROGRAMS = 512

# The largest buffer of partial sums, in elements (16 MiB): it grows with the mask's area times the heads, which no path
# may hold for long sequences.
_MOST_PARTIALS = 2**22


def attention_dmask(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    rng_state: torch.Tensor | None,
    do: torch.Tensor,
    norm: torch.Tensor,
    delta: torch.Tensor,
    excess: torch.Tensor,
    dmask: torch.Tensor,
    sum_b: int,
    sum_h: int,
    sum_m: int,
    sum_n: int,
    scale: float,
    threshold: int,
    keep_scale: float,
    diagonal: int,
    causal: hl.constexpr,
    low_diagonal: int | None,
    softcap: float | None,
) -> None:
    """Helion kernel function: the mask's gradient. Block sizes: [block_m, block_n].

    Args:
        q: Queries [B, Hq, M, D].
        k: Keys [B, Hkv, N, D].
        v: Values [B, Hkv, N, Dv].
        mask: The additive mask expanded to [B, Hq, M, N].
        rng_state: None for no dropout, else int64 [1] with the forward's seed.
        do: Gradient of the output [B, Hq, M, Dv].
        norm: From ``backward.attention_delta``, [B, Hq, M].
        delta: From ``backward.attention_delta``, [B, Hq, M].
        excess: From ``backward.attention_excess``, [B, Hq, M].
        dmask: Output [Bm, Hm, Mm, Nm], any strides, any float dtype.
        sum_b: 1 when dmask's batch dimension has size 1 and stands for all batches, else 0.
        sum_h: The same for heads.
        sum_m: The same for queries.
        sum_n: The same for keys.
        scale: Multiplies q . k.
        threshold: ``parts.signed_threshold(dropout_p)``; not read without ``rng_state``.
        keep_scale: 1 / (1 - dropout_p), or 1.
        diagonal: Query i sees key j when j <= i + diagonal; not read unless ``causal``.
        causal: Whether attention is causal.
        low_diagonal: None, or query i sees key j only when j >= i + low_diagonal.
        softcap: None, or the bound of the scores before the mask.
    """
    B, Hq, M, D = q.shape
    _, Hkv, N, Dv = v.shape
    Bm, Hm, Mm, Nm = dmask.shape
    D = hl.specialize(D)
    Dv = hl.specialize(Dv)
    block_m = hl.register_block_size(16, 256)
    block_n = hl.register_block_size(16, 256)
    for tile_n, tile_m, hm, bm in hl.grid([(Nm + block_n - 1) // block_n, (Mm + block_m - 1) // block_m, Hm, Bm]):
        # How many batches, heads, query tiles and key tiles end up in this tile: 1, or all (and then its index is 0).
        visits_b = 1 + sum_b * (B - 1)
        visits_h = 1 + sum_h * (Hq - 1)
        visits_m = 1 + sum_m * ((M + block_m - 1) // block_m - 1)
        visits_n = 1 + sum_n * ((N + block_n - 1) // block_n - 1)
        c = parts.score_scale(scale, softcap, mask)
        d = hl.arange(parts.padded_width(D))
        d_v = hl.arange(parts.padded_width(Dv))
        total = hl.zeros([block_m, block_n], dtype=torch.float32)
        # Judged for all query tiles at once: Helion cannot divide a scalar by a block size inside of nested loops.
        last_row = (tile_m + visits_m) * block_m - 1
        begin, stop = _visited(tile_n, visits_n, tile_m * block_m, last_row, N, diagonal, causal, low_diagonal, block_n)
        for b in hl.grid(bm, bm + visits_b):
            for h in hl.grid(hm, hm + visits_h):
                hk = h // (Hq // Hkv)
                for i in hl.grid(tile_m, tile_m + visits_m):
                    row = i * block_m + hl.arange(block_m)
                    inside = row < M
                    q_tile = parts.load_rows(q, b, h, row, d, M, D, True)
                    do_tile = parts.load_rows(do, b, h, row, d_v, M, Dv, True)
                    row_norm = _column_values(norm, b, h, row, M)
                    row_excess = _column_values(excess, b, h, row, M)
                    row_delta = _column_values(delta, b, h, row, M)
                    for j in hl.grid(begin, stop):
                        col = j * block_n + hl.arange(block_n)
                        bound = col < N
                        mask_tile = parts.load_mask(mask, b, h, row, col, inside[:, None] & bound[None, :])
                        k_tile = parts.load_rows(k, b, hk, col, d, N, D, True)
                        v_tile = parts.load_rows(v, b, hk, col, d_v, N, Dv, True)
                        s = hl.dot(q_tile, k_tile.T, out_dtype=torch.float32)
                        dp = hl.dot(do_tile, v_tile.T, out_dtype=torch.float32)
                        exponent = parts.exponents(parts.capped(s * c, softcap), softcap, mask)
                        p = _probabilities(exponent, row_norm, row_excess, mask, mask_tile)
                        # Keys past the end have a P of their own that must not count. Queries past the end have dS = 0.
                        seen = parts.visible(row[:, None], col[None, :], N, diagonal, causal, low_diagonal)
                        p = torch.where(seen, p, 0.0)
                        dp = _kept(dp, _keep(rng_state, b * Hq + h, row, j, threshold, block_m, block_n))
                        total = total + p * (dp - row_delta)
        total = total * keep_scale
        zero = hl.full([], 0, dtype=torch.int32)
        total = torch.where(zero + sum_m != 0, total.sum(0)[None, :], total)
        total = torch.where(zero + sum_n != 0, total.sum(1)[:, None], total)
        out_row = tile_m * block_m + hl.arange(block_m)
        out_col = tile_n * block_n + hl.arange(block_n)
        inside_mask = (out_row < Mm)[:, None] & (out_col < Nm)[None, :]
        hl.store(dmask, [bm, hm, out_row, out_col], total.to(dmask.dtype), extra_mask=inside_mask)


def _visited(
    tile_n: Int,
    visits_n: Int,
    first_row: Int,
    last_row: Int,
    keys: Int,
    diagonal: Int,
    causal: bool,
    low_diagonal: Int | None,
    block_n: Int,
) -> tuple[Any, Any]:
    """The key tiles ``[begin, stop)`` to visit: those of ``[tile_n, tile_n + visits_n)`` that some of the rows see."""
    if not causal and low_diagonal is None:
        return tile_n, tile_n + visits_n
    zero = hl.full([], 0, dtype=torch.int32)
    first, full, start, stop = parts.key_tiles(first_row, last_row, keys, diagonal, causal, low_diagonal, block_n)
    begin = zero + first - (zero + full - start)  # the tiles before `first` that some row sees number full - start
    return torch.maximum(zero + tile_n, begin), torch.minimum(zero + (tile_n + visits_n), zero + stop)


def partial_shape(
    mask_shape: Sequence[int], scores_shape: Sequence[int], block_m: int, block_n: int
) -> tuple[int, ...]:
    """Shape of the buffer that :data:`DMASK` should write for a mask.

    Args:
        mask_shape: The mask's own shape [Bm, Hm, Mm, Nm], each size 1 or that of the scores.
        scores_shape: [B, Hq, M, N].
        block_m: The config's tile height.
        block_n: The config's tile width.

    Returns:
        ``mask_shape``: write the gradient itself. Or ``mask_shape`` with heads, or heads and batches, of the scores:
        write an fp32 buffer of this shape and sum it over the dimensions in which it differs from ``mask_shape``. The
        buffer holds at most ``_MOST_PARTIALS`` elements.
    """
    shape = list(mask_shape)
    for dim in (1, 0):
        programs = shape[0] * shape[1] * -(-shape[2] // block_m) * -(-shape[3] // block_n)
        wider = [*shape[:dim], scores_shape[dim], *shape[dim + 1 :]]
        if programs < _ENOUGH_PROGRAMS and math.prod(wider) <= _MOST_PARTIALS:
            shape = wider
    return tuple(shape)


DMASK = runtime.KernelFamily(
    attention_dmask,
    dims={
        "q": "B Hq M D",
        "k": "B Hkv N D",
        "v": "B Hkv N Dv",
        "mask": "B Hq M N",
        "rng_state": "1",
        "do": "B Hq M Dv",
        "norm": "B Hq M",
        "delta": "B Hq M",
        "excess": "B Hq M",
        "dmask": "Bm Hm Mm Nm",
    },
    canonical={"Bm": 4, "Hm": 5, "Mm": 304, "Nm": 560},
)

"""The backward in one kernel, in the one form that Helion lowers to tcgen05 through CuTe-DSL.

With ``c`` the scale, P and delta as in :mod:`.backward`, and ``norm`` the base-2 log-sum-exp, for row ``i`` of the
queries that share a key head and its key ``j``::

    P_ij = exp2(c * log2(e) * q_i . k_j - norm_i)       0 where j is not visible to i
    dS_ij = P_ij * (do_i . v_j - delta_i)
    dv_j = sum_i P_ij do_i      dk_j = c * sum_i dS_ij q_i      dq_i = c * sum_j dS_ij k_j

A program owns a tile of keys and walks over the tiles of all query rows that read them, five products for each. dK and
dV are its own; its part of dQ is added to an fp32 buffer, so the order of those sums, and with it the last bits, differ
from run to run.

What is padded must not count: a query row of padding has ``norm = +inf``, so P is 0. A key of padding must be hidden by
causality; were it visible, P could overflow where ``norm`` is small, and infinity times zero is NaN.

Helion compares this function's graph with a pattern, node for node; hence S transposed, the positions by remainders,
and the scale after the mask. :mod:`.cute_lowering` asserts the match. Through Triton the same function is an ordinary
kernel, in which its values are tested.

Data layout, contiguous, heads folded into rows: q, do [T, D], dq [T, D] fp32, norm, delta [T] fp32; k, v, dk, dv
[S, D]. For each key head come its ``group_rows`` query rows, ``rows`` of each query head, beside ``columns`` keys.
"""

from __future__ import annotations

import helion.language as hl
import torch

from . import flash, forms, runtime


def attention_flash_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    norm: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale_log2: float,
    scale: float,
    group_rows: hl.constexpr,
    rows: hl.constexpr,
    columns: hl.constexpr,
    causal: hl.constexpr,
) -> None:
    """Helion kernel function; :data:`FLASH_BACKWARD` describes its arguments.

    Args:
        q: Queries [T, D].
        k: Keys [S, D].
        v: Values [S, D].
        do: The output's gradient [T, D].
        norm: Base-2 log-sum-exp [T], fp32; +inf for a row that sees nothing.
        delta: The other row term [T], fp32.
        dq: fp32 [T, D], zeroed by the caller; the gradient is added.
        dk: Gradient [S, D], written.
        dv: Gradient [S, D], written.
        scale_log2: ``scale`` times log2(e).
        scale: Multiplies q . k; above 0.
        group_rows: Query rows of a key head.
        rows: Query rows of a query head.
        columns: Keys of a key head.
        causal: Whether query i sees key j only when j <= i.
    """
    total, D = k.shape
    D = hl.specialize(D)
    block_n = hl.register_block_size(total)
    block_m = hl.register_block_size(group_rows)
    for tile_n in hl.tile(total, block_size=block_n):
        k_tile = k[tile_n, :]
        v_tile = v[tile_n, :]
        dv_sum = hl.zeros([tile_n, D], dtype=torch.float32)
        dk_sum = hl.zeros([tile_n, D], dtype=torch.float32)
        base = tile_n.begin // columns * group_rows
        if causal:  # noqa: SIM108 (an expression's arms are both traced)
            begin = base + tile_n.begin % columns // block_m * block_m
        else:
            begin = base
        for tile_m in hl.tile(begin, base + group_rows, block_size=block_m):
            q_tile = q[tile_m, :]
            do_tile = do[tile_m, :]
            s = hl.dot(k_tile, q_tile.T, out_dtype=torch.float32)
            if causal:
                i = tile_m.index % rows
                j = tile_n.index % columns
                s = torch.where(i[None, :] >= j[:, None], s, float("-inf"))
            p = torch.exp2(s * scale_log2 - norm[tile_m][None, :])
            dp = hl.dot(v_tile, do_tile.T, out_dtype=torch.float32)
            dv_sum = hl.dot(p.to(v.dtype), do_tile, acc=dv_sum)
            ds = (p * (dp - delta[tile_m][None, :])).to(q.dtype)
            dk_sum = hl.dot(ds, q_tile, acc=dk_sum)
            hl.atomic_add(dq, [tile_m, slice(None)], hl.dot(ds.T, k_tile, out_dtype=torch.float32) * scale)
        dv[tile_n, :] = dv_sum.to(dv.dtype)
        dk[tile_n, :] = (dk_sum * scale).to(dk.dtype)


FLASH_BACKWARD = runtime.KernelFamily(
    attention_flash_backward,
    dims={
        "q": "T D",
        "k": "S D",
        "v": "S D",
        "do": "T D",
        "norm": "T",
        "delta": "T",
        "dq": "T D",
        "dk": "S D",
        "dv": "S D",
    },
    specialized=("T", "S", "D"),
    cute=forms.CuteForm("cute_flash_bwd_search_enabled", "helion_flash_bwd", flash.TRITON),
)

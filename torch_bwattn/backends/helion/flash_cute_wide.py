"""The forward of width 192 with values of 128, in the one form of those widths that Helion lowers to tcgen05.

As :mod:`.flash_cute`, but over all keys, or those up to the diagonal; queries and keys are of one number, and the scale
is that of the width, a literal. What is padded must be hidden by causality.

Helion compares this function's graph with a pattern, node for node. Through Triton it is tested in the interpreter
alone: with batches in the products, Triton has been seen to give wrong values on a GPU.

Data layout, all contiguous: q [H, S, D], k [G, S, D], v [G, S, Dv], o [H, S, Dv], lse_log2 [H, S].
"""

from __future__ import annotations

import helion.language as hl
import torch

from . import flash, forms, runtime


def attention_flash_wide(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse_log2: torch.Tensor,
    group: hl.constexpr,
    causal: hl.constexpr,
) -> None:
    """Helion kernel function; :data:`FLASH_WIDE` describes its arguments.

    Args:
        q: Queries [H, S, 192].
        k: Keys [G, S, 192].
        v: Values [G, S, 128].
        o: Output [H, S, 128], written.
        lse_log2: Base-2 log-sum-exp [H, S], fp32, written.
        group: Query heads of a key head.
        causal: Whether query i sees key j only when j <= i.
    """
    H, S, D = q.shape
    _, N, Dv = v.shape
    D = hl.specialize(D)
    Dv = hl.specialize(Dv)
    for tile_h, tile_m in hl.tile([H, S]):
        m = hl.full([tile_h, tile_m], float("-inf"), dtype=torch.float32)
        l = hl.zeros([tile_h, tile_m], dtype=torch.float32)
        acc = hl.zeros([tile_h, tile_m, Dv], dtype=torch.float32)
        q_tile = q[tile_h, tile_m, :]
        for tile_n in hl.tile(N):
            hk = tile_h if group == 1 else tile_h.index // group
            k_tile = k[hk, tile_n, :]
            # log2(e) / sqrt(192)
            s = torch.bmm(q_tile * 0.10411754627697264, k_tile.transpose(1, 2), torch.float32)
            if causal:
                s = torch.where(tile_m.index[:, None] >= tile_n.index[None, :], s, float("-inf"))
            m_next = torch.maximum(m, torch.amax(s, -1))
            p = torch.exp2(s - m_next[:, :, None])
            alpha = torch.exp2(m - m_next)
            l = l * alpha + torch.sum(p, -1)
            acc = torch.baddbmm(acc * alpha[:, :, None], p.to(v.dtype), v[hk, tile_n, :])
            m = m_next
        o[tile_h, tile_m, :] = (acc / l[:, :, None]).to(o.dtype)
        lse_log2[tile_h, tile_m] = m + torch.log2(l)


FLASH_WIDE = runtime.KernelFamily(
    attention_flash_wide,
    dims={"q": "H S D", "k": "G S D", "v": "G S Dv", "o": "H S Dv", "lse_log2": "H S"},
    specialized=("D", "Dv", "H", "G"),
    canonical={"S": 272},
    cute=forms.CuteForm("cute_flash_search_enabled", "helion_flash", {**flash.TRITON, "block_sizes": [1, 128, 128]}),
)

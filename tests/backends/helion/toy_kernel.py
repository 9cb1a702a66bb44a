"""A kernel for the tests of the runtime: attention with exp2 and without the division. Imports Helion."""

import helion.language as hl
import torch


def toy(
    q: torch.Tensor,
    k: torch.Tensor,
    o: torch.Tensor,
    total: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    causal: hl.constexpr,
):
    B, H, M, D = q.size()
    N = k.size(2)
    group = H // k.size(1)
    D = hl.specialize(D)
    block_m = hl.register_block_size(16, 256)
    block_n = hl.register_block_size(16, 256)
    for tm, th, tb in hl.tile([M, H, B], block_size=[block_m, 1, 1]):
        b = tb.begin
        h = th.begin
        qi = q[b, h, tm, :]
        acc = hl.zeros([tm, D], dtype=torch.float32)
        row = hl.zeros([tm], dtype=torch.float32)
        for tn in hl.tile(N, block_size=block_n):
            ki = k[b, h // group, tn, :]
            s = hl.dot(qi, ki.T, out_dtype=torch.float32) * scale
            if bias is not None:
                s = s + bias[b, h, tm, tn].to(torch.float32)
            p = torch.where((tn.index < N)[None, :], torch.exp2(s), 0.0)
            if causal:
                p = torch.where(tm.index[:, None] >= tn.index[None, :], p, 0.0)
            row = row + p.sum(-1)
            acc = hl.dot(p.to(ki.dtype), ki, acc=acc)
        o[b, h, tm, :] = acc.to(o.dtype)
        total[b, h, tm] = row


def shifted(q: torch.Tensor, o: torch.Tensor, shift: float):
    B, H, M, D = q.size()
    D = hl.specialize(D)
    twice = 2.0 * shift
    for tm, th, tb in hl.tile([M, H, B], block_size=[None, 1, 1]):
        o[tb.begin, th.begin, tm, :] = q[tb.begin, th.begin, tm, :] + twice

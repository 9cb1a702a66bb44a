"""A tensor-core kernel in plain torch, with its roundings where a kernel has them, and ways to get it wrong."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_bwattn.testing import Results

# Each breaks one thing that some attention kernel has got wrong.
MUTANTS = (
    "causal off by one",
    "causal aligned at the top left",
    "last key dropped",
    "first tile skipped",
    "heads interleaved",
    "scale forgotten in dk",
    "lse in base 2",
    "lse gradient ignored",
    "lse gradient with the wrong sign",
    "delta ignored",
    "dropout not rescaled",
    "dropout mask differs in backward",
    "dmask of one batch entry",
    "dmask scaled",
    "tf32",
)


def emulate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    causal_alignment: str = "top_left",
    keep_mask: torch.Tensor | None = None,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    mutant: str = "",
    **_: Any,
) -> Results:
    """Forward and backward with fp32 accumulation, P, dS and O rounded to the input's dtype."""
    dtype, scale = query.dtype, 1 / math.sqrt(query.shape[-1])
    group = query.shape[1] // key.shape[1] if enable_gqa else 1

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        if mutant == "tf32":
            return (tensor.view(torch.int32) & ~0x1FFF).view(torch.float32)
        return tensor.to(dtype).float()

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        tensor = rounded(tensor.float())
        if mutant == "heads interleaved":
            return tensor.repeat(1, group, 1, 1)
        return tensor.repeat_interleave(group, 1)

    q, k, v, do = rounded(query.float()), spread(key), spread(value), rounded(grad_out.float())
    rows, columns = q.shape[-2], k.shape[-2]
    s = q @ k.mT * scale
    if attn_mask is not None:
        s = s + attn_mask.float()
    if is_causal:
        diagonal = columns - rows if causal_alignment == "bottom_right" else 0
        diagonal = {"causal off by one": diagonal + 1, "causal aligned at the top left": 0}.get(mutant, diagonal)
        s = s.masked_fill(torch.ones(rows, columns, dtype=torch.bool).triu(diagonal + 1), -math.inf)
    if mutant == "last key dropped":
        s[..., -1:] = -math.inf
    if mutant == "first tile skipped":
        s[..., : min(4, columns - 1)] = -math.inf
    m = s.amax(-1, keepdim=True)
    m = m.masked_fill(m == -math.inf, 0.0)
    e = torch.exp2((s - m) * math.log2(math.e))
    total = e.sum(-1, keepdim=True)
    dead = total == 0
    total = total.masked_fill(dead, 1.0)
    keep = torch.ones_like(s) if keep_mask is None else keep_mask / (1 - dropout_p)
    if mutant == "dropout not rescaled":
        keep = keep * (1 - dropout_p)
    out = (rounded(e * keep) @ v / total).to(dtype)
    lse = m + torch.log(total)
    p = torch.exp2((s - lse) * math.log2(math.e))
    shown_lse = (lse.masked_fill(dead, -math.inf) * (math.log2(math.e) if mutant == "lse in base 2" else 1)).squeeze(-1)

    if mutant == "dropout mask differs in backward":
        keep = keep.roll(1, -1)
    sign = {"lse gradient ignored": 0.0, "lse gradient with the wrong sign": -1.0}.get(mutant, 1.0)
    delta = (out.float() * do).sum(-1, keepdim=True) - sign * grad_lse.unsqueeze(-1)
    if mutant == "delta ignored":
        delta = delta * 0
    dp = do @ v.mT * keep
    ds = p * (dp - delta)
    dv = rounded(p * keep).mT @ do
    dq = rounded(ds) @ k * scale
    dk = rounded(ds).mT @ q * (1.0 if mutant == "scale forgotten in dk" else scale)

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        if mutant == "heads interleaved":
            return tensor.unflatten(1, (group, -1)).sum(1).to(dtype)
        return tensor.unflatten(1, (-1, group)).sum(2).to(dtype)

    results = Results(out, shown_lse, dq.to(dtype), gathered(dk), gathered(dv))
    if attn_mask is not None:
        dmask = ds[0].sum(0) if mutant == "dmask of one batch entry" else ds.sum((0, 1))
        results.dmask = (dmask * (scale if mutant == "dmask scaled" else 1.0)).to(attn_mask.dtype)
    return results

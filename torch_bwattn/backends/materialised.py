"""Attention by two matrix products with the whole score matrix in memory between them, in float32.

For few queries beside many keys it is no worse than a fused kernel: its products are as fast as a library's are, and
with grouped heads the rows of a group lie under their key head in one product. The score matrix has ``B Hq Sq Skv``
entries, so :func:`within_bound` says while it may compete.

    S = scale * Q K^T     P = softmax(S)     O = P V
    dV = P^T dO     dP = dO V^T     dS = P * (dP - rowsum(dO * O))     dQ = scale * dS K     dK = scale * dS^T Q
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import conform
from ..problem import Problem
from .base import BackwardInputs, ForwardInputs, Grads

CONFIG = "math"
"""What the backend calls it that has it."""


def within_bound(problem: Problem) -> bool:
    """Whether the scores, ``[B, Hq, Sq, Skv]``, are no more than ``[B, Skv, Hq * D]``: an activation of the keys."""
    return problem.q_len <= problem.head_dim


def beyond_bound(problem: Problem) -> str:
    """Why it must not compete beyond that."""
    return f"its score matrix is larger than an activation: Sq={problem.q_len}, D={problem.head_dim}"


def refuse(problem: Problem) -> str:
    """Why this path does not take a problem without dropout, soft cap and gradient of the mask, or nothing."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, got {problem.dtype}; reference takes any"
    if problem.backward and problem.sink_dtype is not None:
        return "its backward has no sink; helion and reference do"
    if problem.backward and problem.sees_one_key:
        return "delta would leave rounding in what is exactly 0; reference computes it without"
    return ""


def visible(problem: Problem, device: torch.device | str) -> Tensor | None:
    """``[Sq, Skv]`` bool: what causality and a window show; None for all."""
    if problem.diagonal is None and problem.low_diagonal is None:
        return None
    i, j = torch.arange(problem.q_len, device=device)[:, None], torch.arange(problem.kv_len, device=device)
    shown = torch.ones((problem.q_len, problem.kv_len), dtype=torch.bool, device=device)
    if problem.diagonal is not None:
        shown &= j <= i + problem.diagonal
    if problem.low_diagonal is not None:
        shown &= j >= i + problem.low_diagonal
    return shown


def _fold(tensor: Tensor, kv_heads: int) -> Tensor:
    """``[B, Hq, S, X]`` -> ``[B * Hkv, G * S, X]``: the rows of a group's heads under their key head."""
    batch, heads, rows, width = tensor.shape
    return tensor.reshape(batch * kv_heads, heads // kv_heads * rows, width)


def _unfold(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.view(*like.shape[:3], tensor.shape[-1])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` of 16-bit operands with its result in float32."""
    if not a.is_cuda:  # there is no such product on the CPU
        return torch.bmm(a.float(), b.float())
    return torch.bmm(a, b, out_dtype=torch.float32)


def _scores(problem: Problem, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Scores ``[B, Hq, Sq, Skv]`` in float32, -inf where a query does not see a key."""
    s = _product(_fold(q, problem.kv_heads), k.reshape(-1, *k.shape[2:]).mT)
    s = s.view(problem.batch, problem.heads, problem.q_len, problem.kv_len).mul_(problem.scale)
    if mask is not None:
        s = s.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else s.add_(mask)
    shown = visible(problem, q.device)
    if shown is not None:
        s = s.masked_fill_(~shown, -torch.inf)
    return s


def _probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """``softmax(S)``, 0 in a row that sees no key.

    Not ``exp(S - lse)``: beside large numbers the lse has lost the row's sum, as in a row of n times ``finfo.min``.
    """
    return torch.softmax(s, -1).masked_fill_((lse == -torch.inf).unsqueeze(-1), 0.0)


def forward(problem: Problem, x: ForwardInputs) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of one 4-D problem."""
    s = _scores(problem, x.q, x.k, x.mask)
    lse = torch.logsumexp(s, -1)
    p = _probabilities(s, lse)
    if x.sink is not None:
        of_keys, lse = lse, torch.logaddexp(lse, x.sink.float().view(-1, 1))
        p = p.mul_((of_keys - lse.masked_fill(lse == -torch.inf, 0.0)).exp_().unsqueeze(-1))
    p = _fold(p.to(problem.dtype), problem.kv_heads)
    out = _unfold(torch.bmm(p, x.v.reshape(-1, *x.v.shape[2:])), x.q)
    return conform(out, x.q), lse


def backward(problem: Problem, x: BackwardInputs) -> Grads:
    """Gradients of q, k and v."""
    groups = problem.kv_heads
    p = _probabilities(_scores(problem, x.q, x.k, x.mask), x.lse)
    do = _fold(x.grad_out, groups)
    dv = torch.bmm(_fold(p.to(problem.dtype), groups).mT, do)
    dp = _unfold(_product(do, x.v.reshape(-1, *x.v.shape[2:]).mT), x.q)
    delta = (x.grad_out.float() * x.out.float()).sum(-1, keepdim=True)
    if x.grad_lse is not None:
        delta = delta - x.grad_lse.unsqueeze(-1)
    ds = _fold(p.mul_(dp.sub_(delta)).mul_(problem.scale).to(problem.dtype), groups)
    dq = _unfold(torch.bmm(ds, x.k.reshape(-1, *x.k.shape[2:])), x.q)
    dk = torch.bmm(ds.mT, _fold(x.q, groups))
    return (
        conform(dq, x.q), conform(dk.view(x.k.shape), x.k), conform(dv.view(x.v.shape), x.v), None, None,
    )  # fmt: skip

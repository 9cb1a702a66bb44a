"""The reference backend: attention in plain PyTorch, one block of query rows at a time.

For a block of rows, with all keys a row may see in hand, softmax needs no online trick:

    S = cap(scale * Q K^T) + mask     P = exp(S - max S) / l
    O = (P * keep / (1 - p)) V        lse = max S + log l
    dV = (P * keep / (1 - p))^T dO    dP = (dO V^T) * keep / (1 - p)    dS = P * (dP - sum(P * dP) + dlse)
    dQ = scale * dS K                 dK = scale * dS^T Q               dmask = dS, summed to the mask's shape

With a soft cap c, cap(x) = c * tanh(x / c), and dQ and dK take dS * (1 - tanh(x / c)^2). A sink is one more score of
its row, with no value: max and l include it, its P is p_sink = exp(sink - lse), and

    dsink = -p_sink * (sum(P * dP) - dlse), summed over batch and rows

computed in float64 for float64 inputs and for small problems, whose results are then correctly rounded (no other
result of the same dtype is nearer, so the accuracy rule holds for any outcome of its own reference), and in float32
otherwise. Rows come in blocks small enough that a block's scores
take no more memory than the inputs do, so no path here is quadratic in the sequence length. Grouped query heads are
folded into the rows of one product, so keys and values are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import empty_like_order, folded, lse_dtype
from ..problem import Problem, dtype_name
from . import philox
from .base import Backend, BackwardFn, BackwardInputs, ForwardFn, ForwardInputs, Grads, Verdict, Wanted, yes

SMALL_SCORE_COUNT = 2**14
"""Below so many scores, rounding has too few chances to average out: PyTorch's fused CPU kernels break the accuracy
rule on some percent of drawn problems (none from 2**14 on), while float64 costs nothing that matters."""

_FLOAT32_CAP = 1e30
SMALLEST_BUDGET = 2**18  # scores per block: below this, a block's overhead outweighs its arithmetic


class Softmax(NamedTuple):
    """One block's normalised probabilities ``[B, Hq, rows, keys]``, their log-sum-exp and its dropout multiplier."""

    p: Tensor
    lse: Tensor
    kept: Tensor | None  # keep / (1 - p), or None without dropout
    tanh: Tensor | None  # of the scores in units of the soft cap, or None without one
    p_sink: Tensor | None  # [B, Hq, rows, 1], or None without a sink


class Block(NamedTuple):
    """A block of query rows."""

    rows: range
    keys: range  # the block's rows see none but these


def blocks(problem: Problem) -> Iterator[Block]:
    """Split the query rows so that a block's scores number no more than the inputs' elements."""
    per_row = max(1, problem.batch * problem.heads * problem.kv_len)
    step = max(1, max(problem.input_count, SMALLEST_BUDGET) // per_row)
    for start in range(0, problem.q_len, step):
        rows = range(start, min(start + step, problem.q_len))
        first, stop = 0, problem.kv_len
        if problem.diagonal is not None:
            stop = min(max(rows.stop + problem.diagonal, 0), stop)
        if problem.low_diagonal is not None:
            first = min(max(rows.start + problem.low_diagonal, 0), stop)
        yield Block(rows, range(first, stop))


def compute_dtype(problem: Problem) -> torch.dtype:
    """What scores and sums are held in."""
    exact = problem.dtype == torch.float64 or problem.score_count < SMALL_SCORE_COUNT
    if problem.softcap is not None and not 1.0 / _FLOAT32_CAP < problem.softcap < _FLOAT32_CAP:
        exact = True  # float32 has no such number
    return torch.float64 if exact else torch.float32


def _rows_of(mask: Tensor, block: Block) -> Tensor:
    """The mask's part for a block of rows and keys, still broadcast."""
    if mask.shape[2] != 1:
        mask = mask[:, :, block.rows.start : block.rows.stop]
    return mask[..., block.keys.start : block.keys.stop] if mask.shape[3] != 1 else mask


def _keys_of(tensor: Tensor, block: Block) -> Tensor:
    """A block's keys, or their values."""
    return tensor[:, :, block.keys.start : block.keys.stop]


def softmax_block(problem: Problem, block: Block, q: Tensor, k: Tensor, x: ForwardInputs) -> Softmax:
    """Scores, masks, softmax and the dropout multiplier of one block; ``q``, ``k`` are in the compute dtype."""
    rows, keys = block
    s = folded(q[:, :, rows.start : rows.stop] * problem.scale, problem.kv_heads) @ _keys_of(k, block).mT
    s = s.view(problem.batch, problem.heads, len(rows), len(keys))
    tanh = None
    if problem.softcap is not None:
        tanh = torch.tanh(s / problem.softcap)
        s = tanh * problem.softcap
    if x.mask is not None:
        mask = _rows_of(x.mask, block)
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask.to(s.dtype)
    if problem.diagonal is not None or problem.low_diagonal is not None:
        row = torch.arange(rows.start, rows.stop, device=s.device)[:, None]
        col = torch.arange(keys.start, keys.stop, device=s.device)
        if problem.diagonal is not None:
            s = s.masked_fill(col > row + problem.diagonal, -torch.inf)
        if problem.low_diagonal is not None:
            s = s.masked_fill(col < row + problem.low_diagonal, -torch.inf)
    highest = s.amax(-1, keepdim=True)
    sink = None if x.sink is None else x.sink.to(s.dtype).view(-1, 1, 1)
    if sink is not None:
        highest = torch.maximum(highest, sink)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)  # a row that sees nothing: exp(-inf - 0) = 0, not NaN
    p = (s - highest).exp_()
    total = p.sum(-1, keepdim=True)
    p_sink = None
    if sink is not None:
        p_sink = (sink - highest).exp()
        total = total + p_sink
    lse = (highest + total.log()).squeeze(-1)
    divisor = total.masked_fill(total == 0.0, 1.0)
    p = p / divisor
    if p_sink is not None:
        p_sink = p_sink / divisor
    kept = None
    if problem.dropout_p == 1.0:
        kept = torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p)
    elif problem.dropout_p > 0.0 and x.rng_state is not None:
        keep = philox.keep_mask(
            x.rng_state, problem.batch, problem.heads, rows, keys.stop, problem.dropout_p, first_key=keys.start
        )
        kept = keep.to(p.dtype).mul_(1.0 / (1.0 - problem.dropout_p))
    return Softmax(p, lse, kept, tanh, p_sink)


def forward(problem: Problem, x: ForwardInputs) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of one 4-D problem."""
    dtype = compute_dtype(problem)
    out = empty_like_order(x.q, problem.value_dim).zero_()
    lse = torch.full(x.q.shape[:3], -torch.inf, dtype=lse_dtype(problem.dtype), device=x.q.device)
    if x.sink is not None:  # of the rows that see no key; the others are written below
        lse.copy_(x.sink.view(-1, 1).expand_as(lse))
    if problem.batch == 0 or problem.heads == 0 or problem.kv_len == 0:
        return out, lse
    q, k, v = x.q.to(dtype), x.k.to(dtype), x.v.to(dtype)
    for block in blocks(problem):
        rows, keys = block
        if not keys:
            continue
        p, lse_rows, kept, _, _ = softmax_block(problem, block, q, k, x)
        lse[:, :, rows.start : rows.stop] = lse_rows
        if kept is not None:
            p = p * kept
        o = folded(p, problem.kv_heads) @ _keys_of(v, block)
        out[:, :, rows.start : rows.stop] = o.view(problem.batch, problem.heads, len(rows), problem.value_dim)
    return out, lse


def backward(problem: Problem, x: BackwardInputs, wanted: Wanted) -> Grads:
    """Gradients of all operands. Probabilities are computed anew: ``out`` and ``lse`` are not read."""
    dtype = compute_dtype(problem)
    dq = empty_like_order(x.q, problem.head_dim).zero_()
    dk = torch.zeros(x.k.shape, dtype=dtype, device=x.k.device)
    dv = torch.zeros(x.v.shape, dtype=dtype, device=x.v.device)
    dmask = None
    if wanted[3] and x.mask is not None:
        dmask = torch.zeros(x.mask.shape, dtype=dtype, device=x.mask.device)
    dsink = None
    if wanted[4] and x.sink is not None:
        dsink = torch.zeros(x.sink.shape, dtype=dtype, device=x.sink.device)
    if not (problem.batch == 0 or problem.heads == 0):
        q, k, v = x.q.to(dtype), x.k.to(dtype), x.v.to(dtype)
        inputs = ForwardInputs(x.q, x.k, x.v, x.mask, x.rng_state, x.sink)
        for block in blocks(problem):
            rows, keys = block
            dlse = None if x.grad_lse is None else x.grad_lse[:, :, rows.start : rows.stop, None].to(dtype)
            if not keys:
                if dsink is not None and dlse is not None and x.sink is not None:
                    # lse is the sink itself in these rows, unless that is -inf and stands for none.
                    dsink += dlse.sum((0, 2, 3)).masked_fill(x.sink == -torch.inf, 0.0)
                continue
            p, _, kept, tanh, p_sink = softmax_block(problem, block, q, k, inputs)
            do = folded(x.grad_out[:, :, rows.start : rows.stop].to(dtype), problem.kv_heads)
            dp = (do @ _keys_of(v, block).mT).view_as(p)
            if kept is not None:
                dp = dp * kept
            dv_keys = _keys_of(dv, block)
            dv_keys += folded(p if kept is None else p * kept, problem.kv_heads).mT @ do
            shift = (p * dp).sum(-1, keepdim=True)
            if dlse is not None:
                shift = shift - dlse
            ds = p * (dp - shift)
            if dsink is not None and p_sink is not None:
                dsink -= (p_sink * shift).sum((0, 2, 3))
            if dmask is not None:
                part = _rows_of(dmask, block)
                part += ds.sum_to_size(part.shape)
            if tanh is not None:
                ds = ds * (1.0 - tanh * tanh)
            ds = folded(ds, problem.kv_heads)
            dq_rows = (ds @ _keys_of(k, block)).mul_(problem.scale)
            dq[:, :, rows.start : rows.stop] = dq_rows.view(problem.batch, problem.heads, len(rows), problem.head_dim)
            dk_keys = _keys_of(dk, block)
            dk_keys += ds.mT @ folded(q[:, :, rows.start : rows.stop] * problem.scale, problem.kv_heads)
    return (
        dq,
        _cast_in_order(dk, x.k),
        _cast_in_order(dv, x.v),
        None if dmask is None or x.mask is None else dmask.to(x.mask.dtype),
        None if dsink is None or x.sink is None else dsink.to(x.sink.dtype),
    )


def _cast_in_order(grad: Tensor, like: Tensor) -> Tensor:
    return empty_like_order(like, like.shape[3]).copy_(grad)


class ReferenceBackend(Backend):
    """Runs every problem, on every device; the oracle of the other backends and the last resort."""

    name = "reference"

    def supports(self, problem: Problem) -> Verdict:
        return yes(f"blockwise eager, {dtype_name(compute_dtype(problem))}")

    def forward(self, problem: Problem, config: str = "") -> ForwardFn:
        return lambda x: forward(problem, x)

    def backward(self, problem: Problem, config: str = "") -> BackwardFn:
        return lambda x, wanted: backward(problem, x, wanted)

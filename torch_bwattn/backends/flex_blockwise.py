"""Attention with mods and block masks in plain PyTorch, one block of query rows at a time, on any device.

For a block of rows and the keys that any of them may see::

    X = scale * Q K^T     S = score_mod(X, b, h, i, j), -inf where nothing shows (i, j)     P = exp(S - lse)
    O = P V     lse = log sum exp S     max = max S         O = 0, lse = max = -inf of a row that sees nothing
    dV = P^T dO     dS = P * (dO V^T - sum(P * dO V^T) + dlse)     dX = dS * d score_mod / dX
    dQ = scale * dX K     dK = scale * dX^T Q     of what the mod reads of captured tensors, dS * d score_mod / d value

(i, j) is shown by a block that counts as full, and by one that counts as partial where ``mask_mod`` says so; without
lists of blocks by ``mask_mod`` alone. Keys in blocks that no row of a block of rows visits are not touched, but while a
CUDA graph is captured. Scores are held in float32, in float64 for float64 inputs; those of a block of rows are no more
than the inputs have elements, and so is each result of a mod's steps, but for vectors, times their lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..layout import empty_like_order, folded
from ..mods.derivative import GRAD, Derivative, derivative
from ..mods.program import along, evaluate
from .flex_inputs import BlockLists, FlexInputs, Mod, visited
from .reference import SMALLEST_BUDGET


@dataclasses.dataclass(frozen=True)
class _Visited:
    """The lists as bool [B, H, R, C]: blocks visited in part, and whole."""

    part: Tensor
    full: Tensor
    sizes: tuple[int, int]

    def keys(self, rows: range, kv_len: int) -> Tensor | None:
        """Positions of the keys that some of the rows visit; None for all."""
        if self.part.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # what is in the lists is not known before a replay
        some = slice(rows.start // self.sizes[0], (rows.stop - 1) // self.sizes[0] + 1)
        seen = (self.part[:, :, some] | self.full[:, :, some]).flatten(0, 2).any(0)
        if bool(seen.all()):
            return None
        keys = torch.arange(kv_len, device=seen.device)
        return keys[seen[(keys // self.sizes[1]).clamp_(max=len(seen) - 1)] & (keys < len(seen) * self.sizes[1])]

    def of(self, which: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        """A list at positions of queries and keys, [B, H, M, N]."""
        return which[:, :, (rows // self.sizes[0])[:, None], (keys // self.sizes[1])[None, :]]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A block of rows, and the keys that it may see, by position."""

    rows: slice
    keys: Tensor | None
    grid: dict[str, Tensor]  # the positions, each along its own of four dimensions
    shown: Tensor | None

    def of_keys(self, tensor: Tensor) -> Tensor:
        return tensor if self.keys is None else tensor.index_select(2, self.keys)

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        if self.keys is None:
            total += part
        else:
            total.index_add_(2, self.keys, part)


def _blocks_of_rows(x: FlexInputs) -> Iterator[_Rows]:
    batch, heads, q_len, _ = x.q.shape
    kv_len = x.k.shape[2]
    lists = None
    if x.blocks is not None:
        lists = _Visited(*visited(x.blocks, kv_len), x.blocks.sizes)
    budget = max(x.q.numel() + x.k.numel() + x.v.numel(), SMALLEST_BUDGET)
    step = max(1, budget // max(1, batch * heads * kv_len))
    if lists is not None:  # rows of one row of blocks, or of whole ones
        size = lists.sizes[0]
        step = step // size * size if step >= size else step
    every = [torch.arange(size, device=x.q.device) for size in (batch, heads, q_len, kv_len)]
    stop = 0
    while stop < q_len:
        start, stop = stop, min(stop + step, q_len)
        if lists is not None and step < lists.sizes[0]:
            stop = min(stop, (start // lists.sizes[0] + 1) * lists.sizes[0])
        keys = None if lists is None else lists.keys(range(start, stop), kv_len)
        i, j = every[2][start:stop], every[3] if keys is None else keys
        grid = along((*every[:2], i, j))
        shown = _shown_by_mod(x, grid)
        if lists is not None:
            part = lists.of(lists.part, i, j)
            shown = lists.of(lists.full, i, j) | (part if shown is None else part & shown)
        yield _Rows(slice(start, stop), keys, grid, shown)


def _evaluated(mod: Mod, grid: Mapping[str, Tensor]) -> Tensor:
    """A mod on a whole grid."""
    (found,) = evaluate(mod.program.steps, [mod.program.result], grid, mod.captured, mod.numbers)
    return found


def _shown_by_mod(x: FlexInputs, grid: Mapping[str, Tensor]) -> Tensor | None:
    """Which scores ``mask_mod`` shows, [B or 1, H or 1, M, N]; None for all."""
    return None if x.mask_mod is None else _evaluated(x.mask_mod, grid)


def _modified(x: FlexInputs, scores: Tensor, grid: Mapping[str, Tensor]) -> Tensor:
    """Scores [B, H, M, N] after ``score_mod``."""
    if x.score_mod is None:
        return scores
    return _evaluated(x.score_mod, {"score": scores, **grid}).to(scores.dtype).expand_as(scores)


def _raw_scores(x: FlexInputs, q: Tensor, k: Tensor, block: _Rows) -> Tensor:
    rows = q[:, :, block.rows] * x.scale
    return (folded(rows, k.shape[1]) @ block.of_keys(k).mT).view(*rows.shape[:3], -1)


def _held(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A result as a dtype holds it, if one is given."""
    return tensor if dtype is None else tensor.to(dtype).to(tensor.dtype)


def _masked(scores: Tensor, shown: Tensor | None) -> Tensor:
    return scores if shown is None else scores.masked_fill(~shown, -torch.inf)


def forward(x: FlexInputs, *, held: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """``(out [B, Hq, M, Dv], lse [B, Hq, M], max_scores [B, Hq, M])``; out lies as the query does.

    Args:
        x: The call.
        held: The dtype in which products of operands and P are held between steps, by default that of scores: with
            that of the operands, the results are as far from right as a computation in their precision may be.
    """
    out = empty_like_order(x.q, x.v.shape[3]).zero_()
    lse, most = (torch.full(x.q.shape[:3], -torch.inf, dtype=x.dtype, device=x.q.device) for _ in range(2))
    if not (x.q.numel() and x.k.shape[2]):
        return out, lse, most
    q, k, v = (tensor.to(x.dtype) for tensor in (x.q, x.k, x.v))
    for block in _blocks_of_rows(x):
        s = _masked(_modified(x, _held(_raw_scores(x, q, k, block), held), block.grid), block.shown)
        if not s.shape[3]:
            continue
        highest = s.amax(-1, keepdim=True)
        most[:, :, block.rows] = highest.squeeze(-1)
        highest = highest.masked_fill(highest == -torch.inf, 0.0)  # exp(-inf - 0) is 0, not NaN
        p = (s - highest).exp_()
        total = p.sum(-1, keepdim=True)
        lse[:, :, block.rows] = (highest + total.log()).squeeze(-1)
        p /= total.masked_fill(total == 0.0, 1.0)
        o = folded(_held(p, held), v.shape[1]) @ block.of_keys(v)
        out[:, :, block.rows] = o.view(*p.shape[:3], -1)
    return out, lse, most


def backward(
    x: FlexInputs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    lse: Tensor,
    wanted: Sequence[bool],
    *,
    held_as: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of q, k, v, and of those of the score mod's captured tensors that are ``wanted``.

    Args:
        x: The call.
        grad_out: Of the output.
        grad_lse: Of lse, or None.
        lse: The forward's.
        wanted: Of each captured tensor, whether it needs a gradient.
        held_as: The forward's output, in whose dtype products and P are then held between steps, and from which
            sum(P * dO V^T) is taken, as kernels do; see :func:`forward`.
    """
    held = None if held_as is None else held_as.dtype
    dq = empty_like_order(x.q, x.q.shape[3]).zero_()
    dk, dv = (torch.zeros(tensor.shape, dtype=x.dtype, device=x.q.device) for tensor in (x.k, x.v))
    captured = () if x.score_mod is None else x.score_mod.captured
    dcaptured = [
        torch.zeros(tensor.shape, dtype=torch.promote_types(tensor.dtype, x.dtype), device=tensor.device)
        if want
        else None
        for tensor, want in zip(captured, wanted, strict=True)
    ]
    if x.q.numel() and x.k.shape[2]:
        q, k, v = (tensor.to(x.dtype) for tensor in (x.q, x.k, x.v))
        rule = None if x.score_mod is None else _derivative(x.score_mod, tuple(wanted), x.dtype)
        for block in _blocks_of_rows(x):
            raw = _held(_raw_scores(x, q, k, block), held)
            if not raw.shape[3]:
                continue
            row_lse = lse[:, :, block.rows, None].to(x.dtype)
            s = _masked(_modified(x, raw, block.grid), block.shown)
            p = (s - row_lse.masked_fill(row_lse == -torch.inf, 0.0)).exp_()
            do = folded(grad_out[:, :, block.rows].to(x.dtype), v.shape[1])
            dp = _held((do @ block.of_keys(v).mT).view_as(p), held)
            _add_heads(block, dv, folded(_held(p, held), v.shape[1]).mT @ do)
            if held_as is None:
                shift = (p * dp).sum(-1, keepdim=True)
            else:
                shift = (held_as[:, :, block.rows] * grad_out[:, :, block.rows].to(x.dtype)).sum(-1, keepdim=True)
            if grad_lse is not None:
                shift = shift - grad_lse[:, :, block.rows, None].to(x.dtype)
            ds = p * (dp - shift)
            if rule is not None and x.score_mod is not None:
                # Where nothing shows a score the mod may be infinite, and its derivative not a number.
                ds = _through_mod(rule, x.score_mod, raw, ds, block, dcaptured)
            ds = folded(_held(ds, held), k.shape[1])
            dq[:, :, block.rows] = (ds @ block.of_keys(k)).mul_(x.scale).view(*p.shape[:3], -1)
            _add_heads(block, dk, ds.mT @ folded(q[:, :, block.rows] * x.scale, k.shape[1]))
    grads = (empty_like_order(like, like.shape[3]).copy_(grad) for grad, like in ((dk, x.k), (dv, x.v)))
    of_captured = [
        None if grad is None else grad.to(tensor.dtype) for grad, tensor in zip(dcaptured, captured, strict=True)
    ]
    return dq, *grads, of_captured  # type: ignore[return-value]


def _add_heads(block: _Rows, total: Tensor, part: Tensor) -> None:
    """Adds a gradient of keys, of one batch entry where one serves all."""
    block.add_to_keys(total, part.sum_to_size(total.shape[0], *part.shape[1:]))


def _derivative(mod: Mod, wanted: tuple[bool, ...], dtype: torch.dtype) -> Derivative:
    kinds = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in mod.captured)
    places = tuple(place for place, want in enumerate(wanted) if want)
    return derivative(mod.program.text, kinds, places, dtype, len(mod.numbers))


def _through_mod(
    rule: Derivative, mod: Mod, raw: Tensor, ds: Tensor, block: _Rows, dcaptured: Sequence[Tensor | None]
) -> Tensor:
    """The gradient of raw scores; adds that of captured tensors."""
    results = [rule.score] if rule.score is not None else []
    for load in rule.loads:
        results += [load.gradient, *load.index]
    if not results:
        return torch.zeros_like(ds)

    inputs = {"score": raw, GRAD: ds, **block.grid}
    found = iter(evaluate(rule.steps, results, inputs, mod.captured, mod.numbers))
    hidden = ds == 0.0
    by_score = torch.zeros_like(ds) if rule.score is None else torch.where(hidden, 0.0, next(found).to(ds.dtype))
    for load in rule.loads:
        total = dcaptured[load.captured]
        gradient = next(found)
        index = [next(found).to(torch.int64) for _ in load.index]
        if total is None:
            continue
        tail = (1,) * (gradient.dim() - 4)
        gradient = torch.where(hidden.view(*hidden.shape, *tail), 0.0, gradient.to(total.dtype))
        if index:
            places = torch.broadcast_shapes(*(one.shape for one in index))
            total.index_put_(tuple(index), gradient.sum_to_size(*places, *gradient.shape[4:]), accumulate=True)
        else:
            total += gradient.flatten(0, 3).sum(0)
    return by_score


def visits_what_shows(blocks: BlockLists, high: int | None, low: int | None, q_len: int, kv_len: int) -> bool:
    """Whether lists visit every block in which some ``low <= j - i <= high``, and whole only those in which all are."""
    part, full = visited(blocks, kv_len)
    rows, columns = part.shape[2:]
    if rows * blocks.sizes[0] < q_len or columns * blocks.sizes[1] < kv_len:
        return False
    first_row = (torch.arange(rows) * blocks.sizes[0])[:, None]
    first_key = torch.arange(columns) * blocks.sizes[1]
    last_row, last_key = (
        (first_row + blocks.sizes[0]).clamp(max=q_len) - 1,
        (first_key + blocks.sizes[1]).clamp(max=kv_len) - 1,
    )
    there = (first_row < q_len) & (first_key < kv_len)
    least, most = first_key - last_row, last_key - first_row  # of j - i in a block
    high = kv_len if high is None else high
    low = -q_len if low is None else low
    some = (there & (least <= high) & (most >= low)).to(part.device)
    whole = (there & (most <= high) & (least >= low)).to(part.device)
    visited_where_needed = ((part | full) | ~some).all()
    whole_where_counted = (~(full & there.to(part.device)) | whole).all()
    return bool(visited_where_needed & whole_where_counted)

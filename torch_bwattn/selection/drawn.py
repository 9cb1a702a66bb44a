"""Tensors for a problem that is only described, and what is right for them: for self-checks and for tuning."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import testing
from ..backends.base import Backend, BackwardInputs, ForwardInputs, Grads
from ..backends.helion.forms import WHOLE_KEYS
from ..backends.materialised import visible
from ..backends.philox import keep_mask
from ..problem import Problem
from .key import FEW_QUERIES, has_whole_keys

CHECKED_Q_LEN, CHECKED_KV_LEN = 330, 590
"""Of a self-check's problem: past the largest tiles, of 256 and of 512, and no multiple of any."""


def small(problem: Problem) -> Problem:
    """A problem with the features of another (:func:`.key.features_of`), at the sizes of a self-check."""
    group, kv_heads = problem.heads // problem.kv_heads, min(problem.kv_heads, 2)
    q_len = problem.q_len if problem.q_len <= FEW_QUERIES else CHECKED_Q_LEN
    kv_len = CHECKED_KV_LEN
    if problem.kv_len <= problem.q_len:
        kv_len = q_len if problem.kv_len == problem.q_len else max(1, q_len // 2)
    if has_whole_keys(problem):
        equal = q_len == kv_len
        kv_len = -(-kv_len // WHOLE_KEYS) * WHOLE_KEYS
        q_len = kv_len if equal else q_len
    if problem.mask_dtype is not None:
        q_len, kv_len = _with_mask_rows(problem, q_len, kv_len)
    sizes = (min(problem.batch, 2), kv_heads * group, q_len, kv_len)
    diagonal, low_diagonal = _small_window(problem, q_len, kv_len)
    mask_sizes = problem.mask_sizes
    if mask_sizes is not None:
        mask_sizes = tuple(1 if size == 1 else most for size, most in zip(mask_sizes, sizes, strict=True))
    return dataclasses.replace(
        problem,
        batch=sizes[0],
        heads=sizes[1],
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        diagonal=diagonal,
        low_diagonal=low_diagonal,
        mask_sizes=mask_sizes,
        wide_index=False,
    )


def _with_mask_rows(problem: Problem, q_len: int, kv_len: int) -> tuple[int, int]:
    """The lengths with a mask's rows 16 bytes apart, or a multiple of that, where the problem's are, and only there."""
    step = 16 // min(16, problem.mask_dtype.itemsize if problem.mask_dtype is not None else 16)
    if (kv_len % step == 0) == problem.mask_rows_apart:
        return q_len, kv_len
    longer = -(-kv_len // step) * step if problem.mask_rows_apart else kv_len + 1
    return longer if q_len == kv_len else q_len, longer


def _small_window(problem: Problem, q_len: int, kv_len: int) -> tuple[int | None, int | None]:
    """The diagonals at other lengths: as far from the corner that they are nearest to, so that keys are seen."""
    high, low = problem.diagonal, problem.low_diagonal

    def moved(diagonal: int) -> int:
        offset = problem.kv_len - problem.q_len
        near = (0, 0) if abs(diagonal) <= abs(diagonal - offset) else (offset, kv_len - q_len)
        most = min(q_len, kv_len) // 2
        found = near[1] + max(-most, min(diagonal - near[0], most))
        return min(found, -1) if diagonal < 0 else max(found, 0)  # whether some rows see nothing is a feature

    if high is None or low is None:
        return None if high is None else moved(high), None if low is None else moved(low)
    width = min(high - low, max(min(high - low, 2), kv_len // 3))
    return moved(high), moved(high) - width


def normal(generator: torch.Generator, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Normal values on the generator's device."""
    return torch.randn(sizes, generator=generator, device=generator.device, dtype=torch.float32).to(dtype)


def operand(generator: torch.Generator, sizes: Sequence[int], dtype: torch.dtype, *, aligned: bool = True) -> Tensor:
    """Normal values ``[B, H, S, D]``, in ``[B, S, H, D]`` order in memory, from a base that is off by one or not."""
    batch, heads, length, width = sizes
    shift = 0 if aligned else 1
    return normal(generator, (batch, length, heads, width + shift), dtype)[..., shift:].transpose(1, 2)


def inputs(problem: Problem, device: torch.device | str, seed: int = 0) -> ForwardInputs:
    """Normal values in ``[B, S, H, D]`` order in memory, from a base that is off by one where the problem's is.

    A mask hides the second row, and adds its dtype's least number to all of the third.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def of_heads(heads: int, length: int, width: int) -> Tensor:
        sizes = (problem.batch, heads, length, width)
        return operand(generator, sizes, problem.dtype, aligned=problem.bulk_copies)

    mask = rng_state = sink = None
    if problem.mask_dtype is not None and problem.mask_sizes is not None:
        mask = normal(generator, problem.mask_sizes, torch.float32)
        mask = mask > -1.0 if problem.mask_dtype == torch.bool else mask.to(problem.mask_dtype)
        if mask.shape[2] > 2:
            mask[:, :, 1] = False if problem.mask_dtype == torch.bool else -torch.inf
            if problem.mask_dtype != torch.bool:
                mask[:, :, 2] = torch.finfo(problem.mask_dtype).min
    if problem.dropout_p > 0.0:
        rng_state = torch.tensor([seed + 1], dtype=torch.int64, device=device)
    if problem.sink_dtype is not None:
        sink = normal(generator, (problem.heads,), problem.sink_dtype)
    return ForwardInputs(
        of_heads(problem.heads, problem.q_len, problem.head_dim),
        of_heads(problem.kv_heads, problem.kv_len, problem.head_dim),
        of_heads(problem.kv_heads, problem.kv_len, problem.value_dim),
        mask, rng_state, sink,
    )  # fmt: skip


def whole_mask(problem: Problem, x: ForwardInputs) -> Tensor | None:
    """The mask with what causality and a window hide; None where all is shown."""
    mask, shown = x.mask, visible(problem, x.q.device)
    if mask is None or shown is None:
        return shown if mask is None else mask
    return mask & shown if mask.dtype == torch.bool else mask.where(shown, -torch.inf)


def references(problem: Problem, x: ForwardInputs, grad_out: Tensor | None) -> tuple[testing.Results, testing.Results]:
    """What the accuracy rule compares with: the fp64 reference, and PyTorch's math path."""
    keep = None
    if 0.0 < problem.dropout_p < 1.0 and x.rng_state is not None:
        sizes = problem.batch, problem.heads, range(problem.q_len), problem.kv_len
        keep = keep_mask(x.rng_state, *sizes, problem.dropout_p)
    common = {
        "attn_mask": whole_mask(problem, x), "dropout_p": problem.dropout_p, "scale": problem.scale,
        "enable_gqa": True, "softcap": problem.softcap, "sink": x.sink, "keep_mask": keep, "grad_out": grad_out,
        "needs_mask_grad": problem.mask_grad and grad_out is not None,
        "needs_sink_grad": x.sink is not None and grad_out is not None,
    }  # fmt: skip
    oracle = testing.oracle(x.q, x.k, x.v, **common)  # type: ignore[arg-type]
    return oracle, testing.pt_reference(x.q, x.k, x.v, **common)  # type: ignore[arg-type]


def backward_inputs(problem: Problem, x: ForwardInputs, oracle: testing.Results, grad_out: Tensor) -> BackwardInputs:
    """A backward's inputs beside a forward's, with the reference's results rounded as a forward leaves them."""
    if oracle.out is None or oracle.lse is None:
        raise ValueError("oracle: expected its output and lse")
    return _backward_inputs(problem, x, torch.empty_like(grad_out).copy_(oracle.out), oracle.lse, grad_out)


def made_up(problem: Problem, x: ForwardInputs, grad_out: Tensor) -> BackwardInputs:
    """A backward's inputs with an output and an lse that no forward has made, where only time is of interest."""
    lse = torch.full(x.q.shape[:3], math.log(problem.kv_len) + 0.5, dtype=torch.float64, device=x.q.device)
    return _backward_inputs(problem, x, grad_out.clone(memory_format=torch.preserve_format), lse, grad_out)


def _backward_inputs(problem: Problem, x: ForwardInputs, out: Tensor, lse: Tensor, grad_out: Tensor) -> BackwardInputs:
    """With an lse in float64, which is rounded."""
    lse = lse if problem.dtype == torch.float64 else lse.float()
    grad_lse = torch.zeros_like(lse) if problem.lse_grad else None
    return BackwardInputs(grad_out, grad_lse, x.q, x.k, x.v, x.mask, out, lse, x.rng_state, x.sink)


def gradient_of(problem: Problem, x: ForwardInputs, seed: int = 1) -> Tensor:
    """A gradient of the output, laid out as the query."""
    generator = torch.Generator(device=x.q.device).manual_seed(seed)
    sizes = (problem.batch, problem.heads, problem.q_len, problem.value_dim)
    return operand(generator, sizes, problem.dtype)


def wanted(problem: Problem) -> tuple[bool, bool, bool, bool, bool]:
    """The gradients that a problem asks for."""
    return True, True, True, problem.mask_grad, problem.sink_dtype is not None


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A self-check's problem, its tensors, and what is right."""

    problem: Problem
    x: ForwardInputs
    grad_out: Tensor | None
    oracle: testing.Results
    pt: testing.Results


def draw(problem: Problem, device: torch.device | str) -> Drawing:
    """What a config is checked on for a problem: :func:`small` of it."""
    problem = small(problem)
    with on_device(torch.device(device)):
        x = inputs(problem, device)
        grad_out = gradient_of(problem, x) if problem.backward else None
        return Drawing(problem, x, grad_out, *references(problem, x, grad_out))


def failure(backend: Backend, config: str, drawing: Drawing) -> str:
    """By how much a config's results break the accuracy rule, or nothing. Its exceptions are the caller's."""
    problem, x, grad_out = drawing.problem, drawing.x, drawing.grad_out
    with on_device(x.q.device), torch.no_grad():
        leave_nan(x.q.device)
        if grad_out is None:
            out, lse = backend.forward(problem, config)(x)
            results = testing.Results(out=out, lse=lse)
        else:
            y = backward_inputs(problem, x, drawing.oracle, grad_out)
            results = _as_results(backend.backward(problem, config)(y, wanted(problem)))
        judged = testing.judge(results, drawing.oracle, drawing.pt)
    return next((str(found) for found in judged if not found.passed), "")


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Where a device is the current one of its kind."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def leave_nan(device: torch.device) -> None:
    """Fills memory that is allocated next with NaN: what a kernel does not write of its results shows as that."""
    kept = [torch.full((1 << bits,), torch.nan, device=device) for bits in range(8, 21) for _ in range(4)]
    del kept


def _as_results(grads: Grads) -> testing.Results:
    dq, dk, dv, dmask, dsink = grads
    return testing.Results(dq=dq, dk=dk, dv=dv, dmask=dmask, dsink=dsink)

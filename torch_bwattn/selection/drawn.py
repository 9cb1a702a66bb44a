"""Tensors for a problem that is only described, and what is right for them: for self-checks and for tuning."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import torch
from torch import Tensor

from .. import testing
from ..backends.base import Backend, BackwardInputs, ForwardInputs, Grads
from ..backends.philox import keep_mask
from ..problem import Problem

_CHECKED_Q_LEN, _CHECKED_KV_LEN = 330, 590
"""Of a self-check's problem: past the largest tiles, of 256 and of 512, and no multiple of any."""


def small(problem: Problem) -> Problem:
    """A problem of the same kind that takes little time: the features of the kernels' code, fewer and shorter rows."""
    group, kv_heads = problem.heads // problem.kv_heads, min(problem.kv_heads, 2)
    q_len, kv_len = min(problem.q_len, _CHECKED_Q_LEN), min(problem.kv_len, _CHECKED_KV_LEN)
    if problem.q_len == problem.kv_len:  # where the two kinds of causality are one
        kv_len = q_len
    changed = dataclasses.replace(
        problem,
        batch=min(problem.batch, 2),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        wide_index=False,
    )

    def scaled(diagonal: int | None) -> int | None:
        if diagonal is None or diagonal == 0:
            return diagonal
        if diagonal == problem.kv_len - problem.q_len:
            return changed.kv_len - changed.q_len
        return diagonal * changed.kv_len // problem.kv_len

    mask_sizes = problem.mask_sizes
    if mask_sizes is not None:
        full = (changed.batch, changed.heads, changed.q_len, changed.kv_len)
        mask_sizes = tuple(1 if size == 1 else most for size, most in zip(mask_sizes, full, strict=True))
    return dataclasses.replace(
        changed,
        mask_sizes=mask_sizes,
        diagonal=scaled(problem.diagonal),
        low_diagonal=scaled(problem.low_diagonal),
    )


def inputs(problem: Problem, device: torch.device | str, seed: int = 0) -> ForwardInputs:
    """Normal values in ``[B, S, H, D]`` order in memory, from a base that is off by one where the problem's is."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shift = 0 if problem.bulk_copies else 1

    def normal(*sizes: int, dtype: torch.dtype = problem.dtype) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def operand(heads: int, length: int, width: int) -> Tensor:
        return normal(problem.batch, length, heads, width + shift)[..., shift:].transpose(1, 2)

    mask = rng_state = sink = None
    if problem.mask_dtype is not None and problem.mask_sizes is not None:
        mask = normal(*problem.mask_sizes, dtype=torch.float32)
        mask = mask > -1.0 if problem.mask_dtype == torch.bool else mask.to(problem.mask_dtype)
    if problem.dropout_p > 0.0:
        rng_state = torch.tensor([seed + 1], dtype=torch.int64, device=device)
    if problem.sink_dtype is not None:
        sink = normal(problem.heads, dtype=problem.sink_dtype)
    return ForwardInputs(
        operand(problem.heads, problem.q_len, problem.head_dim),
        operand(problem.kv_heads, problem.kv_len, problem.head_dim),
        operand(problem.kv_heads, problem.kv_len, problem.value_dim),
        mask, rng_state, sink,
    )  # fmt: skip


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


def references(problem: Problem, x: ForwardInputs, grad_out: Tensor | None) -> tuple[testing.Results, testing.Results]:
    """What the accuracy rule compares with: the fp64 reference, and PyTorch's math path."""
    mask, shown = x.mask, visible(problem, x.q.device)
    if shown is not None and mask is not None:
        mask = mask & shown if mask.dtype == torch.bool else mask.masked_fill(~shown, -torch.inf)
    keep = None
    if 0.0 < problem.dropout_p < 1.0 and x.rng_state is not None:
        sizes = problem.batch, problem.heads, range(problem.q_len), problem.kv_len
        keep = keep_mask(x.rng_state, *sizes, problem.dropout_p)
    common = {
        "attn_mask": shown if mask is None else mask, "dropout_p": problem.dropout_p, "scale": problem.scale,
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
    out = torch.empty_like(grad_out).copy_(oracle.out)
    lse = oracle.lse.float() if problem.dtype != torch.float64 else oracle.lse
    grad_lse = torch.zeros_like(lse) if problem.lse_grad else None
    return BackwardInputs(grad_out, grad_lse, x.q, x.k, x.v, x.mask, out, lse, x.rng_state, x.sink)


def made_up(problem: Problem, x: ForwardInputs, grad_out: Tensor) -> BackwardInputs:
    """A backward's inputs with an output and an lse that no forward has made, where only time is of interest."""
    lse = torch.full(x.q.shape[:3], math.log(problem.kv_len) + 0.5, dtype=torch.float32, device=x.q.device)
    if problem.dtype == torch.float64:
        lse = lse.double()
    grad_lse = torch.zeros_like(lse) if problem.lse_grad else None
    out = grad_out.clone(memory_format=torch.preserve_format)
    return BackwardInputs(grad_out, grad_lse, x.q, x.k, x.v, x.mask, out, lse, x.rng_state, x.sink)


def gradient_of(problem: Problem, x: ForwardInputs, seed: int = 1) -> Tensor:
    """A gradient of the output, laid out as the query."""
    generator = torch.Generator(device=x.q.device).manual_seed(seed)
    sizes = (problem.batch, problem.q_len, problem.heads, problem.value_dim)
    drawn = torch.randn(sizes, generator=generator, device=x.q.device, dtype=torch.float32)
    return drawn.to(problem.dtype).transpose(1, 2)


def wanted(problem: Problem) -> tuple[bool, bool, bool, bool, bool]:
    """The gradients that a problem asks for."""
    return True, True, True, problem.mask_grad, problem.sink_dtype is not None


def check(backend: Backend, config: str, problem: Problem, device: torch.device | str) -> str:
    """What is wrong with a config's results on :func:`small` of a problem, or nothing.

    Exceptions of the backend are the caller's.
    """
    problem = small(problem)
    index = torch.device(device)
    with torch.cuda.device(index) if index.type == "cuda" else contextlib.nullcontext():
        x = inputs(problem, device)
        grad_out = gradient_of(problem, x) if problem.backward else None
        oracle, pt = references(problem, x, grad_out)
        _leave_nan(x.q.device)
        with torch.no_grad():
            if grad_out is None:
                out, lse = backend.forward(problem, config)(x)
                results = testing.Results(out=out, lse=lse)
            else:
                y = backward_inputs(problem, x, oracle, grad_out)
                results = _as_results(backend.backward(problem, config)(y, wanted(problem)))
        return _first_failure(results, oracle, pt)


def _leave_nan(device: torch.device) -> None:
    """Fills memory that is allocated next with NaN: what a kernel does not write of its results shows as that."""
    kept = [torch.full((1 << bits,), torch.nan, device=device) for bits in range(8, 23) for _ in range(4)]
    del kept


def _as_results(grads: Grads) -> testing.Results:
    dq, dk, dv, dmask, dsink = grads
    return testing.Results(dq=dq, dk=dk, dv=dv, dmask=dmask, dsink=dsink)


def _first_failure(results: testing.Results, oracle: testing.Results, pt: testing.Results) -> str:
    return next((str(found) for found in testing.judge(results, oracle, pt) if not found.passed), "")

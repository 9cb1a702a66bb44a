"""A described problem as a call: of this package's operator, and of PyTorch's function as one would write it today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..api import sdpa
from ..backends.base import ForwardInputs
from ..problem import Problem
from ..selection import drawn

AUTO, PLAIN = "auto", "plain"


def arguments(problem: Problem) -> dict[str, Any]:
    """What :func:`torch_bwattn.sdpa` takes beside the tensors."""
    found: dict[str, Any] = {"scale": problem.scale, "enable_gqa": True, "dropout_p": problem.dropout_p}
    offset = problem.kv_len - problem.q_len
    if problem.low_diagonal is None and problem.diagonal in (0, offset):
        found["is_causal"] = True
        found["causal_alignment"] = "top_left" if problem.diagonal == 0 else "bottom_right"
    elif problem.low_diagonal is not None or problem.diagonal is not None:
        left = -1 if problem.low_diagonal is None else offset - problem.low_diagonal
        right = -1 if problem.diagonal is None else problem.diagonal - offset
        found["window_size"] = (left, right)
        found["causal_alignment"] = "bottom_right"
    if problem.softcap is not None:
        found["softcap"] = problem.softcap
    return found


def has_plain(problem: Problem) -> bool:
    """Whether PyTorch's function can say it."""
    return problem.softcap is None and problem.sink_dtype is None and not problem.lse_grad


def _plain_arguments(problem: Problem, x: ForwardInputs) -> dict[str, Any]:
    found: dict[str, Any] = {"scale": problem.scale, "dropout_p": problem.dropout_p}
    found["enable_gqa"] = problem.heads != problem.kv_heads
    if problem.mask_dtype is None and problem.low_diagonal is None and problem.diagonal is not None:
        if problem.diagonal == 0:
            return {**found, "is_causal": True}
        if problem.diagonal == problem.kv_len - problem.q_len:
            from torch.nn.attention.bias import causal_lower_right

            return {**found, "attn_mask": causal_lower_right(problem.q_len, problem.kv_len)}
    mask = drawn.whole_mask(problem, x)
    if mask is not None:
        found["attn_mask"] = mask
    return found


def work_of(which: str, problem: Problem, x: ForwardInputs) -> Callable[[], Any]:
    """A forward, or a backward after one forward, of :data:`AUTO` or :data:`PLAIN`."""
    query, key, value = (tensor.detach().requires_grad_(problem.backward) for tensor in (x.q, x.k, x.v))
    mask, sink = x.mask, x.sink
    if problem.mask_grad and mask is not None:
        mask = mask.detach().requires_grad_(problem.backward)
    if sink is not None:
        sink = sink.detach().requires_grad_(problem.backward)

    if which == AUTO:
        options = arguments(problem) | ({} if sink is None else {"sink": sink})

        def call() -> Any:
            return sdpa(query, key, value, mask, **options)
    else:
        others = _plain_arguments(problem, x._replace(mask=mask))

        def call() -> Any:
            return F.scaled_dot_product_attention(query, key, value, **others)

    if not problem.backward:
        return call
    with torch.enable_grad():
        out = call()
    grad_out = drawn.gradient_of(problem, x)
    inputs = [query, key, value, *(t for t in (mask, sink) if t is not None and t.requires_grad)]
    return lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True)

"""``bwattn::sdpa_forward`` and ``bwattn::sdpa_backward`` on real tensors: describe, choose, run.

What a description leads to (problem, choice, launch) is remembered under the call's metadata, so that a warm call
costs a dictionary look-up besides its kernels. The table is bounded; it is emptied when full, which costs a
description anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.base import BackwardInputs, ForwardInputs, Grads, Wanted
from ..problem import Problem, Window, describe, resolve_window
from ..selection.attempts import Attempts, choose
from ..selection.pin import pinned
from .schema import library

Options = tuple[float, bool, float, str, Window | None, float | None]
"""dropout_p, is_causal, scale, causal_alignment, window, softcap: what is no tensor in forward and backward alike."""

_MOST_PLANS = 4096
_forward_plans: dict[Hashable, Attempts] = {}
_backward_plans: dict[Hashable, Attempts] = {}
_counts: Counter[str] = Counter()


def call_counts() -> dict[str, int]:
    """Forward calls since start (or the last reset), by the backend that ran them.

    Replays of a CUDA graph run no Python and are not counted.
    """
    return dict(_counts)


def reset_call_counts() -> None:
    """Set every count to 0."""
    _counts.clear()


def count_call(name: str) -> None:
    """Count one forward under the name of what ran it (``pytorch`` for a call that the patch left to PyTorch)."""
    _counts[name] += 1


def meta(tensor: Tensor | None) -> Hashable:
    """What a description reads off one tensor, and what a launch depends on."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15


def signature(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Hashable) -> Hashable:
    """Everything that a description depends on: operands' metadata, options and the determinism flag."""
    return (
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        None if mask is None else meta(mask), torch.are_deterministic_algorithms_enabled(), options,
    )  # fmt: skip


def remember(table: dict[Any, Any], key: Hashable, value: Any) -> None:
    """Store under the table's bound."""
    if len(table) >= _MOST_PLANS:
        table.clear()
    table[key] = value


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    options: Options,
    pin: str | None,
) -> Attempts:
    """What runs a call, made at most once per signature."""
    key = signature(q, k, v, mask, *options, sink is not None and meta(sink), pin)
    found = _forward_plans.get(key)
    if found is None:
        found = choose(_describe(q, k, v, mask, sink, options), pin, q.device)
        remember(_forward_plans, key, found)
    return found


def _describe(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: Tensor | None, options: Options, **more: Any
) -> Problem:
    dropout_p, is_causal, scale, causal_alignment, window, softcap = options
    return describe(
        q, k, v, mask, sink=sink, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        causal_alignment=causal_alignment, window=window, softcap=softcap, **more,
    )  # fmt: skip


def _packed(
    dropout_p: float,
    is_causal: bool,
    scale: float,
    causal_alignment: str,
    window_size: Sequence[int] | None,
    softcap: float | None,
) -> Options:
    """An operator's arguments as :data:`Options`, which can be part of a key."""
    window = resolve_window(window_size, is_causal)
    return dropout_p, is_causal, scale, causal_alignment, window, softcap


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    causal_alignment: str,
    backend: str | None = None,
    window_size: Sequence[int] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one 4-D forward: ``(out, lse)``."""
    pin = pinned() or backend
    options = _packed(dropout_p, is_causal, scale, causal_alignment, window_size, softcap)
    run = plan_forward(q, k, v, mask, sink, options, pin)
    result: tuple[Tensor, Tensor] = run(ForwardInputs(q, k, v, mask, rng_state, sink))
    count_call(run.name)
    return result


def gradients(x: BackwardInputs, options: Options, wanted: Wanted, backend: str | None) -> Grads:
    """Run one 4-D backward; a gradient that is not wanted may be None."""
    pin = pinned() or backend
    extra = (meta(x.grad_out), meta(x.out), x.grad_lse is None, wanted[3], x.sink is not None and meta(x.sink), pin)
    key = signature(x.q, x.k, x.v, x.mask, *options, *extra)
    run = _backward_plans.get(key)
    if run is None:
        problem = _describe(
            x.q, x.k, x.v, x.mask, x.sink, options,
            backward=True, mask_grad=wanted[3], lse_grad=x.grad_lse is not None, more=(x.grad_out, x.out),
        )  # fmt: skip
        run = choose(problem, pin, x.q.device)
        remember(_backward_plans, key, run)
    grads: Grads = run(x, wanted)
    return grads


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rng_state: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    causal_alignment: str,
    output_mask: list[bool],
    backend: str | None = None,
    window_size: Sequence[int] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run one 4-D backward; a gradient that is not wanted comes back as an empty tensor of shape ``[0]``."""
    # A graph that torch.compile cached on disk before there were sinks says nothing of theirs.
    wants_dsink = len(output_mask) > 4 and output_mask[4]
    wanted = (output_mask[0], output_mask[1], output_mask[2], output_mask[3], wants_dsink)
    x = BackwardInputs(grad_out, grad_lse, q, k, v, mask, out, lse, rng_state, sink)
    options = _packed(dropout_p, is_causal, scale, causal_alignment, window_size, softcap)
    grads = gradients(x, options, wanted, backend)
    dq, dk, dv, dmask, dsink = (
        grad if want and grad is not None else q.new_empty(0) for grad, want in zip(grads, wanted, strict=True)
    )
    return dq, dk, dv, dmask, dsink


for _key in ("CPU", "CUDA"):
    library.impl("sdpa_forward", forward, _key)
    library.impl("sdpa_backward", backward, _key)

"""The short way of an eager call: to the kernel without the dispatcher, or without passing it a second time.

A call takes it when nothing watches or transforms operators (no dispatch mode, no functorch level, no tensor
subclass, no autocast that would cast) and its shapes are the primitive's own. It computes what the long way computes;
what it saves is validation, description and choice, remembered under the call's metadata, and one trip through the
dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..backends.base import ForwardInputs
from ..backends.philox import new_state
from ..problem import normalize
from ..selection.attempts import Attempts
from ..selection.pin import pinned
from . import autograd, primitive

_PLAIN = (Tensor, Parameter)


class _Entry(NamedTuple):
    """What is remembered of a call: its options and pin, the mask's missing leading dimensions, and what runs it."""

    settings: tuple[primitive.Options, str | None]
    mask_rank: int
    run: Attempts


_UNKNOWN = "unknown"  # told from None, which says: the long way
_entries: dict[object, _Entry | None] = {}


def _casts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sink: Tensor | None) -> bool:
    """Whether autocast is on for the operands' device and would change one."""
    if not torch.is_autocast_enabled(query.device.type):
        return False
    dtype = torch.get_autocast_dtype(query.device.type)
    if sink is not None and sink.dtype not in (torch.float32, dtype):
        return True
    return any(t is not None and t.is_floating_point() and t.dtype != dtype for t in (query, key, value, mask))


def seen_by_others() -> bool:
    """Whether a trace or a profiler records operators, or a mode intercepts functions: they must see the operator."""
    return (
        torch.autograd._profiler_enabled()
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._get_tracing_state() is not None
    )


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal_alignment: str,
    window_size: Sequence[int] | None,
    softcap: float | None,
    sink: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor] | None:
    """``(out, lse)``, or None where the call must go the long way. Not ``with_lse``, lse may be anything."""
    if not (type(query) in _PLAIN and type(key) in _PLAIN and type(value) in _PLAIN):
        return None
    if mask is not None and type(mask) not in _PLAIN:
        return None
    if autograd.watched():
        return None
    if torch._C._is_any_autocast_enabled() and _casts(query, key, value, mask, sink):
        return None
    pin = pinned()
    window, features = None, None
    options = (dropout_p, is_causal, scale, enable_gqa, causal_alignment)
    try:
        if window_size is not None or softcap is not None or sink is not None:
            if sink is not None and type(sink) not in _PLAIN:
                return None
            window = None if window_size is None else tuple(window_size)
            features = (window, softcap, primitive.meta(sink))
        signature = primitive.signature(query, key, value, mask, *options, features, pin)
    except RuntimeError:  # what is sparse, nested or opaque has no strides, or no shape
        return None
    entry = _entries.get(signature, _UNKNOWN)
    if isinstance(entry, str):
        entry = _enter(query, key, value, mask, *options, window, softcap, sink, pin)
        primitive.remember(_entries, signature, entry)
    if entry is None:
        return None
    if mask is not None and entry.mask_rank:
        mask = mask[(None,) * entry.mask_rank]
    rng_state = new_state(query.device) if 0.0 < dropout_p < 1.0 else None
    result: tuple[Tensor, Tensor]
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (mask is not None and mask.requires_grad)
        or (sink is not None and sink.requires_grad)
    ):
        result = autograd.Forward.apply(  # type: ignore[attr-defined]
            entry.run, query, key, value, mask, sink, rng_state, entry.settings
        )
    else:
        result = entry.run(ForwardInputs(query, key, value, mask, rng_state, sink, with_lse))
    primitive.count_call(entry.run.name)
    return result


def _enter(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal_alignment: str,
    window: tuple[int, ...] | None,
    softcap: float | None,
    sink: Tensor | None,
    pin: str | None,
) -> _Entry | None:
    made = normalize(
        query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment, window, softcap, sink
    )
    if made.q is not query or made.k is not key or made.v is not value or made.lead is not None:
        return None
    options = (dropout_p, is_causal, made.scale, causal_alignment, made.window, softcap)
    run = primitive.plan_forward(made.q, made.k, made.v, made.mask, sink, options, pin)
    return _Entry((options, pin), 0 if mask is None else 4 - mask.dim(), run)

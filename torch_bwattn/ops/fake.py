"""Fakes of the primitives: sizes, strides and dtypes of the results, by the same layout rule as the real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layout import empty_like_order, lse_dtype
from .schema import NAMESPACE, library


def _forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    out = empty_like_order(query, value.shape[3])
    return out, torch.empty(query.shape[:3], dtype=lse_dtype(query.dtype), device=query.device)


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rng_state: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    causal_alignment: str,
    output_mask: list[bool],
    backend: str | None = None,
    window_size: list[int] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    grads = [
        empty_like_order(t, t.shape[3]) if want else query.new_empty(0)
        for t, want in zip((query, key, value), output_mask[:3], strict=True)
    ]
    dmask = torch.empty_like(attn_mask, memory_format=torch.contiguous_format) if output_mask[3] else query.new_empty(0)  # type: ignore[arg-type]
    dsink = torch.empty_like(sink, memory_format=torch.contiguous_format) if output_mask[4] else query.new_empty(0)  # type: ignore[arg-type]
    return (*grads, dmask, dsink)


torch.library.register_fake(f"{NAMESPACE}::sdpa_forward", _forward, lib=library)
torch.library.register_fake(f"{NAMESPACE}::sdpa_backward", _backward, lib=library)

"""``bwattn::sdpa`` and ``bwattn::sdpa_with_lse``: from a user's call to the 4-D primitive.

Registered as CompositeImplicitAutograd, so every transform (autograd, vmap, functionalisation, fake tensors,
subclasses) sees only views, the seed's draw and the primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.philox import new_state
from ..problem import normalize
from . import eager
from .schema import library

_AUTOCAST_KEEPS = (torch.float64,)


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast as PyTorch's autocast casts attention's operands: floating tensors but float64, the mask included."""
    device_type = tensors[0].device.type if tensors[0] is not None else "cpu"
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype not in _AUTOCAST_KEEPS else t
        for t in tensors
    )


def autocast_sink(sink: Tensor | None) -> Tensor | None:
    """The same for a sink, but float32 stays: every query dtype takes it, and a bias of logits is best held in it."""
    if sink is None or sink.dtype == torch.float32:
        return sink
    return autocast(sink)[0]


def _decomposed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal_alignment: str,
    window_size: Sequence[int] | None,
    softcap: float | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` by the primitive operator."""
    q, k, v, mask = autocast(query, key, value, attn_mask)
    sink = autocast_sink(sink)
    call = normalize(
        q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment,  # type: ignore[arg-type]
        window_size, softcap, sink,
    )  # fmt: skip
    rng_state = new_state(call.q.device) if 0.0 < dropout_p < 1.0 else None
    out, lse = torch.ops.bwattn.sdpa_forward.default(
        call.q, call.k, call.v, call.mask, rng_state, dropout_p, is_causal, call.scale, causal_alignment,
        None, call.window, softcap, sink,
    )  # fmt: skip
    return call.restore(out), call.restore(lse)


def _implementation(with_lse: bool) -> Callable[..., Any]:
    """Of ``bwattn::sdpa_with_lse``, or of ``bwattn::sdpa``, which returns the output alone.

    Each is one function without another around it, for the host's time. See :func:`torch_bwattn.sdpa` for the
    arguments.
    """

    def implementation(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        causal_alignment: str = "top_left",
        window_size: Sequence[int] | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Any:
        arguments = (
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment,
            window_size, softcap, sink,
        )  # fmt: skip
        result = eager.call(*arguments, with_lse)
        if result is None:
            result = _decomposed(*arguments)
        return result if with_lse else result[0]

    return implementation


for _name, _function in (("sdpa", _implementation(False)), ("sdpa_with_lse", _implementation(True))):
    library.impl(_name, _function, "CompositeImplicitAutograd")
    library.impl(_name, _function, "FuncTorchBatched")  # vmap's fallback would loop over samples instead of decomposing

"""``bwattn::sdpa`` and ``bwattn::sdpa_with_lse``: from a user's call to the 4-D primitive.

Registered as CompositeImplicitAutograd, so every transform (autograd, vmap, functionalisation, fake tensors,
subclasses) sees only views, the seed's draw and the primitive.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def sdpa_with_lse(
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
) -> tuple[Tensor, Tensor]:
    """``bwattn::sdpa_with_lse``: ``(out, lse)``; see :func:`torch_bwattn.sdpa` for the arguments."""
    done = eager.call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment,
        window_size, softcap, sink,
    )  # fmt: skip
    if done is not None:
        return done
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


def sdpa(*args: Any, **kwargs: Any) -> Tensor:
    """``bwattn::sdpa``: the output alone."""
    return sdpa_with_lse(*args, **kwargs)[0]


for _name, _function in (("sdpa", sdpa), ("sdpa_with_lse", sdpa_with_lse)):
    library.impl(_name, _function, "CompositeImplicitAutograd")
    library.impl(_name, _function, "FuncTorchBatched")  # vmap's fallback would loop over samples instead of decomposing

"""Derivatives of the primitives: the forward's through both outputs; the backward's are refused with a clear word.

The kernels here are registered for the Autograd key itself rather than through ``torch.library.register_autograd``,
whose function is refused under ``torch.func`` transforms. Below autograd the call goes on to whatever the dispatcher
holds next: a functorch level, a fake or proxy mode, or the device's implementation.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _after_autograd_keyset,
    _AutoDispatchBelowAutograd,
    _dispatch_tls_is_dispatch_key_included,
)
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from ..backends.base import BackwardInputs, ForwardFn, ForwardInputs
from ..selection.pin import pinned
from . import primitive
from .schema import library

_NO_FORWARD_MODE = (
    "sdpa: forward-mode derivatives (jvp) are not supported; nearest: F.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)
_NO_SECOND_DERIVATIVE = (
    "sdpa: second derivatives are not supported; nearest: F.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)


def watched() -> bool:
    """Whether a dispatch mode or a functorch level must see every operator call."""
    return (
        _dispatch_tls_is_dispatch_key_included(DispatchKey.Python)
        or _dispatch_tls_is_dispatch_key_included(DispatchKey.PreDispatch)
        or peek_interpreter_stack() is not None
    )


class Forward(_SingleLevelFunction):
    """``sdpa_forward`` as one autograd node.

    Arguments: how to go on (the keyset to redispatch with, or the chosen backend's callable), then the operator's own:
    the tensors, and the options and the backend in one tuple because autograd looks at every argument.
    """

    @staticmethod
    def forward(
        ctx: Any,
        onward: DispatchKeySet | ForwardFn,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sink: Tensor | None,
        rng_state: Tensor | None,
        settings: tuple[primitive.Options, str | None],
    ) -> tuple[Tensor, Tensor]:
        ctx.direct = direct = not isinstance(onward, DispatchKeySet)
        options, backend = settings
        ctx.options = options
        ctx.backend = backend if direct else pinned() or backend  # on the direct way the caller has looked
        if isinstance(onward, DispatchKeySet):
            op = torch.ops.bwattn.sdpa_forward.default
            with _AutoDispatchBelowAutograd():
                out, lse = op.redispatch(
                    onward, query, key, value, mask, rng_state, *options[:4], backend, *options[4:], sink
                )
        else:
            out, lse = onward(ForwardInputs(query, key, value, mask, rng_state, sink))
        ctx.save_for_backward(query, key, value, mask, sink, out, lse, rng_state)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        arguments = len(ctx.needs_input_grad)
        if grad_out is None and grad_lse is None:
            return (None,) * arguments
        query, key, value, mask, sink, out, lse, rng_state = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
        wanted = ctx.needs_input_grad[1:6]
        grads: tuple[Tensor | None, ...]
        if ctx.direct and not torch.is_grad_enabled() and type(grad_out) is Tensor and not watched():
            x = BackwardInputs(grad_out, grad_lse, query, key, value, mask, out, lse, rng_state, sink)
            grads = primitive.gradients(x, ctx.options, wanted, ctx.backend)
        else:
            grads = torch.ops.bwattn.sdpa_backward.default(
                grad_out, grad_lse, query, key, value, mask, out, lse, rng_state,
                *ctx.options[:4], wanted, ctx.backend, *ctx.options[4:], sink,
            )  # fmt: skip
        used = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
        return (None, *used, *(None,) * (arguments - 6))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(_NO_FORWARD_MODE)


class _Backward(_SingleLevelFunction):
    """``sdpa_backward`` as an autograd node that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, keyset: DispatchKeySet, *args: Any) -> tuple[Tensor, ...]:
        with _AutoDispatchBelowAutograd():
            grads: tuple[Tensor, ...] = torch.ops.bwattn.sdpa_backward.default.redispatch(keyset, *args)
        return grads

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        raise NotImplementedError(_NO_SECOND_DERIVATIVE)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(_NO_FORWARD_MODE)


def _forward(keyset: DispatchKeySet, *args: Any) -> Any:
    below = keyset & _after_autograd_keyset
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        # The dispatcher leaves trailing defaults out.
        complete = (*args, *(None,) * (13 - len(args)))
        options, sink = (*complete[5:9], *complete[10:12]), complete[12]
        with enable_single_level_autograd_function():
            return Forward.apply(below, *args[:4], sink, args[4], (options, complete[9]))  # type: ignore[attr-defined]
    with _AutoDispatchBelowAutograd():
        return torch.ops.bwattn.sdpa_forward.default.redispatch(below, *args)


def _backward(keyset: DispatchKeySet, *args: Any) -> Any:
    below = keyset & _after_autograd_keyset
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        with enable_single_level_autograd_function():
            return _Backward.apply(below, *args)  # type: ignore[attr-defined]
    with _AutoDispatchBelowAutograd():
        return torch.ops.bwattn.sdpa_backward.default.redispatch(below, *args)


library.impl("sdpa_forward", _forward, "Autograd", with_keyset=True)
library.impl("sdpa_backward", _backward, "Autograd", with_keyset=True)

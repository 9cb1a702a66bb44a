"""Replacing ``F.scaled_dot_product_attention`` under code that calls it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..api import sdpa
from ..ops.primitive import count_call
from .patching import Patch

_original = F.scaled_dot_product_attention
_installed = 0


def _restricted() -> bool:
    """Whether PyTorch's own choice is restricted (an ``sdpa_kernel`` context, or a backend disabled by a flag)."""
    return not (
        torch.backends.cuda.flash_sdp_enabled()
        and torch.backends.cuda.mem_efficient_sdp_enabled()
        and torch.backends.cuda.math_sdp_enabled()
        and torch.backends.cuda.cudnn_sdp_enabled()
    )


# What torch.compiler.assume_constant_result sets, without its import of all of Dynamo: the flags cannot be traced, so
# they are read while a graph is traced (inside a traced sdpa_kernel context they hold that context's choice) and
# fixed in it.
_restricted._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _nested(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.is_nested


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What stands in for ``F.scaled_dot_product_attention``: same arguments, same values, the best kernel.

    A ``CausalBias`` becomes the causal alignment that it names. Inside an ``sdpa_kernel`` context (or with one of
    PyTorch's attention backends disabled) the caller has chosen a kernel of PyTorch's, and gets it; so do nested
    tensors, which the op does not take.
    """
    bias = attn_mask is not None and type(attn_mask).__name__ == "CausalBias"
    nested = _nested(query) or _nested(key) or _nested(value)
    if not (bias or nested) and has_torch_function((query, key, value, attn_mask)):
        result: Tensor = handle_torch_function(
            scaled_dot_product_attention, (query, key, value, attn_mask), query, key, value,
            attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        return result
    if nested or _restricted():
        count_call("pytorch")
        call: Any = _original
        if bias:
            from torch.nn.attention.bias import CausalBias  # here, not above: it imports all of Dynamo

            call = CausalBias._dispatch
        chosen: Tensor = call(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return chosen
    return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


class patch_sdpa(Patch):
    """Replace ``F.scaled_dot_product_attention`` by this package's op while the patch is on.

    A context manager (``with patch_sdpa():``), a decorator (``@patch_sdpa()``), or a handle
    (``p = patch_sdpa().install()`` … ``p.remove()``). Patches nest and may end in any order, from any thread; the
    original returns with the last one. The replacement is process-wide, as PyTorch's own attention flags are. Code
    compiled under the patch is recompiled when it runs without it, and the other way round.

    What no patch of F can reach: names bound earlier by ``from torch.nn.functional import
    scaled_dot_product_attention``, and the fused inference path of ``nn.MultiheadAttention`` and
    ``nn.TransformerEncoderLayer`` (eval mode, no grad).
    """

    def _begin(self) -> None:
        global _installed
        _installed += 1
        if _installed == 1:
            _replace(_original, scaled_dot_product_attention)

    def _end(self) -> None:
        global _installed
        _installed -= 1
        if _installed == 0:
            _replace(scaled_dot_product_attention, _original)


def _replace(old: Any, new: Any) -> None:
    """Swap the attribute, unless somebody else has put a third function there, which stays theirs."""
    if F.scaled_dot_product_attention is old:
        F.scaled_dot_product_attention = new

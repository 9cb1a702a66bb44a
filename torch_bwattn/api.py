"""The documented function over the operators, and the dry run that explains a choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from .ops import eager
from .ops.composite import autocast, autocast_sink
from .ops.eager import seen_by_others
from .problem import check_flags, check_tensors, describe, normalize, resolve_bias
from .selection import report
from .selection.choose import Plan, plan
from .selection.pin import pinned


@overload
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    *,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    causal_alignment: str = ...,
    window_size: Sequence[int] | None = ...,
    softcap: float | None = ...,
    sink: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    *,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    causal_alignment: str = ...,
    window_size: Sequence[int] | None = ...,
    softcap: float | None = ...,
    sink: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def sdpa(
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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention, ``softmax(scale * Q K^T + mask) V``, with PyTorch's semantics.

    Differentiable once in every floating operand, an additive mask included, and through both results. Compiles without
    graph breaks and without a recompile per length; never synchronises on CUDA; never takes Sq x Skv memory.

    Args:
        query: ``[..., Hq, Sq, D]``, bfloat16, float16, float32 or float64; any strides; rank 2 or more.
        key: ``[..., Hkv, Skv, D]``, the query's dtype; leading dimensions broadcast.
        value: ``[..., Hkv, Skv, Dv]``, likewise; ``Dv`` may differ from ``D``.
        attn_mask: broadcasts to ``[..., Hq, Sq, Skv]``: bool (True keeps a score), or added to the scores in the
            query's dtype or float32. A row that sees nothing gives 0. Or a ``torch.nn.attention.bias.CausalBias``.
        dropout_p: probability in [0, 1] of dropping a softmax weight; applied whenever it is above 0, there is no
            training flag. The seed comes from the device's default generator.
        is_causal: query i sees key j when ``j <= i`` (see ``causal_alignment``). Excludes ``attn_mask``.
        scale: factor of the scores; None means ``1 / sqrt(D)``; 0 and negative are legal.
        enable_gqa: grouped queries: Hq is a multiple of Hkv, and query head h reads key head ``h // (Hq // Hkv)``.
        causal_alignment: ``"top_left"`` as PyTorch's ``is_causal``, or ``"bottom_right"``: ``j <= i + Skv - Sq``, as
            ``torch.nn.attention.bias.causal_lower_right``. A window is aligned likewise.
        window_size: ``(left, right)``: query i sees key j when ``i + offset - left <= j <= i + offset + right``, where
            ``offset`` is 0, or ``Skv - Sq`` with ``"bottom_right"``; -1 stands for no limit on that side, and with
            ``is_causal`` the right side is 0. Combines with ``attn_mask``; keys outside of the window cost nothing.
        softcap: a finite number above 0 that bounds the scores before any mask, by
            ``softcap * tanh(scale * q . k / softcap)``; None leaves them alone.
        sink: ``[Hq]``, the query's dtype or float32: a logit for each query head, neither scaled nor capped, that joins
            the denominator, ``P_ij = exp(s_ij) / (exp(sink_h) + sum_j exp(s_ij))``; dropout passes it by.
        return_lse: return ``(out, lse)``.

    Returns:
        ``out [..., Hq, Sq, Dv]`` in the query's dtype and memory order; with ``return_lse`` also
        ``lse [..., Hq, Sq]``, the natural log of each row's softmax denominator, the sink included (float32; float64
        for float64 inputs; for a row that sees no key ``-inf``, or the sink).

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: shapes that do not fit, a mask together with ``is_causal``, ``dropout_p`` outside [0, 1], a window
            or a soft cap out of range.
        UnsupportedProblem: a pinned backend refuses the problem (a ``NotImplementedError``).
    """
    check_tensors(query, key, value, attn_mask, sink)
    check_flags(is_causal, enable_gqa)
    attn_mask, is_causal, causal_alignment = resolve_bias(query, key, attn_mask, is_causal, causal_alignment)
    result: Tensor | tuple[Tensor, Tensor]
    op = torch.ops.bwattn.sdpa_with_lse if return_lse else torch.ops.bwattn.sdpa
    if window_size is None and softcap is None and sink is None:
        # Whatever else a number may be, the dispatcher converts or refuses.
        converted = type(dropout_p) is float and (scale is None or type(scale) is float)
        if converted and type(causal_alignment) is str and not (torch.compiler.is_compiling() or seen_by_others()):
            found = eager.call(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment,
                None, None, None, return_lse,
            )  # fmt: skip
            if found is not None:
                return found if return_lse else found[0]
        # Every keyword costs the dispatcher time.
        result = op(
            query, key, value, attn_mask, dropout_p, is_causal,
            scale=scale, enable_gqa=enable_gqa, causal_alignment=causal_alignment,
        )  # fmt: skip
        return result
    result = op(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
        causal_alignment=causal_alignment, window_size=window_size, softcap=softcap, sink=sink,
    )  # fmt: skip
    return result


@dataclass(frozen=True)
class Explanation:
    """What would run for one call, forward and backward, and why not the others. ``str()`` is the report."""

    forward: Plan
    backward: Plan

    def __str__(self) -> str:
        return report.text((self.forward, self.backward))


def explain(
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
) -> Explanation:
    """Print which backend and config a call would run, and each refusal's reason; runs and compiles nothing.

    Takes the arguments of :func:`sdpa` and raises what it raises. The backward is described for a dense ``grad_out``
    and, where the mask is additive and requires grad, with the mask's gradient.

    Returns:
        The :class:`Explanation` that was printed.
    """
    check_tensors(query, key, value, attn_mask, sink)
    check_flags(is_causal, enable_gqa)
    attn_mask, is_causal, causal_alignment = resolve_bias(query, key, attn_mask, is_causal, causal_alignment)
    q, k, v, mask = autocast(query, key, value, attn_mask)
    sink = autocast_sink(sink)
    call = normalize(
        q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment,  # type: ignore[arg-type]
        window_size, softcap, sink,
    )  # fmt: skip
    mask_grad = call.mask is not None and call.mask.requires_grad
    forward, backward = (
        plan(
            describe(
                call.q, call.k, call.v, call.mask,
                scale=call.scale, is_causal=is_causal, causal_alignment=causal_alignment, dropout_p=dropout_p,
                window=call.window, softcap=softcap, sink=sink,
                backward=is_backward, mask_grad=mask_grad and is_backward,
            ),
            pinned(),
        )
        for is_backward in (False, True)
    )  # fmt: skip
    explanation = Explanation(forward, backward)
    print(explanation)
    return explanation

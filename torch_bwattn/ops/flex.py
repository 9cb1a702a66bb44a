"""``bwattn::flex_forward`` and ``bwattn::flex_backward``: attention with mods and lists of blocks.

Mods come as text (:mod:`..mods.program`) with the values that they captured. Where they are causality, a window and a
soft cap, and the lists visit what these show, the call is one of ``sdpa_forward``; else Helion's kernels compute it
where they take it, and PyTorch's operations blockwise where they do not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..backends import flex_blockwise
from ..backends.cute import flex as cute_flex
from ..backends.flex_inputs import BlockLists, FlexInputs, Mod
from ..backends.helion import flex as helion_flex
from ..errors import NotCompiled, UnsupportedProblem
from ..layout import empty_like_order, lse_dtype
from ..mods.program import Program, parsed
from ..mods.recognize import Features, recognized, why_not
from ..selection.pin import pinned
from . import primitive
from .schema import NAMESPACE, library

log = logging.getLogger(__name__)

_BLOCKWISE, _KERNELS, _HOPPER = "reference", "helion", "cute"
_Result = TypeVar("_Result")

Mods = tuple[
    str | None,
    Sequence[Tensor],
    Sequence[int],
    str | None,
    Sequence[Tensor],
    Sequence[int],
    Sequence[Tensor],
    Sequence[int],
]
"""What says the mods and the lists, in the operators' order."""


def inputs(query: Tensor, key: Tensor, value: Tensor, scale: float, mods: Mods) -> FlexInputs:
    """A call from the operators' arguments."""
    score_mod, score_captured, score_numbers, mask_mod, mask_captured, mask_numbers, lists, sizes = mods
    blocks = None
    if lists:
        part_count, part_index, *full = lists
        full_count, full_index = full or (None, None)
        blocks = BlockLists(part_count, part_index, full_count, full_index, (int(sizes[0]), int(sizes[1])))
    score = None if score_mod is None else Mod(parsed(score_mod), score_captured, score_numbers)
    mask = None if mask_mod is None else Mod(parsed(mask_mod), mask_captured, mask_numbers)
    return FlexInputs(query, key, value, scale, score, mask, blocks)


def options_of(features: Features, q_len: int, kv_len: int) -> dict[str, Any] | None:
    """Recognised features as options of ``sdpa_forward``, or None where these cannot say it."""
    found: dict[str, Any] = {"is_causal": False, "causal_alignment": "top_left", "softcap": features.softcap}
    if features.high is None and features.low is None:
        return found
    if features.low is None and features.high == 0:
        return {**found, "is_causal": True}
    for alignment, offset in (("top_left", 0), ("bottom_right", kv_len - q_len)):
        left = -1 if features.low is None else offset - features.low
        right = -1 if features.high is None else features.high - offset
        if (features.low is None or left >= 0) and (features.high is None or right >= 0):
            return {**found, "causal_alignment": alignment, "window_size": (left, right)}
    return None


_agreeing: WeakIdKeyDictionary = WeakIdKeyDictionary()


def lists_agree(blocks: BlockLists, features: Features, q_len: int, kv_len: int) -> bool:
    """Whether lists visit what a mask shows, and count as whole only what it shows wholly.

    It is remembered of the very tensors while nothing has changed them, as far as their versions tell.
    """
    lists = [blocks.part_count, blocks.part_index]
    if blocks.full_count is not None and blocks.full_index is not None:
        lists += [blocks.full_count, blocks.full_index]
    has_versions = not any(one.is_inference() for one in lists)
    key = (features, q_len, kv_len, blocks.sizes, *(one._version for one in lists if has_versions))
    if lists[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # what is in them at a replay is not known
    found = _agreeing.get(lists[1]) if has_versions else None
    if (
        found is not None
        and found[0] == key
        and all(one() is other for one, other in zip(found[1], lists, strict=False))
    ):
        return bool(found[2])
    agree = flex_blockwise.visits_what_shows(blocks, features.high, features.low, q_len, kv_len)
    if has_versions:
        _agreeing[lists[1]] = (key, [weakref.ref(one) for one in lists], agree)
    return agree


def route(
    score_mod: Program | None, mask_mod: Program | None, blocks: BlockLists | None, q_len: int, kv_len: int
) -> dict[str, Any] | str:
    """The options of ``sdpa_forward`` that say what mods and lists say, or why none do."""
    features = recognized(score_mod, mask_mod)
    if features is None:
        return f"not recognised, {why_not(score_mod, mask_mod)}"
    options = options_of(features, q_len, kv_len)
    if options is None:
        return f"recognised as {features}, which no window says for these lengths"
    if blocks is not None:
        shown = recognized(None, mask_mod)
        if shown is None or not lists_agree(blocks, shown, q_len, kv_len):
            return f"recognised as {features}, but the block mask's lists visit other blocks than that"
    return options


def _options(x: FlexInputs) -> dict[str, Any] | None:
    score, mask = (None if mod is None else mod.program for mod in (x.score_mod, x.mask_mod))
    found = route(score, mask, x.blocks, x.q.shape[2], x.k.shape[2])
    return None if isinstance(found, str) else found


_refused: dict[Hashable, str] = {}
"""What kernels turned out not to take, by direction and mods, and why."""


def _mods_key(direction: str, x: FlexInputs) -> Hashable:
    return direction, *(None if mod is None else mod.program.text for mod in (x.score_mod, x.mask_mod))


def _why_not_kernels(direction: str, x: FlexInputs, learned: bool) -> str:
    """Why Helion's kernels do not take a call; nothing where they do."""
    if learned and direction == "backward" and torch.are_deterministic_algorithms_enabled():
        return "its kernels add gradients of captured tensors in no fixed order, and deterministic ones are asked for"
    return helion_flex.why_not(x) or _refused.get(_mods_key(direction, x), "")


def way(direction: str, x: FlexInputs, learned: bool) -> str:
    """What runs a call that no options of ``sdpa_forward`` say, in words.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        x: The call.
        learned: Whether captured tensors need gradients.
    """
    if direction == "forward" and pinned() == _HOPPER:
        reason = cute_flex.why_not(x)
        return f"refused by {_HOPPER}: {reason}" if reason else f"{_HOPPER}, {cute_flex.config_of(x)}"
    reason = _why_not_kernels(direction, x, learned)
    if reason:
        return f"{_BLOCKWISE}, in PyTorch's own operations, since {reason}"
    return f"{_KERNELS}, {helion_flex.words(direction, x)}"


def _by_kernels(direction: str, x: FlexInputs, run: Callable[[], _Result], learned: bool = False) -> _Result | None:
    """What Helion's kernels give; None where PyTorch's operations are to compute it.

    Raises:
        UnsupportedProblem: They were pinned and do not take it, or a backend that has no such kernels.
    """
    pin = pinned()
    if pin == _BLOCKWISE:
        return None
    if pin not in (None, "auto", _KERNELS):
        raise UnsupportedProblem(
            f"flex_attention {direction}: backend {pin} was pinned, which has no kernel for mods that are more than "
            f"causality, windows and soft caps; nearest: {_KERNELS}"
        )
    reason = _why_not_kernels(direction, x, learned)
    if not reason:
        try:
            return run()
        except UnsupportedProblem as error:
            reason = _refused[_mods_key(direction, x)] = str(error)
        except NotCompiled as error:  # while a CUDA graph is captured
            reason = str(error)
    if pin == _KERNELS:
        raise UnsupportedProblem(f"flex_attention: backend {pin} was pinned: {reason}; nearest: {_BLOCKWISE}")
    log.debug("flex_attention %s runs on %s: %s", direction, _BLOCKWISE, reason)
    return None


def _on_hopper(x: FlexInputs, with_max_scores: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The hand-written kernel, which only runs where it is pinned.

    Raises:
        UnsupportedProblem: It does not take the call.
    """
    reason = cute_flex.why_not(x, with_max_scores)
    if reason:
        raise UnsupportedProblem(f"flex_attention: backend {_HOPPER} was pinned: {reason}; nearest: {_KERNELS}")
    return cute_flex.forward(x)


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One forward on real tensors."""
    mods, with_max_scores = rest[:-1], rest[-1]
    x = inputs(query, key, value, scale, mods)
    options = None if with_max_scores else _options(x)
    if options is None:
        if pinned() == _HOPPER:
            results = _on_hopper(x, with_max_scores)
            primitive.count_call(_HOPPER)
            return results
        found = _by_kernels("forward", x, lambda: helion_flex.forward(x, with_max_scores=with_max_scores))
        primitive.count_call(_BLOCKWISE if found is None else _KERNELS)
        out, lse, most = found or flex_blockwise.forward(x)
        return out, lse, most if with_max_scores else lse.new_empty(0)
    k, v = x.of_batch()
    out, lse = primitive.forward(query, k, v, None, None, 0.0, scale=scale, **options)
    return out, lse, lse.new_empty(0)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """One backward on real tensors; a captured tensor's gradient that is not wanted is empty."""
    mods, wanted = rest[:-1], list(rest[-1])
    x = inputs(query, key, value, scale, mods)
    options = _options(x)
    captured = mods[1]
    if options is None:
        grads = _by_kernels(
            "backward", x, lambda: helion_flex.backward(x, grad_out, grad_lse, out, lse, wanted), any(wanted)
        )
        dq, dk, dv, found = grads or flex_blockwise.backward(x, grad_out, grad_lse, lse, wanted)
        return dq, dk, dv, [query.new_empty(0) if one is None else one for one in found]
    k, v = x.of_batch()
    dq, dk, dv, _, _ = primitive.backward(
        grad_out, grad_lse, query, k, v, None, out, lse, None, 0.0,
        scale=scale, output_mask=[True, True, True, False, False], **options,
    )  # fmt: skip
    dk, dv = x.of_own_batch(dk, dv)
    zeros = [torch.zeros_like(one) if want else query.new_empty(0) for one, want in zip(captured, wanted, strict=True)]
    return dq, dk, dv, zeros


for _key in ("CPU", "CUDA"):
    library.impl("flex_forward", forward, _key)
    library.impl("flex_backward", backward, _key)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = torch.empty(query.shape[:3], dtype=lse_dtype(query.dtype), device=query.device)
    return empty_like_order(query, value.shape[3]), lse, torch.empty_like(lse) if rest[-1] else lse.new_empty(0)


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    query, key, value, captured, wanted = *args[2:5], args[9], args[-1]
    grads = [torch.empty_like(one, memory_format=torch.contiguous_format) if want else query.new_empty(0)
             for one, want in zip(captured, wanted, strict=True)]  # fmt: skip
    dq, dk, dv = (empty_like_order(like, like.shape[3]) for like in (query, key, value))
    return dq, dk, dv, grads


torch.library.register_fake(f"{NAMESPACE}::flex_forward", _fake_forward, lib=library)
torch.library.register_fake(f"{NAMESPACE}::flex_backward", _fake_backward, lib=library)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, scale, score_mod, score_captured, score_numbers, *others, _ = inputs
    mask_mod, mask_captured, mask_numbers, lists, sizes = others
    out, lse, most = output
    ctx.mark_non_differentiable(most)
    ctx.set_materialize_grads(False)
    ctx.counts = len(score_captured), len(mask_captured)
    ctx.rest = scale, score_mod, score_numbers, mask_mod, mask_numbers, sizes
    ctx.save_for_backward(query, key, value, out, lse, *score_captured, *mask_captured, *lists)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, *others = ctx.saved_tensors
    scale, score_mod, score_numbers, mask_mod, mask_numbers, sizes = ctx.rest
    first, second = ctx.counts
    score_captured, mask_captured, lists = others[:first], others[first : first + second], others[first + second :]
    # register_autograd takes an empty list for one of tensors, and any other list of integers for one value.
    no_numbers: list[Any] = [None if numbers else [] for numbers in (score_numbers, mask_numbers, sizes)]
    none = (
        None,
        [None] * first,
        no_numbers[0],
        None,
        [None] * second,
        no_numbers[1],
        [None] * len(lists),
        no_numbers[2],
        None,
    )
    if grad_out is None and grad_lse is None:
        return (None, None, None, None, *none)
    if grad_out is None:
        grad_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
    wanted = [tensor.requires_grad for tensor in score_captured]
    dq, dk, dv, found = torch.ops.bwattn.flex_backward(
        grad_out, grad_lse, query, key, value, out, lse, scale, score_mod, score_captured, score_numbers, mask_mod,
        mask_captured, mask_numbers, lists, sizes, wanted,
    )  # fmt: skip
    captured = [one if want else None for one, want in zip(found, wanted, strict=True)]
    return (dq, dk, dv, None, None, captured, *none[2:])


torch.library.register_autograd(f"{NAMESPACE}::flex_forward", _differentiate, setup_context=_set_up, lib=library)

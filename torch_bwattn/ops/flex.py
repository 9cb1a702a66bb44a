"""``bwattn::flex_forward`` and ``bwattn::flex_backward``: attention with mods and lists of blocks.

Mods come as text (:mod:`..mods.program`) with the values that they captured. Where they are causality, a window and a
soft cap, and the lists visit what these show, the call is one of ``sdpa_forward``; else CuTe's kernels compute it
where they take it, or Helion's, and PyTorch's operations blockwise where neither do.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import storage
from ..backends import flex_blockwise
from ..backends.cute import flex as cute_flex
from ..backends.flex_inputs import BlockLists, FlexInputs, Mod
from ..backends.helion import flex as helion_flex
from ..errors import NotCompiled, UnsupportedProblem
from ..layout import empty_like_order, lse_dtype
from ..mods.program import Program, parsed
from ..mods.recognize import Features, recognized, why_not
from ..selection import attempts, flex_check
from ..selection.flex_check import FlexCall
from ..selection.pin import pinned
from ..selection.tables import Tunable
from . import primitive
from .schema import NAMESPACE, library

log = logging.getLogger(__name__)

_BLOCKWISE, _HELION, _CUTE = "reference", "helion", "cute"

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
        of_rows = int(sizes[2]) if len(sizes) > 2 else len(lists)
        block = int(sizes[0]), int(sizes[1])
        columns = _lists(lists[of_rows:], block) if len(lists) > of_rows else None
        blocks = _lists(lists[:of_rows], block, columns)
    score = None if score_mod is None else Mod(parsed(score_mod), score_captured, score_numbers)
    mask = None if mask_mod is None else Mod(parsed(mask_mod), mask_captured, mask_numbers)
    return FlexInputs(query, key, value, scale, score, mask, blocks)


def _lists(tensors: Sequence[Tensor], sizes: tuple[int, int], columns: BlockLists | None = None) -> BlockLists:
    part_count, part_index, *full = tensors
    full_count, full_index = full or (None, None)
    return BlockLists(part_count, part_index, full_count, full_index, sizes, columns)


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


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What is asked for beside the call: in which direction, of which pinned backend, with which further results."""

    direction: str
    pin: str | None
    with_max_scores: bool = False
    wanted: Sequence[bool] = ()
    lse_grad: bool = False

    def call(self, x: FlexInputs) -> FlexCall:
        """As a check before the first use sees it."""
        return FlexCall(self.direction, x, self.with_max_scores, self.wanted, self.lse_grad)


_refused: dict[Hashable, str] = {}
"""What kernels turned out not to take, and why."""


def _refused_key(backend: str, x: FlexInputs, asked: _Asked) -> Hashable:
    mods = (None if mod is None else mod.program.text for mod in (x.score_mod, x.mask_mod))
    kind = x.q.device, x.q.dtype, x.q.shape[3], x.v.shape[3]
    return backend, asked.direction, tuple(asked.wanted), *kind, *mods


def _why_not(backend: str, x: FlexInputs, asked: _Asked) -> str:
    """Why a backend's kernels do not take a call; nothing where they do."""
    if backend == _CUTE:
        reason = cute_flex.why_not(
            x, with_max_scores=asked.with_max_scores, backward=asked.direction == "backward", wanted=asked.wanted
        )
    elif any(asked.wanted) and torch.are_deterministic_algorithms_enabled():
        reason = "its kernels add gradients of captured tensors in no fixed order, and deterministic ones are asked for"
    else:
        reason = helion_flex.why_not(x)
    return reason or _refused.get(_refused_key(backend, x, asked), "")


_BY_KERNELS = (_CUTE, _HELION)
"""Backends with kernels, in order: on the H200 CuTe's take 0.45 to 0.7 of the time of PyTorch's Triton template, which
Helion's, not timed there yet, are like."""


def _backends(direction: str, pin: str | None) -> Sequence[str]:
    """Those that may run a call before PyTorch's operations do.

    Raises:
        UnsupportedProblem: One was pinned that has no such kernels.
    """
    if pin is None:
        return _BY_KERNELS
    if pin == _BLOCKWISE:
        return ()
    if pin not in _BY_KERNELS:
        raise UnsupportedProblem(
            f"flex_attention {direction}: backend {pin} was pinned, which has no kernel for mods that are more than "
            f"causality, windows and soft caps; nearest: {_HELION}"
        )
    return (pin,)


def way(direction: str, x: FlexInputs, wanted: Sequence[bool]) -> str:
    """What runs a call that no options of ``sdpa_forward`` say, in words.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        x: The call.
        wanted: Of each captured tensor of ``score_mod``, whether it needs a gradient.

    Returns:
        The backend with its config, and why none before it; ``max_scores``, if asked for, may be another's.
    """
    pin = pinned()
    asked = _Asked(direction, pin, wanted=wanted if direction == "backward" else ())
    reasons: list[tuple[str, str]] = []
    try:
        backends = _backends(direction, pin)
    except UnsupportedProblem as error:
        return f"refused: {error}"
    for backend in backends:
        reason = _why_not(backend, x, asked)
        if not reason:
            tunable = _tunable(backend, direction, x)
            failure = flex_check.recalled(asked.call(x), tunable)
            if not failure:
                others = "".join(f"; not {other}, {why}" for other, why in reasons)
                return f"{backend}, {tunable.config}{others}"
            reason = _failed(tunable.config, failure)
        reasons.append((backend, reason))
    if pin in _BY_KERNELS:
        return f"refused by {pin}: {reasons[0][1]}"
    said = "; ".join(f"not {backend}, {reason}" for backend, reason in reasons)
    return f"{_BLOCKWISE}, in PyTorch's own operations; {said}" if said else f"{_BLOCKWISE}, which was pinned"


def _tunable(backend: str, direction: str, x: FlexInputs) -> Tunable:
    """A backend with the configs that its kernels run with."""
    return Tunable(backend, (cute_flex if backend == _CUTE else helion_flex).words(direction, x))


def _failed(kernels: object, failure: str) -> str:
    return f"{kernels} failed its check on a corner of the call: {failure}"


def _by_kernels(
    x: FlexInputs, asked: _Asked, runs: Mapping[str, flex_check.Run], *args: Any
) -> tuple[str, Sequence[Any]] | None:
    """Which kernels take a call, and what they give; None where PyTorch's operations are to compute it.

    Where they fail, the next take over, for this call if memory was lacking or a CUDA graph is captured, else for good.

    Args:
        x: The call.
        asked: What of it.
        runs: By backend what runs its kernels, with ``x`` and ``args``.
        args: What a backward is given beside.

    Raises:
        UnsupportedProblem: They were pinned and do not take it, or a backend that has no such kernels.
        Exception: What they raise where they were pinned, or where nothing can follow.
    """
    for backend in _backends(asked.direction, asked.pin):
        reason = _why_not(backend, x, asked)
        if not reason:
            try:
                reason = _unless_right(backend, x, asked, runs[backend])
                if not reason:
                    return backend, runs[backend](x, *args)
            except UnsupportedProblem as error:
                reason = _refused[_refused_key(backend, x, asked)] = str(error)
            except NotCompiled as error:  # while a CUDA graph is captured
                reason = str(error)
            except Exception as error:
                if asked.pin == backend or attempts.ends_attempts(error):
                    raise
                reason = _passed_over(backend, x, asked, attempts.failure_of(error))
        if asked.pin == backend:
            nearest = _BLOCKWISE if backend == _HELION else _HELION
            raise UnsupportedProblem(f"flex_attention: backend {backend} was pinned: {reason}; nearest: {nearest}")
        log.debug("flex_attention %s does not run on %s: %s", asked.direction, backend, reason)
    return None


def _passed_over(backend: str, x: FlexInputs, asked: _Asked, failure: attempts.Failure) -> str:
    """Why kernels that raised do not run a call: told once, and remembered unless memory was lacking."""
    key, reason = _refused_key(backend, x, asked), f"{failure.kind}: {failure.text}"
    text = f"flex_attention {asked.direction}: {backend} cannot run, the next backend does: {reason}"
    storage.tell_once(log, text, about=(key, failure.kind))
    if not failure.lacks_memory:
        _refused[key] = reason
    return reason


def _unless_right(backend: str, x: FlexInputs, asked: _Asked, run: flex_check.Run) -> str:
    """Why kernels must not run a call, or nothing; what nobody vouches for is checked before its first use."""
    if flex_check.is_vouched_for(x):
        return ""
    tunable = _tunable(backend, asked.direction, x)
    failure = flex_check.why_distrusted(asked.call(x), tunable, run, capturing=attempts.capturing)
    return _failed(tunable, failure) if failure else ""


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One forward on real tensors."""
    mods, with_max_scores = rest[:-1], rest[-1]
    x = inputs(query, key, value, scale, mods)
    options = None if with_max_scores else _options(x)
    if options is None:
        runs: dict[str, flex_check.Run] = {
            _CUTE: cute_flex.forward,
            _HELION: functools.partial(helion_flex.forward, with_max_scores=with_max_scores),
        }
        taken = _by_kernels(x, _Asked("forward", pinned(), with_max_scores), runs)
        backend, results = (_BLOCKWISE, flex_blockwise.forward(x)) if taken is None else taken
        primitive.count_call(backend)
        out, lse, most = results
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
    mods, (wanted, pin) = rest[:8], (*rest[8:], None)[:2]
    pin = pinned() or pin
    x = inputs(query, key, value, scale, mods)
    options = _options(x)
    captured = mods[1]
    if options is None:
        runs = {_CUTE: cute_flex.backward, _HELION: helion_flex.backward}
        asked = _Asked("backward", pin, wanted=wanted, lse_grad=grad_lse is not None)
        taken = _by_kernels(x, asked, runs, grad_out, grad_lse, out, lse, wanted)
        grads = flex_blockwise.backward(x, grad_out, grad_lse, lse, wanted) if taken is None else taken[1]
        dq, dk, dv, found = grads
        return dq, dk, dv, [query.new_empty(0) if one is None else one for one in found]
    k, v = x.of_batch()
    dq, dk, dv, _, _ = primitive.backward(
        grad_out, grad_lse, query, k, v, None, out, lse, None, 0.0,
        scale=scale, output_mask=[True, True, True, False, False], backend=pin, **options,
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
    query, key, value, captured, wanted = *args[2:5], args[9], args[16]
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
    ctx.pin = pinned()  # autograd may run the backward in a thread of its own
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
        mask_captured, mask_numbers, lists, sizes, wanted, ctx.pin,
    )  # fmt: skip
    captured = [one if want else None for one, want in zip(found, wanted, strict=True)]
    return (dq, dk, dv, None, None, captured, *none[2:])


torch.library.register_autograd(f"{NAMESPACE}::flex_forward", _differentiate, setup_context=_set_up, lib=library)

"""Attention with mods and lists of blocks by the Hopper kernels: what they take, and how a call reaches them.

Kernels and their language load at the first call, and not even then where the kernel is on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedProblem
from ...layout import empty_like_order
from ...mods.derivative import GRAD, of_scalars
from ...mods.program import INDEX_DTYPE, MAKES, POSITION, Program, Ref, call_step, named, parsed, refs
from ...problem import dtype_name, suits_bulk_copies
from ...target import target_of
from .. import flex_blockwise
from ..flex_blocks import aligned, transposed
from ..flex_inputs import MOST_TENSORS, BlockLists, FlexInputs, as_captured, why_not_scalars, zeros_of
from . import calls, configs, loader
from .compile import DoesNotCompile

EMITTED = {
    "__lshift__", "__rshift__", "_to_copy", "abs", "add", "alias", "bitwise_and", "bitwise_not", "bitwise_or",
    "bitwise_xor", "clamp", "clamp_max", "clamp_min", "clone", "cos", "detach", "div", "eq", "exp", "exp2", "floor",
    "floor_divide", "ge", "gelu", "gt", "index", "le", "lift_fresh", "lift_fresh_copy", "log", "log2",
    "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mish",
    "fill", "gelu_backward", "mul", "ne", "neg", "pow", "reciprocal", "relu", "remainder", "rsqrt", "rsub", "sgn",
    "sigmoid", "sigmoid_backward", "silu", "silu_backward", "sin", "softplus", "softplus_backward", "sqrt", "square",
    "sub", "tanh", "tanh_backward", "threshold_backward", "where",
}  # fmt: skip
"""Operators that have a form in CuTe-DSL (:mod:`.parts.mods`), beside those that make tensors of literals."""
_COMPUTED = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)


def why_not(
    x: FlexInputs, *, with_max_scores: bool = False, backward: bool = False, wanted: Sequence[bool] = ()
) -> str:
    """Why the kernels do not take a call; nothing where they do.

    Args:
        x: The call.
        with_max_scores: Whether these are asked for, forward.
        backward: Whether it is a backward.
        wanted: Of each captured tensor of ``score_mod``, whether it needs a gradient, backward.
    """
    missing = loader.why_missing()
    if missing:
        return missing
    target = target_of(x.q.device)
    if target != calls.ARCH:
        return f"its kernels are for {calls.ARCH}, got {target}"
    if x.q.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels take bfloat16 and float16, got {x.q.dtype}"
    for name, width in (("D", x.q.shape[3]), ("Dv", x.v.shape[3])):
        if width % 8 or not 0 < width <= configs.WIDEST:
            return f"its kernels take widths that are multiples of 8 up to {configs.WIDEST}, got {name}={width}"
    if not (x.q.numel() and x.k.numel()):
        return "nothing to attend needs no kernel"
    if not x.scale > 0.0:
        return f"its kernels take a scale above 0, got {x.scale}"
    if x.k.shape[0] != x.q.shape[0]:
        return "its kernels take keys of every batch entry, got those of one"
    if not all(map(suits_bulk_copies, (x.q, x.k, x.v))):
        return "TMA needs unit last strides, other strides and pointers at multiples of 16 bytes"
    if max(x.q.shape[2], x.k.shape[2]) > configs.LONGEST:
        return f"its kernels take up to {configs.LONGEST} queries and keys"
    if with_max_scores:
        return "its kernels write no max_scores"
    if backward and torch.are_deterministic_algorithms_enabled():
        return "its kernels add dQ in no fixed order, and deterministic ones are asked for"
    reason = why_not_scalars(x)
    if reason:
        return reason
    found = x.joined
    kinds = tuple((tensor.dtype, tensor.dim()) for tensor in found.tensors)
    for what, text in (("score_mod", found.score_mod), ("mask_mod", found.mask_mod)):
        if text is None:
            continue
        differentiates = backward and what == "score_mod"
        op = not_emitted(text, kinds, len(found.numbers), _places(wanted) if differentiates else None)
        if op:
            part = f"the derivative of {what}" if differentiates else what
            return f"its kernels have no form of what {part} calls: {op}"
    if any(wanted):
        return not_learned(found.score_mod or "", kinds, len(found.numbers), _places(wanted))
    return ""


def _places(wanted: Sequence[bool]) -> tuple[int, ...]:
    return tuple(place for place, want in enumerate(wanted) if want)


@lru_cache(maxsize=1024)
def not_learned(text: str, kinds: tuple[tuple[torch.dtype, int], ...], numbers: int, wanted: tuple[int, ...]) -> str:
    """Why the kernels give no gradients of captured tensors, of a mod that :func:`not_emitted` has nothing against."""
    if any(kinds[place][0] == torch.float64 for place in wanted):
        return "its kernels sum gradients of captured tensors in float32, and one is float64"
    rule = of_scalars(text, [dtype for dtype, _ in kinds], wanted, numbers)
    read = {"score"}
    for place, step in enumerate(rule.steps):
        if any(ref.name in read for ref in refs(step)):
            read.add(f"%{place}")
    if rule.score != Ref(GRAD) or any(load.gradient.name in read for load in rule.loads):
        return (
            "its kernels give gradients of captured tensors where score_mod only adds to scores what it makes of them"
        )
    return ""


@lru_cache(maxsize=1024)
def not_emitted(
    text: str, kinds: tuple[tuple[torch.dtype, int], ...], numbers: int, wanted: tuple[int, ...] | None = None
) -> str:
    """The first operator of a mod of scalars that has no form in CuTe-DSL; nothing where all have one.

    Args:
        text: The program.
        kinds: (dtype, dimensions) of each captured tensor.
        numbers: How many integers are captured.
        wanted: The captured tensors by which, beside the score, the derivative is asked for too; None for none at all.
    """
    program = parsed(text)
    steps = program.steps
    values: dict[str, Any] = {name: torch.empty((), dtype=INDEX_DTYPE, device="meta") for name in POSITION}
    values["score"] = values[GRAD] = torch.empty((), dtype=torch.float32, device="meta")
    values |= {f"#{place}": torch.empty((), dtype=torch.int64, device="meta") for place in range(numbers)}
    for place, (dtype, rank) in enumerate(kinds):
        rank = rank if _is_indexed(program, place) else 0  # noqa: PLW2901 (one element stands for none dimensions)
        values[f"@{place}"] = torch.empty((2,) * rank, dtype=dtype, device="meta")
    last: set[str] = set()  # gradients as the captured tensor's dtype has them, which are summed as they were
    if wanted is not None:
        try:
            rule = of_scalars(text, [dtype for dtype, _ in kinds], wanted, numbers)
        except NotImplementedError as error:
            return str(error)
        steps = rule.steps
        last = {load.gradient.name for load in rule.loads} - {ref.name for step in steps for ref in refs(step)}
    for place, step in enumerate(steps):
        result = call_step(step, values)
        values |= named(place, result)
        if step.base == "_to_copy" and f"%{place}" in last:
            continue
        if step.base not in EMITTED and step.base not in MAKES:
            return step.op
        if step.base == "pow" and not (isinstance(step.args[1], (int, float)) and step.args[1] in range(1, 17)):
            return f"{step.op} by {step.args[1]}"
        truncates = step.base == "div" and dict(step.kwargs).get("rounding_mode") == "trunc"
        if truncates and isinstance(result, Tensor) and result.dtype.is_floating_point:
            return f"{step.op} that truncates"
        if step.base != "index" and isinstance(result, Tensor) and result.dtype not in _COMPUTED:
            return f"{step.op} of {result.dtype}"
    return ""


def _is_indexed(program: Program, place: int) -> bool:
    return any(step.base == "index" and step.args[0].name == f"@{place}" for step in program.steps)


def _mods(x: FlexInputs, wanted: Sequence[bool] = ()) -> configs.ModFeatures:
    found = x.joined
    return configs.ModFeatures(
        found.score_mod,
        found.mask_mod,
        tuple((dtype_name(tensor.dtype), tensor.dim()) for tensor in found.tensors),
        len(found.numbers),
        x.blocks is not None,
        x.blocks is not None and x.blocks.full_count is not None,
        _places(wanted),
    )


def words(direction: str, x: FlexInputs) -> str:
    """The config that a call runs with."""
    return str((configs.flex_forward if direction == "forward" else configs.flex_backward)(_width(x)))


def _width(x: FlexInputs) -> int:
    return max(x.q.shape[3], x.v.shape[3])


def features_of(x: FlexInputs) -> configs.ForwardFeatures:
    """What of a call shapes the forward's code."""
    return configs.ForwardFeatures(dtype_name(x.q.dtype), x.q.shape[3], x.v.shape[3], mods=_mods(x))


def backward_features_of(x: FlexInputs, wanted: Sequence[bool] = ()) -> configs.BackwardFeatures:
    """What of a call shapes the backward's code."""
    return configs.BackwardFeatures(dtype_name(x.q.dtype), x.q.shape[3], x.v.shape[3], mods=_mods(x, wanted))


@contextmanager
def _compiling() -> Iterator[None]:
    """Where kernels are looked for: one that the compiler refuses is one that does not take the call.

    Raises:
        UnsupportedProblem: The compiler refuses one.
    """
    try:
        yield
    except DoesNotCompile as error:
        raise UnsupportedProblem(str(error).partition("; key: ")[0]) from error


def _lists(x: FlexInputs, blocks: BlockLists | None) -> Iterator[Tensor | None]:
    """Lists as kernels take them: int32, unit last strides."""
    return (
        one if one is None or (one.stride(-1) == 1 and one.dtype == torch.int32) else one.to(torch.int32).contiguous()
        for one in x.lists(blocks)
    )


def _held(tensors: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
    """Captured tensors as kernels take them: bool as bytes."""
    return (one.view(torch.uint8) if one is not None and one.dtype == torch.bool else one for one in tensors)


def forward(x: FlexInputs) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, an empty tensor)`` of a call that :func:`why_not` has nothing against."""
    config = configs.flex_forward(_width(x))
    x = aligned(x, (config.tile_m, config.tile_n))
    with _compiling():
        launch = calls.launch_of(calls.forward_key(features_of(x), config))
    out = empty_like_order(x.q, x.v.shape[3])
    lse = torch.empty(x.q.shape[:3], dtype=torch.float32, device=x.q.device)
    sizes = (config.tile_m, config.tile_n) if x.blocks is None else x.blocks.sizes
    tensors, numbers = x.joined.slots()
    counter = None if x.blocks is None else torch.zeros(1, dtype=torch.int32, device=x.q.device)
    launch(
        *calls.views_for_tma((x.q, x.k, x.v)), out, lse, float(x.scale),
        *_lists(x, x.blocks), *_held(tensors), *numbers,
        sizes[0] // config.tile_m, sizes[1] // config.tile_n, counter, calls.programs_of(x.q.device),
    )  # fmt: skip
    return out, lse, lse.new_empty(0)


def backward(
    x: FlexInputs, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of q, k and v, and of those of the score mod's captured tensors that are ``wanted``.

    Args:
        x: What :func:`why_not` has nothing against.
        grad_out: Of the output.
        grad_lse: Of lse, or None.
        out: The forward's.
        lse: The forward's.
        wanted: Of each captured tensor, whether it needs a gradient.
    """
    if x.k.shape[2] == 1:  # delta would leave rounding in what is exactly 0
        return flex_blockwise.backward(x, grad_out, grad_lse, lse, wanted)
    captured = () if x.score_mod is None else x.score_mod.captured
    config = configs.flex_backward(_width(x))
    x = aligned(x, (config.tile_m, config.tile_n))
    features, f32 = backward_features_of(x, wanted), torch.float32
    with _compiling():
        prepare, main, finish = calls.backward_launches(
            features, config, wide=suits_bulk_copies(out), lse_grad=grad_lse is not None
        )
    (batch, heads, q_len, _), device = x.q.shape, x.q.device
    rows = batch, heads, -(-q_len // config.tile_m) * config.tile_m
    elements, of_head = configs.backward_workspace(features, batch, heads, q_len, config)
    do = grad_out if suits_bulk_copies(grad_out) else empty_like_order(out, out.shape[3]).copy_(grad_out)
    norm, delta, sums = (torch.empty(size, dtype=f32, device=device) for size in (rows, rows, elements))
    prepare(out, do, lse, grad_lse, norm, delta, sums)
    grads = zeros_of(captured, wanted)
    dq, dk, dv = (empty_like_order(one, one.shape[3]) for one in (x.q, x.k, x.v))
    sizes = (config.tile_m, config.tile_n) if x.blocks is None else x.blocks.sizes
    columns = None if x.blocks is None else transposed(x.blocks, q_len, x.k.shape[2])
    tensors, numbers = x.joined.slots()
    main(
        *calls.views_for_tma((x.q, x.k, x.v, do)), norm, delta, dk, dv, sums, float(x.scale), *_lists(x, columns),
        *_held(tensors), *numbers, sizes[0] // config.tile_m, sizes[1] // config.tile_n, *grads,
        *(None,) * (MOST_TENSORS - len(grads)), calls.programs_of(device),
    )  # fmt: skip
    finish(sums, dq, heads * of_head, of_head, float(x.scale), None, None, batch, q_len)
    return dq, dk, dv, as_captured(grads, captured)

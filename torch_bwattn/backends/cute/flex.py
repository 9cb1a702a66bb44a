"""Attention with mods and lists of blocks by the Hopper kernel, forward: what it takes, and how a call reaches it.

Kernels and their language load at the first call, and not even then where the kernel is on disk.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...layout import empty_like_order
from ...mods.program import INDEX_DTYPE, MAKES, POSITION, Program, call_step, named, parsed
from ...problem import dtype_name, suits_bulk_copies
from ...target import target_of
from ..flex_blocks import aligned
from ..flex_inputs import FlexInputs, joined, why_not_scalars
from . import calls, configs, loader
from .compile import KernelKey

EMITTED = {
    "__lshift__", "__rshift__", "_to_copy", "abs", "add", "alias", "bitwise_and", "bitwise_not", "bitwise_or",
    "bitwise_xor", "clamp", "clamp_max", "clamp_min", "clone", "cos", "detach", "div", "eq", "exp", "exp2", "floor",
    "floor_divide", "ge", "gelu", "gt", "index", "le", "lift_fresh", "lift_fresh_copy", "log", "log2",
    "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mish",
    "mul", "ne", "neg", "pow", "reciprocal", "relu", "remainder", "rsqrt", "rsub", "sigmoid", "silu", "sin",
    "softplus", "sqrt", "square", "sub", "tanh", "where",
}  # fmt: skip
"""Operators that have a form in CuTe-DSL (:mod:`.parts.mods`), beside those that make tensors of literals."""
_COMPUTED = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)


def why_not(x: FlexInputs, with_max_scores: bool = False) -> str:
    """Why the kernel does not take a call; nothing where it does."""
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
    if with_max_scores:
        return "its kernels write no max_scores"
    reason = why_not_scalars(x)
    if reason:
        return reason
    found = joined(x)
    kinds = tuple((tensor.dtype, tensor.dim()) for tensor in found.tensors)
    for what, text in (("score_mod", found.score_mod), ("mask_mod", found.mask_mod)):
        op = None if text is None else not_emitted(text, kinds, len(found.numbers))
        if op:
            return f"its kernels have no form of what {what} calls: {op}"
    return ""


@lru_cache(maxsize=1024)
def not_emitted(text: str, kinds: tuple[tuple[torch.dtype, int], ...], numbers: int) -> str:
    """The first operator of a mod of scalars that has no form in CuTe-DSL; nothing where all have one.

    Args:
        text: The program.
        kinds: (dtype, dimensions) of each captured tensor.
        numbers: How many integers are captured.
    """
    program = parsed(text)
    values: dict[str, Any] = {name: torch.empty((), dtype=INDEX_DTYPE, device="meta") for name in POSITION}
    values["score"] = torch.empty((), device="meta")
    values |= {f"#{place}": torch.empty((), dtype=torch.int64, device="meta") for place in range(numbers)}
    for place, (dtype, rank) in enumerate(kinds):
        rank = rank if _is_indexed(program, place) else 0  # noqa: PLW2901 (one element stands for none dimensions)
        values[f"@{place}"] = torch.empty((2,) * rank, dtype=dtype, device="meta")
    for place, step in enumerate(program.steps):
        result = call_step(step, values)
        values |= named(place, result)
        if step.base not in EMITTED and step.base not in MAKES:
            return step.op
        if step.base == "pow" and not (isinstance(step.args[1], int) and 1 <= step.args[1] <= 16):
            return f"{step.op} by {step.args[1]}"
        truncates = step.base == "div" and dict(step.kwargs).get("rounding_mode") == "trunc"
        if truncates and isinstance(result, Tensor) and result.dtype.is_floating_point:
            return f"{step.op} that truncates"
        if step.base != "index" and isinstance(result, Tensor) and result.dtype not in _COMPUTED:
            return f"{step.op} of {result.dtype}"
    return ""


def _is_indexed(program: Program, place: int) -> bool:
    return any(step.base == "index" and step.args[0].name == f"@{place}" for step in program.steps)


def config_of(x: FlexInputs) -> configs.ForwardConfig:
    """The config of a call; not timed yet. Tiles divide blocks of 128 by 128, the usual ones."""
    width = max(x.q.shape[3], x.v.shape[3])
    return configs.ForwardConfig(128, 128 if width <= 128 else 64, 2, ping_pong=True, own_o=width <= 64)


def features_of(x: FlexInputs) -> configs.ForwardFeatures:
    """What of a call shapes the code."""
    found = joined(x)
    mods = configs.ModFeatures(
        found.score_mod,
        found.mask_mod,
        tuple((dtype_name(tensor.dtype), tensor.dim()) for tensor in found.tensors),
        len(found.numbers),
        x.blocks is not None,
        x.blocks is not None and x.blocks.full_count is not None,
    )
    return configs.ForwardFeatures(dtype_name(x.q.dtype), x.q.shape[3], x.v.shape[3], mods=mods)


@lru_cache(maxsize=1024)
def key_of(features: configs.ForwardFeatures, config: configs.ForwardConfig) -> KernelKey:
    """What decides the code."""
    return KernelKey("flex_forward_sm90", calls.ARCH, (features, config))


def forward(x: FlexInputs) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, an empty tensor)`` of a call that :func:`why_not` has nothing against."""
    config = config_of(x)
    x = aligned(x, (config.tile_m, config.tile_n))
    found = joined(x)
    out = empty_like_order(x.q, x.v.shape[3])
    lse = torch.empty(x.q.shape[:3], dtype=torch.float32, device=x.q.device)
    sizes = (config.tile_m, config.tile_n) if x.blocks is None else x.blocks.sizes
    tensors, numbers = found.slots()
    held = (one.view(torch.uint8) if one is not None and one.dtype == torch.bool else one for one in tensors)
    calls.launch_of(key_of(features_of(x), config))(
        *calls.views_for_tma((x.q, x.k, x.v)), out, lse, float(x.scale), *x.lists(x.blocks), *held, *numbers,
        sizes[0] // config.tile_m, sizes[1] // config.tile_n, calls.programs_of(x.q.device),
    )  # fmt: skip
    return out, lse, lse.new_empty(0)

"""Attention with mods and lists of blocks by Helion kernels: what they take, and how a call reaches them.

Kernels and their language load at the first call, never for :func:`why_not`. What is launched is remembered under the
call's metadata, as for ``sdpa``.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedProblem
from ...layout import empty_like_order
from ...target import capability, target_of
from ..flex_blocks import aligned, transposed
from ..flex_inputs import MOST_TENSORS, FlexInputs, Joined, as_captured, why_not_scalars, zeros_of
from . import configs, loader

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 256
_MOST_LAUNCHES = 4096


def why_not(x: FlexInputs) -> str:
    """Why the kernels do not take a call; nothing where they do, unless Helion does not lower what a mod calls."""
    missing = loader.why_missing()
    if missing:
        return missing
    target = target_of(x.q.device)
    arch = capability(target)
    if arch is None or arch < (8, 0):
        return f"its kernels need a CUDA device of sm_80 or later, got {target}"
    if x.q.dtype not in _DTYPES:
        return f"its kernels take bfloat16, float16 and float32, got {x.q.dtype}"
    widths = x.q.shape[3], x.v.shape[3]
    if not all(0 < width <= _WIDEST for width in widths):
        return f"its kernels take widths from 1 to {_WIDEST}, got D={widths[0]} and Dv={widths[1]}"
    if not (x.q.numel() and x.k.numel()):
        return "nothing to attend needs no kernel"
    return why_not_scalars(x)


def _chosen(x: FlexInputs) -> dict[str, configs.Config]:
    """Configs by kernel."""
    return configs.flex(x.q.shape[3], x.v.shape[3], x.q.dtype, target_of(x.q.device))


def words(direction: str, x: FlexInputs) -> str:
    """The configs that a call runs with."""
    kernels = ("forward",) if direction == "forward" else ("dkv", "dq")
    return "; ".join(f"{kernel} {_chosen(x)[kernel]}" for kernel in kernels)


def _ranks(found: Joined) -> tuple[int, ...]:
    return tuple(tensor.dim() for tensor in found.tensors)


@cache
def _family(kernel: str, ranks: tuple[int, ...]) -> Any:
    """A kernel for captured tensors of so many dimensions."""
    function = getattr(loader.kernels(_MODULES[kernel]), kernel)
    dims, canonical = dict(_DIMS[kernel]), dict(_CANONICAL)
    for place, rank in enumerate(ranks):
        names = [f"T{place}{dim}" for dim in range(rank)]
        dims[f"t{place}"] = dims[f"g{place}"] = " ".join(names)
        canonical |= {name: 37 + 20 * place + 5 * dim for dim, name in enumerate(names)}
    for place in range(len(ranks), MOST_TENSORS):  # always None
        dims[f"t{place}"] = dims[f"g{place}"] = "1"
    if kernel != "flex_dq":
        dims = {name: text for name, text in dims.items() if name[0] != "g"}
    return loader.kernels("runtime").KernelFamily(function, dims=dims, canonical=canonical)


_MODULES = {"flex_forward": "flex_forward", "flex_dkv": "flex_backward", "flex_dq": "flex_backward"}
_OPERANDS = {"q": "B Hq M D", "k": "B Hkv N D", "v": "B Hkv N Dv"}
_ROWS = {"part_count": "B Hq R", "part_index": "B Hq R C", "full_count": "B Hq R", "full_index": "B Hq R F"}
_TERMS = {"do": "B Hq M Dv", "norm": "B Hq M", "delta": "B Hq M"}
_DIMS = {
    "flex_forward": {**_OPERANDS, **_ROWS, "o": "B Hq M Dv", "lse": "B Hq M", "most": "B Hq M"},
    "flex_dkv": {**_OPERANDS, **_ROWS, **_TERMS, "dk": "B Hkv N D", "dv": "B Hkv N Dv"},
    "flex_dq": {**_OPERANDS, **_ROWS, **_TERMS, "dq": "B Hq M D"},
}
_CANONICAL = {"R": 17, "C": 19, "F": 23}

_launches: dict[Hashable, Any] = {}
_lock = threading.Lock()


def _prepared(family: Any, arguments: Sequence[Any], config: configs.Config) -> Any:
    try:
        return family.prepare(arguments, config.helion())
    except _not_lowered() as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        line = next(iter(str(cause).splitlines()), "")
        raise UnsupportedProblem(f"Helion does not lower the mods: {type(cause).__name__}: {line}") from error


@cache
def _not_lowered() -> tuple[type[Exception], ...]:
    """What is raised where a mod calls something that Helion or Triton has no form of."""
    loader.load()
    helion = importlib.import_module("helion.exc")
    triton = importlib.import_module("triton.compiler.errors")
    return helion.Base, triton.CompilationError, NotImplementedError


def _run(family: Any, arguments: Sequence[Any], config: configs.Config) -> None:
    """Launches a kernel, prepared once for what its arguments look like; numbers may differ.

    Raises:
        UnsupportedProblem: Helion does not lower what a mod calls.
    """
    key = (
        family, config,
        *(
            (one.shape, one.stride(), one.dtype, one.device) if isinstance(one, Tensor)
            else one if name in family.constexprs or one is None else type(one)
            for name, one in zip(family.parameters, arguments, strict=True)
        ),
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = _prepared(family, arguments, config)
        with _lock:
            if len(_launches) >= _MOST_LAUNCHES:
                _launches.clear()
            _launches[key] = launch
    launch(*arguments)


def forget_launches() -> None:
    """Prepares anew what is called next."""
    with _lock:
        _launches.clear()


def _multiples(chosen: Mapping[str, configs.Config]) -> tuple[int, int]:
    """What every kernel's tiles divide: they are powers of two."""
    tiles = [config for kernel, config in chosen.items() if kernel != "delta"]
    return max(config.tile_m for config in tiles), max(config.tile_n for config in tiles)


def _ragged(length: int, block: int) -> bool:
    return length % block != 0


def _sizes(x: FlexInputs, config: configs.Config) -> tuple[int, int]:
    """Queries and keys of what is visited at once: a block, or a tile without lists."""
    return (config.tile_m, config.tile_n) if x.blocks is None else x.blocks.sizes


def forward(
    x: FlexInputs, *, with_max_scores: bool = False, chosen: Mapping[str, configs.Config] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, max_scores)``, the last empty where it is not wanted.

    Args:
        x: What :func:`why_not` has nothing against.
        with_max_scores: Whether to write these.
        chosen: Configs by kernel, by default :func:`.configs.flex`'s.
    """
    chosen = chosen or _chosen(x)
    config = chosen["forward"]
    x = aligned(x, _multiples(chosen))
    mods = x.joined
    tensors, numbers = mods.slots()
    out = empty_like_order(x.q, x.v.shape[3])
    lse = torch.empty(x.q.shape[:3], dtype=torch.float32, device=x.q.device)
    most = torch.empty_like(lse) if with_max_scores else None
    sizes = _sizes(x, config)
    arguments = (
        x.q, *x.of_batch(), *x.lists(x.blocks), *tensors, out, lse, most, *numbers, float(x.scale),
        sizes[0] // config.tile_m, sizes[1] // config.tile_n, mods.score_mod, mods.mask_mod, x.scale >= 0,
        _ragged(x.k.shape[2], sizes[1]), config.packed,
    )  # fmt: skip
    _run(_family("flex_forward", _ranks(mods)), arguments, config)
    return out, lse, lse.new_empty(0) if most is None else most


def backward(
    x: FlexInputs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wanted: Sequence[bool],
    *,
    chosen: Mapping[str, configs.Config] | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of q, k, v, and of those of the score mod's captured tensors that are ``wanted``.

    Args:
        x: As :func:`forward` took it.
        grad_out: Of the output.
        grad_lse: Of lse, or None.
        out: The forward's.
        lse: The forward's.
        wanted: Of each captured tensor, whether it needs a gradient.
        chosen: Configs by kernel, by default :func:`.configs.flex`'s.
    """
    backward_module = loader.kernels("backward")
    chosen = chosen or _chosen(x)
    captured = () if x.score_mod is None else x.score_mod.captured
    x = aligned(x, _multiples(chosen))
    mods = x.joined
    tensors, numbers = mods.slots()
    k, v = x.of_batch()
    lse, grad_lse = lse.contiguous(), None if grad_lse is None else grad_lse.contiguous()
    norm, delta = torch.empty_like(lse), torch.empty_like(lse)
    terms = (out, grad_out, lse, grad_lse, norm, delta, 1.0, x.score_mod is not None)
    _run(backward_module.DELTA, terms, chosen["delta"])

    q_len, kv_len = x.q.shape[2], k.shape[2]
    dq, dk, dv = (empty_like_order(one, one.shape[3]) for one in (x.q, k, v))
    config = chosen["dkv"]
    sizes = _sizes(x, config)
    columns = None if x.blocks is None else transposed(x.blocks, q_len, kv_len)
    arguments = (
        x.q, k, v, *x.lists(columns), *tensors, grad_out, norm, delta, dk, dv, *numbers, float(x.scale),
        sizes[1] // config.tile_n, sizes[0] // config.tile_m, mods.score_mod, mods.mask_mod, _ragged(q_len, sizes[0]),
        backward_module.row_copies_for(config.helion()),
    )  # fmt: skip
    _run(_family("flex_dkv", _ranks(mods)), arguments, config)

    config = chosen["dq"]
    sizes = _sizes(x, config)
    grads = zeros_of(captured, wanted)
    arguments = (
        x.q, k, v, *x.lists(x.blocks), *tensors, grad_out, norm, delta, dq,
        *grads, *(None,) * (MOST_TENSORS - len(grads)), *numbers, float(x.scale),
        sizes[0] // config.tile_m, sizes[1] // config.tile_n, mods.score_mod, mods.mask_mod,
        _ragged(q_len, sizes[0]) or _ragged(kv_len, sizes[1]),
    )  # fmt: skip
    _run(_family("flex_dq", _ranks(mods)), arguments, config)
    return dq, *x.of_own_batch(dk, dv), as_captured(grads, captured)

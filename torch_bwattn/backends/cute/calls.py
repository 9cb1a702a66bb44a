"""How a call reaches the kernels: keys, allocation and launches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...errors import NotCompiled
from ...layout import collapsed, dense_strides, empty_like_order, with_rows_apart
from ...problem import Problem, suits_bulk_copies
from .. import reference, sinks
from ..base import BackwardInputs, ForwardInputs, Grads, Wanted
from . import configs
from .compile import Build, KernelKey, compiled

ARCH = "sm_90a"


@lru_cache(maxsize=1024)
def forward_key(features: configs.ForwardFeatures, config: configs.ForwardConfig) -> KernelKey:
    """What decides the code of a forward."""
    name = "forward_sm90"
    if features.mods is not None:
        name = "flex_forward_sm90"
    elif features.mask is not None:
        name = "mask_forward_sm90"
    return KernelKey(name, ARCH, (features, config))


def build_of(key: KernelKey) -> Build:
    """Makes the kernel that belongs to a key, for the compiler."""

    def build() -> tuple[Any, tuple[Any, ...]]:
        from .backward_postprocess import Postprocess
        from .backward_preprocess import Preprocess
        from .backward_sm90 import Backward as BackwardKernel
        from .flex_backward_sm90 import FlexBackward
        from .flex_forward_sm90 import FlexForward
        from .forward_sm90 import Forward as ForwardKernel
        from .mask_backward_sm90 import MaskBackward
        from .mask_excess_sm90 import MaskExcess
        from .mask_forward_sm90 import MaskForward

        kinds: dict[str, Any] = {
            "forward_sm90": ForwardKernel,
            "flex_forward_sm90": FlexForward,
            "mask_forward_sm90": MaskForward,
            "mask_excess_sm90": MaskExcess,
            "backward_preprocess": Preprocess,
            "backward_sm90": BackwardKernel,
            "flex_backward_sm90": FlexBackward,
            "mask_backward_sm90": MaskBackward,
            "backward_postprocess": Postprocess,
        }
        kernel = kinds[key.name](*key.parts)
        return kernel, kernel.fake_arguments()

    return build


_launched: set[KernelKey] = set()
"""Kernels that ran: their code is on the device, and a graph capture may hold them."""


def _refuse_during_capture(key: KernelKey) -> None:
    if torch.cuda.is_current_stream_capturing() and key not in _launched:
        raise NotCompiled(
            f"sdpa: expected {key.name} to have run before a CUDA graph captures it, but this is its first call with "
            "these features; make one call of this kind before the capture"
        )


def launch_of(key: KernelKey) -> Any:
    """The launchable kernel of a key.

    Raises:
        NotCompiled: It has not run yet, and a CUDA graph is being captured.
    """
    _refuse_during_capture(key)
    launch = compiled(key, build_of(key))
    _launched.add(key)
    return launch


@lru_cache(maxsize=64)
def programs_of(device: torch.device) -> int:
    """How many programs a kernel that walks over tiles has: one for each SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count


_View = tuple[tuple[int, ...], tuple[int, ...]]


def _view_for_tma(tensor: Tensor) -> _View | None:
    """Sizes and strides to view a tensor with, or None where it does as it is.

    A dimension of size 1 may have any stride, but TMA's descriptor takes multiples of 16 bytes only. What
    ``dense_strides`` lays out does as it is: its strides are multiples of a row, which is one of 16 bytes.
    """
    per_16_bytes = 16 // tensor.element_size()
    if all(step % per_16_bytes == 0 for step in tensor.stride()[:3]):
        return None
    strides = (step if size > 1 else per_16_bytes for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(tensor.shape), (*tuple(strides)[:3], tensor.stride(3))


def _viewed(tensors: tuple[Tensor, ...], views: tuple[_View | None, ...]) -> tuple[Tensor, ...]:
    return tuple(t if view is None else t.as_strided(*view) for t, view in zip(tensors, views, strict=True))


def views_for_tma(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors as TMA's descriptors take them."""
    return _viewed(tensors, tuple(map(_view_for_tma, tensors)))


class MaskForTma:
    """Masks of one layout as TMA takes them: [B, Hq, Sq, Skv], copied once where their rows do not suit it."""

    def __init__(self, problem: Problem, mask: Tensor) -> None:
        mask = collapsed(mask)
        self._copies = not suits_bulk_copies(mask)
        if self._copies:
            mask = self._copy(mask)
        steps = (0 if size == 1 else step for size, step in zip(mask.shape[:3], mask.stride()[:3], strict=True))
        self._view = (problem.batch, problem.heads, problem.q_len, problem.kv_len), (*steps, 1)

    def __call__(self, mask: Tensor) -> Tensor:
        """The mask, a bool one as bytes."""
        mask = (self._copy(collapsed(mask)) if self._copies else mask).as_strided(*self._view)
        return mask.view(torch.uint8) if mask.dtype == torch.bool else mask

    def _copy(self, mask: Tensor) -> Tensor:
        return with_rows_apart(mask.shape, 16 // mask.element_size(), mask.dtype, mask.device).copy_(mask)


class Forward:
    """One problem's forward, for tensors of one layout: allocation and one launch, decided at the first call."""

    def __init__(self, problem: Problem, config: configs.ForwardConfig) -> None:
        self.problem, self.config = problem, config
        self._launch: Any = None
        self._out: tuple[Any, ...] | None = None
        self._lse: tuple[int, ...] = ()
        self._no_lse: Any = None
        self._views: tuple[_View | None, ...] | None = None
        self._mask: MaskForTma | None = None
        self._options: tuple[Any, ...] = ()
        self._counts = 0
        self._counter: Any = None

    def __call__(self, x: ForwardInputs) -> tuple[Tensor, Tensor]:
        if self._launch is None:
            self._prepare(x)
        q, k, v = x.q, x.k, x.v
        # Where it will do, empty_like: of all ways to allocate it costs the host the least.
        if self._out is None:
            out = torch.empty_like(q)
        else:
            out = torch.empty_strided(*self._out, dtype=q.dtype, device=q.device)
        lse = torch.empty(self._lse, dtype=torch.float32, device=q.device) if x.wants_lse else self._no_lse
        if self._views is not None:
            q, k, v = _viewed((q, k, v), self._views)
        sink = None if x.sink is None else x.sink.float().contiguous()
        scale, softcap, right, left, programs = self._options
        counter = None if self._counter is None else self._counter(1, dtype=torch.int32, device=q.device)
        masks = () if self._mask is None else (self._mask(x.mask),)  # type: ignore[arg-type]
        self._launch(q, k, v, *masks, out, lse, scale, softcap, sink, right, left, counter, self._counts, programs)
        return out, lse

    def _prepare(self, x: ForwardInputs) -> None:
        problem, device = self.problem, x.q.device
        self._launch = launch_of(forward_key(configs.features(problem), self.config))
        sizes = (problem.batch, problem.heads, problem.q_len, problem.value_dim)
        strides = dense_strides(x.q, sizes)
        self._out = None if (sizes, strides) == (tuple(x.q.shape), x.q.stride()) else (sizes, strides)
        self._lse = sizes[:3]
        self._no_lse = torch.empty((0, 0, 0), dtype=torch.float32, device=device)
        views = tuple(_view_for_tma(tensor) for tensor in (x.q, x.k, x.v))
        self._views = views if any(views) else None
        self._mask = None if x.mask is None else MaskForTma(problem, x.mask)
        left = None if problem.low_diagonal is None else -problem.low_diagonal
        programs = programs_of(device)
        self._options = (problem.scale, problem.softcap, problem.diagonal, left, programs)
        self._counts = int(configs.counts_tiles(problem, self.config))
        if configs.features(problem).limited:
            # Of each call's own, for nothing else keeps calls in different streams and graphs apart. The kernel takes
            # one also where it does not count.
            self._counter = torch.zeros if self._counts else torch.empty


@lru_cache(maxsize=1024)
def preprocess_key(features: configs.BackwardFeatures, *, wide: bool, lse_grad: bool) -> KernelKey:
    """What decides the code that prepares a backward; ``wide``: O and dO have contiguous, aligned rows."""
    natural = features.mask == "added"
    return KernelKey("backward_preprocess", ARCH, (features.dtype, features.value_dim, wide, lse_grad, natural))


def excess_key(problem: Problem) -> KernelKey:
    """What decides the code that finds what lse has lost beside an additive mask."""
    return KernelKey("mask_excess_sm90", ARCH, (configs.excess_features(problem), configs.excess_config(problem)))


@lru_cache(maxsize=1024)
def backward_key(features: configs.BackwardFeatures, config: configs.BackwardConfig) -> KernelKey:
    """What decides the code of a backward's main kernel."""
    name = "backward_sm90"
    if features.mods is not None:
        name = "flex_backward_sm90"
    elif features.mask is not None:
        name = "mask_backward_sm90"
    return KernelKey(name, ARCH, (features, config))


@lru_cache(maxsize=1024)
def postprocess_key(features: configs.BackwardFeatures, config: configs.BackwardConfig) -> KernelKey:
    """What decides the code that finishes dQ."""
    finish = configs.postprocess(features, config)
    return KernelKey("backward_postprocess", ARCH, (features.dtype, features.head_dim, finish, False, False))


def backward_launches(
    features: configs.BackwardFeatures, config: configs.BackwardConfig, *, wide: bool, lse_grad: bool
) -> tuple[Any, Any, Any]:
    """What prepares a backward, its main kernel, and what finishes dQ.

    Raises:
        NotCompiled: One of them has not run yet, and a CUDA graph is being captured.
    """
    prepare = launch_of(preprocess_key(features, wide=wide, lse_grad=lse_grad))
    return prepare, launch_of(backward_key(features, config)), launch_of(postprocess_key(features, config))


class Backward:
    """One problem's backward, for tensors of one layout: three launches, decided at the first call.

    The gradient of the result is copied once where its rows do not suit TMA.
    """

    def __init__(self, problem: Problem, config: configs.BackwardConfig) -> None:
        self.problem, self.config = problem, config
        self._launches: tuple[Any, Any, Any] | None = None
        self._copies = False
        self._layouts: tuple[tuple[Any, Any], ...] = ()
        self._views: tuple[_View | None, ...] | None = None
        self._mask: MaskForTma | None = None
        self._find_excess: Any = None
        self._rows: tuple[int, ...] = ()
        self._workspace = 0
        self._options: tuple[Any, ...] = ()
        self._steps: tuple[int, int] = (0, 0)

    def __call__(self, x: BackwardInputs, wanted: Wanted) -> Grads:
        problem = self.problem
        if problem.sees_one_key:  # delta would leave rounding in what is exactly 0
            return reference.backward(problem, x, wanted)
        if self._launches is None:
            self._prepare(x)
        prepare, main, finish = self._launches  # type: ignore[misc]
        q, k, v, device = x.q, x.k, x.v, x.q.device
        do = empty_like_order(x.out, problem.value_dim).copy_(x.grad_out) if self._copies else x.grad_out
        norm, delta = (torch.empty(self._rows, dtype=torch.float32, device=device) for _ in range(2))
        sums = torch.empty(self._workspace, dtype=torch.float32, device=device)
        prepare(x.out, do, x.lse, x.grad_lse, norm, delta, sums)
        dq, dk, dv = (t.new_empty_strided(*layout) for t, layout in zip((q, k, v), self._layouts, strict=True))
        if self._views is not None:
            q, k, v, do = _viewed((q, k, v, do), self._views)
        masks = () if self._mask is None else self._masks(x.mask, q, k, v, do, norm)
        main(q, k, v, *masks, do, norm, delta, dk, dv, sums, *self._options)
        if wanted[0]:
            finish(sums, dq, *self._steps, problem.scale, None, None, problem.batch, problem.q_len)
        dsink = sinks.gradient(x.sink, norm, delta) if wanted[4] and x.sink is not None else None
        return dq, dk, dv, None, dsink

    def _masks(
        self, mask: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, norm: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The mask for TMA, and what lse, rounded, lacks beside an additive one."""
        mask = self._mask(mask)  # type: ignore[misc]
        if self._find_excess is None:
            return mask, None
        excess = torch.empty_like(norm)
        limited = self._options[2] is not None or self._options[3] is not None
        counter = torch.empty(1, dtype=torch.int32, device=norm.device) if limited else None
        *options, programs = self._options
        self._find_excess(q, k, v, mask, do, norm, excess, *options, counter, 0, programs)
        return mask, excess

    def _prepare(self, x: BackwardInputs) -> None:
        problem, config = self.problem, self.config
        self._copies = not suits_bulk_copies(x.grad_out)
        tiles = -(-problem.q_len // config.tile_m)
        self._rows = (problem.batch, problem.heads, tiles * config.tile_m)
        features = configs.backward_features(problem)
        rows = problem.batch, problem.heads, problem.q_len
        self._workspace, of_head = configs.backward_workspace(features, *rows, config)
        self._steps = problem.heads * of_head, of_head
        self._layouts = tuple((tuple(t.shape), dense_strides(t, t.shape)) for t in (x.q, x.k, x.v))
        views = (*map(_view_for_tma, (x.q, x.k, x.v)), None if self._copies else _view_for_tma(x.grad_out))
        self._views = views if any(views) else None
        self._mask = None if x.mask is None else MaskForTma(problem, x.mask)
        left = None if problem.low_diagonal is None else -problem.low_diagonal
        programs = programs_of(x.q.device)
        self._options = problem.scale, problem.softcap, problem.diagonal, left, programs
        wide = suits_bulk_copies(x.out)
        if features.mask == "added":
            self._find_excess = launch_of(excess_key(problem))
        self._launches = backward_launches(features, config, wide=wide, lse_grad=problem.lse_grad)

"""The CuTe backend: which problems its Hopper kernels take, and how a call reaches them.

Kernels and their language load at the first call, and not even then where the kernel is on disk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedProblem
from ...layout import dense_strides
from ...problem import Problem
from ..base import Backend, BackwardFn, ForwardFn, ForwardInputs, Verdict, no, yes
from . import configs, loader
from .compile import Build, KernelKey, compiled

_ARCH = "sm_90a"
_WIDEST = 256


class CuteBackend(Backend):
    """Hand-written CuTe-DSL kernels for Hopper."""

    name = "cute"

    def missing(self) -> str | None:
        return loader.why_missing()

    def supports(self, problem: Problem) -> Verdict:
        refusal = self._refusal(problem)
        return no(refusal) if refusal else yes(str(configs.forward(problem)))

    def _refusal(self, problem: Problem) -> str:
        if problem.target != _ARCH:
            return f"its kernels are for {_ARCH}, got {problem.target}"
        if problem.backward:
            return "it has no backward yet; helion's takes this forward's results"
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"its kernels take bfloat16 and float16, got {problem.dtype}; helion takes float32"
        if problem.empty:
            return "a size is 0; helion and reference take it"
        for name, width in (("D", problem.head_dim), ("Dv", problem.value_dim)):
            if width % 8 or not 0 < width <= _WIDEST:
                return f"its kernels take widths that are multiples of 8 up to {_WIDEST}, got {name}={width}"
        if problem.mask_dtype is not None:
            return "its kernels take no mask; helion's do"
        if problem.dropout_p > 0.0:
            return "its kernels have no dropout; helion's do"
        if not problem.scale > 0.0:
            return f"its kernels take a scale above 0, got {problem.scale}; helion takes any"
        if not (problem.unit_last_strides and problem.aligned):
            return "TMA needs unit last strides, other strides and pointers at multiples of 16 bytes; helion takes any"
        return ""

    def forward(self, problem: Problem) -> ForwardFn:
        return _Forward(problem)

    def backward(self, problem: Problem) -> BackwardFn:
        raise UnsupportedProblem(f"sdpa: {self._refusal(problem)}")


def forward_key(problem: Problem) -> KernelKey:
    """What decides the code of a problem's forward."""
    return KernelKey("forward_sm90", _ARCH, (configs.features(problem), configs.forward(problem)))


def forward_build(problem: Problem) -> Build:
    """Makes the kernel that belongs to the key, for the compiler."""
    features, config = configs.features(problem), configs.forward(problem)

    def build() -> tuple[Any, tuple[Any, ...]]:
        from .forward_sm90 import Forward

        kernel = Forward(features, config)
        return kernel, kernel.fake_arguments()

    return build


_launched: set[KernelKey] = set()
"""Kernels that ran: their code is on the device, and a graph capture may hold them."""


def _refuse_during_capture(key: KernelKey) -> None:
    if torch.cuda.is_current_stream_capturing() and key not in _launched:
        raise RuntimeError(
            f"sdpa: expected {key.name} to have run before a CUDA graph captures it, but this is its first call with "
            "these features; make one call of this kind before the capture"
        )


_View = tuple[tuple[int, ...], tuple[int, ...]]


def _view_for_tma(tensor: Tensor) -> _View | None:
    """Sizes and strides to view a tensor with, or None where it does as it is.

    A dimension of size 1 may have any stride, but TMA's descriptor takes multiples of 16 bytes only.
    """
    per_16_bytes = 16 // tensor.element_size()
    if all(step % per_16_bytes == 0 for step in tensor.stride()[:3]):
        return None
    strides = (step if size > 1 else per_16_bytes for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(tensor.shape), (*tuple(strides)[:3], tensor.stride(3))


class _Forward:
    """One problem's forward, for tensors of one layout: allocation and one launch, decided at the first call."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._launch: Any = None
        self._out: tuple[Any, ...] | None = None
        self._lse: tuple[int, ...] = ()
        self._views: tuple[_View | None, ...] | None = None
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
        lse = torch.empty(self._lse, dtype=torch.float32, device=q.device)
        if self._views is not None:
            q, k, v = (
                t if view is None else t.as_strided(*view) for t, view in zip((q, k, v), self._views, strict=True)
            )
        sink = None if x.sink is None else x.sink.float().contiguous()
        scale, softcap, right, left, programs = self._options
        counter = None if self._counter is None else self._counter(1, dtype=torch.int32, device=q.device)
        self._launch(q, k, v, out, lse, scale, softcap, sink, right, left, counter, self._counts, programs)
        return out, lse

    def _prepare(self, x: ForwardInputs) -> None:
        problem, key, device = self.problem, forward_key(self.problem), x.q.device
        _refuse_during_capture(key)
        sizes = (problem.batch, problem.heads, problem.q_len, problem.value_dim)
        strides = dense_strides(x.q, sizes)
        self._out = None if (sizes, strides) == (tuple(x.q.shape), x.q.stride()) else (sizes, strides)
        self._lse = sizes[:3]
        views = tuple(_view_for_tma(tensor) for tensor in (x.q, x.k, x.v))
        self._views = views if any(views) else None
        left = None if problem.low_diagonal is None else -problem.low_diagonal
        programs = torch.cuda.get_device_properties(device).multi_processor_count
        self._options = (problem.scale, problem.softcap, problem.diagonal, left, programs)
        self._counts = int(configs.counts_tiles(problem))
        if configs.features(problem).limited:
            # Of each call's own, for nothing else keeps calls in different streams and graphs apart. The kernel takes
            # one also where it does not count.
            self._counter = torch.zeros if self._counts else torch.empty
        self._launch = compiled(key, forward_build(problem))
        _launched.add(key)

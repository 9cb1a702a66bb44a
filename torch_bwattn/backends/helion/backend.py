"""The Helion backend: which problems its kernels take, and how a call reaches them.

Kernels and their language load at the first call (``forward``, ``backward``), never for a verdict.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...layout import dense_strides
from ...problem import Problem
from ...target import capability
from .. import reference, sinks
from ..base import Backend, BackwardFn, BackwardInputs, ForwardFn, ForwardInputs, Grads, Verdict, Wanted, named, no, yes
from . import configs, flash, flash_backward, flash_wide, forms, loader

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 256
_LARGEST_CAP = 1e30  # with room in fp32 for the scale over it, and for its base-2 form


class HelionBackend(Backend):
    """Helion kernels lowered to Triton, on every CUDA device from sm_80, and to CuTe-DSL where there is tcgen05."""

    name = "helion"

    def missing(self) -> str | None:
        return loader.why_missing()

    def is_checked_apart(self, config: str) -> bool:
        return config.startswith(forms.PREFIX)

    def supports(self, problem: Problem) -> Verdict:
        offers = self.offers(problem)
        return next(filter(None, offers), offers[0])

    def offers(self, problem: Problem) -> tuple[Verdict, ...]:
        refusal = self._refusal(problem)
        if refusal:
            return (no(refusal),)
        if problem.backward:
            usual = [_text(chosen) for chosen in configs.backward_choices(problem)]
        else:
            usual = [str(config) for config in configs.forward_choices(problem)]
        return *_flash_offers(problem), *map(yes, usual)

    def _refusal(self, problem: Problem) -> str:
        arch = capability(problem.target)
        if arch is None or arch < (8, 0):
            return f"its kernels need a CUDA device of sm_80 or later, got {problem.target}"
        if problem.dtype not in _DTYPES:
            return f"its kernels take bfloat16, float16 and float32, got {problem.dtype}"
        if not (0 < problem.head_dim <= _WIDEST and 0 < problem.value_dim <= _WIDEST):
            widths = f"D={problem.head_dim} and Dv={problem.value_dim}"
            return f"its kernels take widths from 1 to {_WIDEST}, got {widths}"
        if problem.softcap is not None and not 1.0 / _LARGEST_CAP < problem.softcap < _LARGEST_CAP:
            return f"its kernels hold soft caps from {1.0 / _LARGEST_CAP:g} to {_LARGEST_CAP:g}, got {problem.softcap}"
        if problem.dropout_p == 1.0:
            return "dropping everything needs no kernel"
        return ""

    def forward(self, problem: Problem, config: str = "") -> ForwardFn:
        config = self._chosen(problem, config)
        if config == flash.NAME:
            return flash.Forward(problem)
        if config == flash_wide.NAME:
            return flash_wide.Forward(problem)
        choices = {str(choice): choice for choice in configs.forward_choices(problem)}
        return _Forward(problem, choices[config] if config else configs.forward(problem))

    def backward(self, problem: Problem, config: str = "") -> BackwardFn:
        config = self._chosen(problem, config)
        if config in flash_backward.offered(problem):
            return flash_backward.Backward(problem, config)
        choices = {_text(choice): choice for choice in configs.backward_choices(problem)}
        return _Backward(problem, choices[config] if config else configs.backward(problem))

    def _chosen(self, problem: Problem, config: str) -> str:
        """The config of that name, or the backend's own choice; without a name where it refuses the problem."""
        if not config:
            return self.supports(problem).config
        offers = self.offers(problem)
        return offers[named(offers, config)].config


def _flash_offers(problem: Problem) -> tuple[Verdict, ...]:
    """Of what Helion lowers to CuTe-DSL, on the targets that have its instructions."""
    if not forms.has_tcgen05(problem.target):
        return ()
    way = _flash_way(problem)
    refusal = way.why_not(problem)
    if refusal:
        return (no(refusal, way.NAME),)
    return tuple(yes(config, note=flash.NOTE) for config in way.offered(problem))


def _flash_way(problem: Problem) -> Any:
    if problem.backward:
        return flash_backward
    return flash_wide if problem.head_dim > forms.WIDEST else flash


def tcgen05_code(problem: Problem, config: str) -> tuple[Hashable, ...]:
    """What decides the code of a config that Helion lowers to CuTe-DSL, but for sizes."""
    return config, problem.dtype, *_flash_way(problem).shaped_by(problem)


def _text(chosen: dict[str, configs.Config]) -> str:
    return "; ".join(f"{kernel} {config}" for kernel, config in chosen.items())


def _expanded(problem: Problem, mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.expand(problem.batch, problem.heads, problem.q_len, problem.kv_len)


def _switches(problem: Problem) -> dict[str, Any]:
    """The options that every kernel's argument list is made from."""
    return {
        "scale": problem.scale,
        "dropout_p": problem.dropout_p,
        "causal": problem.diagonal is not None,
        "diagonal": problem.diagonal or 0,
        "low_diagonal": problem.low_diagonal,
        "softcap": problem.softcap,
    }


class _Forward:
    """One problem's forward: allocation and launch, decided at the first call."""

    def __init__(self, problem: Problem, config: configs.Config) -> None:
        self.problem, self.config = problem, config
        self._launch: Any = None
        self._rest: tuple[Any, ...] = ()
        self._out: tuple[Any, ...] = ()
        self._lse: tuple[Any, ...] = ()

    def __call__(self, x: ForwardInputs) -> tuple[Tensor, Tensor]:
        problem = self.problem
        if self._launch is None:
            self._prepare(x)
        sizes, strides = self._out
        out = torch.empty_strided(sizes, strides, dtype=problem.dtype, device=x.q.device)
        lse = torch.empty_strided(*self._lse, dtype=torch.float32, device=x.q.device)
        mask = x.mask if x.mask is None else _expanded(problem, x.mask)
        self._launch(x.q, x.k, x.v, mask, x.rng_state, x.sink, out, lse, *self._rest)
        return out, lse

    def _prepare(self, x: ForwardInputs) -> None:
        problem = self.problem
        module = loader.kernels("forward")
        sizes = (problem.batch, problem.heads, problem.q_len, problem.value_dim)
        self._out = sizes, dense_strides(x.q, sizes)
        out = torch.empty_strided(*self._out, dtype=problem.dtype, device=x.q.device)
        lse = torch.empty(sizes[:3], dtype=torch.float32, device=x.q.device)
        self._lse = tuple(lse.shape), lse.stride()
        options = {**_switches(problem), "sink": x.sink, "packed": self.config.packed}
        mask = _expanded(problem, x.mask)
        arguments = module.forward_arguments(x.q, x.k, x.v, mask, x.rng_state, out, lse, **options)
        self._rest = arguments[8:]
        self._launch = module.FORWARD.prepare(arguments, self.config.helion())


class _Backward:
    """One problem's backward: the row terms, then dK and dV, dQ, and the mask's gradient, each a launch of its own.

    The gradient of a sink is a sum over the row terms, left to PyTorch.
    """

    def __init__(self, problem: Problem, chosen: dict[str, configs.Config]) -> None:
        self.problem = problem
        self.additive = problem.mask_dtype is not None and problem.mask_dtype != torch.bool
        self.configs = {kernel: config.helion() for kernel, config in chosen.items()}
        self._launches: dict[str, Any] = {}
        self._module: ModuleType | None = None
        self._options: tuple[Any, ...] = ()
        self._copies = 1
        self._layouts: tuple[tuple[Any, Any], ...] = ()

    def __call__(self, x: BackwardInputs, wanted: Wanted) -> Grads:
        problem = self.problem
        if problem.sees_one_key:  # delta would leave rounding in what is exactly 0
            return reference.backward(problem, x, wanted)
        module = self._module or self._prepare(x)
        q, k, v = x.q, x.k, x.v
        mask = x.mask if x.mask is None else _expanded(problem, x.mask)
        terms = self._row_terms(module, x, mask)
        operands = (q, k, v, mask, x.rng_state, x.grad_out, *terms)
        dq = dk = dv = dmask = dsink = None
        if wanted[1] or wanted[2]:
            dk, dv = k.new_empty_strided(*self._layouts[1]), v.new_empty_strided(*self._layouts[2])
            self._run("dkv", module.DKV, (*operands, dk, dv, *self._options, self._copies))
        if wanted[0]:
            dq = q.new_empty_strided(*self._layouts[0])
            self._run("dq", module.DQ, (*operands, dq, *self._options))
        if wanted[3] and x.mask is not None:
            dmask = self._mask_grad(x.mask, operands)
        if wanted[4] and x.sink is not None:
            norm, delta, excess = terms
            dsink = sinks.gradient(x.sink, norm, delta, excess, self._options[2])
        return dq, dk, dv, dmask, dsink

    def _prepare(self, x: BackwardInputs) -> ModuleType:
        """What every call shares: the kernels, their scalars, and the gradients' sizes and strides."""
        module = self._module = loader.kernels("backward")
        self._options = module.options(**_switches(self.problem))
        self._copies = module.row_copies_for(self.configs["dkv"])
        self._layouts = tuple((tuple(t.shape), dense_strides(t, t.shape)) for t in (x.q, x.k, x.v))
        return module

    def _row_terms(
        self, module: ModuleType, x: BackwardInputs, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        scale, _, keep_scale, diagonal, causal, low_diagonal, softcap = self._options
        lse = x.lse.contiguous()
        dlse = None if x.grad_lse is None else x.grad_lse.contiguous()
        norm, delta = torch.empty_like(lse), torch.empty_like(lse)
        self._run("delta", module.DELTA, (x.out, x.grad_out, lse, dlse, norm, delta, keep_scale, self.additive))
        if not self.additive:
            return norm, delta, None
        excess = torch.empty_like(lse)
        switches = scale, diagonal, causal, low_diagonal, softcap
        self._run("excess", module.EXCESS, (x.q, x.k, mask, norm, excess, x.sink, *switches))
        return norm, delta, excess

    def _mask_grad(self, mask: Tensor, operands: tuple[Any, ...]) -> Tensor:
        """The gradient in the mask's own shape, through an fp32 buffer where the mask alone makes too few programs."""
        problem, module = self.problem, loader.kernels("mask_grad")
        scores = (problem.batch, problem.heads, problem.q_len, problem.kv_len)
        shape = module.partial_shape(mask.shape, scores, *self.configs["mask_grad"]["block_sizes"])
        partial = shape != tuple(mask.shape)
        grad = torch.empty(shape, dtype=torch.float32 if partial else mask.dtype, device=mask.device)
        sums = tuple(int(size == 1) for size in shape)
        self._run("mask_grad", module.DMASK, (*operands, grad, *sums, *self._options))
        if partial:
            grad = grad.sum_to_size(mask.shape).to(mask.dtype)
        return grad

    def _run(self, kernel: str, family: Any, arguments: tuple[Any, ...]) -> None:
        launch = self._launches.get(kernel)
        if launch is None:
            launch = self._launches[kernel] = family.prepare(arguments, self.configs[kernel])
        launch(*arguments)

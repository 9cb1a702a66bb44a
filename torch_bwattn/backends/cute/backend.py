"""The CuTe backend: which problems its Hopper kernels take, and how a call reaches them.

Kernels and their language load at the first call, and not even then where the kernel is on disk.
"""

from __future__ import annotations

import math

import torch

from ...problem import Problem
from ..base import Backend, BackwardFn, ForwardFn, Verdict, mask_copy_refusal, named, no, yes
from . import calls, configs, loader


class CuteBackend(Backend):
    """Hand-written CuTe-DSL kernels for Hopper."""

    name = "cute"
    can_hang = True

    def missing(self) -> str | None:
        return loader.why_missing()

    def supports(self, problem: Problem) -> Verdict:
        return self.offers(problem)[0]

    def offers(self, problem: Problem) -> tuple[Verdict, ...]:
        refusal = self._refusal(problem)
        return (no(refusal),) if refusal else tuple(yes(str(config)) for config in _choices(problem))

    def _refusal(self, problem: Problem) -> str:
        if problem.target != calls.ARCH:
            return f"its kernels are for {calls.ARCH}, got {problem.target}"
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"its kernels take bfloat16 and float16, got {problem.dtype}; helion takes float32"
        if problem.empty:
            return "a size is 0; helion and reference take it"
        for name, width in (("D", problem.head_dim), ("Dv", problem.value_dim)):
            if width % 8 or not 0 < width <= configs.WIDEST:
                return f"its kernels take widths that are multiples of 8 up to {configs.WIDEST}, got {name}={width}"
        refusal = _refuse_mask(problem)
        if refusal:
            return refusal
        if problem.dropout_p > 0.0:
            return "its kernels have no dropout; helion's do"
        if not problem.scale > 0.0:
            return f"its kernels take a scale above 0, got {problem.scale}; helion takes any"
        if not problem.bulk_copies:
            return "TMA needs unit last strides, other strides and pointers at multiples of 16 bytes; helion takes any"
        return ""

    def forward(self, problem: Problem, config: str = "") -> ForwardFn:
        return calls.Forward(problem, configs.forward_choices(problem)[named(self.offers(problem), config)])

    def backward(self, problem: Problem, config: str = "") -> BackwardFn:
        return calls.Backward(problem, configs.backward_choices(problem)[named(self.offers(problem), config)])


def _refuse_mask(problem: Problem) -> str:
    """Why kernels do not take a problem's mask, or nothing."""
    if problem.mask_dtype is None or problem.mask_sizes is None:
        return ""
    if problem.mask_grad:
        return "its backward gives no gradient for the mask; helion's does"
    if problem.backward and problem.mask_dtype != torch.bool and problem.sink_dtype is not None:
        return "its backward takes no sink beside an additive mask; helion's does"
    rows, width = problem.mask_sizes[2], max(problem.head_dim, problem.value_dim)
    if problem.backward and rows > 1 and width > configs.WIDEST_MASKED:
        return f"its backward has no room for a mask's tiles beyond width {configs.WIDEST_MASKED}; helion's has"
    if problem.mask_dtype not in (torch.bool, problem.dtype):
        return f"its kernels take masks of bool or of the query's dtype, got {problem.mask_dtype}; helion takes any"
    if problem.mask_sizes[3] != problem.kv_len:
        return f"its kernels take masks of as many columns as keys, got {problem.mask_sizes[3]} for {problem.kv_len}"
    return "" if problem.mask_rows_apart else mask_copy_refusal(problem, math.prod(problem.mask_sizes))


def _choices(problem: Problem) -> tuple[configs.ForwardConfig, ...] | tuple[configs.BackwardConfig, ...]:
    return configs.backward_choices(problem) if problem.backward else configs.forward_choices(problem)

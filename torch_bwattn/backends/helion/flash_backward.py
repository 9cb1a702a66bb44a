"""The tcgen05 backward of sm_100a and sm_103a: which problems it takes, and how a call reaches it.

As :mod:`.flash`, but for what padding costs: here it is multiplied like the rest, so lengths are padded to more sizes,
and keys only where causality hides what is added.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ...layout import empty_like_order
from ...problem import Problem
from .. import sinks
from ..base import BackwardInputs, Grads, Wanted
from . import configs, flash, forms, loader

NAME = forms.PREFIX + "tiles of 128x128"
CONFIGS = {f"{NAME}, programs in pairs": 2, NAME: 1}
"""By name, the programs that share a tile of keys. Pairs read half as much shared memory for each product."""

_PAIR_WIDTH = 128


def offered(problem: Problem) -> tuple[str, ...]:
    """The configs for a problem's width."""
    return tuple(CONFIGS) if flash.width_of(problem) == _PAIR_WIDTH else (NAME,)


def shaped_by(problem: Problem) -> tuple[Hashable, ...]:
    """What of a problem shapes the code beside sizes and dtype: width and causality."""
    return flash.width_of(problem), problem.diagonal is not None


def why_not(problem: Problem) -> str:
    """Why the kernel does not take a problem of such a target, or nothing."""
    longest = flash.full_length(max(problem.q_len, problem.kv_len))
    refusal = flash.width_refusal(problem) or flash.common_refusal(problem, longest, flash.width_of(problem))
    refusal = refusal or flash.full_refusal(problem)
    if not refusal and problem.deterministic:
        return "it adds up the query's gradient in an order that differs from run to run"
    return refusal


class Backward:
    """One problem's backward. In Triton's interpreter, and on GPUs without tcgen05, the same kernel through Triton."""

    def __init__(self, problem: Problem, config: str) -> None:
        self.problem = problem
        # Helion's own choice rounds exponents to fp16 and takes their exp2 in pairs.
        self._config = {"cute_flash_bwd_exp2_f32": 1, "cute_flash_bwd_two_cta": int(CONFIGS[config] == 2)}
        self._delta = configs.backward(problem)["delta"].helion()
        self._rows, self._columns = flash.full_length(problem.q_len), flash.full_length(problem.kv_len)
        self._width = flash.width_of(problem)
        self._terms: Any = None
        self._launch: Any = None

    def __call__(self, x: BackwardInputs, wanted: Wanted) -> Grads:
        problem = self.problem
        norm, delta = self._row_terms(x)
        sizes = (problem.batch, problem.heads, self._rows, self._width)
        dq = torch.zeros(sizes, dtype=torch.float32, device=x.q.device)
        grads = [empty_like_order(tensor, tensor.shape[3]) for tensor in (x.q, x.k, x.v)]
        dk, dv = (flash.room_for(grad, self._columns, self._width) for grad in grads[1:])
        arguments = (
            self._flat(x.q, self._rows),
            self._flat(x.k, self._columns),
            self._flat(x.v, self._columns),
            self._flat(x.grad_out, self._rows),
            norm.view(-1),
            delta.view(-1),
            *(room.view(-1, self._width) for room in (dq, dk, dv)),
            problem.scale * math.log2(math.e),
            problem.scale,
            problem.heads // problem.kv_heads * self._rows,
            self._rows,
            self._columns,
            problem.diagonal is not None,
        )
        if self._launch is None:
            family = loader.kernels("flash_cute_backward").FLASH_BACKWARD
            self._launch = family.prepare(arguments, self._config)
        self._launch(*arguments)
        for grad, room in zip(grads, (dq, dk, dv), strict=True):
            flash.take(grad, room)
        dsink = None
        if wanted[4] and x.sink is not None:
            dsink = sinks.gradient(x.sink, norm, delta)
        return grads[0], grads[1], grads[2], None, dsink

    def _row_terms(self, x: BackwardInputs) -> tuple[Tensor, Tensor]:
        """``norm`` and ``delta`` of all rows, where those of padding count for nothing."""
        problem = self.problem
        sizes = (problem.batch, problem.heads, self._rows)
        norm = torch.full(sizes, math.inf, dtype=torch.float32, device=x.q.device)
        delta = torch.zeros_like(norm)
        grad_lse = None if x.grad_lse is None else x.grad_lse.contiguous()
        real = (terms[..., : problem.q_len] for terms in (norm, delta))
        arguments = (x.out, x.grad_out, x.lse.contiguous(), grad_lse, *real, 1.0, False)
        if self._terms is None:
            self._terms = loader.kernels("backward").DELTA.prepare(arguments, self._delta)
        self._terms(*arguments)
        return norm, delta

    def _flat(self, tensor: Tensor, length: int) -> Tensor:
        return flash.padded(tensor, length, self._width, zeros=length).view(-1, self._width)

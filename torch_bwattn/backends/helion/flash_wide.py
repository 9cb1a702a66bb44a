"""The tcgen05 forward of width 192 with values of up to 128: which problems it takes, and how a call reaches it.

These are the widths of multi-head latent attention. As :mod:`.flash_backward` it multiplies what is padded.
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
from ..base import ForwardInputs
from . import flash, forms, loader

NAME = forms.PREFIX + "widths 192 and 128"

_WIDTH, _VALUE_WIDTH = 192, 128
_SCALE = _WIDTH**-0.5


def offered(_: Problem) -> tuple[str, ...]:
    """The configs for a problem: one."""
    return (NAME,)


def shaped_by(problem: Problem) -> tuple[Hashable, ...]:
    """What of a problem shapes the code beside sizes and dtype: causality."""
    return (problem.diagonal is not None,)


def why_not(problem: Problem) -> str:
    """Why the kernel does not take a problem of such a target, or nothing."""
    if problem.head_dim != _WIDTH or not 0 < problem.value_dim <= _VALUE_WIDTH:
        widths = f"D={problem.head_dim} and Dv={problem.value_dim}"
        return f"it takes widths from 1 to {forms.WIDEST}, or D=192 and Dv up to 128, got {widths}"
    if problem.q_len != problem.kv_len:
        return f"at this width it takes equal lengths, got Sq={problem.q_len} and Skv={problem.kv_len}"
    if not math.isclose(problem.scale, _SCALE, rel_tol=1e-6):
        return f"at this width it takes the scale {_SCALE:.6g} alone, got {problem.scale}"
    return flash.common_refusal(problem, flash.full_length(problem.q_len), _WIDTH) or flash.full_refusal(problem)


class Forward:
    """One problem's forward; in Triton's interpreter the same kernel through Triton."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._length = flash.full_length(problem.q_len)
        self._launch: Any = None

    def __call__(self, x: ForwardInputs) -> tuple[Tensor, Tensor]:
        problem, length = self.problem, self._length
        batch, heads = problem.batch, problem.heads
        out = empty_like_order(x.q, problem.value_dim)
        o = flash.room_for(out, length, _VALUE_WIDTH)
        lse_log2 = torch.empty((batch, heads, length), dtype=torch.float32, device=x.q.device)
        arguments = (
            *(flash.padded(tensor, length, _WIDTH, zeros=length)[0] for tensor in (x.q, x.k)),
            flash.padded(x.v, length, _VALUE_WIDTH, zeros=length)[0],
            o.view(batch * heads, length, _VALUE_WIDTH),
            lse_log2.view(batch * heads, length),
            heads // problem.kv_heads,
            problem.diagonal is not None,
        )
        if self._launch is None:
            self._launch = loader.kernels("flash_cute_wide").FLASH_WIDE.prepare(arguments, {})
        self._launch(*arguments)
        flash.take(out, o)
        lse = lse_log2[..., : problem.q_len] * math.log(2.0)
        return out, lse if x.sink is None else sinks.join(out, lse, x.sink)

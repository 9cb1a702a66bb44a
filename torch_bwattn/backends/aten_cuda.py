"""PyTorch's fused CUDA attention kernels: what each takes, where it is known to be wrong, and how it is called.

A kernel refuses for one of two reasons. Its *limits* are what it cannot do, or does by another rule than this package
states. Its *known-bad* combinations are those that it takes and gets wrong, each with the number of its report: there
``F.scaled_dot_product_attention`` would be wrong as well, and ``auto`` must not be.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import collapsed, with_rows_apart
from ..problem import Problem
from .base import BackwardInputs, ForwardInputs, mask_copy_refusal

_CHUNK = 32
"""The efficient kernel's ``lse`` has its queries padded to a multiple of this."""
_MOST_PROGRAMS = 65535
_MASK_ROW = 8
"""cuDNN wants rows of a mask 16 bytes apart or a multiple of that."""


@dataclass(frozen=True)
class KnownBad:
    """A combination that a kernel takes and gets wrong."""

    report: str
    reason: str
    holds: Callable[[Problem], bool]

    def __str__(self) -> str:
        return f"{self.reason} ({self.report})"


class Fused(ABC):
    """One fused kernel, forward and backward."""

    name: ClassVar[str]
    known_bad: ClassVar[tuple[KnownBad, ...]] = ()
    indexes_far: ClassVar[bool] = False

    def refuse(self, problem: Problem) -> str:
        """Why it does not take a problem, or nothing."""
        bad = next((bad for bad in self.known_bad if bad.holds(problem)), None)
        if bad is not None:
            return f"known to be wrong: {bad}"
        limit = self.operands(problem) or _limits_of_all(problem) or self.rules(problem)
        if limit or self.indexes_far or not problem.wide_index:
            return limit
        return "it is not known to index past 2^31 - 1 elements"

    def operands(self, problem: Problem) -> str:
        """Why it does not take these dtypes and widths, or nothing."""
        return _limits_of_16_bits(problem)

    @abstractmethod
    def rules(self, problem: Problem) -> str:
        """Why it does not do what else a problem asks for, or nothing."""

    @abstractmethod
    def forward(self, problem: Problem, x: ForwardInputs) -> tuple[Tensor, Tensor]:
        """``out``, in any layout, and ``lse`` as backends return it."""

    @abstractmethod
    def backward(self, problem: Problem, x: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v in any layout; ``grad_out`` has unit last strides."""


def _limits_of_all(problem: Problem) -> str:
    if not (problem.unit_last_strides and problem.aligned):
        return "it needs unit last strides and 16-byte alignment"
    if problem.backward and problem.deterministic:
        return "its backward sums dQ in no fixed order"
    if problem.lse_grad:
        return "its backward has no LSE gradient"
    return ""


def _limits_of_16_bits(problem: Problem) -> str:
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, got {problem.dtype}"
    if problem.head_dim != problem.value_dim:
        return f"it needs equal widths, got D={problem.head_dim} and Dv={problem.value_dim}"
    if problem.head_dim % 8 or problem.head_dim > 256:
        return f"it takes widths that are multiples of 8 up to 256, got {problem.head_dim}"
    return ""


def _no_state(q: Tensor) -> Tensor:
    """The dropout seed and offset of a call without dropout."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as cuDNN takes it, added to the scores: itself where it lies so, else a copy in its own sizes."""
    mask = collapsed(mask)
    apart = all(
        size == 1 or stride % _MASK_ROW == 0 for size, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True)
    )
    if mask.dtype == dtype and mask.stride(3) == 1 and apart and mask.data_ptr() % 16 == 0:
        return mask
    room = with_rows_apart(mask.shape, _MASK_ROW, dtype, mask.device)
    return room.copy_(mask) if mask.dtype == dtype else room.fill_(-torch.inf).masked_fill_(mask, 0.0)


class Cudnn(Fused):
    """cuDNN's kernels, top-left causal. Forward beside a mask too; a row that it hides whole is 0, its LSE -inf."""

    name = "cudnn"
    known_bad = (
        KnownBad(
            "NVIDIA/cudnn-frontend 1072",
            "NaN in dK and dV of one query whose LSE is far below 0",
            lambda problem: problem.backward and problem.q_len == 1,
        ),
        KnownBad(
            "NVIDIA/cudnn-frontend 160",
            "NaN gradients of short sequences with large logits",
            lambda problem: problem.backward and min(problem.q_len, problem.kv_len) < 64,
        ),
        KnownBad(
            "pytorch 196678",
            "NaN in dQ beside a mask where the LSE is below -88.7 and half of the last 128 keys is padding",
            lambda problem: problem.backward and problem.mask_dtype is not None,
        ),
    )

    def rules(self, problem: Problem) -> str:
        if problem.diagonal is not None and (problem.diagonal != 0 or problem.q_len != problem.kv_len):
            return "it is called for causality between equal lengths only"
        if problem.mask_dtype not in (None, torch.bool, problem.dtype):
            return f"it takes masks of bool or of the query's dtype, got {problem.mask_dtype}"
        if problem.mask_dtype == torch.bfloat16:
            return (
                "its exponents overflow in a row of the least bfloat16: 0.16 to 0.34 from the mean of V that is right"
            )
        if problem.mask_sizes is not None and problem.mask_sizes[3] != problem.kv_len:
            return f"it takes masks of as many columns as keys, got {problem.mask_sizes[3]} for {problem.kv_len}"
        return mask_copy_refusal(problem, math.prod(problem.mask_sizes or ()))

    def forward(self, problem: Problem, x: ForwardInputs) -> tuple[Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        causal = problem.diagonal is not None
        mask = None if x.mask is None else _added(x.mask, problem.dtype)
        out, lse, *_ = op(x.q, x.k, x.v, mask, True, 0.0, causal, False, scale=problem.scale)
        return out, lse.reshape(lse.shape[:3]).contiguous()

    def backward(self, problem: Problem, x: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
        state, causal = _no_state(x.q), problem.diagonal is not None
        lengths = (None, None, problem.q_len, problem.kv_len)
        grads: tuple[Tensor, Tensor, Tensor] = op(
            x.grad_out, x.q, x.k, x.v, x.out, x.lse.unsqueeze(-1), state, state, None, *lengths, 0.0, causal,
            scale=problem.scale,
        )  # fmt: skip
        return grads


class Flash(Fused):
    """FlashAttention 2 as PyTorch ships it, bottom-right causal."""

    name = "flash"
    indexes_far = True

    def rules(self, problem: Problem) -> str:
        if problem.mask_dtype is not None:
            return "it takes no mask"
        if problem.diagonal is not None and problem.diagonal != problem.kv_len - problem.q_len:
            return "it is bottom-right causal, which differs from top-left when the lengths do"
        if problem.diagonal is not None and problem.diagonal < 0:
            return "it does not answer rows that see no key"
        return ""

    def forward(self, problem: Problem, x: ForwardInputs) -> tuple[Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention.default
        out, lse, *_ = op(x.q, x.k, x.v, 0.0, problem.diagonal is not None, False, scale=problem.scale)
        return out, lse.contiguous()

    def backward(self, problem: Problem, x: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        state, causal = _no_state(x.q), problem.diagonal is not None
        saved = (x.out, x.lse, None, None, problem.q_len, problem.kv_len, 0.0, causal, state, state)
        grads: tuple[Tensor, Tensor, Tensor] = op(x.grad_out, x.q, x.k, x.v, *saved, scale=problem.scale)
        return grads


class Efficient(Fused):
    """The memory-efficient kernel (xFormers'), top-left causal."""

    name = "efficient"
    known_bad = (
        KnownBad(
            "pytorch 125674",
            "NaN gradients of float32 with large logits",
            lambda problem: problem.backward and problem.dtype == torch.float32,
        ),
        KnownBad(
            "pytorch 142228",
            "no launch with more than 65,535 batches or heads",
            lambda problem: max(problem.batch, problem.heads) > _MOST_PROGRAMS,
        ),
        KnownBad(
            "pytorch 162588, 191937",
            "wrong results of masks beside long sequences, or beside broadcast keys",
            lambda problem: problem.mask_dtype is not None,
        ),
    )

    def operands(self, problem: Problem) -> str:
        if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"it takes float16, bfloat16 and float32, got {problem.dtype}"
        return ""

    def rules(self, problem: Problem) -> str:
        if problem.heads != problem.kv_heads:
            return "it has no grouped heads"
        if problem.head_dim % 8 or problem.value_dim % 8:
            return f"it takes widths that are multiples of 8, got D={problem.head_dim} and Dv={problem.value_dim}"
        if problem.diagonal not in (None, 0):
            return "its causal rule is top-left only"
        return ""

    def forward(self, problem: Problem, x: ForwardInputs) -> tuple[Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_efficient_attention.default
        out, lse, *_ = op(x.q, x.k, x.v, None, True, 0.0, problem.diagonal is not None, scale=problem.scale)
        return out, lse[:, :, : problem.q_len].contiguous()

    def backward(self, problem: Problem, x: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
        state, causal = _no_state(x.q), problem.diagonal is not None
        lse = F.pad(x.lse, (0, -problem.q_len % _CHUNK), value=torch.inf)
        dq, dk, dv, _ = op(
            x.grad_out, x.q, x.k, x.v, None, x.out, lse, state, state, 0.0, (True, True, True, False), causal,
            scale=problem.scale,
        )  # fmt: skip
        return dq, dk, dv


FUSED: tuple[Fused, ...] = (Cudnn(), Flash(), Efficient())
"""In the order in which they are tried where nothing was measured."""

"""A sink beside kernels that know none, and its gradient: both of what is known of each row, so left to PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

_LOG2_E = 1.4426950408889634


def join(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Lets a sink join denominators: scales a forward's ``out`` in place, and returns the log-sum-exp with the sink.

    Args:
        out: ``[B, Hq, Sq, Dv]``, the forward's without a sink.
        lse: ``[B, Hq, Sq]``, fp32, its.
        sink: ``[Hq]``.
    """
    whole = torch.logaddexp(lse, sink.to(torch.float32).unsqueeze(1))
    share = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - whole))
    out.mul_(share.unsqueeze(-1))
    return whole


def gradient(
    sink: Tensor, norm: Tensor, delta: Tensor, excess: Tensor | None = None, keep_scale: float = 1.0
) -> Tensor:
    """``-sum(exp(sink - lse) * delta)`` over batch and rows, in the sink's dtype; summed in fp32, in a fixed order.

    Args:
        sink: ``[Hq]``, the forward's.
        norm: ``[B, Hq, rows]``, fp32: lse in powers of two, +inf for what is no row; with ``excess`` in nats.
        delta: ``[B, Hq, rows]``, fp32: the sum of each row's P times its gradient, less the gradient of lse.
        excess: ``[B, Hq, rows]`` with an additive mask: what lse, rounded, lacks, in powers of two.
        keep_scale: ``1 / (1 - dropout_p)``, or 1.
    """
    logit = sink.to(torch.float32).unsqueeze(1)
    exponent = logit * _LOG2_E - norm if excess is None else (logit - norm) * _LOG2_E - excess
    p = torch.exp2(exponent)
    return ((p * delta).sum((0, 2)) * -keep_scale).to(sink.dtype)

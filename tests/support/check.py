"""Runs a call and judges every result by the package's accuracy rule."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from torch_bwattn.testing import Accuracy, Results, judge, oracle, pt_reference

from .calls import Call, Tensors, build, run
from .observe import OpCalls, dense
from .philox import keep_mask


def references(call: Call, tensors: Tensors, seed: int | None = None) -> tuple[Results, Results]:
    """The fp64 oracle and PyTorch's math path for a call; ``seed`` is the one dropout drew."""
    keep = None
    if 0.0 < call.dropout_p < 1.0:
        assert seed is not None, "dropout drew no seed"
        keep = keep_mask(seed, call.scores_shape, call.dropout_p).to(tensors.query.device)
    arguments: dict[str, Any] = {
        **call.arguments(),
        **tensors.sinks(),
        "keep_mask": keep,
        "grad_out": tensors.grad_out,
        "grad_lse": tensors.grad_lse,
        "needs_mask_grad": call.mask is not None and call.mask.needs_grad,
        "needs_sink_grad": call.sink is not None and call.sink.needs_grad,
    }
    inputs = (tensors.query, tensors.key, tensors.value, tensors.mask)
    return oracle(*inputs, **arguments), pt_reference(*inputs, **arguments)


def check_call(
    call: Call, device: torch.device | str = "cpu", entry: str = "function", observe: bool = True
) -> list[Accuracy]:
    """Runs a call forward and backward through an entry point and checks everything about it that is promised."""
    tensors = build(call, device)
    before = [tensor.detach().clone() for tensor in tensors.inputs()]
    # With dropout the seed must be seen; without it the mode is left out, so that the plain path is what is tested.
    watch = OpCalls() if 0.0 < call.dropout_p < 1.0 and observe else contextlib.nullcontext()
    with watch as calls:
        results = run(call, tensors, entry)
    reference, pt = references(call, tensors, calls.seed() if calls is not None else None)
    check_metadata(call, tensors, results)
    for tensor, copy in zip(tensors.inputs(), before, strict=True):
        assert torch.equal(tensor.detach(), copy), "an input was written to"
    verdicts = judge(results, reference, pt)
    for verdict in verdicts:
        verdict.check()
    return verdicts


def check_metadata(call: Call, tensors: Tensors, results: Results) -> None:
    """Shapes, dtypes, devices, and the memory order of the output."""
    assert results.out is not None
    assert tuple(results.out.shape) == call.out_shape
    assert results.out.dtype == call.dtype
    assert results.out.device == tensors.query.device
    assert dense(results.out), f"the output has gaps or overlaps: {results.out.shape} {results.out.stride()}"
    if results.lse is not None:
        assert tuple(results.lse.shape) == call.scores_shape[:-1]
        assert results.lse.dtype == (torch.float64 if call.dtype == torch.float64 else torch.float32)
    check_order(call, results.out)
    for name, tensor in tensors.named_inputs().items():
        gradient = getattr(results, name)
        if gradient is not None:
            assert gradient.shape == tensor.shape
            assert gradient.dtype == tensor.dtype
            assert gradient.device == tensor.device


def check_order(call: Call, out: torch.Tensor) -> None:
    """A contiguous query gives a contiguous output, a transposed B,S,H,D query a transposed B,S,H,D output."""
    if call.query.shape[:-2] != call.batch or 0 in (*call.query.shape, *call.out_shape):
        return
    if call.query.layout == "contiguous":
        assert out.is_contiguous(), out.stride()
    elif call.query.layout == "bshd" and out.dim() >= 3:
        assert out.transpose(-2, -3).is_contiguous(), out.stride()

"""torch.library.opcheck on every op, in every layout, with and without gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.calls import Call, Mask, Operand, Sink, Tensors, build, run
from tests.support.observe import OpCalls

LAYOUTS = ("contiguous", "bshd", "sliced", "expanded_lead", "stepped", "offset")
BASE = Call(Operand((2, 4, 6, 8)), Operand((2, 2, 7, 8)), Operand((2, 2, 7, 16)), enable_gqa=True)
KINDS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right", "with_lse_grad": True},
    "bool": {"mask": Mask((2, 1, 6, 7), kind="bool")},
    "additive": {"mask": Mask((4, 1, 7), kind="own", needs_grad=True), "with_lse_grad": True},
    "dropout": {"dropout_p": 0.5},
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 2.0, "is_causal": True},
    "sink": {"sink": Sink("float32"), "with_lse_grad": True},
}
UTILITIES = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def call_of(kind: str, layout: str, needs_grad: bool) -> Call:
    operands = {name: dataclasses.replace(getattr(BASE, name), layout=layout) for name in ("query", "key", "value")}
    call = dataclasses.replace(BASE, **operands, **KINDS[kind])
    if needs_grad:
        return call
    mask = call.mask and dataclasses.replace(call.mask, needs_grad=False)
    sink = call.sink and dataclasses.replace(call.sink, needs_grad=False)
    return dataclasses.replace(call, needs_grad=(False, False, False), mask=mask, sink=sink)


def arguments(call: Call, tensors: Tensors) -> tuple[tuple, dict]:
    positional = (tensors.query, tensors.key, tensors.value, tensors.mask, call.dropout_p, call.is_causal)
    keywords = {name: value for name, value in call.arguments().items() if name not in ("dropout_p", "is_causal")}
    return positional, {**keywords, **tensors.sinks()}


@pytest.mark.parametrize("needs_grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["sdpa", "sdpa_with_lse"])
def test_composites(name, kind, layout, needs_grad):
    call = call_of(kind, layout, needs_grad)
    positional, keywords = arguments(call, build(call))
    # Two runs of a random op differ, and opcheck compares two.
    utilities = ("test_schema", "test_faketensor") if kind == "dropout" else UTILITIES
    torch.library.opcheck(getattr(torch.ops.bwattn, name), positional, keywords, test_utils=utilities)


def recorded(call: Call) -> OpCalls:
    """The arguments that reach the primitives."""
    with OpCalls() as calls:
        run(call, build(call))
    return calls


@pytest.mark.parametrize("needs_grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_primitive(kind, layout, needs_grad):
    call = call_of(kind, layout, needs_grad=True)
    inputs = list(recorded(call).arguments("forward"))
    if needs_grad:
        inputs[:3] = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
        if kind == "additive":
            inputs[3] = inputs[3].detach().requires_grad_()
        if kind == "sink":
            inputs[-1] = inputs[-1].detach().requires_grad_()
    torch.library.opcheck(
        torch.ops.bwattn.sdpa_forward, tuple(inputs), test_utils=(*UTILITIES, "test_autograd_registration")
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_primitive(kind, layout):
    call = call_of(kind, layout, needs_grad=True)
    torch.library.opcheck(torch.ops.bwattn.sdpa_backward, recorded(call).arguments("backward"), test_utils=UTILITIES)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_backward_primitive_for_some_inputs(wanted):
    call = dataclasses.replace(call_of("causal", "bshd", needs_grad=True), needs_grad=wanted)
    torch.library.opcheck(torch.ops.bwattn.sdpa_backward, recorded(call).arguments("backward"), test_utils=UTILITIES)


@pytest.mark.parametrize("shape", [(0, 4, 6, 8), (2, 4, 0, 8), (2, 0, 6, 8), (2, 4, 6, 0), (3, 8), (2, 3, 8)], ids=str)
@pytest.mark.parametrize("name", ["sdpa", "sdpa_with_lse"])
def test_empty_and_other_ranks(name, shape):
    query = torch.randn(shape, requires_grad=True)
    key = torch.randn((*shape[:-2], 5, shape[-1]), requires_grad=True)
    torch.library.opcheck(
        getattr(torch.ops.bwattn, name), (query, key, key.detach().clone().requires_grad_()), test_utils=UTILITIES
    )


def test_schemas():
    """The positional signature of F.scaled_dot_product_attention, further features keyword-only."""
    expected = (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., bool is_causal=False, *,"
        ' float? scale=None, bool enable_gqa=False, str causal_alignment="top_left", int[]? window_size=None,'
        " float? softcap=None, Tensor? sink=None) -> "
    )
    assert str(torch.ops.bwattn.sdpa.default._schema) == f"bwattn::sdpa{expected}Tensor"
    assert str(torch.ops.bwattn.sdpa_with_lse.default._schema).startswith(f"bwattn::sdpa_with_lse{expected}(Tensor")

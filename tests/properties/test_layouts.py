"""Strides: fakes say what the real op does, and no memory order of any tensor changes a value."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.strategies import calls, share
from tests.support.calls import LAYOUTS, build, run
from tests.support.check import check_call


def metadata(tensor):
    # The stride of a dimension of size 1 (and all of them in an empty tensor) addresses nothing.
    strides = [
        0 if size == 1 or not tensor.numel() else s for size, s in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tuple(tensor.shape), tuple(strides), tensor.dtype


@settings(max_examples=share(1.0))
@given(call=calls())
def test_fake_strides_are_real_strides(call):
    tensors = build(call)
    real = dict(run(call, tensors).items())
    detached = {name: None if tensor is None else tensor.detach() for name, tensor in vars(tensors).items()}
    with FakeTensorMode() as mode:
        fields = {}
        for name, tensor in detached.items():
            fields[name] = None if tensor is None else mode.from_tensor(tensor)
            if tensor is not None and vars(tensors)[name].requires_grad:
                fields[name].requires_grad_()
        fake = dict(run(call, type(tensors)(**fields)).items())
    assert {name: metadata(tensor) for name, tensor in fake.items()} == {
        name: metadata(tensor) for name, tensor in real.items()
    }


@settings(max_examples=share(0.6))
@given(call=calls(layouts=("contiguous",)), which=st.integers(0, 3), layout=st.sampled_from(LAYOUTS))
def test_input_layouts_change_no_value(call, which, layout):
    if layout.startswith("expanded"):
        layout = "sliced"  # other values
    if which == 3:
        changed = type(call)(**{**vars(call), "grad_out": layout})
        call = type(call)(**{**vars(call), "grad_out": "contiguous"})
    else:
        name = ("query", "key", "value")[which]
        operand = getattr(call, name)
        changed = type(call)(**{**vars(call), name: type(operand)(operand.shape, layout)})
    torch.manual_seed(call.seed)
    first = dict(run(call, build(call)).items())
    torch.manual_seed(call.seed)
    second = dict(run(changed, build(changed)).items())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(call.dtype, 2e-2)
    for name, tensor in first.items():
        scale = max(
            1.0, float(tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().amax()) if tensor.numel() else 1.0
        )
        torch.testing.assert_close(second[name], tensor, atol=tolerance * scale, rtol=0, equal_nan=True, msg=name)


@settings(max_examples=share(0.5))
@given(call=calls(), layout=st.sampled_from(LAYOUTS))
def test_every_operand_in_one_layout(call, layout):
    operands = {
        name: type(getattr(call, name))(getattr(call, name).shape, layout) for name in ("query", "key", "value")
    }
    check_call(type(call)(**{**vars(call), **operands, "grad_out": layout}))

"""Any call, forward and backward, against PyTorch's math path in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import DTYPES, KINDS, calls, share
from tests.support.check import check_call

ENTRIES = st.sampled_from(("function", "op_lse"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=share(0.8))
@given(data=st.data())
def test_outputs_and_gradients(dtype, kind, data):
    call = data.draw(calls(dtype=dtype, kind=kind))
    check_call(call, entry=data.draw(ENTRIES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=share(0.8))
@given(data=st.data())
def test_the_op_without_lse(dtype, data):
    call = data.draw(calls(dtype=dtype))
    if call.with_out_grad:
        call = type(call)(**{**call.__dict__, "with_lse_grad": False})
    else:
        call = type(call)(**{**call.__dict__, "with_lse_grad": False, "with_out_grad": True})
    check_call(call, entry="op")

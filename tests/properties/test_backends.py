"""A pinned backend gives right values or refuses; the reference never refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_bwattn
from tests.strategies import KINDS, calls, share
from tests.support.calls import build, run
from tests.support.check import check_call


@settings(max_examples=share(0.8))
@given(data=st.data())
def test_reference_never_refuses(data):
    call = data.draw(calls(kind=data.draw(st.sampled_from(KINDS))))
    with torch_bwattn.backend("reference"):
        check_call(call)


@settings(max_examples=share(0.8))
@given(call=calls())
def test_aten_is_right_or_refuses(call):
    with torch_bwattn.backend("aten"):
        try:
            run(call, build(call))
        except torch_bwattn.UnsupportedProblem as error:
            refusal = error
        else:
            check_call(call)
            return
    assert isinstance(refusal, NotImplementedError)
    assert "aten" in str(refusal)


def test_helion_refuses_the_cpu():
    query = torch.randn(1, 2, 5, 8)
    with torch_bwattn.backend("helion"), pytest.raises(torch_bwattn.UnsupportedProblem, match="helion"):
        torch_bwattn.sdpa(query, query, query)

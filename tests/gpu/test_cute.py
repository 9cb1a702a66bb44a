"""The Hopper kernels: any call that they take against the fp64 oracle, repeats, streams, captures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_bwattn
from tests.gpu.cute_calls import (
    DRAWN_KINDS,
    MASKED,
    SIZED,
    WIDTHS,
    check_drawn,
    drawn_calls,
    forward_only,
    poisoned_on_hopper,  # noqa: F401 (a fixture for all tests here)
    sized_calls,
)
from tests.strategies import share
from tests.support.calls import Call, Operand
from tests.support.check import check_call
from torch_bwattn.testing import Results, judge, oracle, pt_reference

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("kind", DRAWN_KINDS)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
@settings(max_examples=share(0.64))
@given(data=st.data())
def test_forward(width, kind, data, device):
    call = forward_only(data.draw(drawn_calls(width, kind)))
    check_drawn(call, device)


@pytest.mark.parametrize(("width", "kind"), SIZED, ids=str)
def test_sizes(width, kind, device):
    for call in sized_calls(width, kind):
        with torch_bwattn.backend("cute"):
            check_call(forward_only(call), device)


@pytest.mark.parametrize(("width", "kind"), MASKED, ids=str)
def test_masks(width, kind, device):
    for call in sized_calls(width, kind):
        with torch_bwattn.backend("cute"):
            check_call(forward_only(call), device)


@pytest.mark.parametrize("width", [(64, 64), (128, 128), (192, 192), (256, 256)], ids=str)
def test_masks_beside_which_scores_outgrow_what_came_before(width, device):
    """Each tile of keys has larger scores than those before, some by far, and some rows see nothing for a while."""
    rows, columns = 300, 1700
    query, key, value = (
        torch.randn(2, 2, n, w, device=device, dtype=BF16)
        for n, w in ((rows, width[0]), (columns, width[0]), (columns, width[1]))
    )
    for rise in (4.0, 80.0, 1e5):
        mask = (
            torch.linspace(rise, 0, columns, device=device).to(BF16).repeat(1, 1, rows, 1)
        )  # the last are visited first
        mask[:, :, ::3, 600:] = -torch.inf
        mask[:, :, 1] = -torch.inf
        with torch_bwattn.backend("cute"):
            out, lse = torch_bwattn.sdpa(query, key, value, mask, return_lse=True)
        reference = oracle(query, key, value, mask)
        for verdict in judge(Results(out=out, lse=lse), reference, pt_reference(query, key, value, mask)):
            assert verdict.passed, str(verdict)


@pytest.mark.parametrize("magnitude", [6.0, 300.0])
@pytest.mark.parametrize("width", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_scores_that_outgrow_what_came_before(width, magnitude, device):
    """Of some rows the later tiles' scores are larger by far: their exponentials overflow, or nearly, at first."""
    rows, columns = 700, 1700
    generator = torch.Generator(device).manual_seed(0)

    def normal(length: int, columns: int) -> torch.Tensor:
        return torch.randn(2, 2, length, columns, device=device, dtype=BF16, generator=generator)

    query, value = normal(rows, width[0]) * magnitude, normal(columns, width[1])
    # The last keys are visited first.
    key = normal(columns, width[0]) * torch.linspace(2, 0, columns, device=device, dtype=BF16)[:, None]
    with torch_bwattn.backend("cute"):
        out, lse = torch_bwattn.sdpa(query, key, value, return_lse=True)
    reference = oracle(query, key, value)
    for verdict in judge(Results(out=out, lse=lse), reference, pt_reference(query, key, value)):
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize("layout", ["contiguous", "bshd", "expanded_lead"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (3, 1, 7, 64), (1, 5, 64, 128)], ids=str)
def test_dimensions_of_one_may_have_any_stride(shape, layout, device):
    operand = Operand(shape, layout)
    check_call(forward_only(Call(operand, operand, operand, dtype=BF16)), device)


@pytest.mark.parametrize(
    ("shape", "kv_heads", "causal"),
    [
        ((2, 8, 1500, 128), 8, True),
        ((4, 16, 700, 64), 4, False),
        ((1, 4, 2048, 256), 4, True),
        ((8, 8, 9, 128), 1, False),
    ],
    ids=str,
)
def test_a_thousand_repeats_are_bitwise_equal(shape, kv_heads, causal, device):
    batch, _, length, width = shape
    query = torch.randn(shape, device=device, dtype=BF16)
    key, value = (torch.randn(batch, kv_heads, length, width, device=device, dtype=BF16) for _ in range(2))
    options = {"is_causal": causal, "enable_gqa": True, "return_lse": True}
    with torch_bwattn.backend("cute"):
        out, lse = torch_bwattn.sdpa(query, key, value, **options)
        differing = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(1000):
            again, lse_again = torch_bwattn.sdpa(query, key, value, **options)
            differing += (again != out).any() | (lse_again != lse).any()
    assert differing.item() == 0


def test_captured_and_on_a_side_stream(device):
    query, key, value = (torch.randn(2, 4, 300, 128, device=device, dtype=BF16) for _ in range(3))
    with torch_bwattn.backend("cute"):
        expected = torch_bwattn.sdpa(query, key, value)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.equal(torch_bwattn.sdpa(query, key, value), expected)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = torch_bwattn.sdpa(query, key, value)
        query.normal_()
        graph.replay()
        assert torch.equal(out, torch_bwattn.sdpa(query, key, value))


def test_a_first_call_in_a_capture_raises(device):
    query = torch.randn(1, 2, 100, 88, device=device, dtype=FP16)
    raises = pytest.raises(RuntimeError, match="before the capture")
    with torch_bwattn.backend("cute"), raises, torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch_bwattn.sdpa(query, query, query, softcap=3.0)


def test_without_a_log_sum_exp_the_output_is_the_same(device):
    """Where nobody wants it, none is written."""
    query, key, value = (torch.randn(2, 4, length, 64, device=device, dtype=BF16) for length in (200, 300, 300))
    with torch_bwattn.backend("cute"):
        out = torch_bwattn.sdpa(query, key, value, is_causal=True)
        expected, _ = torch_bwattn.sdpa(query, key, value, is_causal=True, return_lse=True)
    assert torch.equal(out, expected)

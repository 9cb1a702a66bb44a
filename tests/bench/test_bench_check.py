import math

import pytest
import torch
import torch.nn.functional as F

from torch_bwattn.bench import check
from torch_bwattn.bench.rows import make_inputs, select_rows


def rows():
    return select_rows(["B2H4/2S24D16", "B1H3/3S33D8"])


def run(row, inputs):
    leaves = inputs.with_grad()
    out = F.scaled_dot_product_attention(*leaves.qkv, is_causal=row.causal, enable_gqa=row.gqa)
    return out.detach(), torch.autograd.grad(out, leaves.qkv, inputs.grad_out)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
@pytest.mark.parametrize("slices", [None, 1, 2, 3])
def test_right_results_pass(row, slices):
    inputs = make_inputs(row, "cpu")
    oracle = check.Oracle(row, inputs, slices=slices, backward=True)
    out, gradients = run(row, inputs)
    forward, backward = oracle.check_forward(out), oracle.check_backward(gradients)
    assert forward.ok, forward.reason
    assert backward.ok, backward.reason
    assert set(forward.as_record()) == {"out"}
    assert set(backward.as_record()) == {"dq", "dk", "dv"}
    assert all(0 <= share <= 1 for share in check.shares(backward.as_record()).values())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_wrong_results_fail(row):
    inputs = make_inputs(row, "cpu")
    oracle = check.Oracle(row, inputs, slices=None, backward=True)
    out, (dq, dk, dv) = run(row, inputs)
    out[-1, -1, -1, -1] += 1
    assert not oracle.check_forward(out).ok
    assert "out: FAILED" in oracle.check_forward(out).reason
    verdict = oracle.check_backward((dq, dk * 1.5, dv))
    assert not verdict.ok
    assert verdict.reason.startswith("dk: FAILED")
    assert verdict.as_record()["dk"]["passed"] is False


def test_another_mask_or_another_head_fails():
    plain, causal = select_rows(["B2H4/2S24D16"])
    inputs = make_inputs(plain, "cpu")
    out, _ = run(causal, inputs)
    assert not check.Oracle(plain, inputs, slices=2, backward=False).check_forward(out).ok
    out, _ = run(plain, inputs)
    assert not check.Oracle(plain, inputs, slices=2, backward=False).check_forward(out.flip(1)).ok


def test_shape_and_unwritten_values_are_seen():
    row = select_rows(["B2H4/4S24D16"])[0]
    inputs = make_inputs(row, "cpu")
    oracle = check.Oracle(row, inputs, slices=2, backward=False)
    out, _ = run(row, inputs)
    assert "expected the shape [2, 4, 24, 16]" in oracle.check_forward(out[:1]).reason
    sampled = check.choose_slices(row, 2)
    number = next(number for number in range(8) if number not in sampled)
    out[number // 4, number % 4, 3, 3] = math.nan
    verdict = oracle.check_forward(out)
    assert not verdict.ok
    assert verdict.reason == "out: expected finite values everywhere, got NaN or infinity"
    assert verdict.as_record() == {}


def test_a_nan_in_a_checked_slice_is_recorded_as_json_can():
    row = select_rows(["B1H1/1S24D16"])[0]
    inputs = make_inputs(row, "cpu")
    out, _ = run(row, inputs)
    out[0, 0, 0, 0] = math.nan
    verdict = check.Oracle(row, inputs, slices=None, backward=False).check_forward(out)
    assert not verdict.ok
    assert check.finite(math.inf) is None
    assert check.finite(1.5) == 1.5


def test_slices_are_the_ends_and_random_others():
    row = select_rows(["B3H8/4S8D8"])[0]
    assert check.choose_slices(row, None) is None
    assert check.choose_slices(row, 12) is None
    assert check.choose_slices(row, 1) == [0]
    assert check.choose_slices(row, 2) == [0, 11]
    five = check.choose_slices(row, 5, seed=1)
    assert len(set(five)) == 5
    assert {five[0], five[-1]} == {0, 11}
    assert five == check.choose_slices(row, 5, seed=1)


def test_a_share_of_no_figure_is_nan():
    assert math.isnan(check.shares({"out": {"error": None, "bound": 1.0}})["out"])

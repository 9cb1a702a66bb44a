"""The Helion backend: its verdicts and configs, and whole calls through it in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_bwattn.backends import reference
from torch_bwattn.backends.base import BackwardInputs, ForwardInputs
from torch_bwattn.backends.helion.backend import HelionBackend
from torch_bwattn.problem import Problem, describe

HOPPER = Problem("sm_90a", torch.bfloat16, 2, 8, 2, 128, 128, 64, 64, 0.125)


def changed(**changes: object) -> Problem:
    return dataclasses.replace(HOPPER, **changes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"target": "cpu"}, "sm_80"),
        ({"target": "sm_75"}, "sm_80"),
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 0}, "widths"),
        ({"value_dim": 257}, "widths"),
        ({"dropout_p": 1.0}, "dropping"),
    ],
)
def test_refusals_name_their_reason(changes, word):
    verdict = HelionBackend().supports(changed(**changes))
    assert not verdict
    assert word in verdict.reason


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_takes_every_cuda_target_from_sm_80(target, backward):
    problem = changed(target=target, backward=backward)
    assert HelionBackend().supports(problem)
    assert any("warps" in offer.config for offer in HelionBackend().offers(problem))


def run(
    problem: Problem, inputs: ForwardInputs, wanted: tuple[bool, bool, bool, bool, bool], grad_lse: bool = True
) -> None:
    """A whole call through the backend, against the reference."""
    backend = HelionBackend()
    out, lse = backend.forward(problem)(inputs)
    expected_out, expected_lse = reference.forward(problem, inputs)
    torch.testing.assert_close(out, expected_out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=2e-5)
    assert out.stride() == expected_out.stride()
    grad_out = torch.randn(out.shape, dtype=out.dtype)
    x = BackwardInputs(
        grad_out, torch.randn(lse.shape) if grad_lse else None, *inputs[:4], out, lse, inputs.rng_state, inputs.sink
    )
    back = dataclasses.replace(problem, backward=True, mask_grad=wanted[3])
    for got, expected in zip(
        backend.backward(back)(x, wanted), reference.backward(back, x, (True, True, True, *wanted[3:])), strict=True
    ):
        if got is not None and expected is not None:
            torch.testing.assert_close(got, expected, atol=5e-5, rtol=5e-5)
            assert got.stride() == expected.stride()


def drawn(q_len: int, kv_len: int, **options: object) -> tuple[Problem, ForwardInputs]:
    q = torch.randn(2, q_len, 4, 16).transpose(1, 2)
    k, v = torch.randn(2, 2, kv_len, 16), torch.randn(2, 2, kv_len, 24)
    mask, rng_state, sink = (options.pop(name, None) for name in ("mask", "rng_state", "sink"))
    settings = {"scale": 0.3, "is_causal": False, "causal_alignment": "top_left", "dropout_p": 0.0, **options}
    return describe(q, k, v, mask, sink=sink, **settings), ForwardInputs(q, k, v, mask, rng_state, sink)


# What one kernel serves is one test: as several, they may run in several workers, and binding a kernel takes seconds.


@pytest.mark.interpreted
def test_ragged_and_empty_lengths():
    for q_len in (1, 35, 0):
        for kv_len in (1, 40, 0):
            problem, inputs = drawn(q_len, kv_len, is_causal=True, causal_alignment="bottom_right")
            run(problem, inputs, (True, True, True, False, False))


@pytest.mark.interpreted
def test_window_soft_cap_and_sink():
    for kv_len in (1, 40, 0):
        problem, inputs = drawn(35, kv_len, window=(9, 4), softcap=2.0, sink=torch.randn(4))
        run(problem, inputs, (True, True, True, False, True))


@pytest.mark.interpreted
def test_mask_gradient_in_the_masks_own_shape():
    for shape in ((1, 1, 1, 1), (2, 1, 19, 1), (1, 4, 1, 33), (2, 4, 19, 33)):
        problem, inputs = drawn(19, 33, mask=torch.randn(shape))
        run(problem, inputs, (True, True, True, True, False))


@pytest.mark.interpreted
def test_unwanted_gradients_are_left_out():
    for index in range(3):
        problem, inputs = drawn(20, 33, dropout_p=0.4, rng_state=torch.tensor([7]))
        run(problem, inputs, tuple(index == other for other in range(5)), grad_lse=False)


@pytest.mark.interpreted
def test_one_key_gives_exactly_zero_gradients():
    problem, inputs = drawn(5, 1)
    out, lse = HelionBackend().forward(problem)(inputs)
    back = dataclasses.replace(problem, backward=True)
    x = BackwardInputs(torch.randn(out.shape), None, *inputs[:4], out, lse, None)
    dq, dk, *_ = HelionBackend().backward(back)(x, (True, True, True, False, False))
    assert torch.count_nonzero(dq) == torch.count_nonzero(dk) == 0


@pytest.mark.interpreted
def test_values_narrower_than_keys_off_the_boundaries():
    torch.manual_seed(0)
    q = torch.randn(1, 20, 2, 35).transpose(1, 2)[..., 1:33]
    k, v = torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 10)
    options = {"scale": 0.2, "is_causal": False, "causal_alignment": "top_left", "dropout_p": 0.0}
    run(describe(q, k, v, None, **options), ForwardInputs(q, k, v, None, None), (True, True, True, False, False))

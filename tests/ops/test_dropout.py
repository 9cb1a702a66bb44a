"""Dropout: which mask, the same one forward and backward, and how the seed is drawn."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_bwattn
from tests.strategies import share
from tests.support.observe import OpCalls
from tests.support.philox import keep_mask


def shown(rows=40, columns=24, heads=(2, 3), dropout_p=0.3, requires_grad=False, dtype=torch.float32):
    """A call whose output is the dropped probabilities: uniform scores, and the identity for values."""
    query = torch.zeros(*heads, rows, 8, dtype=dtype, requires_grad=requires_grad)
    key = torch.zeros(*heads, columns, 8, dtype=dtype)
    value = torch.eye(columns, dtype=dtype).expand(*heads, columns, columns).contiguous().requires_grad_(requires_grad)
    return query, key, value, torch_bwattn.sdpa(query, key, value, dropout_p=dropout_p)


@settings(max_examples=share(1.0))
@given(
    seed=st.integers(0, 2**63 - 1),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
    dropout_p=st.sampled_from((1e-9, 0.1, 0.25, 0.5, 0.999)) | st.floats(1e-6, 1 - 1e-6),
)
def test_the_mask_is_the_documented_philox(seed, shape, dropout_p):
    *lead, rows, columns = shape
    query, key = torch.zeros(*lead, rows, 4), torch.zeros(*lead, columns, 4)
    value = torch.eye(columns).expand(*lead, columns, columns)
    out, _ = torch.ops.bwattn.sdpa_forward(
        query, key, value, None, torch.tensor([seed]), dropout_p, False, 1.0, "top_left", None
    )
    assert torch.equal(out != 0, keep_mask(seed, shape, dropout_p))
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / columns / (1 - dropout_p)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_one_mask_forward_and_backward(dtype):
    _, _, value, out = shown(requires_grad=True, dtype=dtype)
    (dv,) = torch.autograd.grad(out.sum(), value)
    # dV of a sum is the column sums of what the forward kept.
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 2e-2
    expected = out.detach().sum(-2).unsqueeze(-1).expand_as(dv)
    torch.testing.assert_close(dv, expected, rtol=tolerance, atol=tolerance)


def test_backward_gets_the_seed_of_the_forward():
    with OpCalls() as calls:
        _, _, value, out = shown(requires_grad=True)
        torch.autograd.grad(out.sum(), value)
    assert len(calls.forward) == len(calls.backward) == 1
    assert torch.equal(calls.forward[0]["rng_state"], calls.backward[0]["rng_state"])
    assert calls.forward[0]["rng_state"].dtype == torch.int64
    assert calls.seed() >= 0


def test_manual_seed_reproduces():
    torch.manual_seed(5)
    first, second = shown()[3], shown()[3]
    torch.manual_seed(5)
    again = shown()[3]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_seeds_use_all_their_bits():
    torch.manual_seed(0)
    seeds = []
    for _ in range(64):
        with OpCalls() as calls:
            shown(4, 4)
        seeds.append(calls.seed())
    assert len(set(seeds)) == 64
    assert max(seeds) >= 2**60
    assert min(seeds) >= 0


def test_a_call_without_dropout_draws_nothing():
    query = torch.randn(2, 3, 4, 8)
    state = torch.get_rng_state()
    for dropout_p in (0.0, 1.0):
        torch_bwattn.sdpa(query, query, query, dropout_p=dropout_p)
        if dropout_p == 0.0:
            assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dropout_p", [0.05, 0.5, 0.8])
def test_statistics(dropout_p):
    torch.manual_seed(2)
    columns = 64
    out = shown(256, columns, (4, 4), dropout_p)[3]
    kept = (out != 0).double()
    count = kept.numel()
    sigma = math.sqrt(dropout_p * (1 - dropout_p))
    assert abs(kept.mean().item() - (1 - dropout_p)) < 5 * sigma / math.sqrt(count)
    torch.testing.assert_close(out.max().item(), 1 / columns / (1 - dropout_p), rtol=1e-5, atol=0)
    # No two neighbours in any direction may agree more often than chance.
    for dim in range(4):
        length = kept.shape[dim]
        pairs = (kept.narrow(dim, 1, length - 1) - 1 + dropout_p) * (kept.narrow(dim, 0, length - 1) - 1 + dropout_p)
        assert abs(pairs.mean().item()) < 5 * sigma**2 / math.sqrt(pairs.numel()), f"dimension {dim}"


def test_the_expectation_is_the_call_without_dropout():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 6, 8) for _ in range(3))
    many = torch_bwattn.sdpa(*(t.expand(4000, 2, -1, -1) for t in (query, key, value)), dropout_p=0.3)
    expected = torch_bwattn.sdpa(query, key, value)[0, 0]
    error = (many.double().mean((0, 1)) - expected).abs().max()
    assert error < 6 * many.std() / math.sqrt(8000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_p_of_one_gives_zeros(dtype):
    query, _, value, out = shown(dropout_p=1.0, requires_grad=True, dtype=dtype)
    assert not out.any()
    grads = torch.autograd.grad(out.sum(), (query, value))
    assert not any(grad.any() for grad in grads)


def test_lse_is_taken_before_dropout():
    query, key = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 9, 4)
    _, with_dropout = torch_bwattn.sdpa(query, key, key, dropout_p=0.7, return_lse=True)
    _, without = torch_bwattn.sdpa(query, key, key, return_lse=True)
    torch.testing.assert_close(with_dropout, without)


def test_applied_in_inference_too():
    with torch.inference_mode():
        out = shown()[3]
    assert 0.2 < (out == 0).float().mean() < 0.4

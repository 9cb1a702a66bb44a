"""TritonBench's convention: what a benchmark method is given, what it returns, and what is done with that."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F

import torch_bwattn
from tests.support.attend import judged
from torch_bwattn.integrations import tritonbench


def operator(**fields):
    return types.SimpleNamespace(**{"causal": False, "sm_scale": 0.3, **fields})


def inputs(heads=2, kv_heads=2, kv_len=40):
    torch.manual_seed(0)
    sizes = ((1, heads, 40, 16), (1, kv_heads, kv_len, 16), (1, kv_heads, kv_len, 16))
    return tuple(torch.randn(size, requires_grad=True) for size in sizes)


def backward(timed):
    """As the operator's own ``get_bwd_fn`` does it."""
    outputs = timed()
    grads = [0.1 * torch.randn_like(out).detach() for out in outputs]

    def run():
        for tensor in timed._grad_inputs:
            tensor.grad = None
        for out, grad in zip(outputs, grads, strict=True):
            out.backward(grad, retain_graph=True)
        return timed._grad_inputs

    return run, grads


@pytest.mark.parametrize("causal", [False, True])
def test_forward(causal):
    tensors = inputs()
    run = tritonbench.forward(operator(causal=causal), *tensors)
    (out,) = run()
    assert not out.requires_grad
    judged(out, *tensors, is_causal=causal, scale=0.3)


def test_several_inputs_are_timed_at_once():
    threes = [inputs(), inputs(kv_len=24)]
    for factory in (tritonbench.forward, tritonbench.forward_backward):
        outputs = factory(operator(), *threes[0], *threes[1])()
        for out, tensors in zip(outputs, threes, strict=True):
            judged(out.detach(), *tensors, scale=0.3)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward(causal):
    tensors = inputs(heads=4)
    timed = tritonbench.forward_backward(operator(causal=causal), *tensors)
    run, (grad,) = backward(timed)
    wanted = [tensor.detach().double().requires_grad_() for tensor in tensors]
    F.scaled_dot_product_attention(*wanted, is_causal=causal, scale=0.3, enable_gqa=True).backward(grad.double())
    for _ in range(2):  # the second run adds nothing to the first
        for leaf, tensor, of in zip(run(), tensors, wanted, strict=True):
            assert leaf.data_ptr() == tensor.data_ptr()
            assert tensor.grad is None
            torch.testing.assert_close(leaf.grad.double(), of.grad, rtol=1e-4, atol=1e-5)


def test_an_operators_optimizer_sets_gradients_back():
    of = operator(optims={})
    timed = tritonbench.forward_backward(of, *inputs())
    timed()[0].sum().backward()
    assert all(leaf.grad is not None for leaf in timed._grad_inputs)
    of.optims[timed].zero_grad(set_to_none=True)
    assert all(leaf.grad is None for leaf in timed._grad_inputs)


def test_a_window_ends_at_the_last_key():
    tensors = inputs(kv_len=50)
    (out,) = tritonbench.forward(operator(local=True, window_size=(7, 2)), *tensors)()
    query, key = torch.arange(40)[:, None] + 10, torch.arange(50)[None, :]
    seen = (key >= query - 7) & (key <= query + 2)
    judged(out, *tensors, attn_mask=seen, scale=0.3)


def test_the_pinned_backend_runs():
    torch_bwattn.reset_call_counts()
    with torch_bwattn.backend("reference"):
        tritonbench.forward(operator(), *inputs())()
    assert torch_bwattn.call_counts() == {"reference": 1}


@pytest.mark.parametrize("factory", [tritonbench.forward, tritonbench.forward_backward])
def test_misuse(factory):
    with pytest.raises(TypeError, match="tensors: expected query, key and value, once or more often, got 2 tensors"):
        factory(operator(), *inputs()[:2])
    with pytest.raises(TypeError, match="got 0 tensors"):
        factory(operator())
    with pytest.raises(NotImplementedError, match="varlen: expected False"):
        factory(operator(varlen=True), *inputs())

"""opcheck, dropout, autocast, transforms and PyTorch's own samples, on the GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import torch_bwattn
from tests.ops.test_opcheck import BASE, KINDS, UTILITIES, arguments
from tests.ops.test_opinfo import ENTRIES
from tests.ops.test_opinfo import test_sample_inputs as check_sample_inputs
from tests.support.attend import judged
from tests.support.calls import Operand, build, run
from tests.support.observe import OpCalls
from tests.support.philox import keep_mask

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(params=["helion", None], autouse=True)
def _pinned(request):
    with torch_bwattn.backend(request.param) if request.param else torch.enable_grad():
        yield


@pytest.mark.parametrize("kind", ["plain", "bottom_right", "bool", "additive", "dropout"])
@pytest.mark.parametrize("layout", ["contiguous", "bshd", "expanded_lead"])
def test_opcheck(kind, layout, device):
    shapes = ((2, 4, 37, 64), (2, 2, 7, 64), (2, 2, 7, 64))
    shapes = shapes if KINDS[kind].get("mask") is None else ((2, 4, 6, 64), *shapes[1:])
    names = ("query", "key", "value")
    operands = {name: Operand(shape, layout) for name, shape in zip(names, shapes, strict=True)}
    call = dataclasses.replace(BASE, **operands, **KINDS[kind], dtype=BF16)
    with OpCalls() as calls:
        run(call, build(call, device))
    for which, op in (("forward", torch.ops.bwattn.sdpa_forward), ("backward", torch.ops.bwattn.sdpa_backward)):
        torch.library.opcheck(op, calls.arguments(which), test_utils=UTILITIES)
    if kind != "dropout":
        positional, keywords = arguments(call, build(call, device))
        torch.library.opcheck(torch.ops.bwattn.sdpa_with_lse, positional, keywords, test_utils=UTILITIES)


@pytest.mark.parametrize("entry", ["op", "patched"])
def test_sample_inputs_of_pytorch(entry, device, request):
    assert entry in ENTRIES
    check_sample_inputs(entry, BF16, True, device)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 12345, 2**63 - 1, 0x123456789ABCDEF])
def test_dropout_mask_is_bitwise_the_documented_philox(seed, dropout_p, device):
    shape = (2, 3, 201, 128)
    query, key = (torch.zeros(2, 3, length, 64, device=device, dtype=BF16) for length in shape[-2:])
    value = torch.eye(128, device=device, dtype=BF16).expand(2, 3, 128, 128)
    out, _ = torch.ops.bwattn.sdpa_forward(
        query, key, value, None, torch.tensor([seed], device=device), dropout_p, False, 1.0, "top_left", None
    )
    assert torch.equal((out != 0).cpu(), keep_mask(seed, shape, dropout_p))


def test_dropout_is_seeded_and_the_same_in_the_backward(device):
    query = torch.zeros(2, 3, 201, 64, device=device, dtype=BF16)
    key = torch.zeros(2, 3, 128, 64, device=device, dtype=BF16)
    value = torch.eye(128, device=device, dtype=BF16).expand(2, 3, 128, 128).contiguous().requires_grad_()
    torch.manual_seed(4)
    out = torch_bwattn.sdpa(query, key, value, dropout_p=0.4)
    torch.manual_seed(4)
    assert torch.equal(torch_bwattn.sdpa(query, key, value, dropout_p=0.4), out)
    (dv,) = torch.autograd.grad(out.sum(), value)
    expected = (out.detach() != 0).double().sum(-2) / 128 / 0.6
    torch.testing.assert_close(dv.double(), expected.unsqueeze(-1).expand_as(dv), rtol=1e-2, atol=1e-2)


def test_autocast(device):
    query, key, value = (torch.randn(2, 4, 65, 64, device=device).requires_grad_() for _ in range(3))
    with torch.autocast("cuda", BF16):
        out = torch_bwattn.sdpa(query, key.bfloat16(), value)
    assert out.dtype == BF16
    judged(out, *(tensor.bfloat16() for tensor in (query, key, value)))
    out.float().sum().backward()
    assert query.grad.dtype == torch.float32


def test_transforms(device):
    query, key = (
        torch.randn(3, 2, 33, 64, device=device, dtype=BF16),
        torch.randn(3, 2, 35, 64, device=device, dtype=BF16),
    )
    out = vmap(torch_bwattn.sdpa)(query, key, key)
    judged(out, query, key, key)

    def loss(query, key):
        return torch_bwattn.sdpa(query, key, key).float().square().sum()

    for got, index in ((vmap(grad(loss))(query, key)[i], i) for i in range(3)):
        torch.testing.assert_close(got, grad(loss)(query[index], key[index]), atol=1e-2, rtol=1e-2)


def test_misuse_raises_before_any_kernel(device):
    query = torch.randn(2, 4, 33, 64, device=device, dtype=BF16)
    for changes, name in (
        ({"value": query[..., :20, :]}, "value"),
        ({"key": query[..., :60]}, "key"),
        ({"key": query.cpu(), "value": query.cpu()}, "key"),
        ({"attn_mask": torch.zeros(33, 33, device=device, dtype=torch.float64)}, "attn_mask"),
        ({"attn_mask": torch.zeros(33, 33)}, "attn_mask"),
        ({"attn_mask": torch.ones(33, 33, device=device, dtype=torch.bool), "is_causal": True}, "is_causal"),
        ({"dropout_p": 1.5}, "dropout_p"),
    ):
        call = {"query": query, "key": query, "value": query, **changes}
        with pytest.raises((TypeError, ValueError, RuntimeError), match=name):
            torch_bwattn.sdpa(**call)


def test_counts_name_the_backend(device):
    query = torch.randn(2, 4, 33, 64, device=device, dtype=BF16)
    torch_bwattn.reset_call_counts()
    with torch_bwattn.backend("helion"):
        torch_bwattn.sdpa(query, query, query)
        text = str(torch_bwattn.explain(query, query, query))
    assert torch_bwattn.call_counts() == {"helion": 1}
    assert "forward: helion" in text


def test_fp32_is_not_tf32(device):
    """Without PyTorch's own leave, fp32 inputs get fp32 accuracy: ten bits of mantissa would show at once."""
    query, key, value = (torch.randn(1, 2, 513, 64, device=device) for _ in range(3))
    out = torch_bwattn.sdpa(query, key, value)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    assert (out - exact).abs().max() < 2e-6

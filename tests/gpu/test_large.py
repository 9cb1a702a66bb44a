"""Sizes past every 16-, 31- and 32-bit limit. The samples are judged where the whole would not fit."""

from __future__ import annotations

import math

import pytest
import torch

import torch_bwattn
from tests.support.attend import judged
from tests.support.cases import with_gradients
from torch_bwattn.testing import Results

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
CHUNK = 1 << 32


@pytest.fixture(autouse=True)
def _enough_memory():
    free, _ = torch.cuda.mem_get_info()
    if free < 60 << 30:
        pytest.skip("needs 60 GiB of free GPU memory")


@pytest.fixture(params=["helion", None])
def pinned(request):
    with torch_bwattn.backend(request.param) if request.param else torch.enable_grad():
        yield


def test_more_than_2_31_elements(pinned, device):
    """Query, key, value and output of 2.2e9 elements each."""
    shape = (33001, 8, 65, 128)
    assert math.prod(shape) > 2**31
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=device, dtype=BF16) for _ in range(3)]
    grad = torch.randn(shape, device=device, dtype=BF16)
    results = with_gradients(*tensors, grad_out=grad)
    entries = [0, 1, 2**31 // math.prod(shape[1:]) - 1, 2**31 // math.prod(shape[1:]), 33000]
    some = [tensor[entries] for tensor in (*tensors, grad)]
    part = Results(*(None if t is None else t[entries] for t in (
        results.out, None, results.dq, results.dk, results.dv)))  # fmt: skip
    judged(part, *some[:3], grad_out=some[3])


def test_strides_past_2_31(pinned, device):
    """Few elements, far apart: two heads of a packed QKV buffer of 3.2e9 elements."""
    length, heads, width = 65537, 64, 128
    torch.manual_seed(0)
    buffer = torch.empty(2, length, 3, heads, width, device=device, dtype=BF16)
    buffer[:, :, :, -2:] = torch.randn(2, length, 3, 2, width, device=device, dtype=BF16)
    query, key, value = (buffer[:, :, index, -2:].transpose(1, 2) for index in range(3))
    assert query.numel() < 2**31
    assert sum((size - 1) * stride for size, stride in zip(query.shape, query.stride(), strict=True)) > 2**31
    rows = slice(length - 300, length)
    out, lse = torch_bwattn.sdpa(query[:, :, rows], key, value, return_lse=True)
    judged(Results(out, lse), query[:, :, rows], key, value, chunk_bytes=CHUNK)
    columns = slice(length - 1000, length)
    few = [query[:, :, rows], key[:, :, columns], value[:, :, columns]]
    results = with_gradients(*few)
    judged(results, *few, grad_out=torch.ones_like(results.out))


@pytest.mark.parametrize("causal", [False, True])
def test_65537_queries_and_keys(pinned, causal, device):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 1, 65537, 64, device=device, dtype=BF16) for _ in range(3)]
    grad = torch.randn(1, 1, 65537, 64, device=device, dtype=BF16)
    results = with_gradients(*tensors, grad_out=grad, is_causal=causal)
    judged(results, *tensors, is_causal=causal, grad_out=grad, chunk_bytes=CHUNK)


@pytest.mark.parametrize("shape", [(46401, 46401), (70001, 30700), (1, 46345)], ids=str)
def test_wide_bool_masks(pinned, shape, device):
    """Rows of more than 46,344 entries, and masks of more than 2^31."""
    rows, columns = shape
    torch.manual_seed(0)
    query = torch.randn(1, 1, rows, 64, device=device, dtype=BF16)
    key, value = (torch.randn(1, 1, columns, 64, device=device, dtype=BF16) for _ in range(2))
    mask = torch.rand(shape, device=device) < 0.7
    grad = torch.randn(1, 1, rows, 64, device=device, dtype=BF16)
    results = with_gradients(query, key, value, mask, grad_out=grad)
    judged(results, query, key, value, mask, grad_out=grad, chunk_bytes=CHUNK)


def test_no_quadratic_memory(pinned, device):
    """Forward and backward at 32,768 hold far less than the gigabyte that a bf16 score matrix of one head takes."""
    query, key, value = (torch.randn(1, 2, 32768, 64, device=device, dtype=BF16).requires_grad_() for _ in range(3))
    bias = torch.randn(1, 1, 1, 32768, device=device, dtype=BF16).requires_grad_()
    for mask in (None, bias):
        leaves = [query, key, value] if mask is None else [query, key, value, mask]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = torch_bwattn.sdpa(query, key, value, mask, return_lse=True)
        torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
        assert torch.cuda.max_memory_allocated() - before < 32768 * 32768 // 4


def test_peak_memory_of_the_backward(device):
    """At most the outputs, LSE and delta, and an fp32 accumulator for dQ."""
    shape = (4, 32, 8192, 128)
    with torch_bwattn.backend("helion"):
        leaves = [torch.randn(shape, device=device, dtype=BF16).requires_grad_() for _ in range(3)]
        grad = torch.randn(shape, device=device, dtype=BF16)
        for _ in range(2):  # the first compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = torch_bwattn.sdpa(*leaves, is_causal=True)
            gradients = torch.autograd.grad(out, leaves, grad)
            peak = torch.cuda.max_memory_allocated() - before
            del out, gradients
        elements, rows = math.prod(shape), math.prod(shape[:-1])
        assert peak <= 4 * elements + 2 * 4 * rows + 4 * 2 * elements + (1 << 20)

"""CUDA graphs, torch.compile on the GPU, determinism, and that new lengths compile nothing."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import torch_bwattn
from tests.support.attend import count, judged
from tests.support.graphs import Graphs
from torch_bwattn.testing import Results

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(params=["helion", None], autouse=True)
def _pinned(request):
    torch._dynamo.reset()
    with torch_bwattn.backend(request.param) if request.param else torch.enable_grad():
        yield
    torch._dynamo.reset()


def leaves(length=333, heads=(4, 2), width=64, device="cuda"):
    shapes = ((heads[0], length, width), (heads[1], length, width), (heads[1], length, width))
    return [torch.randn(2, *shape, device=device, dtype=BF16).requires_grad_() for shape in shapes]


def attend(query, key, value):
    return torch_bwattn.sdpa(query, key, value, is_causal=True, enable_gqa=True)


OPTIONS = {"is_causal": True, "enable_gqa": True}


def check(out, gradients, tensors, grad):
    judged(Results(out, None, *gradients), *tensors, **OPTIONS, grad_out=grad)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode, device):
    step = torch.compile(attend, fullgraph=True, mode=mode)
    for _ in range(5):
        tensors = leaves()
        torch.compiler.cudagraph_mark_step_begin()
        out = step(*tensors)
        grad = torch.randn_like(out)
        gradients = torch.autograd.grad(out, tensors, grad)
        check(out.clone(), [gradient.clone() for gradient in gradients], tensors, grad)


def test_compiled_dynamic(device):
    graphs = Graphs()
    step = torch.compile(attend, fullgraph=True, dynamic=True, backend=graphs)
    for length in (333, 2, 3, 17, 63, 65, 100, 127, 129, 200, 255, 257, 300, 511, 513, 700, 1000, 1023, 1025, 1500):
        tensors = leaves(length)
        out = step(*tensors)
        grad = torch.randn_like(out)
        check(out, torch.autograd.grad(out, tensors, grad), tensors, grad)
    assert len(graphs.dynamo) == 1


def test_captured_by_hand(device):
    """Forward and backward in one CUDA graph, replayed on new inputs."""
    tensors = leaves()
    grad = torch.randn_like(tensors[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(attend(*tensors), tensors, grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*tensors)
        gradients = torch.autograd.grad(out, tensors, grad)
    for _ in range(3):
        with torch.no_grad():
            for tensor in (*tensors, grad):
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        torch.cuda.synchronize()
        check(out.detach().clone(), [gradient.clone() for gradient in gradients], tensors, grad)


def test_dropout_in_a_cuda_graph_changes_with_each_replay(device):
    query = torch.zeros(1, 2, 64, 64, device=device, dtype=BF16)
    value = torch.eye(64, device=device, dtype=BF16).expand(1, 2, 64, 64)
    torch_bwattn.sdpa(query, query, value, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch_bwattn.sdpa(query, query, value, dropout_p=0.5)
    seen = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        seen.append(out.clone())
    assert not torch.equal(*seen)
    assert 0.4 < (seen[0] == 0).float().mean() < 0.6


@pytest.mark.parametrize("mask", [None, "bool", "additive"])
def test_deterministic(mask, device):
    query, key, value = leaves(1000, (8, 2))
    shown = {None: None, "bool": torch.rand(1000, 1000, device=device) < 0.8}.get(mask)
    wanted = [query, key, value]
    if mask == "additive":
        shown = torch.randn(8, 1, 1000, device=device, dtype=BF16).requires_grad_()
        wanted.append(shown)
    grad = torch.randn_like(query)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(4):
            out, lse = torch_bwattn.sdpa(query, key, value, shown, enable_gqa=True, return_lse=True)
            runs.append((out, lse, *torch.autograd.grad((out, lse), wanted, (grad, torch.ones_like(lse)))))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_new_lengths_compile_nothing(device):
    """A compilation takes a second and more; a call at a new length, or at length 1, must not.

    Each power of two may have kernels of its own, which are compiled, or checked, at the first length up to it.
    """
    for length in (13, 31, 60, 111, 250, 500, 999, 2000, 4000, 9999):
        tensors = leaves(length)
        torch.autograd.grad(attend(*tensors).sum(), tensors)
    torch.cuda.synchronize()
    slowest = 0.0
    for length in (1, 2, 16, 20, 32, 33, 64, 127, 128, 129, 256, 511, 512, 777, 1024, 1025, 2048, 4097):
        tensors = leaves(length)
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.autograd.grad(attend(*tensors).sum(), tensors)
        torch.cuda.synchronize()
        slowest = max(slowest, time.perf_counter() - start)
    assert slowest < 0.5, f"{slowest:.2f} s"


def test_patched(device):
    tensors = leaves()
    torch_bwattn.reset_call_counts()
    with torch_bwattn.patch_sdpa():
        out = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    grad = torch.randn_like(out)
    check(out, torch.autograd.grad(out, tensors, grad), tensors, grad)
    assert count() == 1
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        with torch_bwattn.patch_sdpa():
            assert torch.equal(F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True), expected)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_the_tensors_device_not_the_current_one():
    other = torch.device("cuda", 1)
    with torch.cuda.device(0):
        tensors = leaves(device=other)
        out = attend(*tensors)
        grad = torch.randn_like(out)
        check(out, torch.autograd.grad(out, tensors, grad), tensors, grad)

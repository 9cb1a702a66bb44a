"""The inputs of public reports (support/cases.py), on the GPU."""

from __future__ import annotations

import inspect

import pytest
import torch

import torch_bwattn
from tests.support import cases
from tests.support.attend import judged

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def on_the_gpu(case, device, dtype):
    """Cases that leave the width open take one that other tests compile for too."""
    torch.manual_seed(0)
    options = {"width": 64} if "width" in inspect.signature(case).parameters else {}
    case(device, dtype, **options)


@pytest.mark.parametrize("case", cases.CPU_CASES, ids=lambda case: case.__name__)
def test_bf16(case, device, poisoned):
    on_the_gpu(case, device, BF16)


FP16_CASES = [c for c in cases.CPU_CASES if c.__name__[5:7] in {"03", "04", "05", "07", "10", "12", "14"}]


@pytest.mark.parametrize("case", FP16_CASES, ids=lambda case: case.__name__)
def test_fp16(case, device, poisoned):
    on_the_gpu(case, device, FP16)


FP32_CASES = [c for c in cases.CPU_CASES if c.__name__[5:7] in {"08", "11", "13", "15"}]


@pytest.mark.parametrize("case", FP32_CASES, ids=lambda case: case.__name__)
def test_fp32(case, device, poisoned):
    on_the_gpu(case, device, FP32)


PINNED_CASES = [
    c for c in cases.CPU_CASES if c.__name__[5:7] in {"03", "04", "06", "07", "08", "10", "11", "12", "13", "15"}
]


@pytest.mark.parametrize("case", PINNED_CASES, ids=lambda case: case.__name__)
def test_pinned_to_helion(case, device, poisoned):
    with torch_bwattn.backend("helion"):
        on_the_gpu(case, device, FP32 if case.__name__.startswith("case_08") else BF16)


@pytest.mark.parametrize("pin", [None, "helion"])
@pytest.mark.parametrize("shape", [(65536, 8, 4, 64), (1, 65536, 10, 16), (70001, 1, 3, 64)], ids=str)
def test_case_09_many_batches_or_heads(shape, pin, device):
    torch.manual_seed(0)
    if pin is None:
        cases.case_09_many_batches_or_heads(device, BF16, (shape,))
        return
    with torch_bwattn.backend(pin):
        cases.case_09_many_batches_or_heads(device, BF16, (shape,))


@pytest.mark.parametrize("pin", ["helion", None])
def test_case_16_side_stream(pin, device):
    """A call right after its input was written, on the same side stream, with the default stream idle or busy."""
    queries = [torch.randn(2, 4, 333, 64, device=device, dtype=BF16) for _ in range(3)]
    buffer = torch.zeros_like(queries[0]).requires_grad_()
    stream = torch.cuda.Stream()
    results = []
    with torch_bwattn.backend(pin) if pin else torch.enable_grad():
        torch_bwattn.sdpa(buffer, buffer, buffer, is_causal=True).sum().backward()
        torch.cuda.synchronize()
        for query in queries:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                with torch.no_grad():
                    buffer.copy_(query)
                out = torch_bwattn.sdpa(buffer, buffer, buffer, is_causal=True)
                (grad,) = torch.autograd.grad(out.float().square().sum(), buffer)
                results.append((out.detach().clone(), grad.clone()))
        stream.synchronize()
        for query, (out, grad) in zip(queries, results, strict=True):
            judged(out, query, query, query, is_causal=True)
            leaf = query.clone().requires_grad_()
            (again,) = torch.autograd.grad(
                torch_bwattn.sdpa(leaf, leaf, leaf, is_causal=True).float().square().sum(), leaf
            )
            torch.testing.assert_close(grad, again, atol=1e-2, rtol=1e-2)

"""Autocast: fp32 and low-precision inputs meet in the autocast dtype, fp64 stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_bwattn
from torch_bwattn.testing import Results, judge, oracle, pt_reference

ENTRIES = {
    "function": torch_bwattn.sdpa,
    "op": torch.ops.bwattn.sdpa,
    "op_lse": lambda *args, **kwargs: torch.ops.bwattn.sdpa_with_lse(*args, **kwargs)[0],
}
LOW = (torch.bfloat16, torch.float16)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtypes", ["www", "lll", "wll", "lww", "wlw"])
def test_mixes_are_cast(entry, low, dtypes):
    query, key, value = (
        normal(2, 2, 9, 8, dtype=torch.float32 if kind == "w" else low).requires_grad_() for kind in dtypes
    )
    with torch.autocast("cpu", low):
        out = ENTRIES[entry](query, key, value, is_causal=True)
        assert F.scaled_dot_product_attention(query, key, value).dtype == low
    assert out.dtype == low
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (query, key, value), grad_out)
    assert [grad.dtype for grad in grads] == [tensor.dtype for tensor in (query, key, value)]
    cast = [tensor.detach().to(low) for tensor in (query, key, value)]
    options = {"is_causal": True, "grad_out": grad_out}
    results = Results(out, None, *(grad.to(low) for grad in grads))
    for verdict in judge(results, oracle(*cast, **options), pt_reference(*cast, **options)):
        verdict.check()


@pytest.mark.parametrize("entry", ENTRIES)
def test_fp64_stays(entry):
    query = normal(2, 2, 9, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(query, query, query).dtype == torch.float64
        out = ENTRIES[entry](query, query, query)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, oracle(query, query, query).out)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.float32, "low", torch.bool], ids=str)
def test_masks(low, mask_dtype):
    query = normal(2, 2, 9, 8)
    mask = normal(9, 9)
    mask = mask > 0 if mask_dtype == torch.bool else mask.to(low if mask_dtype == "low" else mask_dtype)
    with torch.autocast("cpu", low):
        out = torch_bwattn.sdpa(query, query, query, mask)
    assert out.dtype == low
    with torch.autocast("cpu", low):
        expected = F.scaled_dot_product_attention(query, query, query, mask)
    # PyTorch casts a mask to the autocast dtype as well; one left in fp32 is nearer to the truth.
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
    if mask.dtype != torch.float32:
        args = (*[query.to(low)] * 3, mask)
        judge(Results(out), oracle(*args), pt_reference(*args))[0].check()


def test_lse_stays_in_fp32():
    query = normal(2, 2, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        _, lse = torch_bwattn.sdpa(query, query, query, return_lse=True)
    assert lse.dtype == torch.float32


def test_without_autocast_mixes_raise():
    query = normal(2, 2, 9, 8)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="key"):
        torch_bwattn.sdpa(query, query.bfloat16(), query)


def test_fp64_does_not_mix():
    query, wide = normal(2, 2, 9, 8), normal(2, 2, 9, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(query, wide, query)
        with pytest.raises((TypeError, ValueError, RuntimeError), match="key"):
            torch_bwattn.sdpa(query, wide, query)


def test_disabled_inside():
    query = normal(2, 2, 9, 8)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert torch_bwattn.sdpa(query, query, query).dtype == torch.float32


def test_misuse_under_autocast_still_raises():
    query = normal(2, 2, 9, 8)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises((TypeError, ValueError, RuntimeError), match="query"):
        torch_bwattn.sdpa(query.int(), query.int(), query.int())


def test_under_compile():
    query = normal(2, 2, 9, 8).requires_grad_()

    def step(query):
        with torch.autocast("cpu", torch.bfloat16):
            return torch_bwattn.sdpa(query, query, query)

    eager = step(query)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(query)
    assert compiled.dtype == eager.dtype == torch.bfloat16
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.float().sum(), query), torch.autograd.grad(eager.float().sum(), query)
    )

"""The inputs of public reports on which some attention broke, each with the check that it does not break here.

Numbered as in the list they come from. Every function takes the device and a dtype, for the CPU and the GPU alike.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import torch_bwattn
from torch_bwattn.testing import Results, judge, oracle, pt_reference

from .attend import judged
from .calls import Call, Mask, Operand, build, run
from .check import check_call, references


def square(shape: tuple[int, ...], dtype: torch.dtype, **others: Any) -> Call:
    """Query, key and value of one shape."""
    return Call(Operand(shape), Operand(shape), Operand(shape), dtype=dtype, **others)


def with_gradients(query, key, value, mask=None, grad_out=None, **options: Any) -> Results:
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    out = torch_bwattn.sdpa(*leaves, mask, **options)
    grad_out = torch.ones_like(out) if grad_out is None else grad_out
    return Results(out, None, *torch.autograd.grad(out, leaves, grad_out))


def case_01_lengths(device, dtype):
    """A value longer than the key raises and names both lengths."""
    query, key, value = (torch.randn(1, 2, length, 8, device=device).to(dtype) for length in (4, 5, 6))
    with pytest.raises((ValueError, RuntimeError), match=r"(?s)value.*5.*6|value.*6.*5"):
        torch_bwattn.sdpa(query, key, value)


def case_02_nan_in_a_hidden_key(device, dtype, width=8):
    """The bool mask removes the score, whatever it is; a hidden NaN in the value spreads, as 0 * NaN does."""
    query, key, value = (torch.randn(1, 2, 5, width, device=device).to(dtype) for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool, device=device)
    mask[:, 3] = False
    dirty = key.clone()
    dirty[..., 3, :] = math.nan
    out, lse = torch_bwattn.sdpa(query, dirty, value, mask, return_lse=True)
    judged(Results(out, lse), query, key, value, mask)
    dirty = value.clone()
    dirty[..., 3, 2] = math.nan
    out = torch_bwattn.sdpa(query, key, dirty, mask)
    assert out[..., 2].isnan().all()
    assert not out[..., [0, 1, 3, width - 1]].isnan().any()


def case_03_causal_with_odd_scales(device, dtype):
    for scale in (0.0, -2.0):
        for shape in ((1, 1, 4, 8), (2, 3, 70, 8)):
            check_call(square(shape, dtype, is_causal=True, scale=scale, with_lse_grad=True), device)


def case_04_dead_rows(device, dtype, width=8):
    mask = Mask((8, 8), kind="bool", content="dead_rows")
    call = square((2, 2, 8, width), dtype, mask=mask, with_lse_grad=True, seed=1)
    tensors = build(call, device)
    dead = ~tensors.mask.any(-1)
    assert dead.any()
    assert not dead.all()
    results = run(call, tensors)
    assert not results.out[..., dead, :].any()
    assert (results.lse[..., dead] == -math.inf).all()
    assert not results.dq[..., dead, :].any()
    assert all(tensor.isfinite().all() for name, tensor in results.items() if name != "lse")
    check_call(call, device)


def case_05_no_keys_width(device, dtype):
    """(7, 9, 0, 7) in fp16: length 0, causal."""
    query = torch.randn(7, 9, 0, 7, device=device, dtype=dtype).requires_grad_()
    out, lse = torch_bwattn.sdpa(query, query, query, is_causal=True, return_lse=True)
    assert out.shape == (7, 9, 0, 7)
    assert lse.shape == (7, 9, 0)
    (grad,) = torch.autograd.grad(out.sum() + lse.sum(), query)
    assert grad.shape == query.shape


def case_06_memory_order_of_grad_out(device, dtype):
    query, key, value = (torch.randn(2, 2, 49, 32, device=device).to(dtype) for _ in range(3))
    grad = torch.randn(2, 2, 49, 32, device=device).to(dtype)
    expected = with_gradients(query, key, value, grad_out=grad)
    for order in ((0, 1, 3, 2), (0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 2, 3), (2, 3, 0, 1)):
        inverse = [order.index(dim) for dim in range(4)]
        found = with_gradients(query, key, value, grad_out=grad.permute(order).contiguous().permute(inverse))
        for (name, got), (_, want) in zip(found.items(), expected.items(), strict=True):
            assert torch.equal(got, want), name


def case_07_logits_near_minus_120(device, dtype):
    length, width = 704, 64
    query = torch.randn(1, 2, length, width, device=device) * 0.1
    key = torch.randn(1, 2, length, width, device=device) * 0.1
    query[..., 0], key[..., 0] = 1.0, -120.0 * 8
    value = torch.randn(1, 2, length, width, device=device)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    grad = torch.randn(1, 2, length, width, device=device).to(dtype)
    results = with_gradients(query, key, value, mask, grad_out=grad)
    assert all(tensor.isfinite().all() for _, tensor in results.items())
    judged(results, query, key, value, mask, grad_out=grad)


def case_08_storage_offsets(device, dtype):
    shape = (6, 4, 64, 64)
    for offset in (1, 2, 3):
        tensors = []
        for _ in range(3):
            buffer = torch.randn(math.prod(shape) + offset, device=device).to(dtype)
            tensors.append(buffer[offset:].view(shape))
        judged(with_gradients(*tensors), *tensors, grad_out=torch.ones(shape, device=device, dtype=dtype))


def case_09_many_batches_or_heads(device, dtype, shapes=((65536, 8, 4, 64), (1, 65536, 10, 16))):
    for shape in shapes:
        tensors = [torch.randn(shape, device=device).to(dtype) for _ in range(3)]
        grad = torch.randn(shape, device=device).to(dtype)
        results = with_gradients(*tensors, grad_out=grad, is_causal=True)
        # The ends and the middle, and a sample of the rest: the whole in fp64 would be most of the GPU's memory.
        dim = 0 if shape[0] > 1 else 1
        count = shape[dim]
        picked = torch.tensor([*range(64), count // 2, count // 2 + 1, *range(count - 65, count)], device=device)
        some = [tensor.index_select(dim, picked) for tensor in (*tensors, grad)]
        part = Results(*(None if t is None else t.index_select(dim, picked) for t in (
            results.out, None, results.dq, results.dk, results.dv)))  # fmt: skip
        judged(part, *some[:3], is_causal=True, grad_out=some[3])
        for name, tensor in results.items():
            assert tensor.isfinite().all(), name


def case_10_finfo_min(device, dtype):
    """An additive mask of finfo.min over the first 128 of 441 keys, and over all of them in some rows."""
    query, key, value = (torch.randn(2, 2, 441, 32, device=device).to(dtype) for _ in range(3))
    grad = torch.randn(2, 2, 441, 32, device=device).to(dtype)
    for mask_dtype in {dtype, torch.float32}:
        mask = torch.zeros(441, 441, dtype=mask_dtype, device=device)
        mask[:, :128] = torch.finfo(mask_dtype).min
        judged(with_gradients(query, key, value, mask, grad_out=grad), query, key, value, mask, grad_out=grad)
        mask[5:9] = torch.finfo(mask_dtype).min
        results = with_gradients(query, key, value, mask, grad_out=grad)
        judged(results, query, key, value, mask, grad_out=grad)
        if mask_dtype != torch.float16:  # fp16's lowest does not swamp the scores
            mean = value.double().mean(-2, keepdim=True).expand(-1, -1, 4, -1)
            torch.testing.assert_close(results.out[..., 5:9, :].double(), mean, atol=1e-2, rtol=1e-2)


def case_11_one_key(device, dtype):
    """With one key the softmax is 1 and dQ is 0, but for the rounding of two sums that cancel."""
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        query, key, value, grad = (torch.randn(1, 1, 1, 16, generator=generator).to(dtype).to(device) for _ in range(4))
        results = with_gradients(query, key, value, grad_out=grad)
        assert torch.equal(results.out, value)
        assert torch.equal(results.dv, grad)
        for gradient in (results.dq, results.dk):
            assert gradient.isfinite().all()
            assert gradient.abs().max() <= 16 * torch.finfo(torch.float32).eps
        judged(results, query, key, value, grad_out=grad)


def case_12_widths(device, dtype):
    for width in (72, 104):
        for causal in (False, True):
            check_call(square((1, 2, 512, width), dtype, is_causal=causal, with_lse_grad=True), device)


def case_13_one_row_for_all_batches(device, dtype):
    query = torch.randn(3, 4, 17, 16, device=device).to(dtype)
    base = torch.randn(1, 4, 19, 16, device=device).to(dtype).requires_grad_()
    grad = torch.randn(3, 4, 17, 16, device=device).to(dtype)
    expanded = base.expand(3, 4, 19, 16)
    assert expanded.stride(0) == 0
    out = torch_bwattn.sdpa(query, expanded, expanded)
    (found,) = torch.autograd.grad(out, base, grad)
    wide = base.detach().double().requires_grad_()
    full = wide.expand(3, 4, 19, 16)
    reference = oracle(query, full, full, grad_out=grad)
    pt = pt_reference(query, expanded, expanded, grad_out=grad)
    total = (reference.dk + reference.dv).sum(0, keepdim=True)
    low = (pt.dk + pt.dv).sum(0, keepdim=True)
    for verdict in judge(
        Results(out, None, None, found), Results(reference.out, None, None, total), Results(pt.out, None, None, low)
    ):
        verdict.check()


def case_14_no_keys_and_no_queries(device, dtype):
    for rows, columns in ((5, 0), (0, 5), (0, 0)):
        query = torch.randn(2, 3, rows, 8, device=device).to(dtype).requires_grad_()
        key = torch.randn(2, 3, columns, 8, device=device).to(dtype).requires_grad_()
        for causal in (False, True):
            out, lse = torch_bwattn.sdpa(query, key, key, is_causal=causal, return_lse=True)
            assert out.shape == (2, 3, rows, 8)
            assert not out.any()
            assert (lse == -math.inf).all()
            grads = torch.autograd.grad(out.sum(), (query, key))
            assert [grad.shape for grad in grads] == [query.shape, key.shape]
            assert not any(grad.any() for grad in grads)


def case_15_grad_out_of_a_sum_and_of_a_cat(device, dtype):
    query, key, value = (torch.randn(2, 3, 33, 16, device=device).to(dtype).requires_grad_() for _ in range(3))
    leaves = (query, key, value)
    grad_out = torch.ones_like(query)
    summed = torch.autograd.grad(torch_bwattn.sdpa(*leaves).sum(), leaves)
    joined = torch.cat([torch_bwattn.sdpa(*leaves), torch.zeros(2, 3, 33, 16, device=device, dtype=dtype)], dim=-1)
    sliced = torch.autograd.grad(joined[..., :16].sum(), leaves)
    for found in (summed, sliced):
        judged(Results(None, None, *found), query, key, value, grad_out=grad_out)


def case_20_static_cache(device, dtype):
    """Three queries, seven keys and is_causal: aligned at the top left, always."""
    call = Call(Operand((1, 2, 3, 8)), Operand((1, 2, 7, 8)), Operand((1, 2, 7, 8)), dtype=dtype, is_causal=True)
    check_call(call, device)
    tensors = build(call, device)
    out = run(call, tensors).out
    torch.testing.assert_close(out[..., 0, :], tensors.value[..., 0, :])


def case_22_calls_that_differ_in_one_thing(device, dtype):
    call = Call(Operand((1, 2, 37, 16)), Operand((1, 2, 51, 16)), Operand((1, 2, 51, 16)), dtype=dtype, is_causal=True)
    tensors = build(call, device)
    for change in (
        {},
        {"scale": 0.5},
        {"scale": 1.5},
        {"causal_alignment": "bottom_right"},
        {"is_causal": False},
        {"key": Operand((1, 2, 51, 16), "bshd")},
        {"value": Operand((1, 2, 51, 16), "offset")},
        {"value": Operand((1, 2, 51, 16), "stepped")},
        {},
    ):
        changed = dataclasses.replace(call, **change)
        own = build(changed, device)
        results = run(changed, own)
        for verdict in judge(results, *references(changed, own)):
            verdict.check()
    assert torch.equal(build(call, device).query, tensors.query)


CPU_CASES = [
    function
    for name, function in sorted(globals().items())
    if name.startswith("case_") and name != "case_09_many_batches_or_heads"
]

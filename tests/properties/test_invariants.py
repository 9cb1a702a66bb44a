"""Relations that hold between calls: each is judged against the fp64 oracle of the plainer of the two."""

from __future__ import annotations

import dataclasses
import math
import warnings

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right

import torch_bwattn
from tests.strategies import DTYPES, calls, probability, share
from tests.support.calls import Call, Operand, build, run
from tests.support.check import references
from torch_bwattn.testing import Results, judge

FOUR_D = {"ndims": (4,), "layouts": ("contiguous", "bshd"), "features": 0}


def check_same(call: Call, tensors, results: Results) -> None:
    """Judges results of another call that must equal those of this one."""
    for verdict in judge(results, *references(call, tensors)):
        verdict.check()


def plain(call: Call) -> Call:
    """Without zero sizes and partial gradients, which these relations do not need."""
    assume(0 not in (*call.out_shape, *call.scores_shape, call.query.shape[-1]))
    return dataclasses.replace(call, needs_grad=(True, True, True), with_out_grad=True)


@settings(max_examples=share(0.4))
@given(call=calls(kind="causal", **FOUR_D))
def test_causal_is_a_triangular_mask(call):
    call = plain(call)
    tensors = build(call)
    rows, columns = call.scores_shape[-2:]
    diagonal = columns - rows if call.causal_alignment == "bottom_right" else 0
    tensors.mask = torch.ones(rows, columns, dtype=torch.bool).tril(diagonal)
    masked = dataclasses.replace(call, is_causal=False, causal_alignment="top_left")
    results = run(masked, tensors)
    tensors.mask = None
    check_same(call, tensors, results)


@settings(max_examples=share(0.4))
@given(call=calls(kind="bool", **FOUR_D))
def test_bool_mask_is_an_additive_mask_of_infinities(call):
    call = plain(call)
    tensors = build(call)
    additive = torch.zeros(tensors.mask.shape, dtype=call.dtype).masked_fill(~tensors.mask, -math.inf)
    results = run(call, dataclasses.replace(tensors, mask=additive))
    check_same(call, tensors, results)


@settings(max_examples=share(0.4))
@given(call=calls(kind="plain", **FOUR_D), group=st.sampled_from((2, 3)))
def test_gqa_is_repeated_heads(call, group):
    call = plain(call)
    assume(call.query.shape[:-2] == call.key.shape[:-2] == call.value.shape[:-2] and not call.enable_gqa)
    batch, heads, rows, width = call.query.shape
    query = Operand((batch, heads * group, rows, width), call.query.layout)
    grouped = dataclasses.replace(call, query=query, enable_gqa=True)
    tensors = build(grouped)
    repeated = dataclasses.replace(
        tensors,
        key=tensors.key.detach().repeat_interleave(group, 1).requires_grad_(),
        value=tensors.value.detach().repeat_interleave(group, 1).requires_grad_(),
    )
    results = run(dataclasses.replace(grouped, enable_gqa=False), repeated)
    results.dk = results.dv = None  # summed over the group in one call, and not in the other
    check_same(grouped, tensors, results)


@settings(max_examples=share(0.4))
@given(call=calls(kind="plain", dtype=torch.float32, **FOUR_D), data=st.data())
def test_key_blocks_merge_by_their_lse(call, data):
    """What a ring of devices does: attention over parts of the keys, merged with weights exp(lse_part - lse)."""
    call = plain(call)
    tensors = build(call)
    columns = call.key.shape[-2]
    cut = data.draw(st.integers(0, columns))
    parts = []
    for part in (slice(0, cut), slice(cut, columns)):
        key, value = (tensor[..., part, :] for tensor in (tensors.key, tensors.value))
        parts.append(torch_bwattn.sdpa(tensors.query, key, value, **call.arguments(), return_lse=True))
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * (part - lse).exp().unsqueeze(-1) for out, part in parts)
    gradients = torch.autograd.grad(merged, (tensors.query, tensors.key, tensors.value), tensors.grad_out)
    call = dataclasses.replace(call, with_lse_grad=False)
    tensors.grad_lse = None
    reference, pt = references(call, tensors)
    for verdict in judge(Results(merged, lse, *gradients), reference, pt):
        # Three rounded results make up one here, so the bound of one is too narrow by as much.
        assert not verdict.mismatch
        assert verdict.error <= 4 * verdict.bound, verdict


@settings(max_examples=share(0.5))
@given(call=calls(kind="bool", **FOUR_D), poisoned=st.sampled_from(("key", "query", "value")), data=st.data())
def test_nan_reaches_only_what_sees_it(call, poisoned, data):
    """A hidden key's NaN changes nothing; a NaN in a query row or in a value column stays there."""
    call = plain(call)
    call = dataclasses.replace(call, with_lse_grad=False)
    tensors = build(call)
    rows, columns = call.scores_shape[-2:]
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    mask = tensors.mask.expand(call.mask_shape).clone()
    mask[..., column] = False
    tensors.mask = mask
    clean = references(call, tensors)
    leaves = {"query": tensors.query, "key": tensors.key, "value": tensors.value}
    values = leaves[poisoned].detach().clone()
    if poisoned == "query":
        values[..., row, :] = math.nan
    elif poisoned == "key":
        values[..., column, :] = math.nan
    else:
        values[..., column, 0] = math.nan
    dirty = dataclasses.replace(tensors, **{poisoned: values.requires_grad_()})
    results = run(call, dirty)
    if poisoned == "key":
        for verdict in judge(Results(results.out, results.lse, None, None, results.dv), *clean):
            verdict.check()
        return
    spoilt = torch.zeros(call.out_shape, dtype=torch.bool)
    if poisoned == "query":
        # A row that sees no key is zero whatever its query holds.
        spoilt[..., row, :] = mask.any(-1).expand(call.scores_shape[:-1])[..., row].unsqueeze(-1)
    else:
        spoilt[..., 0] = True  # 0 * NaN, as in PyTorch's math path
        alive = mask.any(-1).expand(call.scores_shape[:-1])
        spoilt[..., 0] &= alive | results.out.isnan()[..., 0]  # a dead row may go either way
    assert torch.equal(results.out.isnan(), spoilt)
    rest = torch.where(spoilt, clean[0].out.to(call.dtype), results.out)
    judge(Results(rest), *clean)[0].check()


@settings(max_examples=share(0.3))
@given(data=st.data())
def test_batch_entries_do_not_meet(data):
    call = plain(data.draw(calls(dtype=data.draw(st.sampled_from(DTYPES)), kind="causal", **FOUR_D)))
    assume(call.query.shape[:-3] == call.key.shape[:-3] == call.value.shape[:-3] == (call.batch[0],))
    assume(call.batch[0] > 1)
    tensors = build(call)
    whole = run(call, tensors)
    entry = data.draw(st.integers(0, call.query.shape[0] - 1))
    if probability(data.draw, 50):
        spoilt = tensors.key.detach().clone()
        spoilt[torch.arange(call.key.shape[0]) != entry] = math.nan
        tensors.key = spoilt.requires_grad_()
        whole = run(call, tensors)
    one = build(call)
    single = torch_bwattn.sdpa(*(t[entry : entry + 1] for t in (one.query, one.key, one.value)), **call.arguments())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(call.dtype, 2e-2) * max(1.0, call.magnitude)
    torch.testing.assert_close(whole.out[entry : entry + 1], single, atol=tolerance, rtol=0)


@settings(max_examples=share(0.2))
@given(call=calls(kind="causal", dtype=torch.float32, **FOUR_D))
def test_causal_bias_object_is_bottom_right(call):
    call = dataclasses.replace(plain(call), causal_alignment="bottom_right", enable_gqa=False)
    assume(call.query.shape[:-2] == call.key.shape[:-2] == call.value.shape[:-2])
    tensors = build(call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it gives NaN where rows see nothing: PyTorch's does, this must not
        bias = causal_lower_right(*call.scores_shape[-2:])
    with torch_bwattn.patch_sdpa():
        out = torch.nn.functional.scaled_dot_product_attention(
            tensors.query, tensors.key, tensors.value, bias, scale=call.scale
        )
    judge(Results(out), *references(call, tensors))[0].check()

"""The accuracy rule itself: its figures, its references, and that it tells right from wrong."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_bwattn.testing import Accuracy, Results, accuracy, check_accuracy, judge, oracle, pt_reference

from .support.emulate import MUTANTS, emulate


def inputs(dtype, *, heads=(4, 4), rows=33, columns=47, width=16, value_width=16, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads[0], rows, width), (heads[1], columns, width), (heads[1], columns, value_width))
    query, key, value = (torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value, torch.randn(batch, heads[0], rows, value_width, generator=generator).to(dtype)


def math_path(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


class TestRule:
    def test_figures(self):
        ref = torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)
        out = torch.tensor([1.0, 2.0, -4.25]).bfloat16()
        pt = torch.tensor([1.0, 2.125, -4.0]).bfloat16()
        verdict = accuracy(out, ref, pt, factor=2.0)
        low = ref.bfloat16()
        floor = 2 * (((low + 0.3) - 0.3) - low).abs().max().item()
        assert (verdict.error, verdict.pt_error, verdict.floor) == (0.25, 0.125, floor)
        assert verdict.worst == (2,)
        assert verdict.bound == 2 * 0.125 + floor
        assert verdict.passed

    def test_factor_and_bound(self):
        ref = torch.zeros(4, dtype=torch.float64)
        pt = torch.full((4,), 0.01)
        assert accuracy(torch.full((4,), 0.025), ref, pt, factor=3.0).passed
        failed = accuracy(torch.full((4,), 0.025), ref, pt, factor=2.0, name="dq")
        assert not failed.passed
        with pytest.raises(AssertionError, match=r"dq: FAILED.*2\.500e-02.*2 \* max\|pt - ref\| 1\.000e-02"):
            failed.check()

    def test_check_returns_the_figures(self):
        ref = torch.ones(3, dtype=torch.float64)
        assert isinstance(check_accuracy(ref.float(), ref, ref.float()), Accuracy)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_not_finite_where_the_reference_is(self, bad):
        ref = torch.ones(2, 3, dtype=torch.float64)
        out = ref.float()
        out[1, 2] = bad
        with pytest.raises(AssertionError, match=r"1 of 6 positions, first at \[1, 2\]"):
            check_accuracy(out, ref, ref.float())

    @pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
    def test_special_values_must_match(self, special):
        ref = torch.tensor([1.0, special], dtype=torch.float64)
        assert accuracy(torch.tensor([1.0, special]), ref, ref.float()).passed
        for other in {0.0, math.nan, math.inf, -math.inf} - {special}:
            if not (math.isnan(special) and math.isnan(other)):
                assert not accuracy(torch.tensor([1.0, other]), ref, ref.float()).passed

    def test_overflow_of_the_dtype(self):
        ref = torch.tensor([1e6, 1.0], dtype=torch.float64)
        assert accuracy(torch.tensor([math.inf, 1.0]).half(), ref, ref.half()).passed
        assert not accuracy(torch.tensor([6e4, 1.0]).half(), ref, ref.half()).passed

    def test_shapes_must_match(self):
        ref = torch.zeros(2, 3, dtype=torch.float64)
        assert "shapes differ" in accuracy(torch.zeros(3, 2), ref, ref).mismatch
        assert not accuracy(torch.zeros(3, 2), ref, ref).passed

    def test_empty(self):
        ref = torch.zeros(2, 0, dtype=torch.float64)
        assert accuracy(torch.zeros(2, 0), ref, ref).passed

    def test_judge_wants_its_references(self):
        ref = torch.zeros(2, dtype=torch.float64)
        with pytest.raises(ValueError, match="dq is missing"):
            judge(Results(out=ref, dq=ref), Results(out=ref), Results(out=ref))


class TestReferences:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("case", ["plain", "causal", "gqa", "bool", "additive", "scale"])
    def test_equal_the_math_backend(self, dtype, case):
        query, key, value, grad = inputs(dtype, heads=(4, 2) if case == "gqa" else (4, 4))
        arguments: dict = {}
        if case == "causal":
            arguments["is_causal"] = True
        if case == "gqa":
            arguments["enable_gqa"] = True
        if case == "scale":
            arguments["scale"] = -0.5
        if case == "bool":
            arguments["attn_mask"] = torch.rand(33, 47) < 0.5
        if case == "additive":
            arguments["attn_mask"] = torch.randn(4, 1, 47).to(dtype)
        pt = pt_reference(query, key, value, grad_out=grad, **arguments)
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        out = math_path(*leaves, **arguments)
        expected = [out, *torch.autograd.grad(out, leaves, grad)]
        for got, want in zip((pt.out, pt.dq, pt.dk, pt.dv), expected, strict=True):
            assert torch.equal(got, want)
        if arguments.get("attn_mask") is not None and case == "additive":
            arguments["attn_mask"] = arguments["attn_mask"].double()
        wide = math_path(query.double(), key.double(), value.double(), **arguments)
        assert torch.equal(oracle(query, key, value, **arguments).out, wide)

    @pytest.mark.parametrize("reference", [oracle, pt_reference])
    @pytest.mark.parametrize("case", ["causal", "bottom_right", "bool", "additive", "dropout"])
    @pytest.mark.parametrize("gqa", [False, True])
    def test_chunks_change_nothing(self, reference, case, gqa):
        query, key, value, grad = inputs(torch.float32, heads=(4, 2) if gqa else (4, 4), rows=9, columns=11)
        key = key[:1]
        arguments: dict = {"enable_gqa": gqa, "grad_out": grad, "grad_lse": torch.randn(2, 4, 9)}
        if case in ("causal", "bottom_right"):
            arguments["is_causal"] = True
            arguments["causal_alignment"] = "bottom_right" if case == "bottom_right" else "top_left"
        elif case != "dropout":
            mask = torch.randn(4, 1, 11)
            arguments["attn_mask"] = mask if case == "additive" else mask > 0
            arguments["needs_mask_grad"] = case == "additive"
        else:
            arguments.update(dropout_p=0.3, keep_mask=torch.rand(2, 4, 9, 11) > 0.3)
        whole = reference(query, key, value, **arguments)
        tolerance = 1e-12 if reference is oracle else 3e-6
        for chunk_bytes in (1, 1000, 5000, 20000):
            pieces = reference(query, key, value, chunk_bytes=chunk_bytes, **arguments)
            for name, tensor in whole.items():
                torch.testing.assert_close(getattr(pieces, name), tensor, atol=tolerance, rtol=0, msg=name)

    def test_lse_and_its_gradient(self):
        query, key, value, _ = inputs(torch.float64)
        mask = torch.randn(33, 47, dtype=torch.float64)
        mask[5] = -math.inf
        grad_lse = torch.randn(2, 4, 33, dtype=torch.float64)
        found = oracle(query, key, value, mask, grad_lse=grad_lse, needs_mask_grad=True)
        scores = query @ key.mT / 4 + mask
        probabilities = torch.softmax(scores, -1).nan_to_num(0.0)
        torch.testing.assert_close(found.lse, torch.logsumexp(scores, -1))
        assert (found.lse[..., 5] == -math.inf).all()
        torch.testing.assert_close(found.dq, grad_lse.unsqueeze(-1) * (probabilities @ key) / 4)
        torch.testing.assert_close(found.dmask, (grad_lse.unsqueeze(-1) * probabilities).sum((0, 1)))
        assert not found.dv.any()

    def test_dropout_needs_its_mask(self):
        query, key, value, _ = inputs(torch.float32)
        with pytest.raises(ValueError, match="keep_mask"):
            oracle(query, key, value, dropout_p=0.5)
        assert not oracle(query, key, value, dropout_p=1.0).out.any()

    def test_dead_rows_have_finite_gradients(self):
        query, key, value, grad = inputs(torch.float64)
        mask = torch.ones(33, 47, dtype=torch.bool)
        mask[[0, 7]] = False
        found = oracle(query, key, value, mask, grad_out=grad, grad_lse=torch.ones(2, 4, 33))
        assert all(tensor.isfinite().all() for tensor in (found.out, found.dq, found.dk, found.dv))
        assert not found.dq[..., [0, 7], :].any()


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def verdicts(dtype, mutant, rows, columns, magnitude=1.0):
    query, key, value, grad = inputs(dtype, heads=(4, 2), rows=rows, columns=columns)
    query, key, value = query * magnitude, key * magnitude, value * magnitude
    mask = torch.randn(rows, columns).to(dtype) if mutant.startswith("dmask") else None
    arguments: dict = {
        "attn_mask": mask,
        "is_causal": mask is None,
        "enable_gqa": True,
        "causal_alignment": "bottom_right" if mask is None and rows <= columns else "top_left",
        "grad_out": grad,
        "grad_lse": torch.randn(2, 4, rows),
    }
    keep = None
    if mutant.startswith("dropout"):
        keep = torch.rand(2, 4, rows, columns) > 0.25
        arguments.update(dropout_p=0.25, keep_mask=keep)
    reference = oracle(query, key, value, needs_mask_grad=mask is not None, **arguments)
    pt = pt_reference(query, key, value, needs_mask_grad=mask is not None, **arguments)
    return judge(emulate(query, key, value, mutant=mutant, **arguments), reference, pt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (1, 3), (5, 9), (33, 47), (100, 130)], ids=str)
@pytest.mark.parametrize("mutant", ["", "dropout", "dmask"])
def test_a_right_kernel_passes(dtype, size, mutant):
    for verdict in verdicts(dtype, mutant, *size):
        verdict.check()


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("seed", range(20))
def test_equal_columns_added_one_by_one_pass(seed, width):
    """Their roundings repeat, so they do not average: an fp32 kernel without pairwise sums is still right."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, 1, rows, 1, generator=generator).expand(-1, -1, -1, width) for rows in (1, 2))
    value = torch.randn(1, 1, 2, 16, generator=generator)
    scores = torch.zeros(1, 1, 1, 2)
    for column in range(width):
        term = query[..., column, None].double() * key[..., column].double().unsqueeze(-2)
        scores = (scores.double() + term).float()
    scores = (scores * width**-0.5).double()
    out = (torch.softmax(scores, -1) @ value.double()).float()
    results = Results(out, torch.logsumexp(scores, -1).float())
    for verdict in judge(results, oracle(query, key, value), pt_reference(query, key, value)):
        verdict.check()


@pytest.mark.parametrize("rows", [2, 15])
@pytest.mark.parametrize("seed", range(20))
def test_equal_rows_pass(seed, rows):
    """So are their roundings, which add up in dK and dV: where one key has all the weight, there is little else."""
    generator = torch.Generator().manual_seed(seed)
    query, grad_out = (
        torch.randn(1, 1, 1, 256, generator=generator).to(torch.float16).expand(-1, -1, rows, -1) for _ in range(2)
    )
    key, value = (torch.randn(1, 1, 15, 256, generator=generator).to(torch.float16) for _ in range(2))
    key = key * 16  # as a scale of 1 would
    arguments = {"grad_out": grad_out, "grad_lse": torch.zeros(1, 1, rows)}
    reference, pt = (how(query, key, value, **arguments) for how in (oracle, pt_reference))
    for verdict in judge(emulate(query, key, value, **arguments), reference, pt):
        verdict.check()


@pytest.mark.parametrize("logit", [3.0, 8.0, 11.0, 14.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_a_sink_whose_gradient_comes_from_the_stored_output_passes(seed, dtype, logit):
    """A large sink leaves outputs that fp16 stores in few digits; delta and so the sink's gradient come from these."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value, grad_out = (torch.randn(1, 1, 7, 16, generator=generator).to(dtype) for _ in range(4))
    sink = torch.full((1,), logit)
    arguments = {"window_size": (0, 1), "sink": sink, "grad_out": grad_out, "needs_sink_grad": True}
    reference, pt = (how(query, key, value, **arguments) for how in (oracle, pt_reference))
    p_sink = torch.exp(sink - reference.lse).float()
    delta = (reference.out.to(dtype).float() * grad_out.float()).sum(-1)
    results = dataclasses.replace(pt, dsink=-(p_sink * delta).sum().reshape(1))
    for verdict in judge(results, reference, pt):
        verdict.check()


# tf32 is wrong for fp32 only.
@pytest.mark.parametrize(
    ("dtype", "mutant"),
    [(dtype, mutant) for dtype in DTYPES for mutant in MUTANTS if mutant != "tf32" or dtype == torch.float32],
    ids=str,
)
@pytest.mark.parametrize("size", [(5, 9), (33, 47), (100, 130)], ids=str)
def test_a_wrong_kernel_fails(dtype, size, mutant):
    assert not all(verdict.passed for verdict in verdicts(dtype, mutant, *size))


def test_imports_without_hypothesis_and_pytest():
    code = """
import sys
sys.modules["hypothesis"] = sys.modules["pytest"] = None
import torch_bwattn.testing
"""
    subprocess.run([sys.executable, "-c", code], check=True)

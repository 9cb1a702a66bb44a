"""Accuracy where errors pile up: long sums, many heads in a group, large scores. What small problems cannot show."""

from __future__ import annotations

import pytest
import torch

from .support.calls import Call, Mask, Operand
from .support.check import check_call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(2048, 6), (20000, 16), (1500, 1500), (64, 8192)], ids=str)
@pytest.mark.parametrize(("heads", "with_lse_grad"), [((2, 2), False), ((8, 1), True)], ids=str)
def test_gradients_summed_over_many_rows_and_heads(heads, with_lse_grad, size, dtype):
    """A kernel that adds each block's share of dK and dV in the input's precision fails here."""
    rows, columns = size
    if rows * columns > 10**6 and heads != (2, 2):
        heads = (4, 1)
    key = Operand((1, heads[1], columns, 64))
    query = Operand((1, heads[0], rows, 64))
    check_call(Call(query, key, key, dtype=dtype, enable_gqa=True, with_lse_grad=with_lse_grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["causal", "bool", "additive"])
@pytest.mark.parametrize("with_lse_grad", [False, True], ids=["out", "out_and_lse"])
def test_large_scores(with_lse_grad, kind, dtype):
    """Scores of some hundred: P = exp(s - lse) loses what the rounding of s and lse costs, and no more."""
    mask = {"bool": Mask((300, 300), kind="bool"), "additive": Mask((300, 300), kind="own", needs_grad=True)}.get(kind)
    operand = Operand((1, 2, 300, 64), "bshd")
    options = {"is_causal": kind == "causal", "magnitude": 6.0, "with_lse_grad": with_lse_grad}
    check_call(Call(operand, operand, operand, mask, dtype, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 700), (700, 1), (), (1, 2, 700, 700)], ids=str)
def test_mask_gradients_summed_over_many_rows(shape, dtype):
    mask = Mask(shape, kind="own", needs_grad=True)
    operand = Operand((2, 2, 700, 32))
    check_call(Call(operand, operand, operand, mask, dtype, with_lse_grad=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_inputs_broadcast_over_a_large_batch(dtype):
    """dK and dV of a key and value that all batch entries share."""
    shared = Operand((1, 1, 33, 16))
    check_call(Call(Operand((64, 8, 40, 16)), shared, shared, dtype=dtype))

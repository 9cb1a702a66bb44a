"""Lengths, batches and masks past the limits that other kernels hit, on the CPU; tests/gpu has them in full size."""

from __future__ import annotations

import pytest

import torch_bwattn

from .support.calls import Call, Mask, Operand
from .support.check import check_call


@pytest.mark.parametrize("pin", ["auto", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [(3, 65537), (65537, 3)], ids=str)
def test_65537_rows_or_columns(size, causal, pin):
    rows, columns = size
    call = Call(
        Operand((1, 1, rows, 8)),
        Operand((1, 1, columns, 8)),
        Operand((1, 1, columns, 8)),
        is_causal=causal,
        causal_alignment="bottom_right" if causal else "top_left",
        with_lse_grad=True,
    )
    with torch_bwattn.backend(pin):
        check_call(call)


@pytest.mark.parametrize("pin", ["auto", "reference"])
@pytest.mark.parametrize("shape", [(2, 46345), (1, 46345), (1, 70001)], ids=str)
def test_wide_bool_masks(shape, pin):
    columns = shape[1]
    mask = Mask(shape, kind="bool")
    call = Call(Operand((1, 2, 2, 8)), Operand((1, 2, columns, 8)), Operand((1, 2, columns, 8)), mask)
    with torch_bwattn.backend(pin):
        check_call(call)


@pytest.mark.parametrize("shape", [(65537, 1, 2, 4), (1, 65537, 2, 4), (257, 257, 1, 3)], ids=str)
def test_many_batches_and_heads(shape):
    check_call(Call(Operand(shape), Operand(shape), Operand(shape), is_causal=True))


@pytest.mark.parametrize("width", [1, 3, 7, 257, 300, 511])
@pytest.mark.parametrize("value_width", [1, 5, 260])
def test_any_width(width, value_width):
    call = Call(Operand((1, 2, 9, width)), Operand((1, 2, 11, width)), Operand((1, 2, 11, value_width)))
    check_call(call)

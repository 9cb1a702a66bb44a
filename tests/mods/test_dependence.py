"""What of a position values depend on, as it is said and as values show."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.flex.drawn import masks
from torch_bwattn.mods.dependence import Along, differs_by
from torch_bwattn.mods.program import along, evaluate
from torch_bwattn.mods.trace import traced

_TABLE = torch.arange(100)


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (lambda b, h, q, k: h * 2 > b, Along.NOTHING),
        (lambda b, h, q, k: _TABLE[q + 1] > h, Along.QUERIES),
        (lambda b, h, q, k: (q - k) + k > 3, Along.QUERIES),
        (lambda b, h, q, k: k // 2 == b, Along.KEYS),
        (lambda b, h, q, k: _TABLE[(q - k + 20) // 3] > 4, Along.DISTANCE),
        (lambda b, h, q, k: (k - q).abs() % 5 < 2, Along.DISTANCE),
        (lambda b, h, q, k: (5 - (k + 2)) + q > 3, Along.DISTANCE),
        (lambda b, h, q, k: (k - q > 3) & (q - k < h), Along.DISTANCE),
        (lambda b, h, q, k: q + k > 3, Along.SCORES),
        (lambda b, h, q, k: torch.rsub(q, 5, alpha=-1) + k > 3, Along.SCORES),
        (lambda b, h, q, k: torch.sub(q, k, alpha=2) > 3, Along.SCORES),
        (lambda b, h, q, k: 2 * q - k > 3, Along.SCORES),
        (lambda b, h, q, k: (q > 3) & (q - k < 2), Along.SCORES),
    ],
)
def test_kinds(mod, expected):
    program = traced(mod, "mask_mod").program
    assert differs_by(program.steps, [program.result]) is expected


@given(masks())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_values_differ_by_nothing_else(mask):
    found = traced(mask, "mask_mod")
    kind = differs_by(found.program.steps, [found.program.result])
    sizes = (1, 2, 24, 24)
    grid = along([torch.arange(size) for size in sizes])
    (values,) = evaluate(found.program.steps, [found.program.result], grid, found.captured, found.numbers)
    values = values.expand(sizes)
    if kind in (Along.NOTHING, Along.QUERIES):
        assert (values == values[..., :1]).all()
    if kind in (Along.NOTHING, Along.KEYS):
        assert (values == values[..., :1, :]).all()
    if kind is Along.DISTANCE:
        assert (values[..., 1:, 1:] == values[..., :-1, :-1]).all()

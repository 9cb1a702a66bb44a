"""Every pair of padded head widths, with rows that lie on 16-byte boundaries and rows that do not.

The two compile to different kernels, and one of them was once wrong at some pairs only: values narrower than the keys,
rows off the boundaries, silently or by reading shared memory out of bounds.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import torch_bwattn
from tests.support.calls import Call, Operand
from tests.support.check import check_call

pytestmark = pytest.mark.gpu

WIDTHS = (16, 32, 64, 128, 256)
ODD_WIDTHS = (1, 8, 24, 40, 72, 80, 96, 104, 192)


def _call(width: int, value_width: int, layout: str, causal: bool, dtype: torch.dtype) -> Call:
    return Call(
        query=Operand((2, 2, 129, width), layout),
        key=Operand((2, 2, 311, width), layout),
        value=Operand((2, 2, 311, value_width), layout),
        dtype=dtype,
        is_causal=causal,
        grad_out=layout,
        with_lse_grad=True,
    )


@pytest.mark.parametrize("layout", ["bshd", "sliced"])
@pytest.mark.parametrize(("width", "value_width"), list(itertools.product(WIDTHS, WIDTHS)))
def test_pairs_of_widths(width, value_width, layout):
    with torch_bwattn.backend("helion"):
        check_call(_call(width, value_width, layout, causal=True, dtype=torch.float16), "cuda")


@pytest.mark.parametrize("layout", ["bshd", "sliced"])
@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_widths_between(width, layout):
    with torch_bwattn.backend("helion"):
        check_call(_call(width, width, layout, causal=False, dtype=torch.bfloat16), "cuda")


@pytest.mark.parametrize(("width", "value_width"), [(64, 24), (128, 16), (40, 20)])
def test_narrow_values_off_the_boundaries(width, value_width):
    with torch_bwattn.backend("helion"):
        check_call(_call(width, value_width, "sliced", causal=True, dtype=torch.bfloat16), "cuda")

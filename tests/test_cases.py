"""Inputs on which some public attention broke (see support/cases.py), on the CPU.

Cases 16 and the full size of 9 need a GPU (tests/gpu). 17, 18, 19 and 21 are about torch.compile: tests/compile.
"""

from __future__ import annotations

import pytest
import torch

from .support import cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", cases.CPU_CASES, ids=lambda case: case.__name__)
def test_case(case, dtype, device, poisoned):
    torch.manual_seed(0)
    case(device, dtype)


def test_case_09_reduced(device):
    torch.manual_seed(0)
    cases.case_09_many_batches_or_heads(device, torch.float32, ((65536, 2, 2, 4), (1, 65537, 3, 4)))

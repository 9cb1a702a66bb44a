"""What is lowered to tcgen05 is right: on a Blackwell by that, elsewhere through Triton."""

from __future__ import annotations

import types

import pytest
import torch

from tests.gpu.test_candidates import described
from torch_bwattn.backends.helion import flash, flash_backward
from torch_bwattn.selection import drawn

pytestmark = pytest.mark.gpu

BACKEND = types.SimpleNamespace(
    forward=lambda problem, _: flash.Forward(problem),
    backward=flash_backward.Backward,
)


@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"diagonal": 0, "kv_heads": 2}, {"diagonal": -100}, {"diagonal": 20, "low_diagonal": -100},
        {"dtype": torch.float16, "low_diagonal": 3, "kv_len": 1000}, {"softcap": 5.0, "sink_dtype": torch.float32},
        {"mask_dtype": torch.bool, "mask_sizes": (2, 1, 1, 517)},
        {"dtype": torch.float16, "mask_dtype": torch.float16, "mask_sizes": (1, 4, 517, 517)},
    ],
    ids=str,
)  # fmt: skip
def test_forward(width, fields, device):
    problem = described(device, head_dim=width, value_dim=width, **fields)
    assert drawn.failure(BACKEND, "", drawn.draw(problem, device)) == ""


@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("fields", [{"diagonal": 0}, {"diagonal": 0, "kv_heads": 1, "lse_grad": True}], ids=str)
def test_backward(width, fields, device):
    problem = described(device, head_dim=width, value_dim=width, backward=True, **fields)
    for name in flash_backward.offered(problem):
        assert drawn.failure(BACKEND, name, drawn.draw(problem, device)) == "", name

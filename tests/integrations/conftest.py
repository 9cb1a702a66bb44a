"""Every test finds F.scaled_dot_product_attention as PyTorch made it, and leaves it so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_bwattn

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _restored():
    torch._dynamo.reset()
    torch_bwattn.reset_call_counts()
    yield
    torch._dynamo.reset()
    assert F.scaled_dot_product_attention is ORIGINAL

"""The GPU's device. Nothing here or at import of a test asks CUDA anything."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _memory():
    yield
    # The large problems leave tens of GiB in the allocator's cache, which other workers on the GPU need.
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 8 << 30:
        torch.cuda.empty_cache()

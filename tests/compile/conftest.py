"""Each test starts with an empty compiler, and counts what it compiles."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

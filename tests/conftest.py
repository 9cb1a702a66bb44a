"""Hypothesis profiles, the device of a test, and NaN in every piece of unwritten memory."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from .support.poison import poison

_COMMON = {
    "deadline": None,
    "print_blob": True,
    # Without Phase.explain, which runs a failing example many times over.
    "phases": (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink),
    # A drawn problem is some forty choices, and the machines that run this are slow and shared.
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
}
# Each property scales its own share of max_examples, see strategies.share: `ci` draws some 3,000 examples altogether,
# `long` 60,000:  pytest --hypothesis-profile=long
settings.register_profile("ci", max_examples=100, derandomize=True, database=None, **_COMMON)
settings.register_profile("long", max_examples=2100, **_COMMON)
settings.register_profile("quick", max_examples=10, derandomize=True, database=None, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _keep_memory() -> None:
    """Has glibc reuse what is freed instead of asking the kernel for zeroed pages, half of the time of large tests."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


def pytest_configure(config: pytest.Config) -> None:
    # Two workers on two cores: more threads than that only get in each other's way.
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)
        _keep_memory()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    # The device is asked for only if a GPU test was collected, and never at import.
    if gpu_items and not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in gpu_items:
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    """The device of a test; tests/gpu overrides it."""
    return torch.device("cpu")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unwritten memory holds NaN during this test."""
    poison(monkeypatch)

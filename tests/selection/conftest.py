"""Each test has a cache of its own, and starts without what others have met."""

from __future__ import annotations

import pytest

from tests.support import fake_backends
from torch_bwattn import storage
from torch_bwattn.ops import eager, primitive
from torch_bwattn.selection import attempts, choose, on_demand, tables, trust


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BWATTN_CACHE_DIR", str(tmp_path / "cache"))
    for known in (
        storage._told, attempts._failed, trust._known, on_demand._recorded, on_demand._tuned,
        eager._entries, primitive._forward_plans, primitive._backward_plans,
    ):  # fmt: skip
        known.clear()
    for found in (tables.tuned, trust._store):
        found.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def fakes(monkeypatch):
    """Puts fakes in the place of backends, for the choice and for what runs it."""

    def install(can_hang=(), **told):
        fake_backends.install(told, monkeypatch.setattr, can_hang)
        monkeypatch.setattr(attempts, "get_backend", choose.get_backend)

    return install

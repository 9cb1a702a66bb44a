"""Properties run with NaN in every piece of unwritten memory."""

from __future__ import annotations

import pytest

from tests.support.poison import poison


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)

"""As tests/selection."""

from __future__ import annotations

from tests.selection.conftest import cache, fakes  # noqa: F401 (fixtures)

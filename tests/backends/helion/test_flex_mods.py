"""Mods as Helion traces them into a kernel, through Triton's interpreter."""

from __future__ import annotations

import pytest
from hypothesis import given, seed, settings

from tests.flex.emitted import check, drawn_mods

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("part", range(5))
def test_drawn_mods(part):
    """Some 200 in each part."""
    counts = []

    @seed(part)
    @given(drawn_mods())
    @settings(max_examples=6, deadline=None, database=None)
    def run_all(mods):
        counts.append(check(mods))

    run_all()
    assert sum(counts) >= 180

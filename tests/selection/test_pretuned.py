"""The tables that ship, and what may be expected of them where they have no entry."""

from __future__ import annotations

import pytest

from torch_bwattn.selection import choose, tables
from torch_bwattn.selection.choose import get_backend
from torch_bwattn.selection.key import key_of
from torch_bwattn.tuning import problems

TARGETS = [path.stem.replace("sm", "sm_") for path in sorted(tables._SHIPPED.glob("*.json"))]


@pytest.mark.parametrize("target", TARGETS)
def test_a_table_is_one_and_says_where_it_is_from(target):
    contents = tables.shipped(target)
    assert tables.valid(contents)
    assert tables.shipped_name(contents["target"]) == f"{target.replace('_', '')}.json"
    for described in contents["environments"]:
        assert described["driver"]
        assert described["device"]["name"]
        assert all(described["versions"].get(name) for name in tables.VERSIONS_THAT_COUNT)
    for entry in tables.entries_of(contents, "").values():
        times = [one.ms for one in entry.ranking]
        assert times == sorted(times)


def test_choices_for_other_sizes_are_near_the_best(monkeypatch):
    """Each measured problem, as if nothing of its sizes had been measured."""
    for name in ("cute", "helion", "aten"):
        monkeypatch.setattr(type(get_backend(name)), "missing", lambda _: None)
    entries = tables.entries_of(tables.shipped("sm_90a"), "")
    ratios = []
    for key, problem in {key_of(problem): problem for problem in problems.release("sm_90a")}.items():
        others = {other: entry for other, entry in entries.items() if other.sizes != key.sizes}
        times = {one.tunable: one.ms for one in entries[key].ranking} if key in entries else {}
        monkeypatch.setattr(tables, "_shipped_entries", lambda _, others=others: others)
        chosen = choose.unchecked_plan(problem).candidates[0].tunable
        if chosen in times:
            ratios.append(times[chosen] / min(times.values()))
    assert len(ratios) > 150
    assert max(ratios) < 1.15
    assert sum(ratio <= 1.05 for ratio in ratios) > 0.95 * len(ratios)

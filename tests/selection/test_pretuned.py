"""The tables that ship, and what may be expected of them where they have no entry."""

from __future__ import annotations

import dataclasses
import math

import pytest

from torch_bwattn.bench import paper
from torch_bwattn.bench.rows import parse_shape
from torch_bwattn.selection import choose, tables
from torch_bwattn.selection.choose import get_backend
from torch_bwattn.selection.key import key_of
from torch_bwattn.tuning import problems
from torch_bwattn.tuning.problems import of_row

TARGETS = [path.stem.replace("sm", "sm_") for path in sorted(tables._SHIPPED.glob("*.json"))]


@pytest.mark.parametrize("target", TARGETS)
def test_a_table_is_one_and_says_where_it_is_from(target):
    contents = tables.shipped(target)
    assert tables.valid(contents)
    assert tables.shipped_name(contents["target"]) == f"{target.replace('_', '')}.json"
    for described in contents["environments"]:
        assert described["device"]["name"]
        if described.get("predicted"):
            assert described["source"]
            continue
        assert described["driver"]
        assert all(described["versions"].get(name) for name in tables.VERSIONS_THAT_COUNT)
    for entry in tables.entries_of(contents, "").values():
        times = [one.ms for one in entry.ranking]
        assert times == sorted(times)


def test_what_is_predicted_of_a_b200_is_what_the_model_and_the_papers_say():
    (entry,) = tables.entries_of(tables.shipped("sm_100a"), "").values()
    times = {one.tunable.backend: one.ms for one in entry.ranking if "128x64" not in one.tunable.config}
    (triton,) = (one.ms for one in entry.ranking if "128x64" in one.tunable.config)
    row = dataclasses.replace(parse_shape("B4H32/32S8192D128"), causal=False)
    measured = paper.newest_measured()
    predicted = paper.estimate(row, "forward", "sm_100a").ms(paper.efficiency(measured, "forward"))
    assert times["helion"] == pytest.approx(predicted, rel=1e-2)
    published = row.flops("forward") / paper.PUBLISHED_TFLOPS * 1e-9
    assert [times["aten"], triton] == pytest.approx([1.3 * published, 2.7 * published], rel=1e-2)
    assert key_of(of_row(row, "sm_100a", False)) == entry.key


def test_choices_for_other_sizes_are_near_the_best(monkeypatch):
    """Each measured problem, as if nothing of its sizes had been measured, where something else is related to it.

    The farthest from the best are few heads beside many keys, whose measured lengths are three doublings apart.
    """
    for name in ("cute", "helion", "aten"):
        monkeypatch.setattr(type(get_backend(name)), "missing", lambda _: None)
    entries = tables.entries_of(tables.shipped("sm_90a"), "")
    ratios = []
    for key, problem in {key_of(problem): problem for problem in problems.release("sm_90a")}.items():
        others = {other: entry for other, entry in entries.items() if other.sizes != key.sizes}
        if key not in entries or min(map(key.distance, others)) == math.inf:
            continue
        times = {one.tunable: one.ms for one in entries[key].ranking}
        monkeypatch.setattr(tables, "_shipped_entries", lambda _, others=others: others)
        chosen = choose.unchecked_plan(problem).candidates[0].tunable
        if chosen in times:
            ratios.append(times[chosen] / min(times.values()))
    assert len(ratios) > 250
    assert max(ratios) < 2.0
    assert sum(ratio <= 1.05 for ratio in ratios) > 0.88 * len(ratios)
    assert sum(ratio <= 1.15 for ratio in ratios) > 0.93 * len(ratios)

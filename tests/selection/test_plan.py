"""The plan: never empty, in the order of priorities, and nothing of what there is vanishes from it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_bwattn
from torch_bwattn.errors import UnsupportedProblem
from torch_bwattn.problem import Problem
from torch_bwattn.selection import tables
from torch_bwattn.selection.choose import Priority, plan, refusal
from torch_bwattn.selection.key import bucket, features_of, key_of, kind_of
from torch_bwattn.selection.tables import Measured, Tunable

PROBLEM = Problem("cpu", torch.float32, 1, 2, 2, 40, 50, 16, 16, 0.25)
WORDS = st.sampled_from(("right", "slow", "wrong", "-not today", "-never", "right!", "raises!"))
ENVIRONMENT = {"date": "2026-11-30", "device": {"name": "a card"}, "versions": {}}


def keep(problem, ranking, described=ENVIRONMENT):
    tables.tuned(problem.target).update(lambda contents: tables.add(contents, key_of(problem), ranking, described))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    told=st.fixed_dictionaries(
        {name: st.lists(WORDS, min_size=1, max_size=4, unique=True) for name in ("cute", "helion", "aten")}
    )
)
def test_a_plan_holds_every_offer_once_in_the_order_of_priorities(fakes, told):
    fakes(**told)
    made = plan(PROBLEM, None)
    candidates = made.candidates
    assert made.chosen is not None
    priorities = [candidate.priority for candidate in candidates]
    assert priorities == sorted(priorities, reverse=True)
    for name, words in told.items():
        assert sum(candidate.backend == name for candidate in candidates) == len(words)
    for candidate in candidates:
        assert bool(candidate.verdict) == (candidate.priority != Priority.UNSUPPORTED)
        assert bool(candidate.verdict.last_resort) == (candidate.priority == Priority.LAST_RESORT)


SIZES = st.sampled_from((0, 1, 3, 16, 64, 100, 1000, 70_000))
ANY_PROBLEM = st.builds(
    Problem,
    target=st.sampled_from(("cpu", "sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", "mps")),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32, torch.float64)),
    batch=SIZES, heads=st.sampled_from((8, 16)), kv_heads=st.sampled_from((1, 8)), q_len=SIZES, kv_len=SIZES,
    head_dim=st.sampled_from((0, 1, 40, 64, 128, 256, 257, 512)), value_dim=st.sampled_from((0, 8, 64, 256, 300)),
    scale=st.sampled_from((0.0, -1.0, 0.125)), diagonal=st.none() | st.integers(-5, 5),
    low_diagonal=st.none() | st.integers(-5, 5), softcap=st.none() | st.floats(1e-40, 1e39),
    sink_dtype=st.none() | st.just(torch.float32), mask_dtype=st.sampled_from((None, torch.bool, torch.float32)),
    mask_grad=st.booleans(), dropout_p=st.sampled_from((0.0, 0.1, 1.0)), bulk_copies=st.booleans(),
    wide_index=st.booleans(), deterministic=st.booleans(), backward=st.booleans(), lse_grad=st.booleans(),
)  # fmt: skip


@given(ANY_PROBLEM)
def test_any_problem_has_a_plan_of_all_backends(problem):
    made = plan(problem, None)
    assert made.chosen is not None
    assert {candidate.backend for candidate in made.candidates} == {"cute", "helion", "aten", "reference"}
    assert all(candidate.verdict or candidate.verdict.reason for candidate in made.candidates)
    resorts = [candidate for candidate in made.candidates if candidate.priority == Priority.LAST_RESORT]
    assert all(problem.q_len > problem.head_dim for _ in resorts)
    assert not resorts or made.chosen.priority > Priority.LAST_RESORT


def test_a_last_resort_comes_after_the_reference_and_explain_says_why(fakes, capsys):
    fakes(cute=["-no"], helion=["-no"], aten=["right!"])
    names = [candidate.backend for candidate in plan(PROBLEM, None).candidates if candidate.verdict]
    assert names == ["reference", "aten"]
    query = torch.randn(1, 2, 9, 8)
    torch_bwattn.explain(query, query, query)
    assert "aten: supports it, config right, last resort: too large" in capsys.readouterr().out
    assert plan(PROBLEM, "aten").chosen is None
    assert "too large" in str(refusal(plan(PROBLEM, "aten")))


def test_the_installed_versions_measurement_goes_before_anothers(fakes, monkeypatch):
    fakes(cute=["right", "slow"])
    keep(PROBLEM, [Measured(Tunable("cute", "slow"), 0.1)])
    entries = tables.entries_of(tables.tuned("cpu").load(), "the package's table")
    monkeypatch.setattr(tables, "_shipped_entries", lambda _: entries)
    assert not tables.is_known("cpu", key_of(PROBLEM))
    versions = dict.fromkeys(tables.VERSIONS_THAT_COUNT, "1")
    monkeypatch.setattr(tables, "_installed", lambda: versions)
    keep(PROBLEM, [Measured(Tunable("cute", "right"), 0.1)], {**ENVIRONMENT, "versions": versions})
    assert tables.is_known("cpu", key_of(PROBLEM))
    assert plan(PROBLEM, None).candidates[0].verdict.config == "right"


def test_what_was_measured_goes_first_but_no_last_resort_does(fakes):
    fakes(cute=["right", "slow"], helion=["wrong"], aten=["right!"])
    ranking = [("aten", "right", 0.1), ("helion", "wrong", 0.2), ("cute", "slow", 0.3), ("cute", "gone", 0.05)]
    keep(PROBLEM, [Measured(Tunable(backend, config), ms) for backend, config, ms in ranking])
    made = plan(PROBLEM, None)
    assert [tuple(candidate.tunable) for candidate in made.candidates if candidate.verdict] == [
        ("helion", "wrong"),
        ("cute", "slow"),
        ("cute", "right"),
        ("reference", "blockwise eager, float64"),
        ("aten", "right"),
    ]
    assert "a card" in made.source


def test_near_sizes_and_related_kinds_share_an_entry_and_others_do_not(fakes):
    fakes(cute=["right", "slow"])
    keep(PROBLEM, [Measured(Tunable("cute", "slow"), 0.1)])

    def first(**fields):
        return plan(dataclasses.replace(PROBLEM, **fields), None).candidates[0].verdict.config

    assert first() == first(kv_len=200) == first(q_len=64, kv_len=64) == "slow"
    assert first(diagonal=0) == first(kv_heads=1) == first(head_dim=64, value_dim=64) == first(softcap=3.0) == "slow"
    assert first(kv_len=2**31) == first(dtype=torch.bfloat16) == first(dropout_p=0.5) == "right"
    assert first(backward=True) == first(mask_dtype=torch.bool, mask_sizes=(1, 1, 40, 50)) == "right"


def test_the_nearest_counts(fakes):
    fakes(cute=["right", "slow"])
    keep(PROBLEM, [Measured(Tunable("cute", "slow"), 0.1)])
    keep(dataclasses.replace(PROBLEM, q_len=1000), [Measured(Tunable("cute", "right"), 0.1)])
    for q_len, config in ((70, "slow"), (600, "right"), (5000, "right")):
        assert plan(dataclasses.replace(PROBLEM, q_len=q_len), None).candidates[0].verdict.config == config


def test_a_backends_first_config_stands_for_those_that_were_measured(fakes):
    fakes(cute=["right", "slow"], aten=["right"])
    keep(PROBLEM, [Measured(Tunable("cute", "of another width"), 0.1), Measured(Tunable("aten", "right"), 0.2)])
    first, second = plan(PROBLEM, None).candidates[:2]
    assert (*first.tunable, first.figure) == ("cute", "right", "measured 0.100 ms")
    assert second.tunable == ("aten", "right")


def test_more_programs_than_all_sms_have_are_alike():
    def key(batch, q_len):
        return key_of(dataclasses.replace(PROBLEM, batch=batch, q_len=q_len, kv_len=4096))

    assert key(1000, 4096).distance(key(64, 4096)) == 0.0
    assert key(8, 16).distance(key(64, 16)) == 6.0
    assert key(8, 16).distance(key(8, 128)) == key(8, 128).distance(key(8, 16)) == 8.0


@pytest.mark.parametrize("pin", ["cute", "helion"])
def test_a_pin_asks_nobody_else(fakes, pin):
    fakes(cute=["-it is Monday"], helion=["-it is Monday"])
    made = plan(PROBLEM, pin)
    assert {candidate.backend for candidate in made.candidates} == {pin}
    assert made.chosen is None
    assert "it is Monday" in str(refusal(made))
    assert isinstance(refusal(made), UnsupportedProblem)


@given(st.integers(1, 2**20), st.integers(1, 2**20))
def test_buckets_keep_order_and_are_no_wider_than_two(a, b):
    small, large = sorted((a, b))
    assert bucket(small) <= bucket(large)
    assert a <= bucket(a) <= max(16, 2 * a)


@pytest.mark.parametrize(
    "fields",
    [
        {"diagonal": 0}, {"diagonal": 0, "low_diagonal": -5}, {"softcap": 3.0},
        {"mask_dtype": torch.bool, "mask_sizes": (1, 1, 40, 50)}, {"dropout_p": 0.5}, {"backward": True},
        {"kv_heads": 1}, {"head_dim": 64}, {"bulk_copies": False}, {"dtype": torch.float16}, {"target": "sm_80"},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_kernels_changes_the_kind(fields):
    changed = dataclasses.replace(PROBLEM, **fields)
    assert kind_of(changed) != kind_of(PROBLEM)
    assert features_of(changed) != features_of(PROBLEM)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"dtype": torch.bfloat16}, {"dtype": torch.float16}), ({"sink_dtype": torch.float32}, {}),
        ({"heads": 8}, {"heads": 16}), ({"head_dim": 17}, {"head_dim": 31}),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_that_compare_alike_share_a_kind_and_no_verdict(a, b):
    a, b = (dataclasses.replace(PROBLEM, **fields) for fields in (a, b))
    assert kind_of(a) == kind_of(b)
    assert features_of(a) != features_of(b)

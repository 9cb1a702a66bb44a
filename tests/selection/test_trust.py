"""What must have passed a check before it runs, where, and in whose process."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torch_bwattn
from torch_bwattn.backends.cute import calls
from torch_bwattn.backends.cute import loader as cute_loader
from torch_bwattn.crosscompile import lane
from torch_bwattn.errors import UnsupportedProblem
from torch_bwattn.problem import Problem
from torch_bwattn.selection import attempts, drawn, tables, trust
from torch_bwattn.selection.choose import get_backend, plan, unchecked_plan
from torch_bwattn.selection.key import features_of
from torch_bwattn.selection.tables import Tunable

PROBLEM = Problem("cpu", torch.float32, 1, 2, 2, 40, 50, 16, 16, 0.25)
CAUSAL, BACKWARD = dataclasses.replace(PROBLEM, diagonal=10), dataclasses.replace(PROBLEM, backward=True)
RIGHT, SLOW = Tunable("cute", "right"), Tunable("cute", "slow")


@pytest.fixture
def cute_on_blackwell(monkeypatch):
    """CuTe's kernels claim Blackwell, as those that are to come will."""
    monkeypatch.setattr(calls, "ARCH", "sm_100a")
    monkeypatch.setattr(cute_loader, "why_missing", lambda: None)


def cutes(problem):
    """What CuTe's backend offers."""
    return [one.tunable for one in unchecked_plan(problem).candidates if one.backend == "cute" and one.verdict]


def may_run(problem, pin=None):
    return [candidate.tunable for candidate in plan(problem, pin).candidates if candidate.verdict]


@pytest.mark.parametrize("problem", lane.problems("sm_100a"), ids=features_of)
def test_blackwell_without_a_passed_check_uses_what_checks_itself(cute_on_blackwell, problem):
    for tunable in may_run(problem):
        assert not get_backend(tunable.backend).can_hang
        # None is a check in place before the first use; the reference is what that compares with.
        assert trust.recalled(tunable, problem) == ("" if tunable.backend == "reference" else None)
    refused = [one.tunable for one in plan(problem, None).candidates if trust.DOCTOR in one.verdict.reason]
    assert refused == cutes(problem)
    assert bool(refused) == (problem.dropout_p == 0.0 and problem.dtype.itemsize == 2)


@pytest.mark.parametrize("backward", [False, True])
def test_blackwell_uses_what_has_passed(cute_on_blackwell, backward):
    problem = Problem("sm_100a", torch.bfloat16, 1, 4, 2, 300, 300, 128, 128, 0.1, backward=backward)
    first = cutes(problem)[0]
    trust.keep(problem, first, "")
    assert [tunable for tunable in may_run(problem) if tunable.backend == "cute"] == [first]
    assert plan(problem, "cute").chosen.tunable == first


def test_hopper_was_tested_once_whatever_the_versions():
    problem = Problem("sm_90a", torch.bfloat16, 1, 4, 2, 300, 300, 128, 128, 0.1)
    assert get_backend("cute").can_hang
    assert not trust.needs_doctor(get_backend("cute"), "sm_90a")
    assert all(trust.DOCTOR not in candidate.verdict.reason for candidate in plan(problem, None).candidates)


def test_a_pin_raises_the_reason_and_explain_shows_it(fakes, capsys):
    fakes(cute=["right"], helion=["right"], can_hang=["cute"])
    query = torch.randn(1, 2, 9, 8)
    torch_bwattn.explain(query, query, query)
    said = capsys.readouterr().out
    assert "forward: helion" in said
    assert "cute: refuses, config right: its kernels can hang, none was ever tested on cpu" in said
    assert trust.DOCTOR in said
    with torch_bwattn.backend("cute"), pytest.raises(UnsupportedProblem, match=f"can hang.*{trust.DOCTOR}"):
        torch_bwattn.sdpa(query, query, query)


def test_what_has_passed_runs_other_features_of_its_direction_after_a_check_in_place(fakes):
    fakes(cute=["right", "slow"], helion=["-no"], can_hang=["cute"])
    assert RIGHT not in may_run(PROBLEM)
    trust.keep(PROBLEM, RIGHT, "")
    for problem in (PROBLEM, CAUSAL):
        assert RIGHT in may_run(problem)
        assert SLOW not in may_run(problem)
    assert trust.recalled(RIGHT, PROBLEM) == ""
    assert trust.recalled(RIGHT, CAUSAL) is None
    assert RIGHT not in may_run(BACKWARD)


def test_what_has_failed_once_runs_only_what_it_passed(fakes):
    fakes(cute=["right"], helion=["-no"], can_hang=["cute"])
    trust.keep(PROBLEM, RIGHT, "")
    trust.keep(CAUSAL, RIGHT, "no answer within 5 s")
    assert RIGHT in may_run(PROBLEM)
    assert "no answer within 5 s" in str(refusal_of(CAUSAL))
    other = dataclasses.replace(PROBLEM, softcap=3.0)
    assert RIGHT not in may_run(other)
    assert "has failed a check" in str(refusal_of(other))


def refusal_of(problem):
    """What the choice says against the first of cute's configs."""
    return next(one.verdict.reason for one in plan(problem, None).candidates if one.backend == "cute")


def test_other_versions_have_passed_nothing(fakes, monkeypatch):
    fakes(cute=["right"], can_hang=["cute"])
    trust.keep(PROBLEM, RIGHT, "")
    trust._known.clear()  # as in the next process
    assert RIGHT in may_run(PROBLEM)
    monkeypatch.setattr(trust, "_versions", lambda: {"triton": "another"})
    assert RIGHT not in may_run(PROBLEM)


@pytest.mark.parametrize("damage", [{"failure": None}, {"features": 5}, {"versions": None}, None, 5])
def test_what_is_no_verdict_opens_nothing(fakes, damage):
    fakes(cute=["right"], can_hang=["cute"])
    trust.keep(PROBLEM, RIGHT, "")
    trust._known.clear()

    def change(contents):
        ((name, verdict),) = contents["verdicts"].items()
        contents["verdicts"][name] = {**verdict, **damage} if isinstance(damage, dict) else damage

    trust._store("cpu").update(change)
    assert RIGHT not in may_run(PROBLEM)
    assert RIGHT not in may_run(CAUSAL)


def test_what_was_found_wrong_here_counts_more_than_who_vouches(monkeypatch):
    problem = Problem("sm_90a", torch.bfloat16, 1, 2, 2, 40, 50, 16, 16, 0.25)
    versions = tables.shipped("sm_90a")["environments"][tables.shipped("sm_90a")["tested"]]["versions"]
    monkeypatch.setattr(tables, "_installed", lambda: {name: versions[name] for name in tables.VERSIONS_THAT_COUNT})
    first = Tunable("helion", next(one.config for one in get_backend("helion").offers(problem) if one))
    assert trust.recalled(first, problem) == ""
    trust.keep(problem, first, "wrong by 3")
    assert trust.recalled(first, problem) == "wrong by 3"
    assert first not in may_run(problem)
    assert first in may_run(problem, "helion")  # the call raises it
    trust.forget("sm_90a")
    assert trust.recalled(first, problem) == ""


def test_what_failed_is_shown_and_raised_where_it_is_pinned(fakes, capsys):
    fakes(cute=["right"], helion=["right"])
    query = torch.randn(1, 2, 9, 8)
    problem = torch_bwattn.explain(query, query, query).forward.problem
    trust.keep(problem, RIGHT, "dq is wrong by 3")
    torch_bwattn.explain(query, query, query)
    assert f"dq is wrong by 3 ({trust.DOCTOR} --again" in capsys.readouterr().out
    assert attempts.choose(problem, None).name == "helion"
    with torch_bwattn.backend("cute"), pytest.raises(UnsupportedProblem, match="wrong by 3"):
        torch_bwattn.sdpa(query, query, query)


def test_the_reference_stays_whatever_was_found():
    reference = Tunable("reference", plan(PROBLEM, "reference").chosen.verdict.config)
    trust.keep(PROBLEM, reference, "wrong by 3")
    assert reference in may_run(PROBLEM)


@pytest.mark.parametrize("failure", ["", "no answer within 180 s"])
@pytest.mark.parametrize("says_nothing", [False, True])
def test_what_waits_for_itself_is_checked_in_a_process_of_its_own(fakes, monkeypatch, failure, says_nothing):
    fakes(helion=["hangs"])
    asked = []

    def check_apart(problem, *more):
        asked.append((drawn.small(problem) == problem, *more))
        return failure, says_nothing

    backend, tunable, device = get_backend("helion"), Tunable("helion", "hangs"), torch.device("cuda", 1)
    monkeypatch.setattr(type(backend), "is_checked_apart", lambda _, config: config == "hangs")
    monkeypatch.setattr(trust.on_demand, "check_apart", check_apart)
    assert trust.check(tunable, backend, PROBLEM, device) == failure
    assert asked == [(True, tunable, device)]
    assert trust.Verdicts(PROBLEM).of(tunable) == (None if says_nothing else failure)


def test_what_helion_lowers_to_tcgen05_is_checked_apart():
    helion = get_backend("helion")
    for backward in (False, True):
        problem = Problem("sm_100a", torch.bfloat16, 1, 4, 2, 512, 512, 128, 128, 0.1, backward=backward)
        apart = [helion.is_checked_apart(offer.config) for offer in helion.offers(problem)]
        assert apart[0]
        assert not apart[-1]

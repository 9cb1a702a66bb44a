"""The doctor with planted faults: each is found, named and kept, and something else runs."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from tests.tuning.test_tuner import PROBLEM, options, stubbed
from torch_bwattn.errors import UnsupportedProblem
from torch_bwattn.selection import attempts, trust
from torch_bwattn.selection.choose import plan
from torch_bwattn.selection.key import features_of
from torch_bwattn.selection.on_demand import to_json
from torch_bwattn.selection.tables import Tunable
from torch_bwattn.tuning import doctor, tuner, worker

BACKWARD = dataclasses.replace(PROBLEM, backward=True)
FAULTS = {
    "wrong": "allowed", "nan": "nan", "raises": "this config always fails", "does not compile": "does not compile",
    "hangs": "no answer within 10 s", "dies": "status 7",
}  # fmt: skip
ENDS_ITS_PROCESS = ("hangs", "dies")  # and a new one takes seconds to start


def stub(reply: str) -> tuple[str, ...]:
    """A worker with one answer."""
    code = f"import sys\nprint('{{\"ready\": true}}', flush=True)\nfor _ in sys.stdin: print({reply!r}, flush=True)"
    return (sys.executable, "-c", code)


def test_each_planted_fault_is_found_and_something_else_runs(fakes):
    told = {"cute": ["right", *FAULTS], "helion": ["right"], "aten": ["-no"]}
    fakes(**told, can_hang=["cute"])
    asked, lines = doctor.checks([PROBLEM, BACKWARD]), []
    assert len(asked) == 2 * len(told["cute"]) + 4
    todo = [one for one in asked if not (one.problem.backward and one.tunable.config in ENDS_ITS_PROCESS)]
    found = doctor.run("cpu", todo, dataclasses.replace(options(told), jobs=2, limit_s=10.0), log=lines.append)
    assert [one.check for one in found] == todo
    assert sorted(map(str, lines)) == sorted(map(str, found))
    failures = {one.check: one.failure for one in found if one.failure}
    assert {check.tunable.config for check in failures} == set(FAULTS)
    assert len(failures) == 2 * len(FAULTS) - len(ENDS_ITS_PROCESS)
    for (problem, tunable), failure in failures.items():
        assert FAULTS[tunable.config] in failure.lower()
        trust._known.clear()  # as in the next process
        assert trust.recalled(tunable, problem) == failure
    for one in found:
        if one.failure:
            assert doctor.consequence(one) == "cute: right"
    for problem in (PROBLEM, BACKWARD):
        able = [candidate.tunable.config for candidate in plan(problem, None).candidates if candidate.verdict]
        assert able[:2] == ["right", "right"]
        assert not set(able) & {check.tunable.config for check in failures if check.problem == problem}


def test_what_hangs_is_never_run_again(fakes):
    fakes(cute=["hangs"], helion=["right"], can_hang=["cute"])
    (check,) = [one for one in doctor.checks([PROBLEM]) if one.tunable.backend == "cute"]
    trust.keep(PROBLEM, check.tunable, "no answer within 3 s")
    assert attempts.choose(PROBLEM, None).name == "helion"
    assert doctor.consequence(doctor.Found(check, "no answer within 3 s")) == "helion: right"
    with pytest.raises(UnsupportedProblem, match="can hang"):
        attempts.choose(PROBLEM, "cute")


def test_what_is_known_is_not_checked_again_until_it_is_forgotten(fakes):
    fakes(cute=["right"], helion=["wrong"], can_hang=["cute"])
    todo = doctor.checks([PROBLEM])
    assert not any(one.failure for one in doctor.run("cpu", todo, stubbed()))
    trust.keep(PROBLEM, Tunable("helion", "wrong"), "wrong by 3")
    nobody = dataclasses.replace(stubbed(), command=(sys.executable, "-c", "raise SystemExit(1)"))
    found = doctor.run("cpu", todo, nobody)
    assert all(one.seconds is None for one in found)
    assert [one.failure for one in found if one.failure] == ["wrong by 3"]
    assert not any(one.failure for one in doctor.run("cpu", todo, stubbed(again=True)))


@pytest.mark.parametrize(
    "command",
    [(sys.executable, "-c", "raise SystemExit(1)"), stub('{"failure": "too little memory", "says_nothing": true}')],
    ids=["no process", "no memory"],
)
def test_what_says_nothing_of_a_kernel_is_no_verdict(fakes, command):
    fakes(cute=["right"], helion=["-no"], aten=["-no"], can_hang=["cute"])
    todo = doctor.checks([PROBLEM])
    for one in doctor.run("cpu", todo, dataclasses.replace(stubbed(), command=command)):
        assert one.failure
        assert not one.is_verdict
        assert trust.Verdicts(PROBLEM).of(one.check.tunable) is None
        assert "says nothing" in doctor.consequence(one)
    assert plan(PROBLEM, None).chosen.backend == "reference"


def test_of_each_backend_what_would_run_is_checked(fakes):
    fakes(cute=["right", "slow"], helion=["-no", "right", "slow"], aten=["right!"])
    assert [tuple(one.tunable) for one in doctor.checks([PROBLEM])] == [
        ("cute", "right"),
        ("helion", "right"),
        ("reference", "blockwise eager, float64"),
    ]


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90a", "sm_100a"])
def test_every_kind_and_length_is_checked_once(target):
    todo = doctor.checks(doctor.problems(target))
    names = [(features_of(one.problem), one.tunable) for one in todo]
    assert len(names) == len(set(names))
    for backend in ("reference", "aten" if target == "cpu" else "helion"):
        mine = [one.problem for one in todo if one.tunable.backend == backend]
        assert {problem.backward for problem in mine} == {False, True}
        assert any(problem.q_len == doctor._FEW for problem in mine)
    if target == "sm_90a":
        found = [one.problem for one in todo if one.tunable.backend == "cute"]
        assert any(problem.deterministic for problem in found)
        assert len({one.tunable for one in todo if one.tunable.backend == "cute"}) > 10
    assert any(one.problem.mask_grad for one in todo)


def test_few_queries_see_as_far_as_many():
    for problem in doctor.problems("sm_100a"):
        if problem.q_len == doctor._FEW and problem.diagonal is not None:
            assert problem.diagonal == problem.kv_len - problem.q_len


def test_a_lost_device_takes_no_other_check_with_it():
    """The process is replaced, though it answered."""
    asked = tuner.Worker(stub('{"failure": "CUDA error: gone", "says_nothing": false, "lost": true}'))
    try:
        for _ in range(2):
            reply = asked.ask({"do": "check"}, 20.0, {"failure": str})
            assert reply == {"failure": "CUDA error: gone"}
            assert asked._process is None
    finally:
        asked.end()


@pytest.mark.parametrize(
    ("error", "lost", "says_nothing"),
    [
        (torch.AcceleratorError("CUDA error: gone"), True, False),
        (torch.OutOfMemoryError("too little"), False, True),
        (RuntimeError("no"), False, False),
    ],
    ids=str,
)
def test_a_worker_says_what_an_error_means(monkeypatch, error, lost, says_nothing):
    def fail(*_):
        raise error

    request = {"do": "check", "problem": to_json(PROBLEM), "tunable": ["reference", ""]}
    for where, foreign in (("failure", says_nothing), ("draw", True)):
        with monkeypatch.context() as patch:
            patch.setattr(worker.drawn, where, fail)
            reply = worker.answer(request)
        assert (reply["lost"], reply["says_nothing"]) == (lost, foreign)
        assert str(error) in reply["failure"]

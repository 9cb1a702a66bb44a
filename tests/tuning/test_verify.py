"""The check of the choice: its problems, its calls and its sums."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

from tests.tuning.test_tuner import BUDGET, CODE
from torch_bwattn.problem import Problem
from torch_bwattn.selection import drawn, tables
from torch_bwattn.selection.key import key_of
from torch_bwattn.selection.tables import Measured, Tunable
from torch_bwattn.tuning import calls, tuner, verify

PROBLEM = Problem("cpu", torch.float32, 2, 4, 2, 20, 31, 16, 16, 0.25)
FIELDS = (
    {}, {"diagonal": 0}, {"diagonal": 11}, {"diagonal": 11, "low_diagonal": 4}, {"low_diagonal": -2}, {"diagonal": 15},
    {"mask_dtype": torch.bool, "mask_sizes": (2, 1, 20, 31)}, {"kv_heads": 4},
    {"mask_dtype": torch.float32, "mask_sizes": (1, 4, 20, 31), "mask_grad": True},
)  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_operator_and_pytorch_are_asked_for_the_described_problem(fields, backward):
    problem = dataclasses.replace(PROBLEM, backward=backward, **fields)
    x = drawn.inputs(problem, "cpu")
    grad_out = drawn.gradient_of(problem, x) if backward else None
    oracle, _ = drawn.references(problem, x, grad_out)
    wanted = [oracle.dq, oracle.dk, oracle.dv] if backward else [oracle.out]
    assert calls.has_plain(problem)
    for which in (calls.AUTO, calls.PLAIN):
        found = calls.work_of(which, problem, x)()
        for one, right in zip(found if backward else [found], wanted, strict=False):
            torch.testing.assert_close(one.double(), right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fields", [{"softcap": 2.0}, {"sink_dtype": torch.float32}], ids=str)
def test_what_pytorch_cannot_say(fields):
    problem = dataclasses.replace(PROBLEM, **fields)
    assert not calls.has_plain(problem)
    x = drawn.inputs(problem, "cpu")
    oracle, _ = drawn.references(problem, x, None)
    torch.testing.assert_close(calls.work_of(calls.AUTO, problem, x)().double(), oracle.out, atol=1e-5, rtol=1e-4)


def test_problems_are_the_same_for_a_seed_and_no_table_names_them():
    found = verify.draw("sm_90a", 40, seed=3)
    assert found == verify.draw("sm_90a", 40, seed=3)
    assert found != verify.draw("sm_90a", 40, seed=4)
    assert len({key_of(problem) for problem in found}) == 40
    described = {"date": "2026-11-30", "device": {"name": "a card"}, "versions": {}}
    ranking = [Measured(Tunable("cute", "64x64"), 0.5)]
    tables.tuned("sm_90a").update(lambda contents: tables.add(contents, key_of(found[0]), ranking, described))
    assert key_of(found[0]) not in {key_of(problem) for problem in verify.draw("sm_90a", 40, seed=3)}


def test_the_choice_is_compared_with_the_best_and_with_pytorch(fakes):
    told = {"cute": ["slow", "right"], "helion": ["raises"], "aten": ["-no"]}
    fakes(**told)
    command = (sys.executable, "-c", CODE, json.dumps(told))
    lines = []
    options = tuner.Options(limit_s=20.0, budget=BUDGET, command=command)
    (found,) = verify.verify([PROBLEM], options, log=lines.append)
    assert (found.chosen_name, found.best_name) == ("cute: slow", "cute: right")
    assert found.over_best > 2.0
    assert found.over_plain is not None
    assert "always fails" in found.failures["helion: raises"]
    assert "(cute: right)" in lines[0]
    assert verify.summary([found], 1).startswith("1 problems, 1 with times: 0 within 5 %")
    (record,) = verify.document([found])["problems"]
    assert json.loads(json.dumps(record))["over_best"] == found.over_best

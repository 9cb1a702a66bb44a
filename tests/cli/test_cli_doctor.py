"""The command: its options, what it prints, and its status."""

from __future__ import annotations

import json

import pytest
import torch

from tests.selection.conftest import cache  # noqa: F401 (a fixture)
from torch_bwattn import cli
from torch_bwattn.problem import Problem
from torch_bwattn.selection import on_demand, trust
from torch_bwattn.tuning import doctor

PROBLEM = Problem("cpu", torch.float32, 1, 2, 2, 300, 400, 16, 16, 0.25)


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "problems", lambda _: [PROBLEM])


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["--jobs", "0"], "--jobs"), (["--limit", "nan"], "--limit"), (["--from-log", "/nowhere"], "--from-log")],
)
def test_wrong_usage(on_a_cpu, argv, words, capsys):
    assert cli.main(["doctor", *argv]) == 2
    assert words in capsys.readouterr().err


def test_the_cpus_kernels_pass_in_processes_of_their_own(on_a_cpu, capsys):
    assert cli.main(["doctor", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "no CUDA device" in said
    assert "2 of 2 checks passed on cpu" in said
    for tunable in ("aten: flash for CPU", "reference: blockwise eager"):
        assert f"{trust.features_of(PROBLEM)}  {tunable}" in said
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.count("known") == 2


def test_a_failure_names_the_kernel_the_problem_the_error_and_what_runs(on_a_cpu, capsys, tmp_path):
    log = tmp_path / "problems.jsonl"
    other = Problem("sm_90a", torch.bfloat16, 1, 2, 2, 40, 50, 16, 16, 0.25)
    causal = Problem("cpu", torch.float32, 1, 2, 2, 300, 300, 16, 16, 0.25, diagonal=0)
    log.write_text("".join(json.dumps(on_demand.to_json(one)) + "\n" for one in (other, causal)))
    failures = {"aten": "no answer within 5 s", "reference": "wrong by 3"}
    for problem in (PROBLEM, causal):
        for check in doctor.checks([problem]):
            trust.keep(problem, check.tunable, failures[check.tunable.backend] if problem == causal else "")
    assert cli.main(["doctor", "--from-log", str(log)]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 problems" in said
    assert "2 of 4 checks passed" in said
    first, second = said.split("\n\n")[1:3]
    assert first.startswith("aten: flash for CPU")
    assert trust.features_of(causal) in first
    assert "error:        no answer within 5 s" in first
    assert "used instead: reference" in first
    assert "used instead: nothing" in second

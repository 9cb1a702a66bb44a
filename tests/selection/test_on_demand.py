"""What BWATTN_RECORD and BWATTN_TUNE do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_bwattn
from torch_bwattn.problem import Problem
from torch_bwattn.selection import on_demand
from torch_bwattn.selection.choose import plan

DTYPES = st.sampled_from((torch.bfloat16, torch.float32))
PROBLEMS = st.builds(
    Problem, st.sampled_from(("cpu", "sm_90a")), DTYPES, *(st.integers(0, 9) for _ in range(7)), st.floats(0.1, 2.0),
    diagonal=st.none() | st.integers(-3, 3), mask_dtype=st.none() | st.just(torch.bool),
    mask_sizes=st.none() | st.just((1, 1, 4, 4)), softcap=st.none() | st.floats(1.0, 9.0), backward=st.booleans(),
)  # fmt: skip
ON_A_GPU = Problem("sm_90a", torch.bfloat16, 1, 2, 2, 40, 50, 16, 16, 0.25)


@given(PROBLEMS)
def test_a_problem_survives_json(problem):
    assert on_demand.from_json(json.loads(json.dumps(on_demand.to_json(problem)))) == problem


LINES = [
    "[]", '{"target": "cpu"}', '{"nonsense": 1}', '{"dtype": "nonsense"}', "{", "[" * 200_000,
    *(json.dumps({**on_demand.to_json(ON_A_GPU), **wrong}) for wrong in ({"batch": "x"}, {"mask_sizes": 5})),
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_log_that_holds_no_problem_names_its_line(tmp_path, line):
    path = tmp_path / "log"
    path.write_text(json.dumps(on_demand.to_json(ON_A_GPU)) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        on_demand.read_log(path)


def test_each_problem_is_recorded_once(tmp_path, monkeypatch):
    path = tmp_path / "problems.jsonl"
    monkeypatch.setenv("BWATTN_RECORD", str(path))
    for length in (33, 34, 33):
        query = torch.randn(1, 2, length, 24, requires_grad=True)
        torch_bwattn.sdpa(query, query, query, is_causal=True).sum().backward()
    found = on_demand.read_log(path)
    assert {(problem.q_len, problem.backward) for problem in found} == {
        (33, False), (33, True), (34, False), (34, True)
    }  # fmt: skip
    assert len(path.read_text().splitlines()) == 4


def test_a_file_that_cannot_be_written_is_told_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("BWATTN_RECORD", str(tmp_path / "no" / "such" / "folder"))
    on_demand.record(ON_A_GPU)
    on_demand.record(ON_A_GPU)
    assert len(caplog.records) == 1


def test_first_use_tunes_once(monkeypatch):
    monkeypatch.setenv("BWATTN_TUNE", "1")
    commands = []

    def run(command, **options):
        assert options["env"]["BWATTN_TUNE"] == "0"
        commands.append(command)
        assert on_demand.read_log(command[-1]) == [ON_A_GPU]
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    on_demand.tune(ON_A_GPU, None)
    on_demand.tune(ON_A_GPU, None)
    assert len(commands) == 1
    on_demand.tune(Problem("cpu", torch.float32, 1, 2, 2, 40, 50, 16, 16, 0.25), None)
    assert len(commands) == 1


def test_a_failed_tuning_is_told_once(monkeypatch, caplog):
    monkeypatch.setenv("BWATTN_TUNE", "1")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2, stderr="no luck"))
    on_demand.tune(ON_A_GPU, None)
    on_demand.tune(ON_A_GPU, None)
    (record,) = caplog.records
    assert "no luck" in record.message


@pytest.mark.parametrize(("seen", "index", "own"), [("", 1, "1"), ("4,7", 1, "7")])
def test_it_is_tuned_on_the_device_that_it_is_for(monkeypatch, seen, index, own):
    monkeypatch.setenv("BWATTN_TUNE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    found = []

    def run(*_, env, **__):
        found.append(env["CUDA_VISIBLE_DEVICES"])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    on_demand.tune(ON_A_GPU, torch.device("cuda", index))
    assert found == [own]


def test_what_cannot_be_started_is_told_once(monkeypatch, caplog):
    monkeypatch.setenv("BWATTN_TUNE", "1")

    def fail(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "run", fail)
    on_demand.tune(ON_A_GPU, None)
    (record,) = caplog.records
    assert "no more processes" in record.message


def test_a_pipe_that_nobody_reads_does_not_stop_the_call(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("BWATTN_RECORD", str(tmp_path / "pipe"))
    on_demand.record(ON_A_GPU)


def test_empty_is_unset(monkeypatch):
    monkeypatch.setenv("BWATTN_TUNE", "")
    on_demand.tune(ON_A_GPU, None)


def test_another_value_is_an_error(monkeypatch):
    monkeypatch.setenv("BWATTN_TUNE", "yes")
    with pytest.raises(ValueError, match="BWATTN_TUNE"):
        on_demand.tune(ON_A_GPU, None)


class TestCheckApart:
    PROBLEM = Problem("cpu", torch.float32, 1, 2, 2, 20, 31, 16, 16, 0.25)

    def asked(self):
        return on_demand.check_apart(self.PROBLEM, plan(self.PROBLEM, None).chosen.tunable, torch.device("cpu"))

    def test_what_is_right(self):
        assert self.asked() == ("", False)

    def test_what_never_ends(self, monkeypatch):
        monkeypatch.setattr(on_demand, "_CHECK_LIMIT_S", 0.2)
        assert self.asked() == ("no answer within 0 s", False)

    def test_what_dies(self, monkeypatch):
        monkeypatch.setattr(on_demand, "WORKER", (sys.executable, "-c", "raise SystemExit(3)"))
        assert self.asked() == ("its process died with status 3", False)

    def test_where_there_is_no_process(self, monkeypatch):
        monkeypatch.setattr(on_demand, "WORKER", ("/no such program",))
        failure, says_nothing = self.asked()
        assert "no such program" in failure
        assert says_nothing

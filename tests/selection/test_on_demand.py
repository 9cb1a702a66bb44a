"""What BWATTN_RECORD and BWATTN_TUNE do."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_bwattn
from torch_bwattn.problem import Problem
from torch_bwattn.selection import on_demand

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


@pytest.mark.parametrize("line", ["[]", '{"target": "cpu"}', '{"nonsense": 1}', '{"dtype": "nonsense"}', "{"])
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
    on_demand.tune(ON_A_GPU)
    on_demand.tune(ON_A_GPU)
    assert len(commands) == 1
    on_demand.tune(Problem("cpu", torch.float32, 1, 2, 2, 40, 50, 16, 16, 0.25))
    assert len(commands) == 1


def test_a_failed_tuning_is_told_once(monkeypatch, caplog):
    monkeypatch.setenv("BWATTN_TUNE", "1")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2, stderr="no luck"))
    on_demand.tune(ON_A_GPU)
    on_demand.tune(ON_A_GPU)
    (record,) = caplog.records
    assert "no luck" in record.message


def test_another_value_is_an_error(monkeypatch):
    monkeypatch.setenv("BWATTN_TUNE", "yes")
    with pytest.raises(ValueError, match="BWATTN_TUNE"):
        on_demand.tune(ON_A_GPU)

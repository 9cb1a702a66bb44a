"""The command's options; what it does with them is tests/tuning's."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from tests.selection.conftest import cache  # noqa: F401 (a fixture)
from torch_bwattn import cli
from torch_bwattn.cli import tune
from torch_bwattn.problem import Problem
from torch_bwattn.selection import on_demand, tables
from torch_bwattn.selection.key import key_of
from torch_bwattn.selection.tables import Measured, Tunable

PROBLEM = Problem("sm_90a", torch.bfloat16, 1, 2, 2, 40, 50, 16, 16, 0.25)


def parse(*argv):
    parser = argparse.ArgumentParser()
    tune.configure(parser)
    return parser.parse_args(list(argv))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--jobs", "0"], "--jobs"),
        (["--limit", "-1"], "--limit"),
        (["--limit", "inf"], "--limit"),
        (["--suite", "release", "--causal", "yes"], "--causal"),
        (["--shapes", "nonsense"], ""),
    ],
)
def test_wrong_usage(argv, words, capsys):
    assert cli.main(["tune", *argv]) == 2
    said = capsys.readouterr().err
    assert words in said
    if not words and not torch.cuda.is_available():
        assert "expected a CUDA device" in said


def test_shapes_become_problems_of_both_directions():
    found = tune.problems_of(parse("--shapes", "B2H8/2S1024D64", "--causal", "yes"), "sm_90a")
    assert [(problem.kv_heads, problem.diagonal, problem.backward) for problem in found] == [
        (2, 0, False),
        (2, 0, True),
    ]
    assert len(tune.problems_of(parse("--direction", "forward"), "sm_90a")) == 12
    with pytest.raises(ValueError, match="shape"):
        tune.problems_of(parse("--shapes", "nonsense"), "sm_90a")


def test_a_log_becomes_problems(tmp_path):
    log = tmp_path / "problems.jsonl"
    log.write_text(json.dumps(on_demand.to_json(PROBLEM)) + "\n")
    assert tune.problems_of(parse("--from-log", str(log)), "sm_90a") == [PROBLEM]
    assert tune.problems_of(parse("--from-log", str(log), "--direction", "backward"), "sm_90a") == []


def test_a_table_can_be_shipped(tmp_path):
    described = {"date": "2026-11-30", "device": {"name": "a card"}, "driver": "1", "versions": {}}
    ranking = [Measured(Tunable("cute", "64x64"), 0.5)]
    tables.tuned("sm_90a").update(lambda contents: tables.add(contents, key_of(PROBLEM), ranking, described))
    tune.write_table("sm_90a", tmp_path / "table.json")
    contents = json.loads((tmp_path / "table.json").read_text())
    assert tables.valid(contents)
    assert contents["target"] == "sm_90a"
    assert key_of(PROBLEM) in tables.entries_of(contents, "there")

"""The command says of any target what ``torch_bwattn.explain`` says of a call here."""

from __future__ import annotations

import json

import pytest
import torch

from torch_bwattn import cli
from torch_bwattn.backends.helion import flash, flash_backward, flash_wide
from torch_bwattn.problem import Problem
from torch_bwattn.selection import on_demand
from torch_bwattn.target import cuda_target, is_target

SHAPE = "B4H32/8S4096D128"


@pytest.fixture(autouse=True)
def all_are_there(monkeypatch):
    from torch_bwattn.selection.choose import get_backend

    monkeypatch.setattr(flash.cute_loader, "why_missing", lambda: None)
    monkeypatch.setattr(get_backend("helion"), "missing", lambda: None)


def said(capsys, *argv):
    assert cli.main(["explain", *argv]) == 0
    return capsys.readouterr().out


def test_a_gpu_that_is_not_here(capsys):
    text = said(capsys, "--target", "sm_100a", "--shapes", SHAPE, "--causal", "yes")
    forward, backward = text.split("backward: ")
    assert "Hq=32 Hkv=8 Sq=4096" in forward
    source, first = forward.splitlines()[2:4]
    assert "NVIDIA B200, a prediction" in source
    assert first.startswith(f"  + helion: supports it, config {flash.NAME} ({flash.NOTE}), predicted ")
    assert first.endswith(" ms there")
    assert next(iter(flash_backward.CONFIGS)) in backward.splitlines()[1]


def test_why_not(capsys):
    text = said(capsys, "--target", "sm_103a", "--shapes", "B1H8S1000D256", "--direction", "forward")
    assert f"refuses, config {flash_wide.NAME}: it takes widths from 1 to 128, or D=192" in text
    assert "backward" not in text
    assert flash.NAME not in said(capsys, "--target", "sm_90a", "--shapes", SHAPE)


def test_recorded_problems_on_another_target(capsys, tmp_path):
    problem = Problem("sm_90a", torch.bfloat16, 1, 2, 2, 500, 500, 64, 64, 0.25, low_diagonal=-9)
    log = tmp_path / "log"
    log.write_text(json.dumps(on_demand.to_json(problem)) + "\n")
    text = said(capsys, "--target", "sm_100a", "--from-log", str(log))
    assert "on sm_100a" in text
    assert "window (i + -9 <= j)" in text
    assert flash.NAME in text


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--shapes", SHAPE, "--target", "sm_100"], "sm_100a"),
        (["--shapes", "nonsense"], "nonsense"),
        (["--from-log", "nowhere"], "nowhere"),
        (["--from-log", "nowhere", "--causal", "yes"], "--causal"),
    ],
)
def test_wrong_usage(argv, word, capsys):
    assert cli.main(["explain", *argv]) == 2
    assert word in capsys.readouterr().err


def test_what_is_a_target():
    assert is_target("cpu")
    assert all(is_target(cuda_target(*capability)) for capability in ((8, 0), (8, 6), (9, 0), (10, 3), (12, 0)))
    assert not any(map(is_target, ("", "cuda", "sm_90", "sm_80a", "sm_", "sm_100a ", "sm_100f", "h200")))

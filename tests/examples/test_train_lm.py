from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TINY = ("--layers=1", "--heads=2", "--kv-heads=1", "--head-dim=8", "--seq-len=16", "--batch-size=2", "--steps=4")


@pytest.fixture
def train_lm(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return pytest.importorskip("train_lm")


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    # The package of this checkout, installed or not.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "train_lm.py"), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_example_runs_and_reports(tmp_path):
    plot = tmp_path / "curves.png"
    done = run_example(*TINY, "--no-compile", "--device=cpu", "--sample-tokens=8", f"--plot={plot}")
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "Written by the patched model" in done.stdout
    assert "tolerances for torch.float32" in done.stdout
    # One call a layer and step, each counted under the backend that computed it; none without the patch.
    patched = re.search(r"^patched .*  (?P<calls>\S.*)$", done.stdout, re.MULTILINE)
    assert patched is not None
    assert sum(int(count) for count in re.findall(r"\w+ (\d+)", patched["calls"])) == 4
    assert re.search(r"^plain .*  none counted$", done.stdout, re.MULTILINE)
    assert "tokens/s" in done.stderr  # the progress bar


def test_a_control_run_is_another_plain_one(tmp_path):
    losses = tmp_path / "losses.json"
    run = (*TINY, "--no-compile", "--device=cpu", "--sample-tokens=8", "--no-plot", "--control", f"--losses={losses}")
    done = run_example(*run)
    found = json.loads(losses.read_text())
    assert list(found) == ["patched", "plain", "control"]
    assert all(len(values) == len(found["plain"]) > 1 for values in found.values())
    assert done.returncode == 0, done.stderr
    assert re.search(r"^control .*  none counted$", done.stdout, re.MULTILINE)


def test_a_control_run_can_only_widen_the_tolerance(train_lm):
    plain, far, near = (train_lm.Run(None, [3.0 + gap] * 30, 1.0, 1.0, {}) for gap in (0.0, 0.5, 1e-9))
    usual = train_lm.TOLERANCES[torch.float32]
    assert train_lm.tolerance_of(torch.float32, plain, None) == usual
    assert train_lm.tolerance_of(torch.float32, plain, near) == usual
    assert train_lm.tolerance_of(torch.float32, plain, far) == (1.0, 1.0)


def test_the_patched_run_agrees_with_the_nearer_of_the_others(train_lm):
    patched, plain, control = (
        train_lm.Run(None, [3.0 + gap] * 30, 1.0, 1.0, {} if gap else {"aten": 1}) for gap in (0.0, 0.5, 0.3)
    )
    tolerance = train_lm.tolerance_of(torch.float32, plain, control)
    assert train_lm.failures(patched, plain, tolerance) == ["the two loss curves disagree"]
    assert train_lm.nearer(patched, plain, control) is control
    assert train_lm.failures(patched, control, tolerance) == []
    assert train_lm.nearer(patched, plain, None) is plain


def test_example_names_bad_sizes():
    done = run_example("--heads=4", "--kv-heads=3", "--device=cpu")
    assert done.returncode != 0
    assert "heads=4 and kv_heads=3" in done.stderr


@pytest.mark.parametrize(
    ("losses", "calls", "plain_calls", "expected"),
    [
        ([4.0, 3.0], {"aten": 2}, {}, []),
        ([4.0, 3.000001], {"aten": 2}, {}, []),
        ([4.0, 3.001], {"aten": 2}, {}, ["the two loss curves disagree"]),
        ([4.0, math.nan], {"aten": 2}, {}, ["the two loss curves disagree"]),
        ([4.0, 3.0], {}, {}, ["the patch reached no attention call"]),
        ([4.0, 3.0], {"aten": 2}, {"aten": 2}, ["the run without the patch called torch_bwattn"]),
    ],
)
def test_failures_are_found(train_lm, losses, calls, plain_calls, expected):
    patched = train_lm.Run(None, losses, 1.0, 1.0, calls)
    plain = train_lm.Run(None, [4.0, 3.0], 1.0, 1.0, plain_calls)
    assert train_lm.failures(patched, plain, train_lm.TOLERANCES[torch.float32]) == expected


def test_late_steps_may_drift_but_not_on_average(train_lm):
    tolerance = train_lm.TOLERANCES[torch.float32]
    plain = train_lm.Run(None, [3.0] * 100, 1.0, 1.0, {})
    drifted = 3.0 + 2 * tolerance.mean
    for late_steps, expected in ((40, []), (60, ["the two loss curves disagree"])):
        patched = train_lm.Run(None, [3.0] * (100 - late_steps) + [drifted] * late_steps, 1.0, 1.0, {"aten": 1})
        assert train_lm.failures(patched, plain, tolerance) == expected


def test_vocabulary_round_trip(train_lm):
    text = train_lm.read_prose()
    vocabulary = train_lm.Vocabulary(text, 400)
    assert len(vocabulary) == 400
    assert vocabulary.decode(vocabulary.encode(text[:5000]).tolist()) == text[:5000]
    with pytest.raises(ValueError, match="distinct characters, got 10"):
        train_lm.Vocabulary(text, 10)

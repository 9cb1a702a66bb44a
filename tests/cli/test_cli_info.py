import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_bwattn import environment
from torch_bwattn.cli import info, main

ROOT = Path(__file__).resolve().parents[2]


def test_info_prints_every_section(capsys, monkeypatch):
    monkeypatch.setenv("BWATTN_TEST_VARIABLE", "on")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for heading in ("versions", "devices", "backends", "order of choice", "environment variables"):
        assert heading in text.splitlines()
    assert torch.__version__ in text
    assert "  BWATTN_TEST_VARIABLE=on" in text
    assert "  aten                 available" in text
    assert "  cpu                  aten, reference" in text


def test_info_as_json(capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["backends"]["reference"] is None
    assert set(found["backends"]) >= {"helion", "aten", "reference"}


def test_devices_are_listed_with_their_targets(monkeypatch):
    device = {
        "index": 0,
        "name": "NVIDIA H200",
        "capability": "9.0",
        "memory_bytes": 141 * 2**30,
        "multiprocessors": 132,
    }
    monkeypatch.setattr(environment, "devices", lambda: [dict(device)])
    text = info.render(info.collect())
    assert "  cuda:0  NVIDIA H200, capability 9.0 (sm_90a), 141 GiB, 132 multiprocessors" in text
    assert "  sm_90a               cute, helion, aten, reference" in text


def test_a_broken_driver_is_a_finding(monkeypatch):
    def fail():
        raise RuntimeError("driver too old")

    monkeypatch.setattr(environment, "devices", fail)
    assert "  no CUDA device: RuntimeError: driver too old" in info.render(info.collect())


def test_a_missing_backend_says_why(monkeypatch):
    from torch_bwattn.selection import choose

    def refuse(name):
        raise ImportError(f"no {name} here")

    monkeypatch.setattr(choose, "get_backend", refuse)
    assert "missing: no helion here" in info.render(info.collect())


def test_info_works_without_any_kernel_language():
    code = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "helion", "cutlass", "tvm_ffi"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
from torch_bwattn.cli import main
sys.exit(main(["info"]))
"""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "  reference            available" in done.stdout
    assert "helion               missing" in done.stdout


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["info", "--no-such-option"]])
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["--help"], ["info", "--help"], ["run", "--help"], ["bench", "--help"], ["tune", "--help"]]
)
def test_help(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    assert "usage: python -m torch_bwattn" in capsys.readouterr().out

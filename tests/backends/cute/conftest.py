"""A cache folder of its own for every test, and child processes that use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_bwattn import storage
from torch_bwattn.backends.cute import compile as compiling
from torch_bwattn.backends.cute import disk, loader


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = loader.why_missing()
    for item in items:
        if reason is not None and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of the disk cache; nothing is known in memory, and nothing was logged yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BWATTN_CACHE_DIR", str(folder))
    monkeypatch.delenv("BWATTN_CUTE_DISK_CACHE", raising=False)
    monkeypatch.setattr(compiling, "_functions", {})
    monkeypatch.setattr(storage, "_told", set())
    # A source saved while the tests run is no reason to test less.
    monkeypatch.setattr(disk, "_imported_at", float("inf"))
    return folder


@pytest.fixture
def spawn():
    """Starts a script that can import toy_kernels, and the package from where this process has it."""
    processes = []

    def start(script, **environment):
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        command = [sys.executable, "-c", _PREAMBLE + script]
        environment = {**os.environ, "PYTHONPATH": path, **environment}
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def child(spawn):
    """Runs a script as ``spawn`` does and returns what it printed."""

    def run(script, **environment):
        process = spawn(script, **environment)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        return output.strip()

    return run


_PREAMBLE = """
import sys, time
import torch
from torch_bwattn.backends.cute import compile as compiling, disk
from torch_bwattn.backends.cute.compile import KernelKey, compiled, ready

disk._imported_at = float("inf")
built = []

def scale_key(n):
    return KernelKey("scale", "sm_90a", (n, torch.float32))

def build_scale(n):
    def build():
        import toy_kernels
        built.append(n)
        return toy_kernels.build_scale(n)
    return build
"""

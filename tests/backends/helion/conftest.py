"""Runs tests that need another Triton than this process has, in a child process of their own.

Triton decides at import whether its functions are compiled or interpreted, so one process has one kind, and a process
that uses a GPU cannot pretend another. Two markers say what a test needs:

- ``interpreted``: kernels run in Triton's interpreter, on CPU tensors (``TRITON_INTERPRET=1``).
- ``compile_only``: kernels are compiled for a GPU that is pretended, and never run.

A test whose needs this process meets already runs here, as usual. The others are handed, one by one, to a child
process of that kind, which is started once and lives as long as this process; their reports come back and are shown as
usual. With xdist each worker has its own children. To debug a test in this process, set ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from torch_bwattn.backends.helion import loader

MARKERS = {
    "interpreted": "runs kernels in Triton's interpreter, on the CPU",
    "compile_only": "compiles kernels for a pretended GPU and runs none",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = loader.why_missing()
    for item in items:
        if reason is not None and _marker(item) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    marker = _marker(item)
    if marker is None or _met_here(marker) or loader.why_missing() is not None:
        return None
    # The last test that ran here left standing what it shares with this one, which the next to run here may not share.
    item.session._setupstate.teardown_exact(None)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _child(item.config, marker).run(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(scope="module")
def fast_row_maximum():
    """Halves the time: Triton's interpreter takes a reduction that it does not know one pair at a time."""
    if not loader.interpreting():
        yield
        return
    loader.load()
    import triton.language as tl
    from helion.runtime.triton import helpers

    def max_propagate_nan(x, dim):
        nan = tl.max((x != x).to(tl.int32), dim) > 0  # noqa: PLR0124
        return tl.where(nan, float("nan"), tl.max(x, dim))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "max_propagate_nan", max_propagate_nan)
        yield


def _marker(item: pytest.Item) -> str | None:
    return next((name for name in MARKERS if item.get_closest_marker(name) is not None), None)


def _met_here(marker: str) -> bool:
    if marker == "interpreted":
        return loader.interpreting()
    return not loader.interpreting() and not torch.cuda.is_available()


class _Child:
    """A process that runs one test after another and answers each with pytest's serialized reports."""

    def __init__(self, config: pytest.Config, marker: str) -> None:
        self.config = config
        path = os.pathsep.join(
            filter(None, sys.path)
        )  # the package may be importable from here without being installed
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTEST_ADDOPTS="", PYTHONPATH=path)
        environment.pop("TRITON_INTERPRET", None)
        for name in [name for name in environment if name.startswith("PYTEST_XDIST")]:
            del environment[name]
        if marker == "interpreted":
            environment["TRITON_INTERPRET"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(config.rootpath)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=config.rootpath,
            text=True,
        )

    def run(self, item: pytest.Item) -> list[Any]:
        start = time.time()
        stdin, stdout = self.process.stdin, self.process.stdout
        try:
            stdin.write(json.dumps(item.nodeid) + "\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.process.wait()
        reports = [
            self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
            for data in json.loads(answer or "[]")
        ]
        for report in reports:
            if isinstance(report.longrepr, list):
                report.longrepr = tuple(report.longrepr)  # a skip's place and reason; JSON has no tuples
        if reports:
            return reports
        stop = time.time()
        text = f"the child process ran no such test, or ended (return code {self.process.poll()})"
        return [
            pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call", [], stop - start, start, stop)
        ]

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_CHILDREN: pytest.StashKey[dict[str, _Child]] = pytest.StashKey()


def _child(config: pytest.Config, marker: str) -> _Child:
    children = config.stash.setdefault(_CHILDREN, {})
    if marker not in children or children[marker].process.poll() is not None:
        children[marker] = _Child(config, marker)
        config.add_cleanup(children[marker].stop)
    return children[marker]


class _Collector:
    """Keeps the reports of a run in the child, in the form that xdist sends them too."""

    def __init__(self) -> None:
        self.config: pytest.Config | None = None
        self.reports: list[dict[str, Any]] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert self.config is not None
        self.reports.append(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            sys.stderr.write(f"{report.longreprtext}\n")


def _serve(root: str) -> None:
    """Reads node ids, answers reports. The real stdout is the channel: what tests print must not reach it."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    quiet = open(os.devnull, "w")  # noqa: SIM115, PTH123 (lives as long as the process)
    for line in sys.stdin:
        collector = _Collector()
        terminal, sys.stdout = sys.stdout, quiet
        try:
            pytest.main(
                ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:logging", f"--rootdir={root}", json.loads(line)],
                plugins=[collector],
            )
        finally:
            sys.stdout = terminal
        channel.write(json.dumps(collector.reports) + "\n")
        channel.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])

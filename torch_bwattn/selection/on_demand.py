"""What two variables of the environment ask for when a problem is met for the first time.

``BWATTN_RECORD=FILE`` appends each problem, once a process, as a line of JSON: what ``python -m torch_bwattn tune
--from-log FILE`` reads. ``BWATTN_TUNE=1`` has such a problem tuned there and then, in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import expected
from ..problem import Problem
from . import tables
from .key import Key, key_of
from .store import tell_once

RECORD, TUNE = "BWATTN_RECORD", "BWATTN_TUNE"
_LIMIT_S = 1800.0

_lock = threading.Lock()
_recorded: set[Problem] = set()
_tuned: set[Key] = set()


def to_json(problem: Problem) -> dict[str, Any]:
    """A problem as plain values; what a field has by default is left out."""
    fields = {field.name: (getattr(problem, field.name), field.default) for field in dataclasses.fields(problem)}
    plain = {name: value for name, (value, default) in fields.items() if value != default}
    return {name: _word(value) if isinstance(value, torch.dtype) else value for name, value in plain.items()}


def from_json(found: Mapping[str, Any]) -> Problem:
    """The problem of :func:`to_json`.

    Raises:
        ValueError: It is none.
    """
    names = {field.name for field in dataclasses.fields(Problem)}
    if not isinstance(found, dict) or not set(found) <= names:
        raise ValueError(expected("problem", f"an object with fields of {', '.join(sorted(names))}", found))
    values = dict(found)
    for name in ("dtype", "sink_dtype", "mask_dtype"):
        if values.get(name) is not None:
            dtype = getattr(torch, str(values[name]), None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(expected(name, "the name of a dtype", values[name]))
            values[name] = dtype
    if values.get("mask_sizes") is not None:
        values["mask_sizes"] = tuple(values["mask_sizes"])
    try:
        return Problem(**values)
    except TypeError as error:
        raise ValueError(f"problem: {error}") from error


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_log(path: Path | str) -> list[Problem]:
    """The problems of a file that :func:`record` wrote, each once.

    Raises:
        ValueError: A line holds none.
    """
    found: dict[Problem, None] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found[from_json(json.loads(line))] = None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return list(found)


def record(problem: Problem) -> None:
    """Appends a problem to the file that the environment names, if it does."""
    path = os.environ.get(RECORD)
    if not path:
        return
    with _lock:
        if problem in _recorded:
            return
        _recorded.add(problem)
        line = json.dumps(to_json(problem)) + "\n"
        try:
            # One write of a file opened for appending: lines of several processes do not mix.
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)
        except OSError as error:
            tell_once(f"{RECORD}: {path} cannot be written: {error}")


def tune(problem: Problem) -> None:
    """Tunes a problem of a CUDA device, if the environment asks for it and nobody has.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    switch = os.environ.get(TUNE, "0")
    if switch not in ("0", "1"):
        raise ValueError(expected(TUNE, "'0' or '1'", repr(switch)))
    if switch == "0" or not problem.target.startswith("sm_") or problem.empty:
        return
    key = key_of(problem)
    with _lock:
        if key in _tuned or tables.is_known(problem.target, key):
            return
        _tuned.add(key)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "problem.jsonl"
            log.write_text(json.dumps(to_json(problem)) + "\n")
            command = [sys.executable, "-m", "torch_bwattn", "tune", "--quiet", "--from-log", str(log)]
            variables = {**os.environ, TUNE: "0", RECORD: ""}
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(  # noqa: S603 (this interpreter, this package)
                    command, env=variables, capture_output=True, text=True, timeout=_LIMIT_S, check=False
                )
                if done.returncode == 0:
                    return
                tell_once(f"{TUNE}: {key} could not be tuned: {' '.join(done.stderr.split())[-400:]}")
                return
            tell_once(f"{TUNE}: {key} could not be tuned within {_LIMIT_S:.0f} s")

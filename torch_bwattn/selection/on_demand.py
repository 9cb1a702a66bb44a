"""What two variables of the environment ask for when a problem is met for the first time.

``BWATTN_RECORD=FILE`` appends each problem, once a process, as a line of JSON: what ``python -m torch_bwattn tune
--from-log FILE`` reads. ``BWATTN_TUNE=1`` has such a problem tuned there and then, in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import storage
from ..errors import SettingError, expected
from ..problem import Problem, dtype_name
from . import tables
from .key import Key, key_of

RECORD, TUNE = "BWATTN_RECORD", "BWATTN_TUNE"
_LIMIT_S = 1800.0
_CHECK_LIMIT_S = 180.0
WORKER = (sys.executable, "-m", "torch_bwattn.tuning.worker")
_VISIBLE = "CUDA_VISIBLE_DEVICES"

log = logging.getLogger("torch_bwattn")

_recording, _tuning = threading.Lock(), threading.Lock()
_recorded: set[Problem] = set()
_tuned: set[Key] = set()


def _renew_locks() -> None:
    global _recording, _tuning
    _recording, _tuning = threading.Lock(), threading.Lock()  # a thread that is not in the child may have held the old


os.register_at_fork(after_in_child=_renew_locks)


def to_json(problem: Problem) -> dict[str, Any]:
    """A problem as plain values; what a field has by default is left out."""
    fields = {field.name: (getattr(problem, field.name), field.default) for field in dataclasses.fields(problem)}
    plain = {name: value for name, (value, default) in fields.items() if value != default}
    return {name: dtype_name(value) if isinstance(value, torch.dtype) else value for name, value in plain.items()}


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
    if isinstance(values.get("mask_sizes"), list):
        values["mask_sizes"] = tuple(values["mask_sizes"])
    for field in dataclasses.fields(Problem):
        if field.name in values and not _fits(str(field.type), values[field.name]):
            raise ValueError(expected(field.name, str(field.type), repr(values[field.name])))
    try:
        return Problem(**values)
    except TypeError as error:
        raise ValueError(f"problem: {error}") from error


def _fits(kind: str, value: Any) -> bool:
    """Whether a value read from JSON is what an annotation names."""
    if value is None:
        return "None" in kind
    of = kind.split(" | ", maxsplit=1)[0]
    if of == "int":
        return type(value) is int
    if of == "float":
        return type(value) in (int, float)
    if of == "tuple[int, ...]":
        return isinstance(value, tuple) and all(type(one) is int for one in value)
    return isinstance(value, {"bool": bool, "str": str, "torch.dtype": torch.dtype}[of])


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
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return list(found)


def record(problem: Problem) -> None:
    """Appends a problem to the file that the environment names, if it does."""
    path = os.environ.get(RECORD)
    if not path:
        return
    with _recording:
        if problem in _recorded:
            return
        _recorded.add(problem)
        line = json.dumps(to_json(problem)) + "\n"
        try:
            # One write of a file opened for appending: lines of several processes do not mix.
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)
        except OSError as error:
            storage.tell_once(log, f"{RECORD}: {path} cannot be written: {error}")


def tune(problem: Problem, device: torch.device | None) -> None:
    """Tunes a problem of a CUDA device, if the environment asks for it and nobody has; one process at a time.

    Raises:
        SettingError: The variable is neither 0 nor 1.
    """
    switch = os.environ.get(TUNE) or "0"
    if switch not in ("0", "1"):
        raise SettingError(expected(TUNE, "'0' or '1'", repr(switch)))
    if switch == "0" or not problem.target.startswith("sm_") or problem.empty:
        return
    key = key_of(problem)
    with _tuning:
        if key in _tuned:
            return
        _tuned.add(key)
        lock = tables.tuned(problem.target).path(make=True)
        with storage.exclusive(lock.with_suffix(".tuning")) if lock else contextlib.nullcontext():
            if not tables.is_known(problem.target, key):
                try:
                    _tune(problem, device)
                except OSError as error:
                    storage.tell_once(log, f"{TUNE}: nothing can be tuned: {error}")


def _variables(device: torch.device | None) -> dict[str, str]:
    """The environment of a process that sees one device alone, and neither records nor tunes by itself."""
    variables = {**os.environ, TUNE: "0", RECORD: ""}
    if device is not None and device.index is not None:
        seen = [word for word in os.environ.get(_VISIBLE, "").split(",") if word]
        variables[_VISIBLE] = seen[device.index] if seen else str(device.index)
    return variables


def check_apart(problem: Problem, tunable: tables.Tunable, device: torch.device) -> tuple[str, bool]:
    """What a process of its own finds of a tunable: what is wrong, or nothing, and whether that says nothing of it."""
    request = json.dumps({"do": "check", "problem": to_json(problem), "tunable": list(tunable)}) + "\n"
    try:
        done = subprocess.run(  # noqa: S603 (this interpreter, this package)
            WORKER, input=request, env=_variables(device), capture_output=True, text=True,
            timeout=_CHECK_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {_CHECK_LIMIT_S:.0f} s", False
    except OSError as error:
        return f"there is no process to check it: {error}", True
    try:
        reply = json.loads(done.stdout.splitlines()[-1])
        return str(reply["failure"]), bool(reply["says_nothing"])
    except (IndexError, ValueError, KeyError, TypeError):
        return f"its process died with status {done.returncode}", False


def _tune(problem: Problem, device: torch.device | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.jsonl"
        path.write_text(json.dumps(to_json(problem)) + "\n")
        command = [sys.executable, "-m", "torch_bwattn", "tune", "--quiet", "--from-log", str(path)]
        try:
            done = subprocess.run(  # noqa: S603 (this interpreter, this package)
                command, env=_variables(device), capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            storage.tell_once(log, f"{TUNE}: {key_of(problem)} could not be tuned within {_LIMIT_S:.0f} s")
            return
        if done.returncode != 0:
            said = " ".join(done.stderr.split())[-400:]
            storage.tell_once(log, f"{TUNE}: {key_of(problem)} could not be tuned: {said}")

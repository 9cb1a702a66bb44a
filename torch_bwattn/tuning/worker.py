"""The process that checks and times tunables, so that one that hangs or crashes takes nothing else with it.

It says ``{"ready": true}`` once it has imported what it needs. Then it reads requests from its standard input and
writes a reply to each to its standard output, both a line of JSON::

    {"do": "check", "problem": …, "tunable": [backend, config]}             -> {"failure": "", "says_nothing": false}
    {"do": "time", "problem": …, "tunables": […], "budget": {…}}             -> {"ms": […], "failures": […]}

A failure that ``says_nothing`` is none of the kernel's: memory lacked, or there was no reference. After a reply with
``"lost": true`` the process is of no more use: its device is gone. What kernels print goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import torch

from ..backends.base import ForwardInputs
from ..bench.timing import (
    Budget,
    Contender,
    CudaStopwatch,
    HostStopwatch,
    Timing,
    describe_failure,
    time_interleaved,
)
from ..problem import Problem
from ..selection import drawn, trust
from ..selection.choose import get_backend
from ..selection.on_demand import from_json
from . import calls


def device_of(problem: Problem) -> torch.device:
    """The device that a problem's target means in this process."""
    return torch.device("cpu" if problem.target == "cpu" else "cuda")


class NoReference(Exception):
    """There is nothing to compare with."""


def check(problem: Problem, backend: str, config: str) -> str:
    """What is wrong with a tunable, or nothing: its results on a small problem, and that it runs this one.

    Raises:
        NoReference: What is right could not be computed.
    """
    found = get_backend(backend)
    try:
        drawing = drawn.draw(problem, device_of(problem))
    except Exception as error:
        raise NoReference("no reference") from error
    failure = drawn.failure(found, config, drawing)
    if failure:
        return failure
    result = work_of(problem, backend, config, _inputs(problem))()
    if any(bool(tensor.isnan().any()) for tensor in result if tensor is not None):
        return "NaN in its results"
    return ""


def _inputs(problem: Problem) -> ForwardInputs:
    return drawn.inputs(problem, device_of(problem))


def work_of(problem: Problem, backend: str, config: str, x: ForwardInputs) -> Callable[[], Any]:
    """The call that is timed. A backward's ``out`` and ``lse`` are drawn: what is read decides no time."""
    if backend in (calls.AUTO, calls.PLAIN):
        return calls.work_of(backend, problem, x)
    found = get_backend(backend)
    if not problem.backward:
        run = found.forward(problem, config)
        return lambda: run(x)
    back, grad_out = found.backward(problem, config), drawn.gradient_of(problem, x)
    y, wanted = drawn.made_up(problem, x, grad_out), drawn.wanted(problem)
    return lambda: back(y, wanted)


def measure(
    problem: Problem, tunables: Sequence[tuple[str, str]], budget: Mapping[str, float]
) -> tuple[list[float | None], list[str]]:
    """Median milliseconds of each tunable, timed in turns, or None and why."""
    device, x = device_of(problem), _inputs(problem)
    stopwatch = CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()
    contenders: dict[str, Contender] = {}
    found: dict[str, Timing | str] = {}
    names = [" ".join(tunable) for tunable in tunables]
    for name, (backend, config) in zip(names, tunables, strict=True):
        try:
            work = work_of(problem, backend, config, x)
            work()
            contenders[name] = Contender(work)
        except Exception as error:  # noqa: BLE001 (it is the answer)
            found[name] = describe_failure(error)
    found.update(time_interleaved(contenders, stopwatch, Budget(**budget)))  # type: ignore[arg-type]
    results = [found[name] for name in names]
    times = [None if isinstance(result, str) else result.ms for result in results]
    reasons = [result if isinstance(result, str) else "" for result in results]
    return times, reasons


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to one request; what goes wrong is in it."""
    try:
        problem = from_json(request["problem"])
        with torch.no_grad():
            if request["do"] == "check":
                backend, config = request["tunable"]
                return {"failure": check(problem, backend, config), "says_nothing": False}
            times, failures = measure(problem, [(b, c) for b, c in request["tunables"]], request["budget"])
            return {"ms": times, "failures": failures}
    except Exception as error:  # noqa: BLE001 (it is the answer)
        count = len(request.get("tunables", ()))
        reasons = {"failure": describe_failure(error), "failures": [describe_failure(error)] * count}
        foreign = isinstance(error, NoReference) or trust.lacks_memory(error)
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        state = {"says_nothing": foreign, "lost": trust.device_is_lost(cause)}
        return {**reasons, **state, "ms": [None] * count}
    finally:
        if torch.cuda.is_initialized():
            with contextlib.suppress(torch.AcceleratorError):  # again of a device that is lost
                torch.cuda.empty_cache()


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answers until the requests end."""
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in requests:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended: a kernel that hangs would not read the end of the requests."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Keeps the standard output for replies and serves, as long as the process that started this one lives."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()

"""Tunes problems: checks every tunable that may compete, times those that pass, and keeps their order.

Work is done by processes of their own (:mod:`.worker`). Checks, which compile, run beside each other in as many as
asked for; times are taken by one, of all tunables of a problem in turns, while nothing else runs. A tunable that does
not answer within its limit, or takes its process with it, is left out, and the process replaced. What is found is kept
a few problems at a time, so that a run that was ended goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

from .. import environment
from ..problem import Problem
from ..selection import tables
from ..selection.choose import Priority, plan
from ..selection.key import Key, key_of
from ..selection.on_demand import TUNE, WORKER, to_json
from ..selection.tables import Measured, Tunable

_READY = b'{"ready": true}'
_START_LIMIT_S = 120.0
"""What a new process is given to import what it needs."""
_END_LIMIT_S = 30.0


_AT_ONCE = 8
"""Problems whose tunables are checked before any of them is timed."""


class NoAnswer(Exception):
    """A worker has not answered in time, or has died."""


class NotStarted(NoAnswer):
    """A worker cannot be started: that says nothing of what it was to be asked."""


class Worker:
    """One worker process, started when it is first asked, and anew after it failed to answer."""

    def __init__(self, command: Sequence[str] = WORKER, variables: Mapping[str, str] | None = None) -> None:
        """``variables`` are of its environment, where that does not have them."""
        self._command, self._variables = command, variables or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def ask(
        self, request: dict[str, Any], limit_s: float, wanted: Mapping[str, Callable[[Any], Any]]
    ) -> dict[str, Any]:
        """What is ``wanted`` of the reply to a request, each as the function of it that is given.

        Raises:
            NotStarted: There is no process to ask.
            NoAnswer: There is none within the limit, it is no such reply, or the process died.
        """
        process = self._process or self._start()
        try:
            self._write_line(process, json.dumps(request).encode())
            reply = json.loads(self._read_line(process, limit_s))
            found = {name: kind(reply[name]) for name, kind in wanted.items()}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.end()
            raise NoAnswer(f"its process died, or answered with nonsense ({error})") from error
        except NoAnswer:
            self.end()
            raise
        if reply.get("lost"):
            self.end()
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            # A session of its own: what it starts itself is ended with it.
            self._process = subprocess.Popen(  # noqa: S603 (this interpreter, or a test's)
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True, env={**self._variables, **os.environ, TUNE: "0"},
            )  # fmt: skip
            while self._read_line(self._process, _START_LIMIT_S) != _READY:
                pass  # what is printed while modules load
        except (OSError, NoAnswer) as error:
            self.end()
            raise NotStarted(f"its process did not start: {error}") from error
        return self._process

    def _write_line(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        if process.stdin is None:
            raise NoAnswer("its process takes no requests")
        process.stdin.write(line + b"\n")
        process.stdin.flush()

    def _read_line(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes:
        deadline, output = time.monotonic() + limit_s, process.stdout
        if output is None:
            raise NoAnswer("its process gives no replies")
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise NoAnswer(f"no answer within {limit_s:g} s")
            read = os.read(output.fileno(), 1 << 16)
            if not read:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    raise NoAnswer(f"its process ended with status {process.wait(timeout=1.0)}")
                raise NoAnswer("its process has closed its output")
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def end(self) -> None:
        """Ends the process and what it started."""
        process, self._process, self._buffer = self._process, None, b""
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, 9)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that does not let go of it
            process.wait(timeout=_END_LIMIT_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@dataclass(frozen=True)
class Options:
    """How to tune.

    Attributes:
        jobs: Processes that check beside each other.
        limit_s: What one tunable's check may take, and what all times of a problem may.
        budget: Of :class:`torch_bwattn.bench.timing.Budget`, for each tunable of a problem.
        again: Whether what is known is measured anew.
        command: What starts a worker.
    """

    jobs: int = 4
    limit_s: float = 120.0
    budget: dict[str, float] = field(default_factory=lambda: {"warmup_ms": 5.0, "rep_ms": 40.0, "rounds": 6})
    again: bool = False
    command: Sequence[str] = WORKER


@dataclass(frozen=True)
class Outcome:
    """What was found for a problem: its tunables, fastest first, and why others have no time."""

    key: Key
    ranking: tuple[Measured, ...]
    failures: dict[Tunable, str]


def competitors(problem: Problem) -> list[Tunable]:
    """The tunables that may compete: all that support a problem, but for fallbacks while there is anything else."""
    able = [candidate for candidate in plan(problem, None).candidates if candidate.verdict]
    able = [candidate for candidate in able if candidate.priority > Priority.LAST_RESORT]
    fast = [candidate for candidate in able if candidate.backend != "reference"]
    return sorted({candidate.tunable for candidate in fast or able})


def one_of_each_key(problems: Iterable[Problem]) -> dict[Key, Problem]:
    """The problems to measure: the largest of each key."""

    def size(problem: Problem) -> int:
        return problem.batch * problem.heads * problem.q_len * problem.kv_len

    found: dict[Key, Problem] = {}
    for problem in problems:
        key = key_of(problem)
        if problem.empty:
            continue
        if key not in found or size(problem) > size(found[key]):
            found[key] = problem
    return found


def tune(
    problems: Iterable[Problem],
    options: Options = Options(),
    *,
    log: Callable[[str], None] = lambda _: None,
    advance: Callable[[int, int], None] = lambda _done, _total: None,
    describe: Callable[[], dict[str, Any]] | None = None,
) -> list[Outcome]:
    """Tunes problems and keeps what it finds in the user's tables.

    Args:
        problems: What to tune; one of each key is measured.
        options: How.
        log: Takes a line for what is found, and for each tunable that has no time.
        advance: Takes how many of how many steps are done.
        describe: The environment that is noted with the times; by default that of CUDA device 0, or of the CPU.

    Returns:
        What was found, without what was known before.
    """
    todo = {
        key: problem
        for key, problem in one_of_each_key(problems).items()
        if options.again or not tables.is_known(problem.target, key)
    }
    rivals = {key: competitors(problem) for key, problem in todo.items()}
    total, done, lock = sum(map(len, rivals.values())) + len(todo), 0, threading.Lock()

    def step(*_: Any) -> None:
        nonlocal done
        with lock:
            done += 1
            advance(done, total)

    described = describe() if describe else _describe(todo.values())
    outcomes: list[Outcome] = []
    timer = Worker(options.command)
    try:
        with contextlib.closing(checked({todo[key]: rivals[key] for key in todo}, options, step)) as ready:
            for problem, failures in ready:
                outcome = _time(key_of(problem), problem, failures, timer, options)
                for tunable, reason in outcome.failures.items():
                    log(f"{outcome.key}: {tunable} left out: {reason}")
                if outcome.ranking:
                    log(f"{outcome.key}: {outcome.ranking[0].tunable}, {outcome.ranking[0].ms:.4f} ms")
                    _keep(problem, outcome, described)
                outcomes.append(outcome)
                step()
    finally:
        timer.end()
    return outcomes


def checked(
    rivals: Mapping[Problem, Sequence[Tunable]], options: Options, step: Callable[..., None] = lambda *_: None
) -> Generator[tuple[Problem, dict[Tunable, str]]]:
    """Problems whose tunables have been checked, and compiled, by processes that rest now: what is wrong with each.

    A few problems are checked beside each other, then given one by one. ``step`` is called after each check.
    """
    checkers, problems = Checkers(options), list(rivals)
    try:
        for first in range(0, len(problems), _AT_ONCE):
            some = problems[first : first + _AT_ONCE]
            found = checkers.check([(problem, tunable) for problem in some for tunable in rivals[problem]], step)
            for problem in some:
                yield problem, {tunable: found[problem, tunable].failure for tunable in rivals[problem]}
    finally:
        checkers.end()


def _describe(problems: Iterable[Problem]) -> dict[str, Any]:
    device = None if all(problem.target == "cpu" for problem in problems) else 0
    return environment.describe(device)


def _keep(problem: Problem, outcome: Outcome, described: dict[str, Any]) -> None:
    tables.tuned(problem.target).update(lambda contents: tables.add(contents, outcome.key, outcome.ranking, described))


class Checked(NamedTuple):
    """What a check has found: what is wrong, or nothing, and whether that ``says_nothing`` of the kernel."""

    failure: str
    says_nothing: bool
    seconds: float


class Checkers:
    """Workers that check tunables beside each other."""

    def __init__(self, options: Options) -> None:
        self._options = options
        jobs = max(1, options.jobs)
        # With more threads than cores they wait for each other: on two cores four take four times as long as two.
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
        self._all = [Worker(options.command, threads) for _ in range(jobs)]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._all:
            self._free.put(worker)

    def check(
        self,
        checks: Sequence[tuple[Problem, Tunable]],
        step: Callable[[tuple[Problem, Tunable], Checked], None],
    ) -> dict[tuple[Problem, Tunable], Checked]:
        """What is found of each tunable; ``step``, in any thread, takes each as it is found."""

        def one(check: tuple[Problem, Tunable]) -> Checked:
            problem, tunable = check
            worker, start = self._free.get(), time.monotonic()
            try:
                request = {"do": "check", "problem": to_json(problem), "tunable": list(tunable)}
                reply = worker.ask(request, self._options.limit_s, {"failure": str, "says_nothing": bool})
            except NoAnswer as error:
                reply = {"failure": str(error), "says_nothing": isinstance(error, NotStarted)}
            finally:
                self._free.put(worker)
            found = Checked(**reply, seconds=time.monotonic() - start)
            step(check, found)
            return found

        with ThreadPoolExecutor(len(self._all)) as pool:
            return dict(zip(checks, pool.map(one, checks), strict=True))

    def end(self) -> None:
        """Ends them all."""
        for worker in self._all:
            worker.end()


def times_of(count: int) -> dict[str, Callable[[Any], Any]]:
    """What a worker's reply to a request for so many times must have."""

    def times(found: Any) -> list[float | None]:
        if len(found) != count or not all(ms is None or 0.0 < ms < math.inf for ms in found):
            raise ValueError(f"expected {count} times, got {found}")
        return list(found)

    def reasons(found: Any) -> list[str]:
        if len(found) != count:
            raise ValueError(f"expected {count} reasons, got {found}")
        return [str(reason) for reason in found]

    return {"ms": times, "failures": reasons}


def _time(key: Key, problem: Problem, checked: dict[Tunable, str], timer: Worker, options: Options) -> Outcome:
    """Times the tunables that passed their checks."""
    failures = {tunable: reason for tunable, reason in checked.items() if reason}
    passed = [tunable for tunable in checked if tunable not in failures]
    if not passed:
        return Outcome(key, (), failures)
    request = {
        "do": "time",
        "problem": to_json(problem),
        "tunables": [list(tunable) for tunable in passed],
        "budget": options.budget,
    }
    try:
        reply = timer.ask(request, options.limit_s, times_of(len(passed)))
    except NoAnswer as error:
        return Outcome(key, (), {**failures, **dict.fromkeys(passed, str(error))})
    found = []
    for tunable, ms, reason in zip(passed, reply["ms"], reply["failures"], strict=True):
        if ms is None:
            failures[tunable] = reason
        else:
            found.append(Measured(tunable, ms))
    return Outcome(key, tuple(sorted(found, key=lambda one: one.ms)), failures)

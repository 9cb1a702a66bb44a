"""Running a plan: its candidates one after the other, until one does.

A call goes to the first candidate that supports the problem. Where that fails (it does not compile, lacks memory, or
fails its check), the next takes over, for this call where memory was lacking and for good otherwise, and a warning says
so once. A pinned backend's error is the caller's, and so are an error while a CUDA graph is captured, a wrong setting
in the environment, and what follows the loss of the device.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import storage
from ..errors import SettingError, UnsupportedProblem
from ..problem import Problem
from . import on_demand, trust
from .choose import Candidate, Plan, get_backend, plan, refusal
from .key import Key, features_of, key_of
from .tables import Tunable

log = logging.getLogger("torch_bwattn")

_failed: dict[tuple[str, Key, Tunable], str] = {}
"""Why a candidate is not tried again in this process, with these features and sizes of these buckets."""


class Failure(NamedTuple):
    """What is kept of an error. Its traceback would keep the tensors of the candidate that failed."""

    kind: str
    text: str
    lacks_memory: bool


class _State(NamedTuple):
    """Which candidate is called, and how."""

    number: int
    run: Callable[..., Any]
    name: str


class Attempts:
    """What runs a problem: called as the backends' own callables are. ``name`` is the backend's that ran last."""

    __slots__ = ("_able", "_lock", "_made", "_state", "name")

    def __init__(self, made: Plan) -> None:
        """``made`` is the plan.

        Raises:
            UnsupportedProblem: No candidate takes the problem; the reasons are in the message.
        """
        self._made = made
        able = [candidate for candidate in made.candidates if candidate.verdict]
        if not able:
            raise refusal(made)
        if made.pinned is None:
            able = [one for one in able if not _known_failure(made.problem, one.tunable)] or able[-1:]
        self._able = able
        self._lock = threading.Lock()
        self._state = self._unstarted(0)
        self.name = able[0].backend

    def __call__(self, *args: Any) -> Any:
        index, run, name = self._state
        try:
            result = run(*args)
        except Exception as error:
            if self._is_final(index, error):
                raise
            failure = failure_of(error)
        else:
            self.name = name
            return result
        return self._after(index, failure, args)

    def _unstarted(self, index: int) -> _State:
        return _State(index, functools.partial(self._first, index), self._able[index].backend)

    def _first(self, index: int, *args: Any) -> Any:
        """A candidate's first call: checks what has to be, and keeps the candidate's own callable."""
        run = self._started(index, args[0].q.device)
        result = run(*args)
        with self._lock:
            if self._state.number == index:
                self._state = _State(index, run, self._able[index].backend)
        return result

    def _started(self, index: int, device: torch.device) -> Callable[..., Any]:
        candidate, problem = self._able[index], self._made.problem
        backend = get_backend(candidate.backend)
        why = trust.why_distrusted(candidate.tunable, backend, problem, device, capturing=capturing)
        if why:
            raise UnsupportedProblem(f"sdpa: {candidate.tunable} failed its check on a small problem: {why}")
        make = backend.backward if problem.backward else backend.forward
        run: Callable[..., Any] = make(problem, candidate.verdict.config)
        return run

    def _is_final(self, index: int, error: Exception) -> bool:
        """Whether an error is the caller's: nothing else may run, or nothing can after it."""
        return self._made.pinned is not None or index + 1 == len(self._able) or ends_attempts(error)

    def _after(self, index: int, failure: Failure, args: tuple[Any, ...]) -> Any:
        """Goes on with the candidates after the one that failed."""
        problem, failed = self._made.problem, self._able[index]
        _tell(failed, problem, failure)
        if failure.lacks_memory:
            return self._this_once(index + 1, args)
        with self._lock:
            if self._state.number == index:  # else another thread has met the failure
                _failed[features_of(problem), key_of(problem), failed.tunable] = failure.text
                self._state = self._unstarted(index + 1)
        return self(*args)

    def _this_once(self, index: int, args: tuple[Any, ...]) -> Any:
        """This call by a later candidate, the next by the first again."""
        try:
            result = self._started(index, args[0].q.device)(*args)
        except Exception as error:
            if self._is_final(index, error):
                raise
            failure = failure_of(error)
        else:
            self.name = self._able[index].backend
            return result
        _tell(self._able[index], self._made.problem, failure)
        return self._this_once(index + 1, args)


def _known_failure(problem: Problem, tunable: Tunable) -> bool:
    return (features_of(problem), key_of(problem), tunable) in _failed


def failure_of(error: Exception) -> Failure:
    """What is kept of an error."""
    text = " ".join(str(error).split())[:400]
    return Failure(type(error).__name__, text, trust.lacks_memory(error))


def _tell(failed: Candidate, problem: Problem, failure: Failure) -> None:
    text = f"sdpa: {failed.tunable} cannot run {features_of(problem)}, the next candidate does: {failure.text}"
    storage.tell_once(log, text, about=(failed.tunable, features_of(problem), failure.kind))


def ends_attempts(error: Exception) -> bool:
    """Whether after an error no other candidate may run, or none can."""
    return isinstance(error, SettingError) or trust.device_is_lost(error) or capturing()


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def choose(problem: Problem, pin: str | None, device: torch.device | None = None) -> Attempts:
    """What runs ``problem``, on ``device`` (which only tuning at first use asks for).

    Raises:
        UnsupportedProblem: The pinned backend refuses; the message gives its reason.
    """
    on_demand.record(problem)
    if pin is None and not capturing():
        on_demand.tune(problem, device)
    made = plan(problem, pin)
    for candidate in made.candidates:
        if not candidate.verdict:
            log.debug("sdpa: %s is passed over: %s", candidate.tunable, candidate.verdict.reason)
    if made.chosen is not None:
        log.debug("sdpa: %s is chosen, by %s", made.chosen.tunable, made.source or made.chosen.priority.name.lower())
    return Attempts(made)

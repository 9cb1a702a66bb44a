"""Running a plan: its candidates one after the other, until one does.

A call goes to the first candidate that supports the problem. Where that fails (it does not compile, lacks memory, or
fails its check), the next takes over, for this call where memory was lacking and for good otherwise, and a warning says
so once. A pinned backend's error is the caller's, and so is an error while a CUDA graph is captured, or one after which
the device does nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnsupportedProblem
from ..problem import Problem
from . import on_demand, trust
from .choose import Candidate, Plan, get_backend, plan, refusal
from .key import features_of
from .store import tell_once
from .tables import Tunable

log = logging.getLogger("torch_bwattn")

_DEVICE_IS_LOST = (torch.AcceleratorError,)

_failed: dict[tuple[str, Tunable], str] = {}
"""By features and tunable: why a candidate is not tried again in this process."""


def forget_failures() -> None:
    """Candidates that failed may be tried again, by calls of other descriptions than those that met the failure."""
    _failed.clear()


class Attempts:
    """What runs a problem: called as the backends' own callables are. ``name`` is the backend's that ran last."""

    __slots__ = ("_made", "_rest", "_run", "name")

    def __init__(self, made: Plan) -> None:
        """``made`` is the plan.

        Raises:
            UnsupportedProblem: No candidate takes the problem; the reasons are in the message.
        """
        self._made = made
        self._rest = [candidate for candidate in made.candidates if candidate.verdict]
        if not self._rest:
            raise refusal(made)
        self.name = self._rest[0].backend
        self._run: Callable[..., Any] = self._first

    def __call__(self, *args: Any) -> Any:
        run = self._run
        try:
            return run(*args)
        except Exception as error:
            if self._is_final(error):
                raise
            if self._run is not run:  # another thread has met the failure
                return self(*args)
            return self._after(error, args)

    def _first(self, *args: Any) -> Any:
        """A candidate's first call: checks what has to be, and keeps the candidate's own callable."""
        candidate, problem = self._rest[0], self._made.problem
        if len(self._rest) > 1:
            failure = _failed.get((features_of(problem), candidate.tunable))
            if failure is not None:
                raise UnsupportedProblem(failure)
        backend = get_backend(candidate.backend)
        device = args[0].q.device
        why = trust.why_distrusted(candidate.tunable, backend, problem, device, capturing=_capturing)
        if why:
            raise UnsupportedProblem(f"sdpa: {candidate.tunable} failed its check on a small problem: {why}")
        make = backend.backward if problem.backward else backend.forward
        run = make(problem, candidate.verdict.config)
        result = run(*args)
        self._run, self.name = run, candidate.backend
        return result

    def _is_final(self, error: Exception) -> bool:
        """Whether an error is the caller's: nothing else may run, or nothing can after it."""
        return (
            self._made.pinned is not None or len(self._rest) == 1 or isinstance(error, _DEVICE_IS_LOST) or _capturing()
        )

    def _after(self, error: Exception, args: tuple[Any, ...]) -> Any:
        """Goes on with the candidates after the one that failed."""
        failed, *rest = self._rest
        _tell(failed, self._made.problem, error)
        if isinstance(error, torch.OutOfMemoryError):
            others = Attempts(Plan(self._made.problem, tuple(rest), None))
            result = others(*args)
            self.name = others.name
            return result
        _failed[features_of(self._made.problem), failed.tunable] = " ".join(str(error).split())
        self._rest = rest
        self._run = self._first
        return self(*args)


def _tell(failed: Candidate, problem: Problem, error: Exception) -> None:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    tell_once(f"sdpa: {failed.tunable} cannot run {features_of(problem)} and the next candidate does: {text}")


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def choose(problem: Problem, pin: str | None) -> Attempts:
    """What runs ``problem``.

    Raises:
        UnsupportedProblem: The pinned backend refuses; the message gives its reason.
    """
    on_demand.record(problem)
    if pin is None and not _capturing():
        on_demand.tune(problem)
    made = plan(problem, pin)
    for candidate in made.candidates:
        if not candidate.verdict:
            log.debug("sdpa: %s is passed over: %s", candidate.backend, candidate.verdict.reason)
    return Attempts(made)

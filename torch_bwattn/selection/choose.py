"""The choice: an ordered list of candidates for a problem, each with its verdict, and the first that may run.

Authority, highest first: a pinned backend, then the default order of the target. A pinned backend that refuses raises;
without a pin a refusal moves on to the next candidate and is logged at debug level. ``reference`` ends every order, so
there is always an answer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from ..backends.base import Backend, Verdict, no
from ..errors import UnsupportedProblem
from ..problem import Problem
from ..target import capability

log = logging.getLogger("torch_bwattn")

_MODULES = {
    "cute": ("torch_bwattn.backends.cute.backend", "CuteBackend"),
    "helion": ("torch_bwattn.backends.helion.backend", "HelionBackend"),
    "aten": ("torch_bwattn.backends.aten", "AtenBackend"),
    "reference": ("torch_bwattn.backends.reference", "ReferenceBackend"),
}


@cache
def get_backend(name: str) -> Backend:
    """The one instance of a backend; its module is imported at the first use."""
    if name not in _MODULES:
        raise UnsupportedProblem(f"sdpa: backend {name!r} is not part of this version; nearest: helion")
    module, attribute = _MODULES[name]
    instance: Backend = getattr(import_module(module), attribute)()
    return instance


def default_order(target: str) -> tuple[str, ...]:
    """Backends to ask, best first, for a target."""
    if target == "cpu":
        return ("aten", "reference")
    if capability(target) == (9, 0):
        return ("cute", "helion", "aten", "reference")
    if (capability(target) or (0, 0)) >= (8, 0):
        return ("helion", "aten", "reference")
    return ("aten", "reference")


@dataclass(frozen=True)
class Candidate:
    """A backend and what it says of the problem."""

    backend: str
    verdict: Verdict


@dataclass(frozen=True)
class Plan:
    """Candidates in order of preference. ``chosen`` is the first that supports the problem."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    pinned: str | None

    @property
    def chosen(self) -> Candidate | None:
        return next((c for c in self.candidates if c.verdict), None)


def plan(problem: Problem, pin: str | None) -> Plan:
    """Ask every candidate for its verdict (or the pinned one alone)."""
    names = (pin,) if pin else default_order(problem.target)
    return Plan(problem, tuple(Candidate(name, _verdict(name, problem)) for name in names), pin)


def _verdict(name: str, problem: Problem) -> Verdict:
    try:
        backend = get_backend(name)
    except UnsupportedProblem as error:
        return no(str(error))
    missing = backend.missing()
    return no(missing) if missing else backend.supports(problem)


def choose(problem: Problem, pin: str | None) -> Backend:
    """The backend that runs ``problem``.

    Raises:
        UnsupportedProblem: the pinned backend refuses; the message gives its reason.
    """
    made = plan(problem, pin)
    chosen = made.chosen
    if chosen is None:
        reasons = "; ".join(f"{c.backend}: {c.verdict.reason}" for c in made.candidates)
        raise UnsupportedProblem(f"sdpa: no backend takes this problem ({reasons})")
    for candidate in made.candidates:
        if candidate is chosen:
            break
        log.debug("sdpa: %s passes to the next backend: %s", candidate.backend, candidate.verdict.reason)
    return get_backend(chosen.backend)

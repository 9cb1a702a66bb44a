"""The choice: an ordered list of candidates for a problem, each with its verdict, and the first that may run.

Every config of every backend is a candidate. Candidates form groups, and a group has a priority for each problem: the
package's own kernels first, then PyTorch's fused ones, then the blockwise reference; the path that materialises the
scores competes only while its score matrix is no larger than an activation, else it is the last resort. What does not
support a problem sinks below all that do and never vanishes, and ``reference`` takes everything: so there is always an
answer. So does what a check has found wrong on this machine, or must not run before one has passed (:mod:`.trust`).

Authority, highest first: a pinned backend, which raises when it refuses; what was measured (:mod:`.tables`), which
goes before its group's priority but never makes the last resort any other; the order of groups, and in a group that of
its backends, each of which names first the config that it would choose itself.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module

from ..backends import materialised
from ..backends.base import Backend, Verdict, no
from ..errors import UnsupportedProblem
from ..problem import Problem
from ..target import capability
from . import tables, trust
from .key import key_of
from .tables import Tunable

log = logging.getLogger("torch_bwattn")


class Priority(enum.IntEnum):
    """Of a group for a problem."""

    UNSUPPORTED = 0
    LAST_RESORT = 1
    FALLBACK = 2
    FUSED = 3
    OWN = 4
    MEASURED = 5


_BACKENDS = {
    "cute": ("torch_bwattn.backends.cute.backend", "CuteBackend", Priority.OWN),
    "helion": ("torch_bwattn.backends.helion.backend", "HelionBackend", Priority.OWN),
    "aten": ("torch_bwattn.backends.aten", "AtenBackend", Priority.FUSED),
    "reference": ("torch_bwattn.backends.reference", "ReferenceBackend", Priority.FALLBACK),
}
"""Where each is, and the priority of what it offers."""
_MATERIALISED = Tunable("aten", materialised.CONFIG)


@cache
def get_backend(name: str) -> Backend:
    """The one instance of a backend; its module is imported at the first use."""
    if name not in _BACKENDS:
        raise UnsupportedProblem(f"sdpa: backend {name!r} is not part of this version; nearest: helion")
    module, attribute, _ = _BACKENDS[name]
    instance: Backend = getattr(import_module(module), attribute)()
    return instance


def default_order(target: str) -> tuple[str, ...]:
    """Backends with kernels for a target, best first."""
    if target == "cpu":
        return ("aten", "reference")
    if capability(target) == (9, 0):
        return ("cute", "helion", "aten", "reference")
    if (capability(target) or (0, 0)) >= (8, 0):
        return ("helion", "aten", "reference")
    return ("aten", "reference")


@dataclass(frozen=True)
class Candidate:
    """One config of a backend, what the backend says of the problem, and why it stands where it stands."""

    backend: str
    verdict: Verdict
    priority: Priority
    figure: str = ""

    @property
    def tunable(self) -> Tunable:
        return Tunable(self.backend, self.verdict.config)


@dataclass(frozen=True)
class Plan:
    """Candidates in order of preference. ``chosen`` is the first that supports the problem."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    pinned: str | None
    source: str = ""

    @property
    def chosen(self) -> Candidate | None:
        return next((c for c in self.candidates if c.verdict), None)


def plan(problem: Problem, pin: str | None) -> Plan:
    """Ask every backend for its verdicts (or the pinned one alone), and put them in order."""
    verdicts = trust.Verdicts(problem)
    if pin:
        # What a check has found wrong stays here: the call raises it, and hides nothing behind another config.
        asked = [_pinned(candidate) for candidate in _candidates(pin, problem)]
        return Plan(problem, _in_order([_sunk(one, trust.why_unproven, verdicts) for one in asked]), pin)
    return _placed(problem, [_sunk(one, trust.why_passed_over, verdicts) for one in _asked(problem)])


def unchecked_plan(problem: Problem) -> Plan:
    """The plan of a problem if every candidate were trusted: what there is to check."""
    return _placed(problem, _asked(problem))


def _asked(problem: Problem) -> list[Candidate]:
    order = default_order(problem.target)
    names = (*order, *(name for name in _BACKENDS if name not in order))
    return [candidate for name in names for candidate in _candidates(name, problem)]


def _placed(problem: Problem, found: list[Candidate]) -> Plan:
    """What was measured before the rest.

    Where none of a backend's configs was, for they depend on sizes and widths that the entry need not share, its first
    stands for those that were.
    """
    key = key_of(problem)
    able = [one for one in found if one.priority > Priority.LAST_RESORT]
    entry = tables.lookup(problem.target, key, {one.backend for one in able} - {"reference"})
    if entry is None:
        return Plan(problem, _in_order(found), None)
    times = {one.tunable: one.ms for one in entry.ranking}
    if _MATERIALISED in times:
        # It takes as long as its scores are many, where others have programs to spare: by its place at 16 queries it
        # would be chosen at 128, for 3.7 times the best time.
        times[_MATERIALISED] *= max(1.0, math.prod(key.sizes) / math.prod(entry.key.sizes))
    word, where = "predicted" if entry.predicted else "measured", "" if entry.key == key else " there"
    for backend in {one.tunable.backend for one in entry.ranking}:
        own = [one.tunable for one in able if one.backend == backend]
        if own and not any(tunable in times for tunable in own):
            times[own[0]] = min(one.ms for one in entry.ranking if one.tunable.backend == backend)

    def placed(one: Candidate) -> Candidate:
        if one.tunable not in times or one.priority <= Priority.LAST_RESORT:
            return one
        return replace(one, priority=Priority.MEASURED, figure=f"{word} {times[one.tunable]:.3f} ms{where}")

    measured = sorted(map(placed, found), key=lambda one: times.get(one.tunable, 0.0) if one.figure else 0.0)
    return Plan(problem, _in_order(measured), None, str(entry))


def _pinned(candidate: Candidate) -> Candidate:
    """A pinned backend has nothing after which a last resort could come: there it refuses."""
    verdict = candidate.verdict
    if not verdict.last_resort:
        return candidate
    return _refused(candidate, verdict.last_resort)


def _sunk(
    candidate: Candidate, why: Callable[[Tunable, Backend, trust.Verdicts], str], verdicts: trust.Verdicts
) -> Candidate:
    """A candidate as one that refuses, where it must not run."""
    reason = why(candidate.tunable, get_backend(candidate.backend), verdicts) if candidate.verdict else ""
    return _refused(candidate, reason) if reason else candidate


def _refused(candidate: Candidate, reason: str) -> Candidate:
    return Candidate(candidate.backend, no(reason, candidate.verdict.config), Priority.UNSUPPORTED)


def _in_order(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(candidates, key=lambda one: -one.priority))


def _candidates(name: str, problem: Problem) -> list[Candidate]:
    return [Candidate(name, verdict, _priority(name, verdict)) for verdict in _verdicts(name, problem)]


def _priority(name: str, verdict: Verdict) -> Priority:
    if not verdict:
        return Priority.UNSUPPORTED
    return Priority.LAST_RESORT if verdict.last_resort else _BACKENDS[name][2]


def _verdicts(name: str, problem: Problem) -> tuple[Verdict, ...]:
    try:
        backend = get_backend(name)
    except UnsupportedProblem as error:
        return (no(str(error)),)
    missing = backend.missing()
    return (no(missing),) if missing else backend.offers(problem)


def refusal(made: Plan) -> UnsupportedProblem:
    """What is raised where no candidate takes a problem."""
    reasons = "; ".join(f"{c.backend}: {c.verdict.reason}" for c in made.candidates)
    return UnsupportedProblem(f"sdpa: no backend takes this problem ({reasons})")

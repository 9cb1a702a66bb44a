"""Checks the kernels that a target would use, on small problems, each in a process that can be ended.

What is found is kept where the first use of a kernel looks for it (:mod:`..selection.trust`), and there is no other
judge: a hang, a crash and an exception are verdicts like wrong values.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..crosscompile import lane
from ..problem import Problem
from ..selection import choose, drawn, trust
from ..selection.key import features_of
from ..selection.pin import NAMES
from ..selection.tables import Tunable
from . import tuner

_LONG, _FEW = 4096, 16
"""Lengths for which other configs are chosen than for the lane's: many queries and keys, and few queries."""


class Check(NamedTuple):
    """A kernel, and a problem of the kind that it is to be checked for."""

    problem: Problem
    tunable: Tunable

    def __str__(self) -> str:
        return f"{features_of(self.problem)}  {self.tunable}"


@dataclasses.dataclass(frozen=True)
class Found:
    """What a check has found.

    Attributes:
        check: Of what.
        failure: What is wrong, or nothing.
        seconds: How long it took; None where it was known.
        is_verdict: Whether that says anything of the kernel: not where memory lacked, or no process could be started.
    """

    check: Check
    failure: str
    seconds: float | None = None
    is_verdict: bool = True


def problems(target: str) -> list[Problem]:
    """The kinds of problems that have kernels of their own on a target, at the lengths that decide configs."""
    found = []
    for problem in lane.problems(target):
        found += [problem, _at(problem, _LONG, _LONG)]
        if not problem.backward:
            found.append(_at(problem, _FEW, _LONG))
        elif problem.diagonal is not None and problem.low_diagonal is None:
            found.append(dataclasses.replace(problem, deterministic=True))
        elif problem.mask_dtype is not None and problem.mask_dtype.is_floating_point:
            found.append(dataclasses.replace(problem, mask_grad=True))
    return found


def _at(problem: Problem, q_len: int, kv_len: int) -> Problem:
    """A problem at other lengths, the last query seeing as far as it did."""
    moved = (kv_len - q_len) - (problem.kv_len - problem.q_len)
    return dataclasses.replace(
        problem,
        q_len=q_len,
        kv_len=kv_len,
        diagonal=None if problem.diagonal is None else problem.diagonal + moved,
        low_diagonal=None if problem.low_diagonal is None else problem.low_diagonal + moved,
        mask_sizes=None if problem.mask_sizes is None else (*problem.mask_sizes[:2], q_len, kv_len),
    )


def checks(found: Iterable[Problem]) -> list[Check]:
    """What there is to check for problems, each kernel once for the same features.

    Of each backend the config that would run; all of them where nothing else lets them run. What compiles longest comes
    first, and few queries, which mostly share a kernel with many, last.
    """
    every: dict[tuple[str, Tunable], Check] = {}
    for problem in found:
        taken: set[str] = set()
        for candidate in choose.unchecked_plan(problem).candidates:
            if _is_asked_for(candidate, problem, taken):
                taken.add(candidate.backend)
                check = Check(problem, candidate.tunable)
                every.setdefault((features_of(problem), candidate.tunable), check)

    def place(check: Check) -> tuple[int, bool, int]:
        return NAMES.index(check.tunable.backend), not check.problem.backward, -check.problem.q_len

    return sorted(every.values(), key=place)


def _is_asked_for(candidate: choose.Candidate, problem: Problem, taken: set[str]) -> bool:
    if not candidate.verdict or candidate.verdict.last_resort:
        return False
    return candidate.backend not in taken or trust.needs_doctor(choose.get_backend(candidate.backend), problem.target)


def run(
    target: str,
    todo: Sequence[Check],
    options: tuner.Options,
    *,
    log: Callable[[Found], None] = lambda _: None,
) -> list[Found]:
    """Makes checks and keeps what they find.

    Args:
        target: Whose they are.
        todo: The checks.
        options: How many at once, how long each may take, and whether what is kept is forgotten first.
        log: Takes what is found, in no order.

    Returns:
        What was found, in the order of the checks.
    """
    if options.again:
        trust.forget(target)
    found: dict[Check, Found] = {}
    lock = threading.Lock()

    def take(one: Found) -> None:
        with lock:
            found[one.check] = one
            log(one)

    for check in todo:
        known = trust.Verdicts(check.problem).of(check.tunable)
        if known is not None:
            take(Found(check, known))
    # The small problem itself: its original says which config is chosen, and would take long on a CPU.
    asked = {(drawn.small(check.problem), check.tunable): check for check in todo if check not in found}

    def step(request: tuple[Problem, Tunable], checked: tuner.Checked) -> None:
        check = asked[request]
        if not checked.says_nothing:
            trust.keep(check.problem, check.tunable, checked.failure)
        take(Found(check, checked.failure, checked.seconds, not checked.says_nothing))

    checkers = tuner.Checkers(options)
    try:
        checkers.check(list(asked), step)
    finally:
        checkers.end()
    return [found[check] for check in todo]


def consequence(found: Found) -> str:
    """What runs the problem of a check that failed now."""
    if not found.is_verdict:
        return "nothing, this says nothing of the kernel"
    chosen = choose.plan(found.check.problem, None).chosen
    if chosen is None or chosen.tunable == found.check.tunable:
        return "nothing, there is no other"
    return str(chosen.tunable)

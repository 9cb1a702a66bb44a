"""Whether a config may run: measured right on this architecture with these versions, or checked at its first use here.

The blockwise reference is trusted, and what PyTorch has for the CPU. A kernel of this package is trusted for a target
whose table says that the package's GPU tests passed there with the versions that are installed: what it chooses itself
was tested there, and what a table names was checked when it was timed. Anywhere else, and for PyTorch's CUDA kernels,
the first use on a machine is preceded by a check of a small problem with the same features. A result that breaks the
accuracy rule is remembered for later processes, as is one that keeps it; an exception is for this process only.

A hand-written kernel can hang, and is not checked at its first use on a target where the package's tests have never
passed: there :data:`DOCTOR` checks it first, in a process that can be ended. Of those that are not by hand but wait for
each other too, the first use is checked in a process of its own. What such a process finds is kept in the same file, a
hang and an exception too, until it is forgotten or versions change. What was found wrong here counts more than who
vouches for it.

A check says nothing of what only a large problem has: indices past 2**31.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import backends, environment
from ..backends.base import Backend
from ..errors import NotCompiled
from ..problem import Problem
from . import drawn, on_demand, tables
from .key import features_of
from .store import Store
from .tables import Tunable

log = logging.getLogger("torch_bwattn")

DOCTOR = "python -m torch_bwattn doctor"

_OWN = ("cute", "helion")
_lock = threading.RLock()
_here = threading.local()
_known: dict[tuple[str, Tunable], str] = {}
"""What is wrong with a tunable where a call has such features, or nothing; features name the target too."""


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that is not in the child may have held the old one


os.register_at_fork(after_in_child=_renew_lock)


@functools.cache
def _store(target: str) -> Store:
    return Store("verdicts", target, lambda contents: isinstance(contents.get("verdicts", {}), dict))


def passed_tests(target: str) -> bool:
    """Whether the package's GPU tests passed on a target with the installed versions."""
    table = tables.shipped(target)
    tested = table.get("tested")
    return tested is not None and tables.same_versions(table["environments"][tested])


def _is_beyond_doubt(tunable: Tunable, problem: Problem) -> bool:
    return problem.empty or tunable.backend == "reference"


def needs_check(tunable: Tunable, problem: Problem) -> bool:
    """Whether nobody vouches for a tunable."""
    if _is_beyond_doubt(tunable, problem) or (tunable.backend == "aten" and problem.target == "cpu"):
        return False
    return tunable.backend not in _OWN or not passed_tests(problem.target)


def needs_doctor(backend: Backend, target: str) -> bool:
    """Whether a backend's kernels may hang on a target, as far as the package's tests know: they never passed there."""
    return backend.can_hang and tables.shipped(target).get("tested") is None


class Verdicts:
    """What checks have found of problems with one's features and versions that are installed: read once for a plan."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.features = problem, features_of(problem)
        self._kept = _kept(problem.target)

    def of(self, tunable: Tunable) -> str | None:
        """What is wrong with a tunable, or nothing; None where no check was made."""
        return _found(self.features, tunable, lambda: self._kept)

    def of_direction(self, tunable: Tunable) -> list[str]:
        """What was kept of a tunable with any features of the same direction."""
        direction, versions = self.features.split(maxsplit=1)[0], _digest()
        return [
            verdict["failure"]
            for verdict in self._kept.values()
            if _is_verdict(verdict)
            and (verdict["backend"], verdict["config"], verdict["versions"]) == (*tunable, versions)
            and verdict["features"].split(maxsplit=1)[0] == direction
        ]


def _kept(target: str) -> Mapping[str, Any]:
    """The verdicts of the file, by name."""
    found: Mapping[str, Any] = _store(target).load().get("verdicts", {})
    return found


def _found(features: str, tunable: Tunable, kept: Callable[[], Mapping[str, Any]]) -> str | None:
    found = _known.get((features, tunable))
    if found is not None:
        return found
    verdicts = kept()
    verdict = verdicts.get(_name(tunable, features)) if verdicts else None
    return str(verdict["failure"]) if verdict is not None and _is_verdict(verdict) else None


def recalled_of(target: str, features: str, tunable: Tunable) -> str | None:
    """What checks have found of a tunable where a call has these features; None where none was made."""
    return _found(features, tunable, lambda: _kept(target))


def recalled(tunable: Tunable, problem: Problem) -> str | None:
    """What is known without a check: what is wrong, or nothing; None where nobody vouches and no check was made.

    What a check has found wrong here counts more than who vouches for it.
    """
    if _is_beyond_doubt(tunable, problem):
        return ""
    found = Verdicts(problem).of(tunable)
    return "" if found is None and not needs_check(tunable, problem) else found


def why_passed_over(tunable: Tunable, backend: Backend, verdicts: Verdicts) -> str:
    """Why the choice goes on to the next, as far as is known without running anything, or nothing."""
    failure = "" if _is_beyond_doubt(tunable, verdicts.problem) else verdicts.of(tunable)
    if failure:
        return f"it failed its check on a small problem: {failure} ({DOCTOR} --again checks it anew)"
    return why_unproven(tunable, backend, verdicts)


def why_unproven(tunable: Tunable, backend: Backend, verdicts: Verdicts) -> str:
    """Why a tunable that can hang must not run, nor be checked in place, on a target; or nothing.

    It may run what it was checked for in a process of its own; and problems with other features, checked in place,
    where it has passed all checks of its direction that are kept, and one at least.
    """
    if not needs_doctor(backend, verdicts.problem.target) or verdicts.of(tunable) == "":
        return ""
    found = verdicts.of_direction(tunable)
    if found and not any(found):
        return ""
    failed = "has failed a check" if found else "was not checked"
    return (
        f"its kernels can hang, none was ever tested on {verdicts.problem.target}, and this one {failed} here: "
        f"{DOCTOR} checks it"
    )


def why_distrusted(
    tunable: Tunable, backend: Backend, problem: Problem, device: torch.device, *, capturing: Callable[[], bool]
) -> str:
    """Why a tunable must not run a problem, or nothing; checks it where nobody has.

    Raises:
        NotCompiled: It would have to be checked, while a CUDA graph is being captured.
    """
    features = features_of(problem)
    return settled(
        lambda: recalled(tunable, problem),
        lambda: check(tunable, backend, problem, device),
        (features, tunable),
        capturing=capturing,
    )


def settled(
    recall: Callable[[], str | None],
    check: Callable[[], str],
    what: tuple[str, Tunable],
    *,
    capturing: Callable[[], bool],
) -> str:
    """What is wrong with a tunable, or nothing: as it is recalled, else as a check finds, once for all threads.

    Args:
        recall: What is known; None where nothing is.
        check: Checks it.
        what: Features and tunable.
        capturing: Whether a CUDA graph is being captured.

    Raises:
        NotCompiled: It would have to be checked, while a CUDA graph is being captured.
    """
    found = recall()
    if found is not None:
        return found
    if getattr(_here, "checks", False):  # what a backend under check calls itself
        return ""
    with _lock:
        found = recall()
        if found is not None:
            return found
        features, tunable = what
        if capturing():
            raise NotCompiled(
                f"sdpa: expected {tunable.backend} to be checked before a CUDA graph captures it, but this is "
                "its first call with these features; make one call of this kind before the capture"
            )
        log.debug("sdpa: first use of %s for %s, checked on a small problem", tunable, features)
        found = _known[what] = check()
        return found


def check(tunable: Tunable, backend: Backend, problem: Problem, device: torch.device) -> str:
    """Runs the self-check and keeps its verdict: what is wrong, or nothing.

    Raises:
        BaseException: The references', and of the kernel's those that say nothing of it: lack of memory, a lost device.
    """
    if device.type == "cuda" and backend.is_checked_apart(tunable.config):
        failure, says_nothing = on_demand.check_apart(drawn.small(problem), tunable, device)
        if not says_nothing:
            keep(problem, tunable, failure)
        return failure
    return checked(
        problem.target,
        (features_of(problem), tunable),
        lambda: drawn.draw(problem, device),
        lambda drawing: drawn.failure(backend, tunable.config, drawing),
    )


_Drawing = TypeVar("_Drawing")


def checked(
    target: str,
    what: tuple[str, Tunable],
    draw: Callable[[], _Drawing],
    failure_of: Callable[[_Drawing], str],
    *,
    refusal: tuple[type[Exception], ...] = (),
) -> str:
    """What is wrong with a kernel's results, or nothing, which is kept; or what it raises, for this process only.

    In a thread of its own: the call that asks may be inside an operator, where autograd, which the references need, is
    out of reach, or below modes and transforms that must not see the check; and it may itself be a backward.

    Args:
        target: Where it runs.
        what: Features and tunable.
        draw: Makes a small problem, and what is right for it.
        failure_of: Runs the kernel on that, and says what is wrong.
        refusal: What the kernel raises where it does not take the call.

    Raises:
        BaseException: The references', and of the kernel's those that say nothing of its results: a refusal, lack of
            memory, a lost device.
    """
    found: list[str | BaseException] = []

    def judged() -> str:
        drawing = draw()
        try:
            failure = failure_of(drawing)
        except Exception as error:
            if isinstance(error, refusal) or lacks_memory(error) or device_is_lost(error):
                raise
            return f"{type(error).__name__}: {error}"
        keep_of(target, *what, failure)
        return failure

    def run() -> None:
        _here.checks = True
        try:
            # Not by autograd's own thread, which may be the one that waits.
            with torch.autograd.set_multithreading_enabled(False), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's, of its own functions that are for tests
                found.append(judged())
        except BaseException as error:  # noqa: BLE001 (raised in the thread that asked)
            found.append(error)

    thread = threading.Thread(target=run, name="bwattn-check")
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, BaseException):
        raise result
    return result


def lacks_memory(error: Exception) -> bool:
    """Whether an error is for lack of device memory, whoever raises it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return "out of memory" in text or "alloc_failed" in text or "can't allocate" in text


def device_is_lost(error: Exception) -> bool:
    """Whether after an error the device does nothing more for this process."""
    if lacks_memory(error):
        return False
    text = str(error)
    return isinstance(error, torch.AcceleratorError) or "illegal memory access" in text or "CUDA error" in text


def _name(tunable: Tunable, features: str) -> str:
    """What a verdict is of: features, tunable, and the versions that make the code."""
    return hashed(features, *tunable, _digest())


def _digest() -> str:
    return hashed(*(f"{name} {version}" for name, version in sorted(_versions().items())))


def hashed(*lines: str) -> str:
    """A name for some lines, of 32 letters."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@functools.cache
def _versions() -> dict[str, str | None]:
    found = environment.versions()
    sources = hashlib.sha256()
    for path in sorted(Path(backends.__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    described = {name: found.get(name) for name in (*tables.VERSIONS_THAT_COUNT, "cuda", "cudnn")}
    return {**described, "backends": sources.hexdigest()}


_FIELDS = ("features", "backend", "config", "versions", "failure")


def _is_verdict(found: Any) -> bool:
    """Whether a value of the file is a verdict: another version or another hand may have written it."""
    return isinstance(found, dict) and all(isinstance(found.get(name), str) for name in _FIELDS)


def forget(target: str) -> None:
    """Drops the verdicts that are kept for a target."""
    _known.clear()
    _store(target).update(lambda contents: contents.pop("verdicts", None))


def keep(problem: Problem, tunable: Tunable, failure: str) -> None:
    """Keeps a verdict, for this process and for later ones: what is wrong, or nothing."""
    keep_of(problem.target, features_of(problem), tunable, failure)


def keep_of(target: str, features: str, tunable: Tunable, failure: str) -> None:
    """:func:`keep` where a call has these features."""
    _known[features, tunable] = failure
    verdict = {
        "features": features,
        "backend": tunable.backend,
        "config": tunable.config,
        "versions": _digest(),
        "failure": failure,
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d"),
    }

    def change(contents: dict[str, Any]) -> None:
        contents.setdefault("verdicts", {})[_name(tunable, verdict["features"])] = verdict

    _store(target).update(change)

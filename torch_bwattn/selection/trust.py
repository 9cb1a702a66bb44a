"""Whether a config may run: measured right on this architecture with these versions, or checked at its first use here.

The blockwise reference is trusted, and what PyTorch has for the CPU. A kernel of this package is trusted for a target
whose table says that the package's GPU tests passed there with the versions that are installed. Anywhere else, and for
PyTorch's CUDA kernels, the first use on a machine is preceded by a check of a small problem with the same features,
whose verdict is kept.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import backends, environment
from ..backends.base import Backend
from ..problem import Problem
from . import drawn, tables
from .key import features_of
from .store import Store
from .tables import Tunable

log = logging.getLogger("torch_bwattn")

_OWN = ("cute", "helion")
_lock = threading.RLock()
_known: dict[tuple[str, Tunable], str] = {}


@functools.cache
def _store(target: str) -> Store:
    return Store("verdicts", f"{target}.json", lambda contents: isinstance(contents.get("verdicts", {}), dict))


def passed_tests(target: str) -> bool:
    """Whether the package's GPU tests passed on a target with the installed versions."""
    table = tables.shipped(target)
    tested = table.get("tested")
    return tested is not None and tables.same_versions(table["environments"][tested])


def needs_check(tunable: Tunable, problem: Problem) -> bool:
    """Whether nobody vouches for a tunable."""
    if tunable.backend == "reference" or (tunable.backend == "aten" and problem.target == "cpu"):
        return False
    return tunable.backend not in _OWN or not passed_tests(problem.target)


def why_distrusted(
    tunable: Tunable, backend: Backend, problem: Problem, device: torch.device, *, capturing: Callable[[], bool]
) -> str:
    """Why a tunable must not run a problem, or nothing; checks it where nobody has.

    Raises:
        RuntimeError: It would have to be checked, while a CUDA graph is being captured.
    """
    if problem.empty or not needs_check(tunable, problem):
        return ""
    known = features_of(problem), tunable
    if known in _known:
        return _known[known]
    with _lock:
        if known not in _known:
            found = _recall(problem, known)
            if found is None:
                if capturing():
                    raise RuntimeError(
                        f"sdpa: expected {tunable.backend} to be checked before a CUDA graph captures it, but this is "
                        "its first call with these features; make one call of this kind before the capture"
                    )
                found = check(tunable, backend, problem, device)
                _keep(problem, known, found)
            _known[known] = found
    return _known[known]


def check(tunable: Tunable, backend: Backend, problem: Problem, device: torch.device) -> str:
    """Runs the self-check: what is wrong, or nothing. An exception is what is wrong, except for lack of memory.

    In a thread of its own: the call that asks may be inside an operator, where autograd, which the references need, is
    out of reach, or below modes and transforms that must not see the check.
    """
    log.debug("sdpa: first use of %s for %s, checked on a small problem", tunable, features_of(problem))
    found: list[str | torch.OutOfMemoryError] = []

    def run() -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's, of its own functions that are for tests
                found.append(drawn.check(backend, tunable.config, problem, device))
        except torch.OutOfMemoryError as error:
            found.append(error)
        except Exception as error:  # noqa: BLE001 (whatever it is, the config must not run)
            found.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="bwattn-check")
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, torch.OutOfMemoryError):
        raise result
    return result


def _name(known: tuple[str, Tunable]) -> str:
    """What a verdict is of: features, tunable, and the versions that make the code."""
    features, tunable = known
    described = "\n".join([features, *tunable, *(f"{name} {version}" for name, version in sorted(_versions().items()))])
    return hashlib.sha256(described.encode()).hexdigest()[:32]


@functools.cache
def _versions() -> dict[str, str | None]:
    found = environment.versions()
    sources = hashlib.sha256()
    for path in sorted(Path(backends.__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    described = {name: found.get(name) for name in (*tables.VERSIONS_THAT_COUNT, "cuda")}
    return {**described, "backends": sources.hexdigest()}


def _recall(problem: Problem, known: tuple[str, Tunable]) -> str | None:
    verdict = _store(problem.target).load().get("verdicts", {}).get(_name(known))
    if not isinstance(verdict, dict) or not isinstance(verdict.get("failure"), str):
        return None
    return str(verdict["failure"])


def _keep(problem: Problem, known: tuple[str, Tunable], failure: str) -> None:
    features, tunable = known
    today = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d")
    verdict = {
        "features": features,
        "backend": tunable.backend,
        "config": tunable.config,
        "failure": failure,
        "date": today,
    }

    def change(contents: dict[str, Any]) -> None:
        contents.setdefault("verdicts", {})[_name(known)] = verdict

    _store(problem.target).update(change)

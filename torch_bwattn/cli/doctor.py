"""Check the kernels that would run on this machine, on small problems, and keep what is found.

Each backend's kernels, forward and backward, are compared with an fp64 reference in processes of their own: one that
hangs is ended after a limit, and one that crashes takes nothing else with it. What is found decides what runs here: a
kernel that fails is passed over, and on a GPU for which the package was never tested, kernels that can hang run only
after they passed. It is kept until versions change, or --again forgets it; a second run checks what is not known.

On the first GPU that is visible, or the CPU where there is none. The status is 1 where a check failed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import UsageError, check_jobs, check_limit

if TYPE_CHECKING:
    from ..tuning import doctor

_MOST_JOBS = 16
_BYTES_OF_A_JOB = 2**30
"""Of the device's memory: a context, its kernels and a small problem."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--again", action="store_true", help="forget what was found here, and check everything")
    parser.add_argument("--from-log", metavar="FILE", help="also the problems that BWATTN_RECORD=FILE has recorded")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes beside each other (default: by cores)")
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="seconds for a check with its compiling (default: 120)"
    )


def main(namespace: argparse.Namespace) -> int:
    """Checks.

    Returns:
        0; 1 where a check failed, now or when it was made.

    Raises:
        UsageError: An option's value is wrong.
    """
    from ..selection.choose import default_order, get_backend
    from ..selection.on_demand import read_log
    from ..target import here
    from ..tuning import doctor, tuner

    check_jobs(namespace)
    check_limit(namespace)
    target = here()
    if target == "cpu":
        print("PyTorch finds no CUDA device: what runs on the CPU is checked")
    problems = doctor.problems(target)
    if namespace.from_log:
        try:
            named = read_log(namespace.from_log)
        except (OSError, ValueError) as error:
            raise UsageError(f"--from-log: {error}") from error
        mine = [problem for problem in named if problem.target == target and not problem.empty]
        print(f"{len(mine)} of {len(named)} problems of {namespace.from_log} are of {target}")
        problems += mine
    for name in default_order(target):
        missing = get_backend(name).missing()
        if missing:
            print(f"{name} is not checked: {missing}")
    todo = doctor.checks(problems)
    options = tuner.Options(jobs=namespace.jobs or _jobs(target), limit_s=namespace.limit, again=namespace.again)
    start, done = time.monotonic(), 0

    def log(one: doctor.Found) -> None:
        nonlocal done
        done += 1
        print(line(one, done, len(todo)), flush=True)

    found = doctor.run(target, todo, options, log=log)
    print(f"{summary(found)} on {target}, in {time.monotonic() - start:.0f} s")
    return int(any(one.failure for one in found))


def _jobs(target: str) -> int:
    """How many processes a machine has cores and memory for."""
    from ..environment import describe_device

    cores = min(_MOST_JOBS, os.cpu_count() or 1)
    return cores if target == "cpu" else max(1, min(cores, describe_device(0)["memory_bytes"] // _BYTES_OF_A_JOB))


def line(one: doctor.Found, done: int, total: int) -> str:
    """What was found, as a line of a table."""
    word = "ok" if not one.failure else "FAILED" if one.is_verdict else "unclear"
    took = "known" if one.seconds is None else f"{one.seconds:.1f} s"
    return f"{done:4}/{total} {word:<7} {took:>7}  {one.check}"


def summary(found: Sequence[doctor.Found]) -> str:
    """Each failure, with what runs in its place, and how many checks passed."""
    from ..selection.key import features_of
    from ..tuning import doctor

    lines, wrong = [], [one for one in found if one.failure]
    for one in wrong:
        lines += [
            "",
            str(one.check.tunable),
            f"  problem:      {features_of(one.check.problem)}",
            f"  error:        {one.failure}",
            f"  used instead: {doctor.consequence(one)}",
        ]
    passed = f"{len(found) - len(wrong)} of {len(found)} checks passed"
    return "\n".join([*lines, "", passed] if wrong else [passed])

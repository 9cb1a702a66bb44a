"""Compile every kernel that the package would use on a GPU, on a machine without it, and say what it became.

Prints for each kernel its matrix instructions, bulk tensor copies, packed arithmetic, registers, spills, shared memory
and compile time. Nothing runs. The status is 1 where an expected instruction is missing, products are more or fewer
than a kernel was written with, a spill or a limit is exceeded, or a backend of the target is not installed.

for example:
  compile --target sm_100a              everything that Blackwell (B200) would run
  compile --target sm_90a --backend cute
"""

from __future__ import annotations

import argparse
import os
import sys

from . import UsageError, check_jobs

_BACKENDS = ("cute", "helion")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--target", required=True, metavar="NAME", help="sm_80, sm_90a, sm_100a, sm_103a or sm_120a")
    parser.add_argument("--backend", choices=_BACKENDS, help="only this one's kernels (default: both)")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes that compile beside each other (default: cores)"
    )
    parser.add_argument("--table", action="store_true", help="print only the table, not each kernel as it is done")


def main(namespace: argparse.Namespace) -> int:
    """Compiles.

    Returns:
        0; 1 where a kernel has a fault.

    Raises:
        UsageError: An option's value is wrong.
    """
    from ..crosscompile import lane

    check_jobs(namespace)

    def log(one: lane.Compiled) -> None:
        if not namespace.table:
            print(f"{one.backend} {one.kernel}, {one.problem}: {one.seconds:.0f} s", file=sys.stderr, flush=True)

    backends = (namespace.backend,) if namespace.backend else _BACKENDS
    try:
        found = lane.run(namespace.target, backends, jobs=namespace.jobs or os.cpu_count() or 1, log=log)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(lane.table(found))
    return int(any(one.faults for one in found))

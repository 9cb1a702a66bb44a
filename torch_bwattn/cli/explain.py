"""Say which backend and config would run your problems on a GPU, here or not, and why not the others.

Compiles and runs nothing. For tensors that are there, ``torch_bwattn.explain`` says it of a call.

for example:
  explain --target sm_100a --shapes 'B8H32/8S4096D128' --causal yes
  BWATTN_RECORD=problems.jsonl python train.py; explain --target sm_100a --from-log problems.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses

from . import UsageError
from .bench import CAUSAL_WORDS


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--target", metavar="NAME", help="such as sm_90a or sm_100a (default: this machine's)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shapes", metavar="LIST", help="names like B4H32/8S4096D128, or patterns like '*D64'")
    what.add_argument("--from-log", metavar="FILE", help="the problems that BWATTN_RECORD=FILE has recorded")
    parser.add_argument("--causal", choices=tuple(CAUSAL_WORDS), help="of --shapes (default: both)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), help="of --shapes (default: bfloat16)")
    parser.add_argument("--direction", choices=("forward", "backward", "both"), default="both", help="default: both")
    parser.set_defaults(suite=None)


def main(namespace: argparse.Namespace) -> int:
    """Explains.

    Returns:
        0.

    Raises:
        UsageError: An option's value is wrong.
    """
    from ..problem import Problem
    from ..selection import report
    from ..selection.choose import Plan, plan
    from ..selection.pin import pinned
    from ..target import here, is_target
    from .tune import problems_of

    if namespace.from_log and (namespace.causal or namespace.dtype):
        raise UsageError("--causal, --dtype: expected only with --shapes; recorded problems have their own")
    target = namespace.target or here()
    if not is_target(target):
        raise UsageError(f"--target: expected cpu or a name such as sm_90a or sm_100a, got {target!r}")
    try:
        problems = problems_of(namespace, target)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    calls: dict[Problem, list[Plan]] = {}
    for problem in problems:
        there = dataclasses.replace(problem, target=target)
        calls.setdefault(dataclasses.replace(there, backward=False), []).append(plan(there, pinned()))
    print("\n\n".join(map(report.text, calls.values())))
    return 0

"""The command line: ``python -m torch_bwattn {info, explain, run, bench, tune, doctor, compile, paper}``.

A command is a module here with ``SUMMARY``, ``configure(parser)`` and ``main(namespace) -> int``, loaded when it is
asked for.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Sequence

COMMANDS = ("info", "explain", "run", "bench", "tune", "doctor", "compile", "paper")

_SUMMARIES = {
    "info": "print versions, devices, backends and why any is missing",
    "explain": "say what would run your problems on any GPU, and why not the others",
    "run": "run a Python script with scaled_dot_product_attention replaced",
    "bench": "check and time attention on this machine's GPU, beside its peers",
    "tune": "measure which backend and config is fastest for your problems",
    "doctor": "check the kernels that would run on this machine, each in a process of its own",
    "compile": "compile all kernels for a GPU that is not here, and say what they became",
    "paper": "how long attention takes on paper, beside what was measured, and predicted for B200",
}


def check_jobs(namespace: argparse.Namespace) -> None:
    """Refuses a number of processes that is none."""
    if namespace.jobs is not None and namespace.jobs < 1:
        raise UsageError(f"--jobs: expected a positive number, got {namespace.jobs}")


def check_limit(namespace: argparse.Namespace) -> None:
    """Refuses a time limit that is none."""
    if not 0.0 < namespace.limit < math.inf:
        raise UsageError(f"--limit: expected a positive number of seconds, got {namespace.limit}")


def main(argv: Sequence[str]) -> int:
    """Runs one command.

    Args:
        argv: The arguments after ``python -m torch_bwattn``.

    Returns:
        The exit status: 0, 1 where the command's own check failed, 2 on wrong usage.
    """
    program = "python -m torch_bwattn"
    parser = argparse.ArgumentParser(prog=program, description="Attention kernels chosen per device.")
    lines = "\n".join(f"  {name:<7} {_SUMMARIES[name]}" for name in COMMANDS)
    parser.epilog = f"commands:\n{lines}\n\n'{program} COMMAND --help' describes one."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    # What follows the command is the command's: a script's arguments must pass `run` untouched.
    namespace = parser.parse_args(list(argv[:1]))
    module = importlib.import_module(f".{namespace.command}", __package__)
    command = argparse.ArgumentParser(
        prog=f"{program} {namespace.command}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.configure(command)
    rest = list(argv[1:])
    if namespace.command == "run":
        from .run import split_arguments

        rest, script = split_arguments(rest)
        parsed = command.parse_args(rest)
        parsed.script = script
    else:
        parsed = command.parse_args(rest)
    try:
        status: int = module.main(parsed)
    except UsageError as error:
        print(f"{command.prog}: {error}", file=sys.stderr)
        return 2
    return status


class UsageError(Exception):
    """Wrong arguments that the parser cannot see; printed without a traceback."""

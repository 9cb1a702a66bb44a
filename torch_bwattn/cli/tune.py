"""Measure which backend and config is fastest for your problems, and keep the order for this machine.

Each tunable that may compete is checked against the fp64 reference and timed with the others in turns. What is known
already, with the installed versions, is not measured again, so a run that was ended goes on where it was.

for example:
  tune                                         the shapes of the README's tables
  tune --shapes 'B8H32/8S4096D128' --causal yes
  BWATTN_RECORD=problems.jsonl python train.py; tune --from-log problems.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import UsageError, check_jobs, check_limit
from .bench import CAUSAL_WORDS, words_of

if TYPE_CHECKING:
    from ..problem import Problem
    from ..tuning import tuner

_SUITES = ("rows", "release")
_MOST_JOBS = 8  # each has its tensors on the device


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    group = parser.add_argument_group("what is tuned")
    what = group.add_mutually_exclusive_group()
    what.add_argument("--suite", choices=_SUITES, help="rows: those of the README; release: the package's own tables")
    what.add_argument("--shapes", metavar="LIST", help="names like B4H32/8S4096D128, or patterns like '*D64'")
    what.add_argument("--from-log", metavar="FILE", help="the problems that BWATTN_RECORD=FILE has recorded")
    what.add_argument("--verify", type=int, metavar="N", help="tune nothing: time N drawn problems' choices")
    group.add_argument("--seed", type=int, default=0, help="of --verify (default: 0)")
    group.add_argument("--causal", choices=tuple(CAUSAL_WORDS), help="of --shapes and the rows (default: both)")
    group.add_argument("--dtype", choices=("bfloat16", "float16"), help="of --shapes and the rows (default: bfloat16)")
    group.add_argument("--direction", choices=("forward", "backward", "both"), default="both", help="default: both")
    how = parser.add_argument_group("how")
    how.add_argument("--jobs", type=int, metavar="N", help="processes that check beside each other (default: by cores)")
    how.add_argument(
        "--limit",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds for a check, and for the times of a problem (default: 120)",
    )
    how.add_argument("--again", action="store_true", help="measure also what is known")
    how.add_argument("--quiet", action="store_true", help="say nothing but errors")
    how.add_argument("--out", metavar="FILE", help="write everything that this user has tuned for the target, as JSON")


def main(namespace: argparse.Namespace) -> int:
    """Tunes.

    Returns:
        0; 1 where a problem has no tunable that passes.

    Raises:
        UsageError: An option's value is wrong, or there is no GPU.
    """
    import torch

    from ..target import target_of
    from ..tuning import tuner

    check_jobs(namespace)
    check_limit(namespace)
    elsewhere = namespace.from_log or namespace.suite == "release" or namespace.verify is not None
    if elsewhere and (namespace.causal or namespace.dtype):
        raise UsageError("--causal, --dtype: expected only with --shapes or the rows; other problems have their own")
    if not torch.cuda.is_available():
        raise UsageError("expected a CUDA device; on the CPU there is nothing to tune")
    target = target_of(torch.device("cuda", 0))
    if namespace.verify is not None:
        return _verify(namespace, target)
    try:
        named = problems_of(namespace, target)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    problems = [problem for problem in named if problem.target == target]
    if len(problems) < len(named) and not namespace.quiet:
        _line(f"{len(named) - len(problems)} of {len(named)} problems are not of {target} and left out")
    options = _options(namespace)
    log, advance, close = _progress(namespace.quiet)
    try:
        outcomes = tuner.tune(problems, options, log=log, advance=advance)
    finally:
        close()
    if namespace.out:
        write_table(target, Path(namespace.out))
    return 0 if all(outcome.ranking for outcome in outcomes) else 1


def _options(namespace: argparse.Namespace) -> tuner.Options:
    from ..tuning import tuner

    jobs = namespace.jobs or max(1, min(_MOST_JOBS, (os.cpu_count() or 1) // 2))
    return tuner.Options(jobs=jobs, limit_s=namespace.limit, again=namespace.again)


def _verify(namespace: argparse.Namespace, target: str) -> int:
    from ..tuning import verify

    if namespace.verify < 1:
        raise UsageError(f"--verify: expected a positive number, got {namespace.verify}")
    problems = verify.draw(target, namespace.verify, namespace.seed)
    found = verify.verify(problems, _options(namespace), log=_line)
    _line(verify.summary(found, len(problems)))
    if namespace.out:
        Path(namespace.out).write_text(json.dumps(verify.document(found), indent=1) + "\n")
    return 0


def problems_of(namespace: argparse.Namespace, target: str) -> list[Problem]:
    """The problems that the options name.

    Raises:
        OSError: The log cannot be read.
        ValueError: A name or a line is no problem.
    """
    from ..selection.on_demand import read_log
    from ..tuning import problems

    directions = {"forward": (False,), "backward": (True,), "both": (False, True)}[namespace.direction]
    if namespace.from_log:
        found = read_log(namespace.from_log)
        return [problem for problem in found if problem.backward in directions]
    if namespace.suite == "release":
        return [problem for problem in problems.release(target) if problem.backward in directions]
    patterns = words_of(namespace.shapes) if namespace.shapes else None
    return problems.rows(
        target, patterns, CAUSAL_WORDS[namespace.causal or "both"], namespace.dtype or "bfloat16", directions
    )


def write_table(target: str, path: Path) -> None:
    """Writes the user's table of a target, in the form of the package's own: an entry a line, in order."""
    from ..selection import tables

    contents = {**tables.tuned(target).load(), "target": target}
    entries = sorted(contents.pop("entries", []), key=lambda entry: (entry["kind"], entry["sizes"]))
    head = json.dumps(contents, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    path.write_text(f'{head},\n "entries": [\n{lines}\n ]\n}}\n')


def _progress(quiet: bool) -> tuple[Callable[[str], None], Callable[[int, int], None], Callable[[], None]]:
    """Something that takes a line, something that takes a state, and something to call at the end."""
    if quiet:
        return (lambda _: None), (lambda _done, _total: None), (lambda: None)
    try:
        from tqdm import tqdm
    except ImportError:  # lines do as well
        return _line, (lambda _done, _total: None), (lambda: None)
    bar: Any = tqdm(desc="tune", unit="step", file=sys.stderr)

    def advance(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return (lambda text: tqdm.write(text, file=sys.stderr)), advance, bar.close


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

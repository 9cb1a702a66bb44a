"""Check and time attention on one CUDA GPU, beside its peers.

The figures are written as JSON; those that ship make the README's tables.

for example:
  bench --suite all --out h200.json            everything that the README shows
  bench --rows fwd --shapes '*D128' --quick    a glance at the forward
  bench --configs FILE.json                    time Helion configs (see bench/configs.py)
  bench --report --readme README.md            generate the tables
  bench --report --readme README.md --check    compare, status 1 where they differ
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from . import UsageError

_DIRECTION_WORDS = {"fwd": "forward", "bwd": "backward", "forward": "forward", "backward": "backward"}
CAUSAL_WORDS = {"no": (False,), "yes": (True,), "both": (False, True)}
_PEERS = ("cudnn", "aten_flash", "fa4", "flex")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--suite", choices=("rows", "host", "memory", "flex", "all"), default="rows", help="default: rows"
    )
    what.add_argument(
        "--rows", default="fwd,bwd", metavar="LIST", help="directions of the rows: fwd, bwd (default both)"
    )
    what.add_argument("--shapes", metavar="LIST", help="names like B4H32/8S4096D128, or patterns like '*D64'")
    what.add_argument("--causal", choices=tuple(CAUSAL_WORDS), default="both", help="default: both")
    what.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default: bfloat16")
    what.add_argument("--backend", default="helion", metavar="NAME", help="pinned backend, or auto (default: helion)")
    what.add_argument("--peers", default=",".join(_PEERS), metavar="LIST", help=f"of {', '.join(_PEERS)}, or none")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--quick", action="store_true", help="a third of the time, and only 4 slices of each result checked"
    )
    how.add_argument("--warmup-ms", type=float, metavar="MS", help="untimed work before each timing (default: 25)")
    how.add_argument("--rep-ms", type=float, metavar="MS", help="timed work per implementation and row (default: 120)")
    how.add_argument("--rounds", type=int, metavar="N", help="turns of each implementation (default: 10)")
    how.add_argument("--slices", metavar="N", help="slices of each result that are checked, or all (default: all)")
    how.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    how.add_argument(
        "--jobs", type=int, metavar="N", help="processes that compile ahead; 0 for none (default: by cores)"
    )
    how.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the machinery (default: cuda)")
    out = parser.add_argument_group("what comes of it")
    out.add_argument("--out", metavar="FILE", help="write the figures as JSON, anew after each row")
    out.add_argument("--commit", metavar="HASH", help="the commit to record, where the package is no git checkout")
    out.add_argument("--report", action="store_true", help="measure nothing; write the README's tables")
    out.add_argument("--readme", default="README.md", metavar="FILE", help="for --report (default: README.md)")
    out.add_argument("--check", action="store_true", help="for --report: compare instead of writing")
    out.add_argument("--configs", metavar="FILE", help="check and time the Helion configs of this JSON file instead")
    # Of the processes that compile ahead.
    out.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    out.add_argument("--part", help=argparse.SUPPRESS)


def main(namespace: argparse.Namespace) -> int:
    """Measures, or reports.

    Returns:
        0; 1 where a result of this package is wrong or failed, or where ``--check`` finds a difference.

    Raises:
        UsageError: An option's value is wrong.
    """
    try:
        if namespace.report:
            return _report(namespace)
        return _measure(namespace)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _report(namespace: argparse.Namespace) -> int:
    from ..bench import report

    readme = Path(namespace.readme)
    if not readme.is_file():
        raise UsageError(f"--readme: no such file: {readme}")
    same = report.update_readme(readme, report.shipped_results(), check=namespace.check)
    if same:
        print(f"{readme}: the tables are those of the shipped measurements")
    elif namespace.check:
        print(f"{readme}: the tables differ from the shipped measurements; run the command without --check")
        return 1
    else:
        print(f"{readme}: tables written")
    return 0


def words_of(text: str) -> list[str]:
    """What stands between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def directions_of(text: str) -> tuple[str, ...]:
    """``"fwd,bwd"`` as names of directions.

    Raises:
        ValueError: A word is no direction.
    """
    words = words_of(text)
    unknown = [word for word in words if word not in _DIRECTION_WORDS]
    if unknown or not words:
        raise ValueError(f"--rows: expected fwd, bwd or both with a comma, got {text!r}")
    return tuple(dict.fromkeys(_DIRECTION_WORDS[word] for word in words))


def slices_of(text: str | None, quick: bool) -> int | None:
    """How many slices are checked; None is all.

    Raises:
        ValueError: ``text`` is neither a positive number nor ``all``.
    """
    if text is None:
        return 4 if quick else None
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--slices: expected a positive number or all, got {text!r}")
    return int(text)


def _budget(namespace: argparse.Namespace) -> Any:
    from ..bench.timing import Budget

    usual = Budget(warmup_ms=8.0, rep_ms=40.0, rounds=2) if namespace.quick else Budget()
    return Budget(
        warmup_ms=usual.warmup_ms if namespace.warmup_ms is None else namespace.warmup_ms,
        rep_ms=usual.rep_ms if namespace.rep_ms is None else namespace.rep_ms,
        rounds=usual.rounds if namespace.rounds is None else namespace.rounds,
    )


def make_plan(namespace: argparse.Namespace) -> Any:
    """The plan that the options describe.

    Raises:
        ValueError: An option's value is wrong.
    """
    import torch

    from ..bench import suite
    from ..bench.rows import select_rows

    try:
        device = torch.device(namespace.device)
    except RuntimeError as error:
        raise ValueError(f"--device: {error}") from error
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"--device: expected cuda or cpu, got {namespace.device!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device: expected a CUDA GPU, and PyTorch finds none here (--device cpu tries the machinery)"
        )
    rows = select_rows(
        None if namespace.shapes is None else words_of(namespace.shapes),
        causal=CAUSAL_WORDS[namespace.causal],
        dtype=namespace.dtype,
    )
    return suite.Plan(
        rows=rows,
        suites=suite.SUITES if namespace.suite == "all" else (namespace.suite,),
        directions=directions_of(namespace.rows),
        device=device,
        budget=_budget(namespace),
        slices=slices_of(namespace.slices, namespace.quick),
        seed=namespace.seed,
        host_blocks=10 if namespace.quick else 40,
    )


def _measure(namespace: argparse.Namespace) -> int:
    from ..selection import pin

    plan = make_plan(namespace)
    backend = namespace.backend
    if backend != "auto":
        pin.check_name("--backend", backend)
    import torch

    from ..bench import document, suite
    from ..bench.peers import OpProvider, make_peers

    peers = make_peers([] if namespace.peers == "none" else words_of(namespace.peers))
    providers = [OpProvider(backend), *peers]
    if plan.device.index is not None:
        torch.cuda.set_device(plan.device)
    if namespace.configs is not None:
        from ..bench import configs

        return configs.run_file(namespace.configs, plan, jobs=namespace.jobs, part=namespace.part, log=_say)
    if namespace.compile_only:
        suite.compile_only(plan, providers, _say)
        return 0
    if suite.ROWS in plan.suites and plan.device.type == "cuda":
        _compile_ahead(namespace, plan)
    if namespace.out is not None:
        target = Path(namespace.out)

        def save(made: Any) -> None:
            document.save(made, target)

    else:

        def save(made: Any) -> None:
            document.validate(made)

    made = suite.run(
        plan,
        providers,
        [OpProvider(backend), OpProvider(backend, function=True), *peers],
        save=save,
        log=_say,
        commit=namespace.commit,
    )
    return conclude(made, OpProvider(backend).name)


def _say(line: str) -> None:
    print(line, flush=True)


def _compile_ahead(namespace: argparse.Namespace, plan: Any) -> None:
    from ..bench import prewarm

    jobs = prewarm.default_jobs(plan.rows, os.cpu_count()) if namespace.jobs is None else namespace.jobs
    dealt = prewarm.groups(plan.rows, jobs)
    if not dealt:
        return
    common = ["--compile-only", "--rows", ",".join(plan.directions), "--causal", namespace.causal]
    common += ["--dtype", namespace.dtype, "--backend", namespace.backend, "--peers", namespace.peers]
    common += ["--device", namespace.device]
    prewarm.prewarm([[*common, "--shapes", ",".join(names)] for names in dealt], timeout_s=180.0, log=_say)


def conclude(made: Any, provider: str) -> int:
    """Prints the tables and the limits of a finished run.

    Returns:
        1 where a result of ``provider`` is wrong or failed, else 0.
    """
    from ..bench import document, limits, patterns, report, suite

    _say("")
    _say(report.render([made]))
    if made["rows"]:
        _say(f"\n**{provider}, times as fast as**\n\n{report.ratios(made['rows'], provider)}")
    found = limits.findings(made, provider)
    if found:
        _say("")
        marks = {True: "met   ", False: "MISSED", None: "open  "}
        for finding in found:
            _say(f"{marks[finding.met]} {finding.text}")
    bad = [
        record
        for name in suite.SUITES
        for record in made[name]
        if record["provider"] in (provider, patterns.OUR_PROVIDER) and record["status"] != document.OK
    ]
    for record in bad:
        print(f"{provider}: {record['status']}: {record['reason']}", file=sys.stderr)
    return 1 if bad else 0

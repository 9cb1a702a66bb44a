"""Compiles in parallel what will be timed one after another.

Flex and FA4 take seconds per shape to compile, on one core each. Processes that run every provider once, a few shapes
each, fill the disk caches (Inductor, Triton, CuTe-DSL) from which the measuring process then loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from .rows import Row


def groups(rows: Sequence[Row], jobs: int) -> list[list[str]]:
    """Shape names dealt out over at most ``jobs`` processes; every shape in one of them, with all its masks."""
    names = list(dict.fromkeys(row.shape for row in rows))
    return [names[start::jobs] for start in range(min(jobs, len(names)))] if jobs > 0 else []


def default_jobs(rows: Sequence[Row], cores: int | None) -> int:
    """As many processes as there are shapes, two cores each; none where that is not at least two."""
    jobs = min(len({row.shape for row in rows}), (cores or 1) // 2)
    return jobs if jobs > 1 else 0


def _start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 (this interpreter, this package)
        [sys.executable, "-m", "torch_bwattn", "bench", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    )


def prewarm(
    commands: Sequence[Sequence[str]],
    *,
    timeout_s: float,
    log: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs ``commands`` (arguments after ``python -m torch_bwattn bench``) beside each other and waits for all.

    A process that fails or takes too long only means that the measuring process compiles for itself: it is logged.

    Args:
        commands: One argument list per process.
        timeout_s: After this many seconds what still runs is ended.
        log: Takes a line per failure.
        environment: Variables set for the processes beside this one's.
    """
    start = time.monotonic()
    # FA4 keeps its code on disk only if told to before it is imported, here too: this process is the one that loads it.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    variables = {**os.environ, **(environment or {})}
    # Each has its own pool of compile workers otherwise, one worker per core.
    variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running += [_start(command, variables)]
        for process in running:
            left = max(0.1, timeout_s - (time.monotonic() - start))
            try:
                _, errors = process.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                log(f"compiling ahead took longer than {timeout_s:.0f} s: the rest is compiled when it is timed")
                break
            if process.returncode:
                last = errors.strip().splitlines()[-1:] or ["no message"]
                log(f"a process that compiled ahead ended with status {process.returncode}: {last[0]}")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    log(f"compiled ahead in {len(commands)} processes, {time.monotonic() - start:.0f} s")

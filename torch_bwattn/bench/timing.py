"""Clocks and the order in which competing implementations meet them.

All implementations of a row are timed in turns, each after each of the others equally often: a card whose clock sinks
with the power that it has just drawn favours who follows a slow one. Every figure is a median over single calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

Work = Callable[[], object]
Key = TypeVar("Key")


class Stopwatch(Protocol):
    """Times single calls."""

    def laps(self, work: Work, count: int) -> list[float]:
        """Calls ``work`` ``count`` times and gives the milliseconds of each call."""


class CudaStopwatch:
    """Times device work between two events on the current stream, with a cold L2 cache before each call.

    Args:
        device: The CUDA device.
        flush_bytes: Memory overwritten before each call; several times the largest L2.
    """

    def __init__(self, device: torch.device, flush_bytes: int = 256 * 2**20) -> None:
        self._device = device
        self._flush = torch.empty(flush_bytes, dtype=torch.int8, device=device)

    def laps(self, work: Work, count: int) -> list[float]:
        """See `Stopwatch.laps`. Synchronizes the device once, at the end."""
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        with torch.cuda.device(self._device):
            for start, end in pairs:
                self._flush.zero_()
                start.record()
                work()
                end.record()
            torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


class HostStopwatch:
    """Times each call with the host's clock; right for CPU work only."""

    def laps(self, work: Work, count: int) -> list[float]:
        """See `Stopwatch.laps`."""
        times = []
        for _ in range(count):
            start = time.perf_counter_ns()
            work()
            times.append((time.perf_counter_ns() - start) * 1e-6)
        return times


@dataclasses.dataclass(frozen=True)
class Budget:
    """How long one implementation of one row is timed.

    Attributes:
        warmup_ms: Untimed calls before the first timed one, in milliseconds of work.
        rep_ms: Timed calls, in milliseconds of work, all rounds together.
        rounds: Turns that each implementation gets. Ten are balanced for five implementations, and for ten.
        max_laps: Most timed calls in one turn, which bounds the events of very short calls.
    """

    warmup_ms: float = 25.0
    rep_ms: float = 120.0
    rounds: int = 10
    max_laps: int = 400

    def __post_init__(self) -> None:
        if self.warmup_ms < 0:
            raise ValueError(f"warmup_ms: expected a time that is not negative, got {self.warmup_ms}")
        if self.rep_ms <= 0:
            raise ValueError(f"rep_ms: expected a positive time, got {self.rep_ms}")
        if self.rounds < 1:
            raise ValueError(f"rounds: expected a positive number, got {self.rounds}")
        if self.max_laps < 1:
            raise ValueError(f"max_laps: expected a positive number, got {self.max_laps}")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one implementation.

    Attributes:
        ms: Median over all timed calls.
        p20_ms: 20th percentile.
        p80_ms: 80th percentile.
        laps: Number of timed calls.
        spread: Largest over smallest median of a round, minus one: a difference below it is noise.
    """

    ms: float
    p20_ms: float
    p80_ms: float
    laps: int
    spread: float


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value at ``fraction`` (0 to 1) of the sorted ``values``, interpolated.

    Raises:
        ValueError: ``values`` is empty.
    """
    if not values:
        raise ValueError("values: expected at least one value, got none")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def turns(keys: Sequence[Key], rounds: int) -> list[list[Key]]:
    """The order of each round: a Latin square in which each follows each other one equally often.

    Each row goes to and fro through the list (first, second, last, third, last but one, ...), a place further on than
    the row before; an odd number of keys needs each row's reverse too (E. J. Williams, 1949). So as many rounds as keys
    are balanced, or twice as many.
    """
    count = len(keys)
    places = [(index + 1) // 2 if index % 2 else -(index // 2) for index in range(count)]
    rows = [[keys[(place + start) % count] for place in places] for start in range(count)]
    if count % 2:
        rows = [order for row in rows for order in (row, row[::-1])]
    return list(itertools.islice(itertools.cycle(rows or [[]]), rounds))


def describe_failure(error: BaseException, limit: int = 300) -> str:
    """One line that names an exception, and the one behind it if there is one, for records."""
    text = _one_line(error, limit)
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return text if cause is error else f"{text} (from {_one_line(cause, limit)})"


def _one_line(error: BaseException, limit: int) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to time: a call, and the context in which it is to run."""

    work: Work
    active: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def time_interleaved(
    contenders: Mapping[str, Contender], stopwatch: Stopwatch, budget: Budget
) -> dict[str, Timing | str]:
    """Times all ``contenders`` in turns.

    One that raises is dropped from the later turns and does not end the others.

    Args:
        contenders: The calls by name. Each must have run before, so that no compilation is timed.
        stopwatch: The clock.
        budget: How long each is timed.

    Returns:
        By name: the times, or the reason why there are none.
    """
    rounds: dict[str, list[list[float]]] = {}
    counts: dict[str, int] = {}
    failed: dict[str, str] = {}
    for name, contender in contenders.items():
        try:
            with contender.active():
                estimate = max(min(stopwatch.laps(contender.work, 2)), 1e-6)
                stopwatch.laps(contender.work, min(max(1, math.ceil(budget.warmup_ms / estimate)), budget.max_laps))
        except Exception as error:
            failed[name] = describe_failure(error)
            continue
        counts[name] = min(max(1, math.ceil(budget.rep_ms / budget.rounds / estimate)), budget.max_laps)
        rounds[name] = []
    for order in turns(list(counts), budget.rounds):
        for name in order:
            if name in failed:
                continue
            contender = contenders[name]
            try:
                with contender.active():
                    # The first call of a turn finds the caches and the clock as its predecessor left them: not timed.
                    rounds[name].append(stopwatch.laps(contender.work, counts[name] + 1)[1:])
            except Exception as error:
                failed[name] = describe_failure(error)
    return {name: failed[name] if name in failed else _summary(rounds[name]) for name in contenders}


def _summary(rounds: Sequence[Sequence[float]]) -> Timing:
    laps = [lap for turn in rounds for lap in turn]
    medians = [statistics.median(turn) for turn in rounds]
    return Timing(
        ms=statistics.median(laps),
        p20_ms=quantile(laps, 0.2),
        p80_ms=quantile(laps, 0.8),
        laps=len(laps),
        spread=max(medians) / max(min(medians), 1e-12) - 1,
    )


@dataclasses.dataclass(frozen=True)
class HostTiming:
    """Host time of one call in microseconds: median, 20th and 80th percentile over blocks of calls."""

    us: float
    p20_us: float
    p80_us: float
    blocks: int


def time_host(
    contenders: Mapping[str, Contender],
    *,
    synchronize: Callable[[], object],
    calls: int = 100,
    blocks: int = 40,
    warmup: int = 20,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, HostTiming | str]:
    """Times what one call costs the host, without waiting for the device.

    Each implementation is called in blocks of ``calls``, in turns. The device is idle at the start of a block, and a
    block is short enough never to fill its launch queue. The garbage collector rests meanwhile.

    Args:
        contenders: The calls by name.
        synchronize: Waits for the device.
        calls: Calls in a block.
        blocks: Blocks of each implementation.
        warmup: Calls before the first block.
        clock_ns: The host's clock, in nanoseconds.

    Returns:
        By name: the times, or the reason why there are none.
    """
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name, contender in contenders.items():
        try:
            with contender.active():
                for _ in range(warmup):
                    contender.work()
                synchronize()
        except Exception as error:
            failed[name] = describe_failure(error)
            continue
        times[name] = []
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for order in turns(list(times), blocks):
            for name in order:
                if name in failed:
                    continue
                try:
                    with contenders[name].active():
                        work = contenders[name].work
                        work()
                        synchronize()
                        start = clock_ns()
                        for _ in range(calls):
                            work()
                        elapsed = clock_ns() - start
                        synchronize()
                except Exception as error:
                    failed[name] = describe_failure(error)
                    continue
                times[name].append(elapsed / calls * 1e-3)
    finally:
        if collecting:
            gc.enable()
    return {
        name: failed[name]
        if name in failed
        else HostTiming(
            us=statistics.median(times[name]),
            p20_us=quantile(times[name], 0.2),
            p80_us=quantile(times[name], 0.8),
            blocks=len(times[name]),
        )
        for name in contenders
    }

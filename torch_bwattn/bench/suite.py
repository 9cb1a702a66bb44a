"""The measurements: rows of shapes, host cost, memory. Each result is checked before it is timed.

The order within a row is: reference, check of every provider, then the timing of those that passed, in turns. One that
is missing, raises or is wrong leaves a record with the reason and does not end the run; the document is handed to
``save`` after each row, so that a run that is stopped keeps what it has.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import environment
from . import check, document, patterns
from .peers import Attention, Provider
from .rows import BACKWARD, DIRECTIONS, FORWARD, Inputs, Row, make_inputs
from .timing import (
    Budget,
    Contender,
    CudaStopwatch,
    HostStopwatch,
    HostTiming,
    Stopwatch,
    Timing,
    describe_failure,
    time_host,
    time_interleaved,
)

ROWS = "rows"
HOST = "host"
MEMORY = "memory"
FLEX = "flex"
SUITES = (ROWS, HOST, MEMORY, FLEX)

HOST_ROW = Row(batch=1, heads=8, kv_heads=8, length=128, head_dim=64, causal=False)
MEMORY_ROW = Row(batch=4, heads=32, kv_heads=32, length=8192, head_dim=128, causal=False)

Record = dict[str, Any]
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        rows: The shapes of the ``rows`` suite.
        suites: Which of `SUITES` to run.
        directions: Which of `DIRECTIONS` the rows are measured in.
        device: Where.
        budget: How long each implementation of a row is timed.
        slices: Slices (one key-value head of one sequence) of each result that are checked; None checks all.
        seed: Of the inputs.
        host_row: The shape of the ``host`` suite.
        host_calls: Calls in a block of the ``host`` suite.
        host_blocks: Blocks of the ``host`` suite.
        memory_row: The shape of the ``memory`` suite.
        flex_row: The shape of the ``flex`` suite.
    """

    rows: Sequence[Row]
    suites: Sequence[str] = SUITES
    directions: Sequence[str] = DIRECTIONS
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cuda"))
    budget: Budget = dataclasses.field(default_factory=Budget)
    slices: int | None = None
    seed: int = 0
    host_row: Row = HOST_ROW
    host_calls: int = 100
    host_blocks: int = 40
    memory_row: Row = MEMORY_ROW
    flex_row: Row = patterns.FLEX_ROW

    def options(self) -> dict[str, Any]:
        """How it was measured, for the document."""
        return {
            "suites": list(self.suites),
            "directions": list(self.directions),
            "budget": dataclasses.asdict(self.budget),
            "slices": self.slices,
            "seed": self.seed,
            "host_calls": self.host_calls,
            "host_blocks": self.host_blocks,
        }


def run(
    plan: Plan,
    providers: Sequence[Provider],
    host_providers: Sequence[Provider],
    *,
    save: Callable[[Mapping[str, Any]], None] = lambda _: None,
    log: Log = print,
    commit: str | None = None,
) -> dict[str, Any]:
    """Measures what ``plan`` asks for.

    Args:
        plan: What to measure.
        providers: Implementations of the ``rows`` and ``memory`` suites, this package's first.
        host_providers: Implementations of the ``host`` suite.
        save: Takes the document after each row and suite.
        log: Takes each line of progress.
        commit: The commit to record; None looks for it.

    Returns:
        The document (see `document`).
    """
    index = None
    if plan.device.type == "cuda":
        index = torch.cuda.current_device() if plan.device.index is None else plan.device.index
    made = document.new(environment.describe(index, commit), plan.options())
    stopwatch: Stopwatch | None = None
    if {ROWS, FLEX} & set(plan.suites):
        stopwatch = CudaStopwatch(plan.device) if index is not None else HostStopwatch()
    if ROWS in plan.suites and stopwatch is not None:
        present, absent = _part_missing(providers, log)
        for row in plan.rows:
            for direction in plan.directions:
                made[ROWS] += [_row_record(row, direction, name, reason) for name, reason in absent.items()]
            made[ROWS] += measure_row(row, present, plan, stopwatch, log)
            save(made)
    if FLEX in plan.suites and stopwatch is not None:
        made[FLEX] += patterns.measure(plan, stopwatch, log)
        save(made)
    del stopwatch
    if MEMORY in plan.suites:
        made[MEMORY] += measure_memory(plan.memory_row, providers, plan, log)
        save(made)
    if HOST in plan.suites:
        made[HOST] += measure_host(plan.host_row, host_providers, plan, log)
        save(made)
    return made


def _part_missing(providers: Sequence[Provider], log: Log) -> tuple[list[Provider], dict[str, str]]:
    present, absent = [], {}
    for provider in providers:
        reason = provider.missing()
        if reason is None:
            present.append(provider)
        else:
            absent[provider.name] = reason
            log(f"{provider.name}: missing: {reason}")
    return present, absent


def release(device: torch.device) -> None:
    """Gives cached device memory back, so that one row's peak is not the next one's fragmentation."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------------- rows


def _row_record(row: Row, direction: str, provider: str, reason: str | None = None, status: str = "") -> Record:
    record: Record = {
        "direction": direction,
        "shape": row.shape,
        **dataclasses.asdict(row),
        "provider": provider,
        "status": status or (document.OK if reason is None else document.MISSING),
    }
    if reason is not None:
        record["reason"] = reason
    return record


def measure_row(row: Row, providers: Sequence[Provider], plan: Plan, stopwatch: Stopwatch, log: Log) -> list[Record]:
    """Checks and times ``providers`` on one row, in each direction of ``plan``."""
    records: list[Record] = []
    try:
        inputs = make_inputs(row, plan.device, plan.seed)
        oracle = check.Oracle(row, inputs, slices=plan.slices, backward=BACKWARD in plan.directions, seed=plan.seed)
    except Exception as error:
        reason = f"no reference: {describe_failure(error)}"
        log(f"{row.name}: {reason}")
        return [
            _row_record(row, direction, provider.name, reason, document.FAILED)
            for direction in plan.directions
            for provider in providers
        ]
    opened: dict[str, Attention] = {}
    refused: dict[str, str] = {}
    for provider in providers:
        try:
            opened[provider.name] = provider.open(row)
        except Exception as error:
            refused[provider.name] = describe_failure(error)
    for direction in (name for name in DIRECTIONS if name in plan.directions):
        records += _measure_direction(row, direction, providers, opened, refused, inputs, oracle, plan, stopwatch, log)
        release(plan.device)
    del inputs, oracle
    release(plan.device)
    return records


def _measure_direction(
    row: Row,
    direction: str,
    providers: Sequence[Provider],
    opened: Mapping[str, Attention],
    refused: Mapping[str, str],
    inputs: Inputs,
    oracle: check.Oracle,
    plan: Plan,
    stopwatch: Stopwatch,
    log: Log,
) -> list[Record]:
    records: dict[str, Record] = {}
    contenders: dict[str, Contender] = {}
    prepare = _prepare_forward if direction == FORWARD else _prepare_backward
    for provider in providers:
        name = provider.name
        if name in refused:
            records[name] = _row_record(row, direction, name, refused[name], document.FAILED)
            continue
        try:
            with provider.active():
                provider.backend_used()
                work, verdict = prepare(opened[name], inputs, oracle)
                used = {"backend": provider.backend_used(), "config": provider.config(row, inputs, direction)}
        except Exception as error:
            records[name] = _row_record(row, direction, name, describe_failure(error), document.FAILED)
            continue
        if not verdict.ok:
            records[name] = _row_record(row, direction, name, verdict.reason, document.WRONG)
        else:
            records[name] = _row_record(row, direction, name)
            contenders[name] = Contender(work, provider.active)
        records[name]["check"] = verdict.as_record()
        records[name].update({key: value for key, value in used.items() if value is not None})
    for name, timing in time_interleaved(contenders, stopwatch, plan.budget).items():
        records[name].update(_timing_fields(row, direction, timing))
    for name, record in records.items():
        log(describe_row_record(name, record))
    return list(records.values())


def _prepare_forward(attention: Attention, inputs: Inputs, oracle: check.Oracle) -> tuple[Callable[[], object], Any]:
    def work() -> torch.Tensor:
        with torch.no_grad():
            return attention(*inputs.qkv)

    return work, oracle.check_forward(work())


def _prepare_backward(attention: Attention, inputs: Inputs, oracle: check.Oracle) -> tuple[Callable[[], object], Any]:
    leaves = inputs.with_grad()
    out = attention(*leaves.qkv)

    def work() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves.qkv, leaves.grad_out, retain_graph=True)

    return work, oracle.check_backward(work())


def _timing_fields(row: Row, direction: str, timing: Timing | str) -> Record:
    if isinstance(timing, str):
        return {"status": document.FAILED, "reason": timing}
    return {**dataclasses.asdict(timing), "tflops": row.tflops(direction, timing.ms)}


def describe_row_record(name: str, record: Record) -> str:
    """One line of progress."""
    head = f"{record['shape']:<20} {'causal' if record['causal'] else '      '} {record['direction']:<8} {name:<16}"
    if record["status"] != document.OK:
        return f"{head} {record['status']}: {record['reason']}"
    figures = " ".join(f"{key} {worst:.0%}" for key, worst in check.shares(record["check"]).items())
    return f"{head} {record['ms']:8.3f} ms {record['tflops']:6.1f} TFLOP/s  of the error allowed: {figures}"


# -------------------------------------------------------------------------------------------------------------- memory


def memory_bound(row: Row) -> int:
    """What forward and backward may add at their peak: outputs, LSE, delta and an fp32 accumulator of dQ, in bytes."""
    element = getattr(torch, row.dtype).itemsize
    query = row.batch * row.heads * row.length * row.head_dim
    key = row.batch * row.kv_heads * row.length * row.head_dim
    outputs = (2 * query + 2 * key) * element
    statistics = 2 * row.batch * row.heads * row.length * 4
    return outputs + statistics + query * 4


def measure_memory(row: Row, providers: Sequence[Provider], plan: Plan, log: Log) -> list[Record]:
    """Peak device memory of one forward and backward beyond the inputs, the gradient of the output included in those.

    Known on CUDA devices only: no records elsewhere.
    """
    records: list[Record] = []
    if plan.device.type != "cuda":
        log("memory: the peak is known on CUDA devices only")
        return records
    for provider in providers:
        record: Record = {
            "shape": row.shape,
            "dtype": row.dtype,
            "causal": row.causal,
            "provider": provider.name,
            "status": document.OK,
            "bound_bytes": memory_bound(row),
        }
        records.append(record)
        reason = provider.missing()
        if reason is not None:
            record.update(status=document.MISSING, reason=reason)
        else:
            try:
                record["extra_bytes"] = _peak_extra(provider, row, plan)
            except Exception as error:
                record.update(status=document.FAILED, reason=describe_failure(error))
        release(plan.device)
        shown = (
            record.get("reason") or f"{record['extra_bytes'] / 2**20:.1f} of {record['bound_bytes'] / 2**20:.1f} MiB"
        )
        log(f"memory {row.shape} {provider.name:<16} {shown}")
    return records


def _peak_extra(provider: Provider, row: Row, plan: Plan) -> int:
    inputs = make_inputs(row, plan.device, plan.seed).with_grad()
    attention = provider.open(row)

    def once() -> None:
        out = attention(*inputs.qkv)
        gradients = torch.autograd.grad(out, inputs.qkv, inputs.grad_out)
        torch.cuda.synchronize(plan.device)
        del out, gradients

    with provider.active():
        once()  # compiles, and allocates what lives on after the call
        release(plan.device)
        before = torch.cuda.memory_allocated(plan.device)
        torch.cuda.reset_peak_memory_stats(plan.device)
        once()
    return torch.cuda.max_memory_allocated(plan.device) - before


# ---------------------------------------------------------------------------------------------------------------- host


def host_inputs(row: Row, device: torch.device, seed: int) -> Inputs:
    """Contiguous ``[B, H, S, D]`` inputs, the cheapest for every implementation."""
    inputs = make_inputs(row, device, seed)
    query, key, value, grad_out = (tensor.contiguous() for tensor in (*inputs.qkv, inputs.grad_out))
    return Inputs(query, key, value, grad_out)


def measure_host(row: Row, providers: Sequence[Provider], plan: Plan, log: Log) -> list[Record]:
    """What one call costs the host: without gradients, with inputs that require them, and forward with backward."""
    present, absent = _part_missing(providers, log)
    plain = host_inputs(row, plan.device, plan.seed)
    leaves = plain.with_grad()
    opened: dict[str, Attention] = {}
    failed: dict[str, str] = {}
    for provider in present:
        try:
            opened[provider.name] = provider.open(row)
        except Exception as error:
            failed[provider.name] = describe_failure(error)

    def forward_backward(attention: Attention) -> None:
        torch.autograd.grad(attention(*leaves.qkv), leaves.qkv, leaves.grad_out)

    calls: dict[str, Callable[[Attention], Callable[[], object]]] = {
        "no_grad": lambda attention: functools.partial(attention, *plain.qkv),
        "grad": lambda attention: functools.partial(attention, *leaves.qkv),
        "forward_backward": lambda attention: functools.partial(forward_backward, attention),
    }
    synchronize = functools.partial(torch.cuda.synchronize, plan.device) if plan.device.type == "cuda" else _nothing
    records: list[Record] = []
    for call, make in calls.items():
        contenders = {
            provider.name: Contender(make(opened[provider.name]), provider.active)
            for provider in present
            if provider.name in opened
        }
        timings = time_host(contenders, synchronize=synchronize, calls=plan.host_calls, blocks=plan.host_blocks)
        for provider in providers:
            record: Record = {"call": call, "shape": row.shape, "dtype": row.dtype, "provider": provider.name}
            name = provider.name
            timing = absent.get(name) or failed.get(name) or timings[name]
            if isinstance(timing, HostTiming):
                record.update(status=document.OK, **dataclasses.asdict(timing))
                shown = f"{timing.us:.1f} us ({timing.p20_us:.1f} to {timing.p80_us:.1f})"
            else:
                record.update(status=document.MISSING if name in absent else document.FAILED, reason=timing)
                shown = f"{record['status']}: {timing}"
            records.append(record)
            log(f"host {call:<16} {name:<24} {shown}")
    return records


def _nothing() -> None:
    pass


# ------------------------------------------------------------------------------------------------------------- compile


def compile_only(plan: Plan, providers: Sequence[Provider], log: Log) -> None:
    """Calls every provider once on every row, in each direction, so that disk caches hold its code."""
    present, _ = _part_missing(providers, log)
    for row in plan.rows:
        inputs = make_inputs(row, plan.device, plan.seed)
        leaves = inputs.with_grad()
        for provider in present:
            try:
                attention = provider.open(row)
                with provider.active():
                    if FORWARD in plan.directions:
                        with torch.no_grad():
                            attention(*inputs.qkv)
                    if BACKWARD in plan.directions:
                        torch.autograd.grad(attention(*leaves.qkv), leaves.qkv, leaves.grad_out)
            except Exception as error:
                log(f"{row.name} {provider.name}: {describe_failure(error)}")
            release(plan.device)

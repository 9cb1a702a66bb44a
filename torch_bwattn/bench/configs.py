"""Time named Helion configs of one kernel against each other: the measurement behind the backend's table of configs.

A file of candidates is a JSON list; each names a kernel, a head width, the mask, and a config::

    [{"kernel": "forward", "head_dim": 128, "causal": true,
      "config": {"tile_m": 128, "tile_n": 64, "num_warps": 8, "num_stages": 3}}, ...]

``kernel`` is the kernel function's name, or what follows an underscore in it (``forward``, ``dq``). ``config`` is in
the terms of the backend's table, as above, or a full Helion config (``block_sizes``, ``indexing`` …). ``shape`` may
name another shape than the default of the width, ``dtype`` another element type. Each candidate runs inside the whole
forward or backward, whose result is checked before anything is timed; then the kernel alone is timed, all candidates
of a kernel, shape and mask in turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..backends.base import BackwardInputs, ForwardInputs
from ..problem import describe
from . import check
from .rows import BACKWARD, FORWARD, Inputs, Row, make_inputs, parse_shape
from .timing import Budget, Contender, Stopwatch, Timing, describe_failure, time_interleaved

#: What a width is measured on unless the candidate says otherwise.
DEFAULT_SHAPES = {64: "B4H32/32S8192D64", 128: "B4H32/32S8192D128", 256: "B2H16/16S8192D256"}

#: A config in the terms of the backend's table; what it leaves out is as it stands there.
SHORT = ("tile_m", "tile_n", "num_warps", "num_stages")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One config of one kernel.

    Attributes:
        kernel: Name of the kernel function, or its ending after an underscore.
        row: The problem it is measured on.
        config: A Helion config, or fields of `SHORT`.
    """

    kernel: str
    row: Row
    config: dict[str, Any]

    @property
    def group(self) -> tuple[str, Row]:
        """Candidates of one group compete."""
        return self.kernel, self.row

    @property
    def label(self) -> str:
        """The config on one line."""
        shown = {name: value for name, value in self.config.items() if (name, value) != ("indexing", "pointer")}
        return " ".join(f"{name}={_plain(value)}" for name, value in shown.items())


def _plain(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


def read_candidate(record: Mapping[str, Any]) -> Candidate:
    """One record of a file of candidates.

    Raises:
        ValueError: A field is missing or wrong.
    """
    known = {"kernel", "head_dim", "causal", "config", "shape", "dtype"}
    unknown = sorted(set(record) - known)
    if unknown:
        raise ValueError(f"candidate: expected fields among {', '.join(sorted(known))}, got {', '.join(unknown)}")
    for name, kind in (("kernel", str), ("head_dim", int), ("causal", bool), ("config", dict)):
        if not isinstance(record.get(name), kind):
            raise ValueError(f"candidate.{name}: expected {kind.__name__}, got {record.get(name)!r}")  # noqa: TRY004
    width = record["head_dim"]
    shape = parse_shape(record.get("shape") or DEFAULT_SHAPES.get(width) or f"B4H16/16S4096D{width}")
    if shape.head_dim != width:
        raise ValueError(f"candidate.shape: expected D{width}, got {shape.shape}")
    row = dataclasses.replace(shape, causal=record["causal"], dtype=record.get("dtype", "bfloat16"))
    return Candidate(record["kernel"], row, _checked_config(record["config"]))


def _checked_config(config: Mapping[str, Any]) -> dict[str, Any]:
    if is_short(config) and not set(config) <= set(SHORT):
        raise ValueError(f"candidate.config: expected fields among {', '.join(SHORT)}, got {', '.join(config)}")
    return dict(config)


def is_short(config: Mapping[str, Any]) -> bool:
    """Whether a config speaks of tiles, as the backend's table does, and not of Helion's block sizes."""
    return not set(config).isdisjoint(SHORT[:2])


def read_candidates(path: Path | str) -> list[Candidate]:
    """A file of candidates.

    Raises:
        ValueError: It is not such a file.
        OSError: It cannot be read.
    """
    records = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(records, list):
        raise ValueError(f"{path}: expected a list of candidates")  # noqa: TRY004 (a file's content, not a type)
    return [read_candidate(record) for record in records]


@dataclasses.dataclass(frozen=True)
class _Named:
    """Stands in the backend's table of configs for a config under test."""

    config: dict[str, Any]

    def helion(self) -> dict[str, Any]:
        return dict(self.config)


class Probe:
    """Replaces the configs of named kernels while it is active, and keeps the launches that were made.

    Args:
        overrides: Configs by kernel name (see `Candidate`).

    Attributes:
        launches: By kernel function's name: the prepared launch and the arguments of its last call.
    """

    def __init__(self, overrides: Mapping[str, Mapping[str, Any]]) -> None:
        self.overrides = {name: dict(config) for name, config in overrides.items()}
        self._expected: dict[str, dict[str, Any]] = {}
        self.launches: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[Probe]:
        """The context. One at a time in a process."""
        from ..backends.helion import configs as table
        from ..backends.helion.runtime import KernelFamily

        original, forward, backward = KernelFamily.prepare, table.forward, table.backward

        def prepare(family: Any, args: Sequence[Any], config: Mapping[str, Any]) -> Any:
            name = next((name for name in self.overrides if names(name, family.name)), None)
            if name is not None and dict(config) != self._expected.get(name):
                raise RuntimeError(
                    f"{family.name}: the backend passed another config than the one under test: {config}"
                )
            launch = original(family, args, config)

            def launch_and_keep(*arguments: Any) -> None:
                self.launches[family.name] = launch, arguments
                launch(*arguments)

            return launch_and_keep

        def chosen(key: str, usual: Any) -> Any:
            name = next((name for name in self.overrides if names(key, name)), None)
            if name is None:
                return usual
            own = self.overrides[name]
            config = dataclasses.replace(usual, **own) if is_short(own) else _Named(own)
            self._expected[name] = config.helion()
            return config

        # In the table and not in `prepare`: the backend derives arguments from configs too.
        patched: Any = table
        patched.forward = lambda problem: chosen("forward", forward(problem))
        patched.backward = lambda problem: {key: chosen(key, usual) for key, usual in backward(problem).items()}
        KernelFamily.prepare = prepare  # type: ignore[method-assign,assignment]
        try:
            yield self
        finally:
            KernelFamily.prepare = original  # type: ignore[method-assign]
            patched.forward, patched.backward = forward, backward

    def find(self, kernel: str) -> tuple[str, Callable[..., None], tuple[Any, ...]]:
        """The launch of a kernel: its full name, the launch, its arguments.

        Raises:
            LookupError: It was not launched.
        """
        for name, (launch, arguments) in self.launches.items():
            if names(kernel, name):
                return name, launch, arguments
        raise LookupError(f"no kernel named {kernel} ran; those that ran: {', '.join(self.launches) or 'none'}")


def names(short: str, full: str) -> bool:
    """Whether ``short`` names the kernel function ``full``."""
    return short == full or full.endswith(f"_{short}")


def run_once(row: Row, inputs: Inputs, direction: str, probe: Probe) -> tuple[torch.Tensor, ...]:
    """One forward or backward of the Helion backend, chosen anew, with the probe's configs."""
    from ..backends.helion.backend import HelionBackend

    backend = HelionBackend()
    common: dict[str, Any] = {
        "scale": 1 / math.sqrt(row.head_dim),
        "is_causal": row.causal,
        "causal_alignment": "top_left",
        "dropout_p": 0.0,
    }
    forward_inputs = ForwardInputs(*inputs.qkv, None, None)
    forward_problem = describe(*inputs.qkv, None, **common)
    with torch.no_grad():
        if direction == FORWARD:
            with probe.active():
                out, _ = backend.forward(forward_problem)(forward_inputs)
            return (out,)
        out, lse = backend.forward(forward_problem)(forward_inputs)
        problem = describe(*inputs.qkv, None, **common, backward=True, more=(inputs.grad_out, out))
        backward_inputs = BackwardInputs(inputs.grad_out, None, *inputs.qkv, None, out, lse, None)
        with probe.active():
            gradients = backend.backward(problem)(backward_inputs, (True, True, True, False, False))
    return tuple(gradient for gradient in gradients[:3] if gradient is not None)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a candidate: its times, or why it has none."""

    candidate: Candidate
    timing: Timing | None
    trouble: str
    registers: str


def direction_of(kernel: str) -> str:
    """The pass that a kernel belongs to."""
    return FORWARD if names("forward", kernel) else BACKWARD


def measure(
    candidates: Sequence[Candidate],
    *,
    device: torch.device,
    budget: Budget,
    stopwatch: Stopwatch,
    slices: int | None = 4,
    log: Callable[[str], None] = print,
) -> list[Outcome]:
    """Checks and times candidates; the outcomes come group by group, fastest first."""
    outcomes: list[Outcome] = []
    for group in dict.fromkeys(candidate.group for candidate in candidates):
        members = [candidate for candidate in candidates if candidate.group == group]
        found = _measure_group(members, device, budget, stopwatch, slices, log)
        found.sort(key=lambda outcome: outcome.timing.ms if outcome.timing else math.inf)
        outcomes += found
        log(table(found))
    return outcomes


def _measure_group(
    members: Sequence[Candidate],
    device: torch.device,
    budget: Budget,
    stopwatch: Stopwatch,
    slices: int | None,
    log: Callable[[str], None],
) -> list[Outcome]:
    kernel, row = members[0].group
    direction = direction_of(kernel)
    inputs = make_inputs(row, device)
    oracle = check.Oracle(row, inputs, slices=slices, backward=direction == BACKWARD)
    contenders: dict[str, Contender] = {}
    troubles: dict[int, str] = {}
    registers: dict[int, str] = {}
    shared: tuple[Any, ...] | None = None
    for number, candidate in enumerate(members):
        probe = Probe({kernel: candidate.config})
        try:
            results = run_once(row, inputs, direction, probe)
            verdict = oracle.check_forward(results[0]) if direction == FORWARD else oracle.check_backward(results)
            if not verdict.ok:
                troubles[number] = f"wrong: {verdict.reason}"
            name, launch, arguments = probe.find(kernel)
        except Exception as error:
            troubles[number] = describe_failure(error)
            log(f"{kernel} {row.name} {candidate.label}: {troubles[number]}")
            continue
        registers[number] = _registers(launch)
        if number in troubles:
            log(f"{kernel} {row.name} {candidate.label}: {troubles[number]}")
            continue
        # All work on the tensors of the first, so that a long list needs no more memory than a short one.
        shared = arguments if shared is None else shared
        contenders[f"{name}/{number}"] = Contender(_bound_launch(launch, arguments, shared))
    timings = time_interleaved(contenders, stopwatch, budget)
    outcomes = {int(key.rpartition("/")[2]): timing for key, timing in timings.items()}
    return [
        Outcome(
            candidate,
            timing if isinstance(timing := outcomes.get(number), Timing) else None,
            timing if isinstance(timing, str) else troubles.get(number, ""),
            registers.get(number, ""),
        )
        for number, candidate in enumerate(members)
    ]


def _bound_launch(launch: Callable[..., None], own: tuple[Any, ...], shared: tuple[Any, ...]) -> Callable[[], None]:
    mixed = [other if isinstance(other, torch.Tensor) else mine for mine, other in zip(own, shared, strict=True)]
    return lambda: launch(*mixed)


def _registers(launch: Any) -> str:
    """Registers and spills of the binaries behind a launch, where it tells."""
    binaries = (binary for binary in getattr(launch, "_binaries", ()) if hasattr(binary, "n_regs"))
    return "; ".join(dict.fromkeys(f"{binary.n_regs} regs, {binary.n_spills} spilled" for binary in binaries))


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes of one group, fastest first."""
    kernel, row = outcomes[0].candidate.group
    lines = [f"{kernel} {row.name} {row.dtype}"]
    best = next((outcome.timing.ms for outcome in outcomes if outcome.timing), None)
    for outcome in outcomes:
        if outcome.timing is None or best is None:
            figure = f"{'-':>9}    {outcome.trouble[:120]}"
        else:
            timing = outcome.timing
            figure = f"{timing.ms:9.4f} ms  {timing.ms / best:5.2f} of the best, spread {timing.spread:4.1%}"
        lines.append(f"  {figure}  {outcome.candidate.label}  {outcome.registers}".rstrip())
    return "\n".join(lines)


def compile_part(candidates: Sequence[Candidate], device: torch.device, log: Callable[[str], None]) -> None:
    """Runs each candidate once, so that Triton's disk cache holds its code."""
    for candidate in candidates:
        kernel, row = candidate.group
        try:
            run_once(row, make_inputs(row, device), direction_of(kernel), Probe({kernel: candidate.config}))
        except Exception as error:
            log(f"{kernel} {row.name} {candidate.label}: {describe_failure(error)}")


def run_file(path: str, plan: Any, *, jobs: int | None, part: str | None, log: Callable[[str], None]) -> int:
    """``bench --configs FILE``.

    Args:
        path: The file of candidates.
        plan: Says the device, the budget and the slices to check.
        jobs: Processes that compile ahead; None chooses by cores.
        part: ``i/n`` only compiles every n-th candidate from the i-th on: what those processes do.
        log: Takes each line.

    Returns:
        0 if a candidate of every group passed its check, else 1.
    """
    from . import prewarm
    from .timing import CudaStopwatch, HostStopwatch

    candidates = read_candidates(path)
    if part is not None:
        start, _, step = part.partition("/")
        compile_part(candidates[int(start) :: int(step)], plan.device, log)
        return 0
    if plan.device.type == "cuda":
        cores = (os.cpu_count() or 1) // 2
        count = min(len(candidates), cores if jobs is None else jobs)
        if count > 1:
            common = ["--configs", path, "--device", str(plan.device)]
            commands = [[*common, "--part", f"{index}/{count}"] for index in range(count)]
            prewarm.prewarm(commands, timeout_s=180.0, log=log)
        stopwatch: Stopwatch = CudaStopwatch(plan.device)
    else:
        stopwatch = HostStopwatch()
    outcomes = measure(
        candidates,
        device=plan.device,
        budget=plan.budget,
        stopwatch=stopwatch,
        slices=4 if plan.slices is None else plan.slices,
        log=log,
    )
    groups = {outcome.candidate.group for outcome in outcomes}
    return 0 if groups == {outcome.candidate.group for outcome in outcomes if outcome.timing} else 1

"""Time on paper: how long a row takes by the clocks that its tiles need (:mod:`.clocks`), without a GPU.

A program has tiles of queries and visits tiles of keys, or the other way round in the backward. What overlaps nothing
is added to its visits: the first scores and their exponentials, the results' way out, the loads' latency. Programs run
in waves, one on each SM, or, where tiles differ in their visits, each takes the next tile as it is done.

So far nothing is fitted; two times are assumed (:data:`LAUNCH_S`, :data:`.clocks.LATENCY`). The clock of a card under
load, and all that is not here, are one number for each direction, the *efficiency*: the geometric mean, over the
measured rows, of the time at the datasheet's clock over the measured one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..backends.cute import configs
from ..selection.choose import get_backend
from ..tuning.problems import of_row
from . import clocks, document, report
from .peers import OURS
from .rows import BACKWARD, DIRECTIONS, FORWARD, Row, parse_shape
from .tiles import key_tiles, query_tiles

TARGETS = ("sm_90a", "sm_100a")
SEED_SHAPES = ("B4H32/32S8192D64", "B4H32/32S8192D128")
"""At which B200 is predicted: those of the kernels that this package grew from."""

PUBLISHED_TFLOPS = 1605.0
"""Of FlashAttention 4's forward on a B200, bf16, its best row (together.ai/blog/flashattention-4)."""

LAUNCH_S = 4e-6
"""From the record of an event before a kernel to its first tile, and from its last to the event after. Assumed."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A row's time on paper.

    Attributes:
        row: Of which.
        direction: Forward or backward.
        config: Tiles, in words.
        kernel: Whose clocks these are.
        clocked_s: Seconds of the kernel at the datasheet's clock.
        copied_s: Seconds at least, by what the kernel reads and writes of device memory.
        other_s: Seconds that no clock changes: launches, and kernels that only copy.
    """

    row: Row
    direction: str
    config: str
    kernel: clocks.Kernel
    clocked_s: float
    copied_s: float
    other_s: float

    def ms(self, efficiency: float) -> float:
        """Milliseconds of a call, where a clock of the kernel takes ``1 / efficiency`` of the datasheet's."""
        return (max(self.clocked_s / efficiency, self.copied_s) + self.other_s) * 1e3

    def efficiency(self, ms: float) -> float:
        """At which the time would be the measured one."""
        return self.clocked_s / (ms * 1e-3 - self.other_s)


def _program_clocks(row: Row, kernel: clocks.Kernel, direction: str) -> list[float]:
    """Of each program's tile of one head, from the first to the last."""
    count, repeats = (query_tiles, row.heads // row.kv_heads) if direction == BACKWARD else (key_tiles, 1)
    own, found = kernel.own * kernel.cluster, []
    whole = kernel.visit.clocks(masked=False, maximum=False)
    limited = kernel.visit.clocks(masked=True, maximum=kernel.maxima)
    for first in range(0, row.length, own):
        visits, masked = count(first, own, kernel.other, row.length, row.causal, row.window)
        visited = repeats * ((visits - masked) * whole + masked * limited)
        found.append(visited + kernel.visit.scalars(masked > 0, kernel.maxima) + kernel.outside)
    return found


def _clocks(row: Row, kernel: clocks.Kernel, direction: str, gpu: clocks.Gpu) -> float:
    """Of the whole kernel."""
    tiles, programs = _program_clocks(row, kernel, direction), gpu.sms // kernel.cluster
    heads = row.batch * (row.kv_heads if direction == BACKWARD else row.heads)
    if row.causal:  # tiles differ, the longest come first, and each program takes the next that none has taken
        return max(math.fsum(tiles) * heads / programs, *tiles)
    return -(-len(tiles) * heads // programs) * tiles[0]


def _hopper(row: Row, direction: str, measured: str | None) -> tuple[str, clocks.Kernel]:
    """The config in words, and the kernel: the first choice, or the one that a row was measured with."""
    problem = of_row(row, "sm_90a", direction == BACKWARD)
    verdict = get_backend("cute").supports(problem)
    if not verdict:
        raise ValueError(f"shape: expected one that the cute backend takes, got {row.name}: {verdict.reason}")
    if direction == BACKWARD:
        width, _ = configs.backward_widths(configs.backward_features(problem))
        config = _named(configs.backward_choices(problem), measured)
        return str(config), clocks.hopper_backward(width, config)
    config = _named(configs.forward_choices(problem), measured)
    return str(config), clocks.hopper_forward(row.head_dim, config)


def _named(choices: Sequence[Any], words: str | None) -> Any:
    if words is None:
        return choices[0]
    for config in choices:
        if str(config) == words:
            return config
    raise ValueError(f"config: expected one of {', '.join(map(repr, map(str, choices)))}, got {words!r}")


def _blackwell(row: Row, direction: str) -> tuple[str, clocks.Kernel]:
    if row.head_dim not in (64, 128):
        raise ValueError(f"shape: expected a width of 64 or 128 for sm_100a, got {row.name}")
    kernel = (
        clocks.blackwell_backward(row.head_dim) if direction == BACKWARD else clocks.blackwell_forward(row.head_dim)
    )
    tiles = (kernel.other, kernel.own) if direction == BACKWARD else (kernel.own, kernel.other)
    return f"{tiles[0]}x{tiles[1]}", kernel


def estimate(row: Row, direction: str, target: str, config: str | None = None) -> Estimate:
    """The time of a row on paper.

    Args:
        row: Which.
        direction: ``forward`` or ``backward``.
        target: Of :data:`TARGETS`.
        config: Of the Hopper kernels, in its own words; None is the first choice, and all that there is of sm_100a.

    Raises:
        ValueError: Another direction or target, or a row or config that the kernels do not have.
    """
    for name, value, known in (("direction", direction, DIRECTIONS), ("target", target, TARGETS)):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    if target == "sm_90a":
        words, kernel = _hopper(row, direction, config)
    elif config is None:
        words, kernel = _blackwell(row, direction)
    else:
        raise ValueError(f"config: expected None for sm_100a, got {config!r}")
    gpu = clocks.GPUS[target]
    q, kv = (row.batch * heads * row.length * row.head_dim for heads in (row.heads, row.kv_heads))
    if direction == FORWARD:
        copied, other = 2 * (q + kv) * clocks.BYTES, LAUNCH_S
    else:
        copied = (2 * q + 4 * kv) * clocks.BYTES + q * 4
        # Before: O and dO are read, the sums of dQ set to 0. After: those are read, and dQ written.
        other = 3 * LAUNCH_S + (3 * q * clocks.BYTES + 2 * q * 4) / gpu.copy_bytes_per_s
    seconds = _clocks(row, kernel, direction, gpu) / gpu.clock_hz
    return Estimate(row, direction, words, kernel, seconds, copied / gpu.copy_bytes_per_s, other)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row's time on paper and as it was measured."""

    estimate: Estimate
    ms: float

    def ratio(self, efficiency: float) -> float:
        """The time on paper over the measured one."""
        return self.estimate.ms(efficiency) / self.ms


def measured(loaded: Mapping[str, Any]) -> list[Measured]:
    """The rows of a document that the Hopper kernels were timed on."""
    found = []
    for record in loaded["rows"]:
        if record["provider"] == f"{OURS}.cute" and record["status"] == document.OK:
            row = dataclasses.replace(parse_shape(record["shape"]), causal=record["causal"], dtype=record["dtype"])
            found.append(Measured(estimate(row, record["direction"], "sm_90a", record["config"]), record["ms"]))
    return found


def newest_measured() -> list[Measured]:
    """Of the measurements that ship, the newest of the Hopper kernels.

    Raises:
        ValueError: None ships.
    """
    documents = sorted(report.shipped_results(), key=lambda loaded: loaded["environment"]["date"])
    for loaded in reversed(documents):
        if rows := measured(loaded):
            return rows
    raise ValueError("expected measured rows of the cute backend among the shipped results, found none")


def efficiency(rows: Sequence[Measured], direction: str) -> float:
    """The one number of a direction.

    Raises:
        ValueError: No row is of it.
    """
    found = [math.log(one.estimate.efficiency(one.ms)) for one in rows if one.estimate.direction == direction]
    if not found:
        raise ValueError(f"rows: expected some of the {direction}, got none")
    return math.exp(math.fsum(found) / len(found))


_CLOCKS = ("tensor", "shared", "exp2", "issue")
_HEAD = ("direction", "shape", "causal", "tiles", *(f"{name}, clocks" for name in _CLOCKS), "longest", "on paper")


def _cells(one: Estimate, tflops: float) -> list[str]:
    visit = one.kernel.visit
    numbers = [f"{getattr(visit, name):.0f}" for name in _CLOCKS]
    words = [one.direction, one.row.shape, "yes" if one.row.causal else "no", one.config.split(",")[0]]
    return [*words, *numbers, visit.bound, f"{tflops:.0f}"]


def render_measured(rows: Sequence[Measured]) -> str:
    """The measured rows beside their times on paper."""
    by_direction = {direction: efficiency(rows, direction) for direction in DIRECTIONS}
    body, worst = [], 1.0
    for one in rows:
        ratio = one.ratio(by_direction[one.estimate.direction])
        worst = max(worst, ratio, 1 / ratio)
        reached = one.estimate.row.tflops(one.estimate.direction, one.ms)
        body.append([*_cells(one.estimate, reached / ratio), f"{reached:.0f}", f"{ratio:.2f}"])
    words = ", ".join(f"{direction} {number:.3f}" for direction, number in by_direction.items())
    return (
        f"H200, TFLOP/s; clocks are of a visit. Efficiency, of all rows: {words}.\n\n"
        f"{report.table([*_HEAD, 'measured', 'time on paper / measured'], body)}\n\n"
        f"The farthest row is off by a factor of {worst:.2f}."
    )


def render_predicted(rows: Sequence[Row], measured_rows: Sequence[Measured]) -> str:
    """A B200, with the efficiency that the H200 has: predictions."""
    body = []
    for direction in DIRECTIONS:
        number = efficiency(measured_rows, direction)
        for row in rows:
            paper = estimate(row, direction, "sm_100a")
            published = f"{PUBLISHED_TFLOPS:.0f}" if direction == FORWARD else "-"
            body.append([*_cells(paper, row.tflops(direction, paper.ms(number))), published])
    return (
        "B200, TFLOP/s: a prediction, of no kernel that was run here. Tiles and tricks are those published for "
        f"FlashAttention 4 ({clocks.POLYNOMIAL_SHARE:.0%} of the forward's exponentials by polynomial, products of two "
        "CTAs backward), the efficiency is the H200's, exp2 and shared memory are Hopper's. Published is its best row "
        f"of any shape.\n\n{report.table([*_HEAD, 'published'], body)}"
    )

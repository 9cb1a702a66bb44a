"""What a measured version of this package is held to, and whether a document meets it.

Ratios are against peers of the same run, with the backend pinned; the figures were set for one H200.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import document
from .peers import OURS
from .report import best_peer, same_row
from .rows import BACKWARD, DIRECTIONS, FORWARD, SHAPES
from .tiles import key_tiles


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A direction in which ours is to reach ``least`` times the peer's TFLOP/s on each row of these head widths.

    ``peer`` None is the best one of each row, ``head_dims`` None are all.
    """

    direction: str
    peer: str | None
    least: float
    head_dims: tuple[int, ...] | None = (64, 128)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one backend is held to.

    Attributes:
        ratios: On each row.
        mean: Least geometric mean, of each direction, of the ratios to the best peer.
        host_us: Most microseconds of a call of the host suite, by call.
        window: Most time of a forward row with a window, as a multiple of the causal row's time and of the share of its
            tiles that the window leaves.
    """

    ratios: tuple[Ratio, ...]
    mean: float | None = None
    host_us: Mapping[str, float] = dataclasses.field(default_factory=dict)
    window: float | None = None


LIMITS: dict[str, Limits] = {
    f"{OURS}.helion": Limits(
        (Ratio(FORWARD, "flex", 0.95), Ratio(BACKWARD, "aten_flash", 1.0)), host_us={"no_grad": 35.0, "grad": 60.0}
    ),
    f"{OURS}.cute": Limits(
        (Ratio(FORWARD, None, 1.0, None), Ratio(FORWARD, None, 1.08, (64,)), Ratio(BACKWARD, None, 1.0, None)),
        mean=1.05,
        host_us={"no_grad": 20.0},
        window=1.25,
    ),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One limit and what was measured: ``met`` is None where a figure is missing."""

    text: str
    met: bool | None


def findings(loaded: Mapping[str, Any], provider: str = f"{OURS}.helion") -> list[Finding]:
    """All limits that the suites of ``loaded`` speak about, for ``provider``; none for figures of a CPU."""
    found: list[Finding] = []
    limits = LIMITS.get(provider)
    if loaded["environment"]["device"].get("capability") is None or limits is None:
        return found
    rows: Sequence[Mapping[str, Any]] = loaded["rows"]
    ours = [record for record in rows if record["provider"] == provider]
    for ratio in limits.ratios:
        for record in ours:
            widths = ratio.head_dims
            if record["direction"] == ratio.direction and (widths is None or record["head_dim"] in widths):
                found.append(_ratio_finding(ratio, record, rows))
    if limits.mean is not None:
        for direction in DIRECTIONS:
            found += _mean_finding(limits.mean, direction, ours, rows)
    if limits.window is not None:
        forward = [record for record in ours if record["direction"] == FORWARD]
        windowed = [record for record in forward if record.get("window") is not None]
        found += [_window_finding(limits.window, record, forward) for record in windowed]
    for record in loaded["memory"]:
        if record["provider"] == provider:
            met = record["extra_bytes"] <= record["bound_bytes"] if record["status"] == document.OK else None
            got = f"{record['extra_bytes'] / 2**20:.1f}" if met is not None else record["status"]
            text = f"memory {record['shape']}: {got} of {record['bound_bytes'] / 2**20:.1f} MiB"
            found.append(Finding(text, met))
    for record in loaded["host"]:
        limit = limits.host_us.get(record["call"])
        if limit is not None and record["provider"] == provider:
            met = record["us"] <= limit if record["status"] == document.OK else None
            got = f"{record['us']:.1f}" if met is not None else record["status"]
            found.append(Finding(f"host {record['call']}: {got} of {limit:.0f} us", met))
    return found


def _peer(ours: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], name: str | None) -> Mapping[str, Any] | None:
    """The measured record of a peer, or of the best one, on the row of ``ours``."""
    group = same_row(rows, ours)
    return best_peer(group if name is None else (record for record in group if record["provider"] == name))


def _ratio_finding(ratio: Ratio, ours: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Finding:
    place = f"{ratio.direction} {ours['shape']}{' causal' if ours['causal'] else ''}"
    if ours["status"] != document.OK:
        return Finding(f"{place}: {ours['status']}: {ours['reason']}", False)
    peer = _peer(ours, rows, ratio.peer)
    if peer is None:
        return Finding(f"{place}: no figure of {ratio.peer or 'a peer'}", None)
    got = ours["tflops"] / peer["tflops"]
    return Finding(f"{place}: {got:.3f} times {peer['provider']}, at least {ratio.least}", got >= ratio.least)


def _mean_finding(
    least: float, direction: str, ours: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Over the rows of the table."""
    logarithms = []
    for record in ours:
        peer = _peer(record, rows, None)
        if (
            record["direction"] == direction
            and record["shape"] in SHAPES
            and record["status"] == document.OK
            and peer is not None
        ):
            logarithms.append(math.log(record["tflops"] / peer["tflops"]))
    if logarithms:
        mean = math.exp(math.fsum(logarithms) / len(logarithms))
        text = (
            f"{direction}, geometric mean of {len(logarithms)} rows: {mean:.3f} times the best peer, at least {least}"
        )
        yield Finding(text, mean >= least if len(logarithms) == 2 * len(SHAPES) else None)


def _window_finding(most: float, record: Mapping[str, Any], ours: Sequence[Mapping[str, Any]]) -> Finding:
    place = f"forward {record['shape']}"
    full_shape = record["shape"].removesuffix(f"W{record['window']}")
    full = next((one for one in ours if one["shape"] == full_shape and one["causal"]), None)
    if full is None or {record["status"], full["status"]} != {document.OK}:
        return Finding(f"{place}: not measured, or not its causal row", None)
    tile_m, tile_n = (int(size) for size in record["config"].split(",")[0].split("x"))
    length, window = record["length"], record["window"]
    seen = every = 0
    for first in range(0, length, tile_m):
        every += key_tiles(first, tile_m, tile_n, length, True, None)[0]
        seen += key_tiles(first, tile_m, tile_n, length, True, window)[0]
    got = record["ms"] / (full["ms"] * seen / every)
    text = f"{place}: {got:.3f} times its {seen} of {every} tiles' share of the causal time, at most {most}"
    return Finding(text, got <= most)

"""What a measured version of this package is held to, and whether a document meets it.

Ratios are against peers of the same run, on rows with D 64 and 128, with the backend pinned to helion; the figures were
set for one H200.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from . import document
from .peers import OURS
from .rows import BACKWARD, FORWARD


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A direction in which ours is to reach ``least`` times the peer's TFLOP/s on each row of these head widths."""

    direction: str
    peer: str
    least: float
    head_dims: tuple[int, ...] = (64, 128)


RATIOS = (Ratio(FORWARD, "flex", 0.95), Ratio(BACKWARD, "aten_flash", 1.0))
HOST_US = {"no_grad": 35.0, "grad": 60.0}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One limit and what was measured: ``met`` is None where a figure is missing."""

    text: str
    met: bool | None


def findings(loaded: Mapping[str, Any], provider: str = f"{OURS}.helion") -> list[Finding]:
    """All limits that the suites of ``loaded`` speak about, for ``provider``; none for figures of a CPU."""
    found: list[Finding] = []
    if loaded["environment"]["device"].get("capability") is None:
        return found
    rows: Sequence[Mapping[str, Any]] = loaded["rows"]
    for ratio in RATIOS:
        for record in rows:
            if record["provider"] != provider or record["direction"] != ratio.direction:
                continue
            if record["head_dim"] not in ratio.head_dims:
                continue
            found.append(_ratio_finding(ratio, record, rows))
    for record in loaded["memory"]:
        if record["provider"] == provider:
            met = record["extra_bytes"] <= record["bound_bytes"] if record["status"] == document.OK else None
            got = f"{record['extra_bytes'] / 2**20:.1f}" if met is not None else record["status"]
            text = f"memory {record['shape']}: {got} of {record['bound_bytes'] / 2**20:.1f} MiB"
            found.append(Finding(text, met))
    for record in loaded["host"]:
        limit = HOST_US.get(record["call"])
        if limit is not None and record["provider"] == provider:
            met = record["us"] <= limit if record["status"] == document.OK else None
            got = f"{record['us']:.1f}" if met is not None else record["status"]
            found.append(Finding(f"host {record['call']}: {got} of {limit:.0f} us", met))
    return found


def _ratio_finding(ratio: Ratio, ours: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Finding:
    place = f"{ratio.direction} {ours['shape']}{' causal' if ours['causal'] else ''}"
    if ours["status"] != document.OK:
        return Finding(f"{place}: {ours['status']}: {ours['reason']}", False)
    same = ("direction", "shape", "causal", "dtype")
    peer = next(
        (
            record
            for record in rows
            if record["provider"] == ratio.peer and all(record[name] == ours[name] for name in same)
        ),
        None,
    )
    if peer is None or peer["status"] != document.OK:
        return Finding(f"{place}: no figure of {ratio.peer}", None)
    got = ours["tflops"] / peer["tflops"]
    return Finding(f"{place}: {got:.3f} times {ratio.peer}, at least {ratio.least}", got >= ratio.least)

"""The tables of the README, generated from the shipped measurements.

They stand between the marker comments ``<!-- bench:begin -->`` and ``<!-- bench:end -->``; what stands there is a
function of the JSON files in ``results/`` and of nothing else, so a test can compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from . import document
from .peers import OURS, title_of
from .rows import BACKWARD, DIRECTIONS, FORWARD, SHAPES

BEGIN = "<!-- bench:begin -->"
END = "<!-- bench:end -->"

NO_RESULTS = (
    "No measurements ship with this version. `python -m torch_bwattn bench --suite all --out FILE.json` makes them on "
    "a CUDA GPU."
)

#: How the calls of the host suite are put in words, in the order of the table.
HOST_CALLS = {
    "no_grad": "no grad",
    "grad": "inputs that require grad, forward call",
    "forward_backward": "forward and backward",
}

_ABSENT = "-"


def shipped_results() -> list[dict[str, Any]]:
    """The documents in ``torch_bwattn/bench/results``, by file name.

    Raises:
        ValueError: A file is not a document of measurements.
    """
    found = []
    for entry in sorted(resources.files("torch_bwattn.bench.results").iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".json"):
            with resources.as_file(entry) as path:
                found.append(document.load(path))
    return found


def render(documents: Iterable[Mapping[str, Any]]) -> str:
    """The Markdown of all ``documents``, without the markers."""
    parts = [_render_one(loaded) for loaded in documents]
    return "\n\n".join(parts) if parts else NO_RESULTS


def _render_one(loaded: Mapping[str, Any]) -> str:
    parts = [_introduction(loaded)]
    rows: Sequence[Mapping[str, Any]] = loaded["rows"]
    for direction, title in ((FORWARD, "Forward"), (BACKWARD, "Backward")):
        records = [record for record in rows if record["direction"] == direction]
        if _ordered_providers(records):
            parts.append(f"**{title}, TFLOP/s**\n\n{_rows_table(records)}")
    if _ordered_providers(loaded["host"]):
        parts.append(f"**Host cost of one eager call, us: median (20 to 80 %)**\n\n{_host_table(loaded['host'])}")
    if _ordered_providers(loaded["memory"]):
        parts.append(f"**Peak extra memory of forward and backward, MiB**\n\n{_memory_table(loaded['memory'])}")
    flex: Sequence[Mapping[str, Any]] = loaded.get("flex", ())
    for direction, title in ((FORWARD, "forward"), (BACKWARD, "backward")):
        records = [record for record in flex if record["direction"] == direction]
        if _ordered_providers(records):
            head = f"**`flex_attention` {title} at {records[0]['shape']}, TFLOP/s of the blocks that are visited**"
            parts.append(f"{head}\n\n{_flex_table(records)}")
    remarks = _remarks(loaded)
    if remarks:
        parts.append(remarks)
    return "\n\n".join(parts)


def _introduction(loaded: Mapping[str, Any]) -> str:
    environment = loaded["environment"]
    versions = environment["versions"]
    words = [f"{environment['device'].get('name', 'unknown device')}, {environment['date'][:10]}"]
    if environment.get("driver"):
        words.append(f"driver {environment['driver']}")
    shown = ("torch", "cudnn", "triton", "helion", "nvidia-cutlass-dsl", "flash-attn-4")
    words += [f"{'cuDNN' if name == 'cudnn' else name} {versions[name]}" for name in shown if versions.get(name)]
    dtypes = sorted({record["dtype"] for section in document.SECTIONS for record in loaded.get(section, ())})
    text = ", ".join(words) + "."
    if dtypes:
        text += f" Element type {' and '.join(dtypes)}."
    if loaded["rows"]:
        text += (
            " Inputs are `[B, H, S, D]` views of B, S, H, D memory, H is query / key-value heads; every result passed "
            "the accuracy rule before it was timed; all implementations of a row are timed in turns, and the median is "
            "shown. TFLOP/s counts 4 B H S S D forward, half of it when causal, 2.5 times that backward."
        )
    if any(record.get("window") is not None for record in loaded["rows"]):
        text += " W at the end of a name is a window: so many keys before the query are seen, and only those count."
    return text


def _ordered_providers(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Providers with at least one figure, this package's first, otherwise in order of appearance."""
    names: list[str] = []
    for record in records:
        if record["status"] == document.OK and record["provider"] not in names:
            names.append(record["provider"])
    return sorted(names, key=lambda name: not _is_ours(name))


def _is_ours(provider: str) -> bool:
    return provider.startswith(f"{OURS}.")


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row_order(record: Mapping[str, Any]) -> tuple[int, str, bool]:
    shape = record["shape"]
    place = SHAPES.index(shape) if shape in SHAPES else len(SHAPES)
    return place, shape, record["causal"]


def same_row(records: Iterable[Mapping[str, Any]], record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those of ``records`` that are of the row and direction of ``record``."""
    fields = ("direction", "shape", "causal", "dtype")
    return [other for other in records if all(other[field] == record[field] for field in fields)]


def best_peer(records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Of the records of one row and direction, the fastest that is not this package's."""
    peers = [record for record in records if record["status"] == document.OK and not _is_ours(record["provider"])]
    return max(peers, key=lambda record: record["tflops"], default=None)


def _rows_table(records: Sequence[Mapping[str, Any]]) -> str:
    providers = _ordered_providers(records)
    ours = next((name for name in providers if _is_ours(name)), None)
    head = ["shape", "causal", *(title_of(name) for name in providers)]
    if ours is not None:
        head.append("of the best peer")
    groups: dict[tuple[int, str, bool], dict[str, Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(_row_order(record), {})[record["provider"]] = record
    body = []
    for key in sorted(groups):
        group = groups[key]
        cells = [key[1], "yes" if key[2] else "no", *(_figure(group.get(name)) for name in providers)]
        if ours is not None:
            cells.append(_share(group.get(ours), best_peer(group.values())))
        body.append(cells)
    return table(head, body)


def ratios(records: Sequence[Mapping[str, Any]], provider: str) -> str:
    """A table of how many times as fast as the best peer, and as each peer, ``provider`` is on each of ``records``."""
    peers = [name for name in _ordered_providers(records) if not _is_ours(name)]
    body = []
    for record in sorted(records, key=lambda one: (DIRECTIONS.index(one["direction"]), _row_order(one))):
        if record["provider"] != provider or record["status"] != document.OK:
            continue
        group = same_row(records, record)
        by_name = {other["provider"]: other for other in group if other["status"] == document.OK}
        cells = [record["direction"], record["shape"], "yes" if record["causal"] else "no"]
        cells.append(_share(record, best_peer(group)))
        cells += [_share(record, by_name.get(name)) for name in peers]
        body.append(cells)
    return table(["direction", "shape", "causal", "best peer", *(title_of(name) for name in peers)], body)


def _figure(record: Mapping[str, Any] | None) -> str:
    if record is None or record["status"] in (document.MISSING, document.FAILED):
        return _ABSENT
    if record["status"] == document.WRONG:
        return "wrong"
    return f"{record['tflops']:.0f}" if record["tflops"] >= 10 else f"{record['tflops']:.2g}"


def _share(ours: Mapping[str, Any] | None, peer: Mapping[str, Any] | None) -> str:
    if ours is None or ours["status"] != document.OK or peer is None:
        return _ABSENT
    return f"{ours['tflops'] / peer['tflops']:.2f}"


def _host_table(records: Sequence[Mapping[str, Any]]) -> str:
    providers = _ordered_providers(records)
    by_call: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        by_call.setdefault(record["call"], {})[record["provider"]] = record
    calls = [name for name in HOST_CALLS if name in by_call] + [name for name in by_call if name not in HOST_CALLS]
    shape = records[0]["shape"]
    body = []
    for call in calls:
        cells = [HOST_CALLS.get(call, call)]
        for name in providers:
            found = by_call[call].get(name)
            cells.append(_host_cell(found) if found and found["status"] == document.OK else _ABSENT)
        body.append(cells)
    return table([f"call at {shape}", *(title_of(name) for name in providers)], body)


def _host_cell(record: Mapping[str, Any]) -> str:
    """The median, and what three fifths of the blocks lie between: hosts are shared, and their speed varies."""
    return f"{record['us']:.1f} ({record['p20_us']:.0f}-{record['p80_us']:.0f})"


def _flex_table(records: Sequence[Mapping[str, Any]]) -> str:
    providers = _ordered_providers(records)
    ours = next((name for name in providers if _is_ours(name)), None)
    head = ["pattern", "visited", *(title_of(name) for name in providers)]
    if ours is not None:
        head.append("of the best peer")
    body = []
    for pattern in dict.fromkeys(record["pattern"] for record in records):
        group = {record["provider"]: record for record in records if record["pattern"] == pattern}
        density = next(iter(group.values()))["density"]
        cells = [pattern, f"{density:.1%}", *(_figure(group.get(name)) for name in providers)]
        if ours is not None:
            cells.append(_share(group.get(ours), best_peer(group.values())))
        body.append(cells)
    return table(head, body)


def _memory_table(records: Sequence[Mapping[str, Any]]) -> str:
    providers = _ordered_providers(records)
    body = []
    for record in records:
        if record["status"] != document.OK:
            continue
        body.append(
            [
                f"{record['shape']}{' causal' if record['causal'] else ''}",
                title_of(record["provider"]),
                _mebibytes(record["extra_bytes"]),
                _mebibytes(record["bound_bytes"]),
            ]
        )
    body.sort(key=lambda cells: [title_of(name) for name in providers].index(cells[1]))
    return table(["shape", "implementation", "extra", "bound: outputs, LSE, delta, fp32 dQ"], body)


def _mebibytes(size: int) -> str:
    # Rounded up to a tenth, so that a figure over the bound never reads as equal to it.
    return f"{math.ceil(size / 2**20 * 10) / 10:.1f}"


def _remarks(loaded: Mapping[str, Any]) -> str:
    """One line for each provider that is missing, failed or wrong, with the first reason."""
    seen: dict[tuple[str, str], tuple[str, int]] = {}
    for section in document.SECTIONS:
        for record in loaded.get(section, ()):
            if record["status"] == document.OK:
                continue
            key = (record["provider"], record["status"])
            reason, count = seen.get(key, (record["reason"], 0))
            seen[key] = (reason, count + 1)
    lines = []
    for (provider, status), (reason, count) in seen.items():
        times = "" if count == 1 else f" ({count} times)"
        lines.append(f"- {title_of(provider)}: {status}{times}: {' '.join(reason.split())}")
    return "\n".join(lines)


def replace_section(text: str, tables: str) -> str:
    """``text`` with ``tables`` between the markers.

    Raises:
        ValueError: ``text`` does not hold each marker exactly once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected the markers {BEGIN} and {END} once each and in this order")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def update_readme(path: Path | str, documents: Iterable[Mapping[str, Any]], *, check: bool = False) -> bool:
    """Writes the tables into a README, or only compares.

    Args:
        path: The README.
        documents: The measurements.
        check: Compare and leave the file alone.

    Returns:
        Whether the file held exactly these tables before the call.

    Raises:
        ValueError: The markers are absent.
        OSError: The file cannot be read or written.
    """
    readme = Path(path)
    old = readme.read_text(encoding="utf-8")
    new = replace_section(old, render(documents))
    if new != old and not check:
        readme.write_text(new, encoding="utf-8")
    return new == old

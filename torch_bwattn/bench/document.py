"""The file of measurements: its form, its check, and its way to the disk.

A document is a dictionary of plain JSON values::

    schema       1
    environment  date, commit, device, driver, platform, versions, variables (see environment.py)
    options      how it was measured
    rows         one record per row, direction and provider
    host         one record per way of calling and provider
    memory       one record per provider
    flex         one record per pattern, direction and provider; absent from older documents

Every record has ``provider`` and ``status``: ``ok``, ``wrong`` (it failed the accuracy rule and was not timed),
``missing`` (not installed) or ``failed`` (it raised); the last three come with a ``reason``.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1

OK = "ok"
WRONG = "wrong"
MISSING = "missing"
FAILED = "failed"
STATUSES = (OK, WRONG, MISSING, FAILED)

_NUMBER = (int, float)
_COMMON: dict[str, Any] = {"provider": str, "status": str}
_FIELDS: dict[str, dict[str, Any]] = {
    "rows": {
        **_COMMON,
        "direction": str,
        "shape": str,
        "batch": int,
        "heads": int,
        "kv_heads": int,
        "length": int,
        "head_dim": int,
        "dtype": str,
        "causal": bool,
    },
    "host": {**_COMMON, "call": str, "shape": str, "dtype": str},
    "memory": {**_COMMON, "shape": str, "dtype": str, "causal": bool},
    "flex": {**_COMMON, "pattern": str, "direction": str, "shape": str, "dtype": str, "density": _NUMBER},
}
SECTIONS = tuple(_FIELDS)
_LATER_SECTIONS = ("flex",)
"""Those that older documents have not."""
_FIELDS_WHEN_OK: dict[str, dict[str, Any]] = {
    "rows": {"ms": _NUMBER, "p20_ms": _NUMBER, "p80_ms": _NUMBER, "tflops": _NUMBER, "laps": int, "check": dict},
    "host": {"us": _NUMBER, "p20_us": _NUMBER, "p80_us": _NUMBER},
    "memory": {"extra_bytes": int, "bound_bytes": int},
    "flex": {"ms": _NUMBER, "p20_ms": _NUMBER, "p80_ms": _NUMBER, "tflops": _NUMBER, "laps": int, "check": dict},
}


def new(environment: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """An empty document."""
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "options": dict(options),
        "rows": [],
        "host": [],
        "memory": [],
        "flex": [],
    }


def _complaints(document: Any) -> Iterator[str]:
    if not isinstance(document, dict):
        yield f"document: expected an object, got {type(document).__name__}"
        return
    if document.get("schema") != SCHEMA:
        yield f"schema: expected {SCHEMA}, got {document.get('schema')!r}"
    environment = document.get("environment")
    if not isinstance(environment, dict):
        yield f"environment: expected an object, got {environment!r}"
    else:
        for name, kind in (("date", str), ("device", dict), ("versions", dict)):
            if not isinstance(environment.get(name), kind):
                yield f"environment.{name}: expected {kind.__name__}, got {environment.get(name)!r}"
    for section in _FIELDS:
        records = document.get(section, [] if section in _LATER_SECTIONS else None)
        if not isinstance(records, list):
            yield f"{section}: expected a list, got {records!r}"
            continue
        for index, record in enumerate(records):
            yield from _record_complaints(section, f"{section}[{index}]", record)


def _record_complaints(section: str, where: str, record: Any) -> Iterator[str]:
    if not isinstance(record, dict):
        yield f"{where}: expected an object, got {record!r}"
        return
    status = record.get("status")
    if status not in STATUSES:
        yield f"{where}.status: expected one of {', '.join(STATUSES)}, got {status!r}"
    fields = dict(_FIELDS[section])
    fields.update(_FIELDS_WHEN_OK[section] if status == OK else {"reason": str})
    for name, kind in fields.items():
        value = record.get(name)
        # A bool is an int to isinstance, and never one here.
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            expected = kind.__name__ if isinstance(kind, type) else "a number"
            yield f"{where}.{name}: expected {expected}, got {value!r}"
        elif kind is _NUMBER and not value >= 0:
            yield f"{where}.{name}: expected a number that is not negative, got {value!r}"


def validate(document: Any) -> None:
    """Checks that a document has the form described above.

    Raises:
        ValueError: It has not; the text names each field.
    """
    complaints = list(_complaints(document))
    if complaints:
        shown = complaints[:20] + ([f"and {len(complaints) - 20} more"] if len(complaints) > 20 else [])
        raise ValueError("not a document of measurements: " + "; ".join(shown))


def load(path: Path | str) -> dict[str, Any]:
    """Reads and checks a document.

    Raises:
        ValueError: The file is not JSON, or not such a document.
        OSError: The file cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        document = json.loads(text)
        validate(document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    loaded: dict[str, Any] = document
    return loaded


def save(document: Mapping[str, Any], path: Path | str) -> None:
    """Checks a document and writes it atomically: a reader sees the old file or the new one.

    Raises:
        ValueError: It does not have the form of a document, or holds a number that is not finite.
    """
    validate(document)
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        # mkstemp makes a private file; a result is to be read by everybody whom the umask allows.
        part.chmod(0o666 & ~_umask())
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask

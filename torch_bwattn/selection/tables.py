"""What was measured: the package's own tables, and what the user has tuned.

A table holds, for each key, the tunables that were timed, fastest first, each of which had passed the accuracy rule
there, and of every entry the environment: card, driver, versions, date. For a problem the entry of its very key is
asked for, else the nearest (:meth:`.key.Key.distance`) up to :data:`FARTHEST`. Where both the package and the user have
one, that of the installed versions counts, or the package's.

In a table of the package, ``tested`` is the number of the environment in which all of its GPU tests have passed. An
environment that is ``predicted`` is of a card that nobody here has: its ``source`` says where times are from.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import environment
from .key import Key
from .store import Store

FARTHEST = 12.0
"""How far an entry may be to be asked for its order."""

VERSIONS_THAT_COUNT = ("torch", "triton", "helion", "nvidia-cutlass-dsl")
"""Of other versions than these, an entry's tunables are checked anew before they are used."""

_MOST = 2**62
_SHIPPED = Path(__file__).parent / "pretuned"


class Tunable(NamedTuple):
    """A backend and one of its configs."""

    backend: str
    config: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.config}" if self.config else self.backend


class Measured(NamedTuple):
    """A tunable's time in an entry."""

    tunable: Tunable
    ms: float


@dataclass(frozen=True)
class Entry:
    """What was measured for a key, fastest first, and where."""

    key: Key
    ranking: tuple[Measured, ...]
    environment: Mapping[str, Any]
    source: str

    @property
    def same_versions(self) -> bool:
        """Whether it was measured with the versions that are installed."""
        return same_versions(self.environment)

    @property
    def predicted(self) -> bool:
        """Whether its times were not measured, but predicted or published."""
        return bool(self.environment.get("predicted"))

    def __str__(self) -> str:
        device, date = self.environment["device"].get("name", "?"), self.environment["date"][:10]
        return f"{self.source} of {date}, {device}{', a prediction' if self.predicted else ''}, for {self.key}"


def same_versions(described: Mapping[str, Any]) -> bool:
    """Whether an environment has the installed versions of what decides kernels."""
    versions = described["versions"]
    return all(versions.get(name) == installed for name, installed in _installed().items())


@functools.cache
def _installed() -> dict[str, str | None]:
    found = environment.versions()
    return {name: found[name] for name in VERSIONS_THAT_COUNT}


def valid(contents: Any) -> bool:
    """Whether a JSON object is a table."""
    entries, environments = contents.get("entries", []), contents.get("environments", [])
    if not isinstance(entries, list) or not isinstance(environments, list):
        return False
    if contents.get("tested") not in (None, *range(len(environments))):
        return False
    return all(map(_describes, environments)) and all(_valid(one, len(environments)) for one in entries)


def _describes(described: Any) -> bool:
    """Whether a JSON value is an environment, with what is read of one."""
    return (
        isinstance(described, dict)
        and isinstance(described.get("date"), str)
        and isinstance(described.get("device"), dict)
        and isinstance(described.get("versions"), dict)
    )


def _valid(entry: Any, environments: int) -> bool:
    try:
        sizes, ranking, number = entry["sizes"], entry["ranking"], entry["environment"]
        return (
            isinstance(entry["kind"], str)
            and type(number) is int
            and 0 <= number < environments
            and len(sizes) == 3
            and all(type(size) is int and 0 < size < _MOST for size in sizes)
            and all(isinstance(name, str) and isinstance(config, str) for name, config, _ in ranking)
            and all(type(ms) in (int, float) and 0.0 < ms < _MOST for _, _, ms in ranking)
        )
    except (KeyError, TypeError, ValueError):
        return False


def entries_of(contents: Mapping[str, Any], source: str) -> dict[Key, Entry]:
    """The entries of a table by key."""
    found = {}
    for one in contents.get("entries", []):
        key = Key(one["kind"], tuple(one["sizes"]))
        ranking = tuple(Measured(Tunable(name, config), float(ms)) for name, config, ms in one["ranking"])
        found[key] = Entry(key, ranking, contents["environments"][one["environment"]], source)
    return found


def add(contents: dict[str, Any], key: Key, ranking: Iterable[Measured], described: Mapping[str, Any]) -> None:
    """Puts an entry into a table, in the place of what it says of the key; the environment once for all its entries."""
    environments = contents.setdefault("environments", [])
    if described not in environments:
        environments.append(dict(described))
    entries = [one for one in contents.get("entries", []) if (one["kind"], tuple(one["sizes"])) != key]
    entries.append(
        {
            "kind": key.kind,
            "sizes": list(key.sizes),
            "environment": environments.index(described),
            "ranking": [[one.tunable.backend, one.tunable.config, round(one.ms, 6)] for one in ranking],
        }
    )
    contents["entries"] = entries


def shipped_name(target: str) -> str:
    """The file of a target's table: ``sm_90a`` -> ``sm90.json``."""
    return target.replace("_", "").rstrip("af") + ".json"


@functools.cache
def shipped(target: str) -> dict[str, Any]:
    """The package's table for a target; empty where there is none."""
    path = _SHIPPED / shipped_name(target)
    return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def _shipped_entries(target: str) -> dict[Key, Entry]:
    return entries_of(shipped(target), "the package's table")


@functools.cache
def tuned(target: str) -> Store:
    """The file of what this user has tuned for a target."""
    return Store("tuned", target, valid)


_parsed: tuple[dict[str, Any], dict[Key, Entry]] | None = None


def _tuned_entries(target: str) -> dict[Key, Entry]:
    global _parsed
    contents, parsed = tuned(target).load(), _parsed
    if parsed is None or parsed[0] is not contents:
        parsed = _parsed = contents, entries_of(contents, "the user's table")
    return parsed[1]


_UNTIMED = 2.0
"""How much farther an entry is for each backend that may run here and has no time there: it says nothing of that."""


def lookup(target: str, key: Key, backends: Collection[str] = ()) -> Entry | None:
    """The entry to go by: the very key's before the nearest, one of the installed versions before others.

    ``backends`` are those that may run; of near entries, those with times of them count as nearer.
    """
    found = exact(target, key)
    if found is not None:
        return found
    every = (entry for table in (_shipped_entries(target), _tuned_entries(target)) for entry in table.values())
    near = [
        (apart + _UNTIMED * len(set(backends) - {one.tunable.backend for one in entry.ranking}), entry)
        for entry in every
        if (apart := key.distance(entry.key)) <= FARTHEST
    ]
    return min(near, key=lambda one: (one[0], not one[1].same_versions), default=(0.0, None))[1]


def exact(target: str, key: Key) -> Entry | None:
    """The entry of the very key, one of the installed versions before others."""
    tables = (_shipped_entries(target), _tuned_entries(target))
    return max((table[key] for table in tables if key in table), key=lambda entry: entry.same_versions, default=None)


def is_known(target: str, key: Key) -> bool:
    """Whether this very key was measured with the installed versions."""
    entry = exact(target, key)
    return entry is not None and entry.same_versions

"""What of a score's position a value depends on.

``b`` and ``h`` are the same for a tile of scores; so a value is one number for the tile, one for each query, one for
each key, one for each distance ``q_idx - kv_idx``, or one for each score.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .program import Ref, Step, refs


class Along(enum.Enum):
    """What a value differs by."""

    NOTHING = "nothing"
    QUERIES = "queries"
    KEYS = "keys"
    DISTANCE = "distance"
    SCORES = "scores"


class _Known(NamedTuple):
    """What a value differs by; (rows, columns) if it is rows * q_idx + columns * kv_idx + something of the tile."""

    along: Along
    linear: tuple[int, int] | None = None


_OF_TILE = _Known(Along.NOTHING, (0, 0))
_INPUTS = {"q_idx": _Known(Along.QUERIES, (1, 0)), "kv_idx": _Known(Along.KEYS, (0, 1)), "b": _OF_TILE, "h": _OF_TILE}


def differs_by(steps: Sequence[Step], wanted: Sequence[Ref]) -> Along:
    """What a tuple of values differs by.

    Args:
        steps: Of a program of scalars.
        wanted: The values; inputs but those of a position are one for each score.
    """
    known: dict[str, _Known] = {}

    def of(ref: Ref) -> _Known:
        if ref.name[0] in "@#":
            return _OF_TILE
        head = ref.name.partition(".")[0]
        return known.get(head) or _INPUTS.get(head) or _Known(Along.SCORES)

    for place, step in enumerate(steps):
        known[f"%{place}"] = _linear(step, of) or _Known(_joined([of(ref).along for ref in refs(step)]))
    return _joined([of(ref).along for ref in wanted])


def _joined(some: Sequence[Along]) -> Along:
    kinds = set(some) - {Along.NOTHING}
    if len(kinds) > 1:
        return Along.SCORES
    return kinds.pop() if kinds else Along.NOTHING


def _linear(step: Step, of: Callable[[Ref], _Known]) -> _Known | None:
    """A step that keeps a value linear in positions, or None."""
    if step.base not in ("add", "sub", "rsub") or step.kwargs or len(step.args) > 2:  # beside a factor
        return None
    one, other = ((of(arg) if isinstance(arg, Ref) else _OF_TILE).linear for arg in step.args)
    if one is None or other is None:
        return None
    if step.base == "rsub":
        one, other = other, one
    sign = 1 if step.base == "add" else -1
    rows, columns = one[0] + sign * other[0], one[1] + sign * other[1]
    if rows and columns:
        kind = Along.DISTANCE if rows == -columns else Along.SCORES
    else:
        kind = Along.QUERIES if rows else Along.KEYS if columns else Along.NOTHING
    return _Known(kind, (rows, columns))

"""Is a result right? Judged before it is timed, by the rule of :mod:`torch_bwattn.testing`.

The fp64 reference of a large row is computed in chunks on the device. A *slice* is one key-value head of one sequence
with the query heads that read it: attention never mixes slices, so some of them can be checked without the others.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..testing import Accuracy, Results, judge, oracle, pt_reference
from .rows import Inputs, Row

#: Memory for a chunk of the reference: large chunks keep a GPU busy, small ones fit any host.
_CHUNK_BYTES = {"cuda": 8 * 2**30, "cpu": 2**28}


@dataclasses.dataclass(frozen=True)
class Check:
    """The verdict on one implementation's result in one direction."""

    accuracies: tuple[Accuracy, ...]
    trouble: str = ""

    @property
    def ok(self) -> bool:
        """Whether every result passed."""
        return not self.trouble and all(accuracy.passed for accuracy in self.accuracies)

    @property
    def reason(self) -> str:
        """What is wrong; empty if nothing is."""
        return self.trouble or "; ".join(str(accuracy) for accuracy in self.accuracies if not accuracy.passed)

    def as_record(self) -> dict[str, Any]:
        """The figures of the rule by result, for a document."""
        return {
            accuracy.name: {
                "error": finite(accuracy.error),
                "bound": finite(accuracy.bound),
                "pt_error": finite(accuracy.pt_error),
                "passed": accuracy.passed,
            }
            for accuracy in self.accuracies
        }


def finite(value: float) -> float | None:
    """``value``, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def shares(record: Mapping[str, Any]) -> dict[str, float]:
    """By result: the error as a share of what the rule allows, from a recorded check."""
    found = {}
    for name, figures in record.items():
        error, bound = figures["error"], figures["bound"]
        found[name] = error / bound if error is not None and bound else math.nan
    return found


def choose_slices(row: Row, count: int | None, seed: int = 0) -> list[int] | None:
    """Numbers (``batch * kv_heads + head``) of ``count`` slices: the first, the last and random ones; None for all."""
    total = row.batch * row.kv_heads
    if count is None or count >= total:
        return None
    ends = [0, total - 1][:count]
    others = random.Random(seed).sample(range(1, total - 1), count - len(ends))  # noqa: S311 (no secret)
    return sorted([*ends, *others])


class Oracle:
    """The references of one row, computed once for all implementations.

    Args:
        row: The row.
        inputs: Its inputs.
        slices: How many slices to check; None for all.
        backward: Whether gradients will be checked.
        seed: Chooses the slices.
    """

    def __init__(self, row: Row, inputs: Inputs, *, slices: int | None, backward: bool, seed: int = 0) -> None:
        self._row = row
        self._chosen = choose_slices(row, slices, seed)
        query, key, value, grad_out = (self._part(tensor) for tensor in (*inputs.qkv, inputs.grad_out))
        arguments: dict[str, Any] = {
            **row.arguments,
            "grad_out": grad_out if backward else None,
            "chunk_bytes": _CHUNK_BYTES["cuda" if query.is_cuda else "cpu"],
        }
        self._reference: Results = oracle(query, key, value, **arguments)
        self._pt: Results = pt_reference(query, key, value, **arguments)

    def check_forward(self, out: torch.Tensor) -> Check:
        """Judges an output ``[B, Hq, S, D]``."""
        return self._check({"out": out})

    def check_backward(self, gradients: Sequence[torch.Tensor]) -> Check:
        """Judges the gradients of query, key and value."""
        return self._check(dict(zip(("dq", "dk", "dv"), gradients, strict=True)))

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> Check:
        expected = self._expected_sizes()
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != expected[name]:
                return Check((), f"{name}: expected the shape {list(expected[name])}, got {list(tensor.shape)}")
            # What was not sampled may still hold what was never written.
            if self._chosen is not None and not bool(torch.isfinite(tensor).all()):
                return Check((), f"{name}: expected finite values everywhere, got NaN or infinity")
        parts = Results()
        for name, tensor in tensors.items():
            setattr(parts, name, self._part(tensor.detach()))
        return Check(tuple(judge(parts, self._reference, self._pt)))

    def _expected_sizes(self) -> dict[str, tuple[int, ...]]:
        row = self._row
        query = (row.batch, row.heads, row.length, row.head_dim)
        key = (row.batch, row.kv_heads, row.length, row.head_dim)
        return {"out": query, "dq": query, "dk": key, "dv": key}

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The chosen slices as ``[slices, heads of a slice, S, D]``, or the whole tensor."""
        if self._chosen is None:
            return tensor
        kv_heads = self._row.kv_heads
        heads = tensor.unflatten(1, (kv_heads, tensor.shape[1] // kv_heads))
        return torch.stack([heads[number // kv_heads, number % kv_heads] for number in self._chosen])

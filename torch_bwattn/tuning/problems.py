"""The problems that tables are made of: the README's rows, and what a release is tuned for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..bench.rows import Row, select_rows
from ..problem import Problem


def of_row(row: Row, target: str, backward: bool) -> Problem:
    """A row of the bench as a problem, in the layout in which models have it."""
    return Problem(
        target=target,
        dtype=getattr(torch, row.dtype),
        batch=row.batch,
        heads=row.heads,
        kv_heads=row.kv_heads,
        q_len=row.length,
        kv_len=row.length,
        head_dim=row.head_dim,
        value_dim=row.head_dim,
        scale=row.head_dim**-0.5,
        diagonal=0 if row.causal else None,
        low_diagonal=None if row.window is None else -row.window,
        backward=backward,
    )


def rows(
    target: str, patterns: Iterable[str] | None, causal: Sequence[bool], dtype: str, directions: Sequence[bool]
) -> list[Problem]:
    """Rows of the bench, or shapes by name, in each of ``directions`` (whether backward).

    Raises:
        ValueError: A pattern names nothing.
    """
    found = select_rows(patterns, causal=causal, dtype=dtype)
    return [of_row(row, target, backward) for backward in directions for row in found]


_TOKENS, _MOST_TOKENS = 2**15, 2**18
"""Of a release's problem: enough programs for all SMs at every length; and of one with many keys."""


def release(target: str) -> list[Problem]:
    """What the package's own table of a target is measured on.

    Prefill and training of short and long sequences, chunks of few queries beside many keys, and decoding, at the
    widths that models have, with every feature that has kernels of its own.
    """
    return list(dict.fromkeys(_release(target)))


def _plain(target: str, width: int, q_len: int, kv_len: int, kv_heads: int = 16, heads: int = 16) -> Problem:
    batch = max(1, min(32, _TOKENS // max(q_len, kv_len)))
    return Problem(
        target, torch.bfloat16, batch, heads, kv_heads, q_len, kv_len, width, width, width**-0.5,
        diagonal=None,
    )  # fmt: skip


def _causal(problem: Problem) -> Problem:
    return dataclasses.replace(problem, diagonal=problem.kv_len - problem.q_len)


def _release(target: str) -> Iterator[Problem]:
    for width, length in itertools.product((64, 128, 256), (128, 512, 2048, 8192, 32768)):
        for problem in (_plain(target, width, length, length), _plain(target, width, length, length, kv_heads=4)):
            for masked in (problem, _causal(problem)):
                yield from _both(masked)
    for width, (q_len, kv_len) in itertools.product(
        (64, 128, 256), itertools.product((1, 16, 128), (512, 4096, 32768))
    ):
        for kv_heads in (16, 4):
            yield _causal(_plain(target, width, q_len, kv_len, kv_heads))
    # Few programs beside many keys, and many: what decides when a batch is small.
    for width, batch, (q_len, kv_len) in itertools.product(
        (64, 128), (1, 8, 32), itertools.product((16, 128), (512, 4096, 32768))
    ):
        few = _plain(target, width, q_len, kv_len, kv_heads=4)
        if batch * kv_len <= _MOST_TOKENS:
            yield _causal(dataclasses.replace(few, batch=batch))
    for width in (64, 128):
        base = _plain(target, width, 4096, 4096)
        for fields in _FEATURES:
            yield from _both(dataclasses.replace(base, **fields))
        yield from _both(dataclasses.replace(base, dtype=torch.float16))
        yield from _both(dataclasses.replace(base, dtype=torch.float32, batch=1))
    for head_dim, value_dim in ((32, 32), (96, 96), (192, 128), (192, 192)):
        base = dataclasses.replace(_plain(target, head_dim, 4096, 4096), value_dim=value_dim)
        for masked in (base, _causal(base)):
            yield from _both(masked)
    # What the nearest of the above was seen to decide badly.
    for width, q_len in itertools.product((64, 128, 256), (16, 128)):
        few = _plain(target, width, q_len, 8192, kv_heads=4)
        for fields in (_masked(torch.bool, q_len, 8192), _masked(torch.bfloat16, q_len, 8192), {"dropout_p": 0.1}):
            yield dataclasses.replace(few, **fields)
    for width in (96, 192, 256):
        base = _plain(target, width, 4096, 4096)
        for fields in (_masked(torch.bfloat16, 4096, 4096), {"dropout_p": 0.1}):
            yield from _both(dataclasses.replace(base, **fields))
    for width in (64, 128, 256):
        long = _plain(target, width, 16384, 16384, kv_heads=4)
        yield from _both(dataclasses.replace(long, diagonal=0, low_diagonal=-1023))
        yield dataclasses.replace(long, batch=1, diagonal=0, low_diagonal=-1023)
    for width in (32, 96, 192):
        yield _causal(_plain(target, width, 16, 32768, kv_heads=4))
        yield from _both(_causal(_plain(target, width, 16384, 16384)))
    for width, q_len in itertools.product((96, 192), (16, 128)):
        few = _plain(target, width, q_len, 8192, kv_heads=4)
        for fields in (_masked(torch.bool, q_len, 8192), _masked(torch.bfloat16, q_len, 8192)):
            yield dataclasses.replace(few, **fields)
        for batch, kv_len in ((4, 4096), (8, 16384)):
            yield _causal(dataclasses.replace(few, batch=batch, kv_len=kv_len))
    for width in (96, 192):
        yield from _both(_causal(_plain(target, width, 8192, 8192, kv_heads=4)))
    for width, dtype in itertools.product((64, 96, 128, 256), (torch.bool, torch.bfloat16)):
        yield from _both(dataclasses.replace(_plain(target, width, 2048, 2048), batch=2, **_masked(dtype, 2048, 2048)))


def _masked(dtype: torch.dtype, q_len: int, kv_len: int) -> dict[str, Any]:
    return {"mask_dtype": dtype, "mask_sizes": (1, 1, q_len, kv_len)}


_FEATURES: tuple[dict[str, Any], ...] = (
    _masked(torch.bool, 4096, 4096),
    _masked(torch.bfloat16, 4096, 4096),
    {"dropout_p": 0.1},
    {"dropout_p": 0.1, "diagonal": 0},
    {"diagonal": 0, "low_diagonal": -1023},
    {"diagonal": 0, "softcap": 30.0},
    {"diagonal": 0, "sink_dtype": torch.bfloat16},
    {"diagonal": 0, "low_diagonal": -127, "sink_dtype": torch.bfloat16},
    {"bulk_copies": False, "aligned": False},
    {"diagonal": 0, "deterministic": True},
)


def _both(problem: Problem) -> Iterator[Problem]:
    yield problem
    yield dataclasses.replace(problem, backward=True)

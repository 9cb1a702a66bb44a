"""Every value of a tile belongs to one thread, whatever the architecture, the threads and the split."""

from __future__ import annotations

import pytest

from torch_bwattn.backends.cute.parts.accumulators import Accumulator

SHAPES = [(64, 32), (64, 64), (64, 96), (128, 32), (128, 64), (128, 128), (128, 256), (192, 64), (256, 64)]
KINDS = [
    Accumulator(arch, rows, columns, threads, split)
    for arch in (80, 90, 100)
    for rows, columns in SHAPES
    for threads in (128, 256)
    for split in ("rows", "columns")
]


@pytest.mark.parametrize("accumulator", [kind for kind in KINDS if not kind.why_not()], ids=str)
def test_one_thread_for_each_value(accumulator):
    places = {
        accumulator.coordinates(thread, value)
        for thread in range(accumulator.threads)
        for value in range(accumulator.values)
    }
    assert places == {(row, column) for row in range(accumulator.rows) for column in range(accumulator.columns)}
    assert accumulator.values * accumulator.threads == accumulator.rows * accumulator.columns


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_some_of_each_architecture_exist(arch):
    assert sum(kind.arch == arch and not kind.why_not() for kind in KINDS) >= 6


@pytest.mark.parametrize(
    ("accumulator", "word"),
    [
        (Accumulator(75, 64, 64), "arch"),
        (Accumulator(90, 64, 64, 384), "threads"),
        (Accumulator(90, 64, 64, 256, "both"), "split"),
        (Accumulator(90, 80, 64), "rows"),
        (Accumulator(90, 64, 60), "columns"),
        (Accumulator(100, 64, 64), "rows"),
    ],
    ids=str,
)
def test_others_say_why_not(accumulator, word):
    assert accumulator.why_not().startswith(word)

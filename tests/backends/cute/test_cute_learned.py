"""Sums over a warp's part of a tile, on arrays of 32 lanes."""

from __future__ import annotations

import numpy as np
import pytest

from torch_bwattn.backends.cute.parts import learned

LANE = np.arange(32)
C, G = LANE & 3, LANE >> 2


def shuffle(value, lane):
    return value[lane]


@pytest.fixture(params=[2, 4, 8, 16], ids=lambda eights: f"{8 * eights} queries")
def tile(request):
    return np.random.default_rng(0).standard_normal((16, 8 * request.param))


def part_of(tile):
    columns = tile.shape[1] // 4
    return {(r, j): tile[G + 8 * r, 2 * C + j % 2 + 8 * (j // 2)] for r in range(2) for j in range(columns)}, columns


def test_all(tile):
    np.testing.assert_allclose(learned.over_all(*part_of(tile), LANE, shuffle), tile.sum())


def test_keys(tile):
    for r, sums in enumerate(learned.by_keys(*part_of(tile), LANE, shuffle)):
        np.testing.assert_allclose(sums, tile.sum(1)[G + 8 * r])


def test_queries(tile):
    for j, sums in enumerate(learned.by_queries(*part_of(tile), LANE, shuffle)):
        np.testing.assert_allclose(sums, tile.sum(0)[2 * C + j % 2 + 8 * (j // 2)])


def test_distances(tile):
    rho, sums = learned.by_distances(*part_of(tile), LANE, shuffle, np.where, 0.0 * LANE)
    found = {}
    for number, values in enumerate(sums):
        for lane in LANE[number % 4 == C]:
            found[int(rho[lane]) + 8 * (number - 2)] = values[lane]
    for distance in range(-15, tile.shape[1]):
        np.testing.assert_allclose(found.pop(distance), np.trace(tile, offset=distance), atol=1e-12)
    assert not any(found.values())

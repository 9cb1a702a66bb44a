"""The kernels' index arithmetic, compiled for the host and run on the CPU, against plain statements of its meaning."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_bwattn.backends.cute import loader

pytestmark = pytest.mark.skipif(loader.why_missing() is not None, reason=str(loader.why_missing()))

MOST = 128


def on_the_host(name, count, *constants):
    """Compiles a function of ``host_kernels`` that fills a tensor; returns a function of its numbers that reads it."""
    loader.load()
    import host_kernels
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    out = torch.zeros(MOST, dtype=torch.int32)
    launch = cute.compile(getattr(host_kernels, name), from_dlpack(out), *[Int32(1)] * count, *constants)

    def run(*numbers):
        out.fill_(-1)
        launch(from_dlpack(out), *numbers)
        return out.tolist()

    return run


@pytest.mark.parametrize(("tile_m", "tile_n", "packed"), [(8, 4, 1), (4, 6, 1), (12, 8, 1), (8, 4, 2), (8, 6, 4)])
@pytest.mark.parametrize("has_left", [False, True])
@pytest.mark.parametrize("has_right", [False, True])
def test_every_seen_key_is_visited_once_and_masked_where_it_must_be(tile_m, tile_n, packed, has_right, has_left):
    run = on_the_host("visited_tiles", 5, tile_m, tile_n, packed, has_right, has_left)

    @settings(max_examples=200)
    @given(data=st.data())
    def check(data):
        q_len, kv_len = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 90))
        tile = data.draw(st.integers(0, -(-q_len * packed // tile_m) - 1))
        right = data.draw(st.integers(-q_len, kv_len))
        left = data.draw(st.integers(-right if has_right else -kv_len, q_len))
        count, masked, *order = run(tile * tile_m, q_len, kv_len, right, left)
        queries = [row // packed for row in range(tile * tile_m, min((tile + 1) * tile_m, q_len * packed))]

        def sees(i, j):
            return j < kv_len and (not has_right or j <= i + right) and (not has_left or j >= i - left)

        blocks = [range(n * tile_n, (n + 1) * tile_n) for n in range(-(-kv_len // tile_n))]
        needed = {n for n, block in enumerate(blocks) if any(sees(i, j) for i in queries for j in block)}
        whole = {n for n, block in enumerate(blocks) if all(sees(i, j) for i in queries for j in block)}
        order = order[: max(count, 0)]
        assert len(set(order)) == len(order)
        assert needed <= set(order) <= set(range(len(blocks)))
        # The first tile is masked in any case.
        assert set(order[max(masked, 1) :]) <= whole
        if needed:
            assert set(order) == needed
            assert whole.isdisjoint(order[1:masked])

    check()


@pytest.mark.parametrize("kv_len", [100, 20_000, 3_000_000])
def test_every_tile_of_queries_is_visited_once(kv_len):
    run = on_the_host("query_tile", 6)
    for m_tiles, heads, kv_heads, batch in ((1, 1, 1, 1), (3, 4, 2, 5), (5, 6, 1, 3), (7, 8, 8, 1), (2, 3, 3, 7)):
        total = run(0, m_tiles, heads, kv_heads, batch, kv_len)[0]
        assert total == m_tiles * heads * batch
        tiles = [run(index, m_tiles, heads, kv_heads, batch, kv_len)[1:5] for index in range(total)]
        assert {tuple(tile[:3]) for tile in tiles} == {
            (m, b, h) for m in range(m_tiles) for b in range(batch) for h in range(heads)
        }
        assert all(head // (heads // kv_heads) == kv_head for _, _, head, kv_head in tiles)
        # The longest of a pair come first.
        for pair in {tuple(tile[1:3]) for tile in tiles}:
            of_pair = [tile[0] for tile in tiles if tuple(tile[1:3]) == pair]
            assert of_pair == sorted(of_pair, reverse=True)

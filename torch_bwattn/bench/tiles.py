"""How many tiles a program visits: on the host what the Hopper kernels' functions of these names count on a device."""

from __future__ import annotations


def key_tiles(first: int, tile_m: int, tile_n: int, length: int, causal: bool, window: int | None) -> tuple[int, int]:
    """Tiles of keys for the queries of a tile.

    Args:
        first: The tile's first query.
        tile_m: Its queries; the last tile may have fewer.
        tile_n: Keys of a tile.
        length: Queries, and keys.
        causal: Whether query i sees only keys j <= i.
        window: Whether only keys j >= i - window; None is no limit.

    Returns:
        How many tiles hold keys that some of the queries see, and how many of these need a mask.
    """
    last = min(first + tile_m, length) - 1
    end = -(-(last + 1 if causal else length) // tile_n)
    whole_end = (first + 1 if causal else length) // tile_n
    begin = whole_begin = 0
    if window is not None:
        begin = max(first - window, 0) // tile_n
        whole_begin = -(-max(last - window, 0) // tile_n)
    return end - begin, end - begin - max(whole_end - whole_begin, 0)


def query_tiles(first: int, tile_n: int, tile_m: int, length: int, causal: bool, window: int | None) -> tuple[int, int]:
    """Tiles of queries for the keys of a tile, as :func:`key_tiles`. A tile of keys past the end is always masked."""
    last = min(first + tile_n, length) - 1
    begin = whole_begin = 0
    end = whole_end = -(-length // tile_m)
    if causal:
        begin, whole_begin = first // tile_m, -(-last // tile_m)
    if window is not None:
        end = min(end, (last + window) // tile_m + 1)
        whole_end = min((first + window + 1) // tile_m, end)
    whole = max(whole_end - whole_begin, 0) if first + tile_n <= length else 0
    return end - begin, end - begin - whole

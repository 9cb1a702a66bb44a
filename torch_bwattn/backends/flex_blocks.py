"""Lists of blocks as kernels take them: blocks that are multiples of tiles, and the lists of columns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..mods.program import Program, Ref, Step
from .flex_inputs import BlockLists, FlexInputs, Mod, visited


def aligned(x: FlexInputs, multiples: tuple[int, int]) -> FlexInputs:
    """The same attention with lists whose blocks are multiples of a kernel's tiles.

    Lists of other blocks become lists of blocks of the size ``multiples``: one is visited whole where all that it
    touches are, else in part where any is visited; the blocks themselves are a table that ``mask_mod`` then reads,
    :func:`_within`.

    Args:
        x: Has lists.
        multiples: Queries and keys of what a block must be a multiple of.
    """
    blocks = x.blocks
    if blocks is None or all(size % tile == 0 for size, tile in zip(blocks.sizes, multiples, strict=True)):
        return x
    part, full = visited(blocks, x.k.shape[2])
    lengths = x.q.shape[2], x.k.shape[2]
    whole = _pooled(full, blocks.sizes, multiples, lengths, every=True)
    some = _pooled(part | full, blocks.sizes, multiples, lengths, every=False) & ~whole
    lists = BlockLists(*_listed(some), *_listed(whole), multiples)
    kinds = part.to(torch.uint8) + 2 * full.to(torch.uint8)
    kinds = kinds.expand(x.q.shape[0], x.q.shape[1], -1, -1)
    mask = Mod(Program((), Ref("")), ()) if x.mask_mod is None else x.mask_mod
    program = _within(mask.program, len(mask.captured), blocks.sizes)
    return dataclasses.replace(x, blocks=lists, mask_mod=Mod(program, (*mask.captured, kinds), mask.numbers))


@functools.lru_cache(maxsize=1024)
def _within(mask: Program, place: int, sizes: tuple[int, int]) -> Program:
    """A mask kept to blocks: shown are those of kind 2 and more whole, of kind 1 what the mask shows.

    Args:
        mask: Its program, without steps for all.
        place: Of the table of kinds [B, H, R, C] among the captured tensors.
        sizes: Queries and keys of a block.
    """
    first = len(mask.steps)
    row, column, kind, in_full, in_part, shown = (Ref(f"%{first + number}") for number in range(6))
    index = (Ref("b"), Ref("h"), row, column)
    steps = [
        Step("aten.floor_divide.default", (Ref("q_idx"), sizes[0])),
        Step("aten.floor_divide.default", (Ref("kv_idx"), sizes[1])),
        Step("aten.index.Tensor", (Ref(f"@{place}"), index)),
        Step("aten.ge.Scalar", (kind, 2)),
        Step("aten.ge.Scalar", (kind, 1)),
    ]
    if not mask.steps:
        return Program(tuple(steps), in_part)
    steps += [
        Step("aten.bitwise_and.Tensor", (in_part, mask.result)),
        Step("aten.bitwise_or.Tensor", (in_full, shown)),
    ]
    return Program((*mask.steps, *steps), Ref(f"%{first + 6}"))


def transposed(blocks: BlockLists, q_len: int, kv_len: int) -> BlockLists:
    """Of each column of blocks, which rows visit it, in order: as they came, or made of the rows."""
    if blocks.columns is not None:
        return blocks.columns
    part, full = (one[:, :, : -(-q_len // blocks.sizes[0])].mT for one in visited(blocks, kv_len))
    return _lists_of(part, None if blocks.full_count is None else full, blocks.sizes)


def _lists_of(part: Tensor, full: Tensor | None, sizes: tuple[int, int]) -> BlockLists:
    """Lists of what is visited, from bool [.., R, C]."""
    count, index = _listed(part)
    if full is None:
        return BlockLists(count, index, None, None, sizes)
    return BlockLists(count, index, *_listed(full), sizes)


def cut(blocks: BlockLists, kv_len: int, heads: Sequence[int], lengths: tuple[int, int]) -> BlockLists:
    """The lists of a call's first queries and keys.

    Args:
        blocks: Of the call.
        kv_len: Its keys.
        heads: (batch, heads) that are kept.
        lengths: (queries, keys) that are kept.
    """
    rows, columns = (-(-length // size) for length, size in zip(lengths, blocks.sizes, strict=True))

    def first(tensor: Tensor) -> Tensor:
        return tensor[: heads[0], : heads[1], :rows]

    def first_if(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else first(tensor)

    kept = BlockLists(
        first(blocks.part_count), first(blocks.part_index), first_if(blocks.full_count), first_if(blocks.full_index),
        blocks.sizes,
    )  # fmt: skip
    part, full = (which[..., :columns] for which in visited(kept, kv_len))
    return _lists_of(part, None if blocks.full_count is None else full, blocks.sizes)


def _listed(which: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [.., R] and indices [.., R, C] of what is true of [.., R, C], in order."""
    index = which.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    return which.sum(-1, dtype=torch.int32), index.to(torch.int32, memory_format=torch.contiguous_format)


def _pooled(
    which: Tensor, sizes: tuple[int, int], wanted: tuple[int, int], lengths: tuple[int, int], *, every: bool
) -> Tensor:
    """Of blocks of the wanted sizes, whether every block that one touches is true, or any."""
    total = which.to(torch.int32)
    for dim, size, new, length in zip((2, 3), sizes, wanted, lengths, strict=True):
        start = torch.arange(-(-length // new), device=which.device) * new
        first, last = start // size, (start + new).clamp(max=length).sub(1) // size
        sums = torch.nn.functional.pad(total.cumsum(dim), (0, 0, 1, 0) if dim == 2 else (1, 0))
        of_part = sums.index_select(dim, last + 1) - sums.index_select(dim, first)
        if every:
            touched = (last + 1 - first).view(-1, 1) if dim == 2 else last + 1 - first
            total = (of_part == touched).to(torch.int32)
        else:
            total = (of_part > 0).to(torch.int32)
    return total.to(torch.bool)

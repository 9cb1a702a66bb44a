"""What a call with mods and lists of blocks is to the backends that compute it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..layout import empty_like_order, lse_dtype
from ..mods.program import Program, Ref, moved, vectors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclasses.dataclass(frozen=True)
class Mod:
    """A program with the values that it captured."""

    program: Program
    captured: Sequence[Tensor] = ()
    numbers: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class BlockLists:
    """Which blocks of scores are visited, as in ``torch.nn.attention.flex_attention.BlockMask``.

    Attributes:
        part_count: Of each row of blocks, how many are visited where ``mask_mod`` says so, int32 [B or 1, H or 1, R].
        part_index: Which, [B or 1, H or 1, R, C]; beyond the count not read.
        full_count: How many are visited whole, or None for none.
        full_index: Which.
        sizes: Queries and keys of a block.
        columns: Of each column of blocks, which rows visit it, in order, or None: they can be made of the others.
    """

    part_count: Tensor
    part_index: Tensor
    full_count: Tensor | None
    full_index: Tensor | None
    sizes: tuple[int, int]
    columns: BlockLists | None = None

    @staticmethod
    def of(mask: BlockMask) -> BlockLists:
        """Those of a block mask."""
        counts, index = mask.kv_num_blocks, mask.kv_indices
        return BlockLists(counts, index, mask.full_kv_num_blocks, mask.full_kv_indices, mask.BLOCK_SIZE)


@dataclasses.dataclass(frozen=True)
class FlexInputs:
    """Operands of a forward. ``k`` and ``v`` have a batch of 1 for all, or the query's, and heads that divide its.

    ``score_mod`` and ``mask_mod`` are None where they change nothing.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    blocks: BlockLists | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of scores."""
        return lse_dtype(self.q.dtype)

    def of_batch(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the query's batch."""
        batch = self.q.shape[0]
        return self.k.expand(batch, -1, -1, -1), self.v.expand(batch, -1, -1, -1)

    def of_own_batch(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of keys and values of their own batch, from those of the query's."""
        if self.k.shape[0] == self.q.shape[0]:
            return dk, dv
        own_dk, own_dv = (
            empty_like_order(like, like.shape[3]).copy_(grad.sum(0, keepdim=True))
            for like, grad in ((self.k, dk), (self.v, dv))
        )
        return own_dk, own_dv

    @functools.cached_property
    def joined(self) -> Joined:
        """The mods, joined."""
        nothing = Mod(Program((), Ref("score")))
        score, mask = self.score_mod or nothing, self.mask_mod or nothing
        after = moved(mask.program, len(score.captured), len(score.numbers))
        return Joined(
            None if self.score_mod is None else score.program.text,
            None if self.mask_mod is None else after.text,
            tuple(tensor if tensor.dim() else tensor.view(1) for tensor in (*score.captured, *mask.captured)),
            tuple(int(number) for number in (*score.numbers, *mask.numbers)),
        )

    def lists(self, blocks: BlockLists | None) -> tuple[Tensor | None, ...]:
        """Lists as kernels take them, of the query's batch and heads: counts and indices in part, then whole."""
        if blocks is None:
            return None, None, None, None
        some = (blocks.part_count, blocks.part_index, blocks.full_count, blocks.full_index)
        return tuple(None if one is None else one.expand(*self.q.shape[:2], *one.shape[2:]) for one in some)


def _dense(count: Tensor, index: Tensor, columns: int) -> Tensor:
    """The blocks of a list as bool [B, H, R, columns]."""
    listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    # What is beyond the count goes to a column of its own, which is cut off.
    place = torch.where(listed, index.to(torch.int64), columns)
    return torch.zeros((*index.shape[:-1], columns + 1), dtype=torch.bool, device=index.device).scatter_(
        -1, place, value=True
    )[..., :columns]


def visited(blocks: BlockLists, kv_len: int) -> tuple[Tensor, Tensor]:
    """Blocks that are visited in part, and those that are visited whole."""
    columns = max(blocks.part_index.shape[-1], -(-kv_len // blocks.sizes[1]))
    part = _dense(blocks.part_count, blocks.part_index, columns)
    if blocks.full_count is None or blocks.full_index is None:
        return part, torch.zeros_like(part)
    return part, _dense(blocks.full_count, blocks.full_index, columns)


MOST_TENSORS, MOST_NUMBERS = 8, 4
"""How many captured tensors and integers the kernels' signatures have room for."""


@dataclasses.dataclass(frozen=True)
class Joined:
    """Both mods with what they captured in one row, as kernels take it.

    Attributes:
        score_mod: Its program's text, or None.
        mask_mod: Likewise; its captured values come after those of ``score_mod``.
        tensors: Of both, each with a dimension or more.
        numbers: Of both.
    """

    score_mod: str | None
    mask_mod: str | None
    tensors: tuple[Tensor, ...]
    numbers: tuple[int, ...]

    def slots(self) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        """Tensors and integers as signatures of kernels take them, None where there is no more."""
        no_tensors, no_numbers = MOST_TENSORS - len(self.tensors), MOST_NUMBERS - len(self.numbers)
        return (*self.tensors, *(None,) * no_tensors), (*self.numbers, *(None,) * no_numbers)


def zeros_of(captured: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """What kernels add gradients of captured tensors to, in float32 or more; those without dimensions get one."""
    return [
        torch.zeros(one.shape or (1,), dtype=torch.promote_types(one.dtype, torch.float32), device=one.device)
        if want
        else None
        for one, want in zip(captured, wanted, strict=True)
    ]


def as_captured(grads: Sequence[Tensor | None], captured: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients as the captured tensors are, from what :func:`zeros_of` gave."""
    return [
        None if grad is None else grad.view(one.shape).to(one.dtype) for grad, one in zip(grads, captured, strict=True)
    ]


_TABLE_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
)  # fmt: skip


def why_not_scalars(x: FlexInputs) -> str:
    """Why kernels that take mods of scalars do not take these; nothing where they do."""
    for what, mod in (("score_mod", x.score_mod), ("mask_mod", x.mask_mod)):
        if mod is None:
            continue
        op = vectors(mod.program, tuple(tensor.dim() for tensor in mod.captured))
        if op:
            return f"its kernels take mods of scalars, and {what} calls {op} on more"
        for tensor in mod.captured:
            if tensor.dtype not in _TABLE_DTYPES or not tensor.numel():
                return f"its kernels read no captured tensors of {tensor.dtype} and shape {list(tensor.shape)}"
        if any(not -(2**31) <= int(number) < 2**31 for number in mod.numbers):
            return f"its kernels take captured integers of 32 bits, and {what} has others"
    found = x.joined
    tensors, numbers = len(found.tensors) + (x.blocks is not None), len(found.numbers)  # lists may become a table
    if tensors > MOST_TENSORS or numbers > MOST_NUMBERS:
        return f"its kernels take {MOST_TENSORS} captured tensors and {MOST_NUMBERS} integers, got {tensors}, {numbers}"
    return ""

"""The tcgen05 forward of sm_100a and sm_103a: which problems it takes, and how a call reaches it.

Importing this module loads no kernel language. The kernel is compiled for fixed sizes, so queries, keys and values are
padded, which costs a copy where their lengths or widths are not those sizes already or where they are not contiguous.
So is a mask, in its own sizes, none of which is broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ...layout import collapsed, empty_like_order
from ...problem import Problem
from .. import sinks
from ..base import ForwardInputs, mask_copy_refusal
from ..cute import loader as cute_loader
from . import flash_blocks, forms, loader

NAME = forms.PREFIX + "blocks of 128x128"
NOTE = "compiles some 10 s for each batch x heads and each pair of padded lengths"

_DTYPES = (torch.bfloat16, torch.float16)
_MASK_DTYPES = (torch.bool, torch.float16)
_FEWEST_QUERIES = 64
_PER_DOUBLING = 8
_OLDEST_CUDA = 13
_LARGEST_CAP = 1e3  # its tanh is right to 1e-7 of the cap, not of small scores
_INT32_MAX = 2**31 - 1

TRITON = {"block_sizes": [128, 128], "num_warps": 8, "num_stages": 2, "indexing": "pointer"}
"""For the kernels through Triton, where their values are tested; not for use, as they were timed nowhere."""

_HELION = {"cute_flash_kv_split": 1}
"""What is changed in Helion's own choice, which for a width and dtype depends on the sizes in this alone: few programs
would split rows of keys. Without that, what a check at the first use has run is the body of every size."""


def _unbuildable() -> str:
    missing = cute_loader.why_missing()
    if missing:
        return missing
    built_for = torch.version.cuda
    if built_for is not None and int(built_for.split(".")[0]) < _OLDEST_CUDA:
        return f"it needs PyTorch built for CUDA {_OLDEST_CUDA} or later, got {built_for}"
    return ""


def offered(_: Problem) -> tuple[str, ...]:
    """The configs for a problem: one."""
    return (NAME,)


def shaped_by(problem: Problem) -> tuple[Hashable, ...]:
    """What of a problem shapes the code beside sizes and dtype: width, cap, mask; the rest is lists and numbers."""
    return width_of(problem), problem.softcap is not None, problem.mask_dtype, _along(problem)


def _along(problem: Problem) -> tuple[bool, ...]:
    """For each dimension of a problem's mask, if any, whether its size is not 1."""
    return tuple(size > 1 for size in problem.mask_sizes or ())


def common_refusal(problem: Problem, longest: int, width: int) -> str:
    """Why no kernel of these takes a problem whose longer length and width are padded to these, or nothing."""
    return _unbuildable() or _size_refusal(problem, longest, width) or _feature_refusal(problem)


def why_not(problem: Problem) -> str:
    """Why the kernel does not take a problem of such a target, or nothing."""
    longest = flash_blocks.padded_length(max(problem.q_len, problem.kv_len))
    refusal = width_refusal(problem) or common_refusal(problem, longest, width_of(problem))
    if refusal:
        return refusal
    blocks = flash_blocks.block_count(problem.q_len, problem.kv_len)
    if blocks > flash_blocks.MOST_BLOCKS:
        return f"it takes up to {flash_blocks.MOST_BLOCKS} blocks of 128x128, got {blocks}"
    if problem.softcap is not None and problem.softcap > _LARGEST_CAP:
        return f"it takes soft caps up to {_LARGEST_CAP:g}, got {problem.softcap}"
    if problem.mask_dtype not in (None, *_MASK_DTYPES):
        # Scores are multiplied by log2(e) beside what was added to them, which the least bfloat16 and float32 overflow.
        return f"it takes masks of bool and float16, got {problem.mask_dtype}"
    elements = math.prod(_mask_sizes(problem))
    if elements > _INT32_MAX:
        return f"it takes masks of up to {_INT32_MAX} elements once padded"
    return mask_copy_refusal(problem, elements)


def width_refusal(problem: Problem) -> str:
    """Why the kernels of one width for all operands do not take a problem's widths, or nothing."""
    if not (0 < problem.head_dim <= forms.WIDEST and 0 < problem.value_dim <= forms.WIDEST):
        return f"it takes widths from 1 to {forms.WIDEST}, got D={problem.head_dim} and Dv={problem.value_dim}"
    return ""


def _size_refusal(problem: Problem, longest: int, width: int) -> str:
    if problem.dtype not in _DTYPES:
        return f"it takes bfloat16 and float16, got {problem.dtype}"
    if problem.empty:
        return "nothing to attend needs no kernel"
    if problem.q_len <= _FEWEST_QUERIES:
        return f"it takes more than {_FEWEST_QUERIES} queries, for tiles of 128, got {problem.q_len}"
    if problem.batch * problem.heads * longest * width > _INT32_MAX:
        return f"it takes tensors of up to {_INT32_MAX} elements once padded"
    return ""


def _feature_refusal(problem: Problem) -> str:
    if problem.dropout_p > 0.0:
        return "it takes no dropout"
    if problem.scale <= 0.0:
        return f"it takes scales above 0, for it masks and compares scores before they are scaled, got {problem.scale}"
    return ""


def width_of(problem: Problem) -> int:
    """The width that a problem's queries, keys and values are padded to."""
    return flash_blocks.padded_width(max(problem.head_dim, problem.value_dim))


class Forward:
    """One problem's forward. In Triton's interpreter, and on GPUs without tcgen05, the same kernel through Triton."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._bounds = flash_blocks.bounds(problem.q_len, problem.kv_len, problem.diagonal, problem.low_diagonal)
        self._rows = flash_blocks.padded_length(problem.q_len)
        self._columns = flash_blocks.padded_length(problem.kv_len)
        self._width = width_of(problem)
        self._launch: Any = None

    def __call__(self, x: ForwardInputs) -> tuple[Tensor, Tensor]:
        problem, device = self.problem, x.q.device
        heads = problem.batch * problem.heads
        out = empty_like_order(x.q, problem.value_dim)
        o = room_for(out, self._rows, self._width)
        lse = torch.empty((problem.batch, problem.heads, self._rows), dtype=torch.float32, device=device)
        masked = x.mask is not None
        arguments = (
            padded(x.q, self._rows, self._width),
            padded(x.k, self._columns, self._width),
            padded(x.v, self._columns, self._width),
            *flash_blocks.blocks(problem.q_len, problem.kv_len, *self._bounds, device, masked),
            None if x.mask is None else _padded_mask(x.mask, _mask_sizes(problem)).flatten(0, 2),
            o.view(1, heads, self._rows, self._width),
            lse.view(1, heads, self._rows),
            problem.scale / (problem.softcap or 1.0),
            problem.softcap,
            problem.kv_len,
            *self._bounds,
            _along(problem),
        )
        if self._launch is None:
            self._launch = loader.kernels("flash_cute").FLASH.prepare(arguments, _HELION)
        self._launch(*arguments)
        take(out, o)
        lse = lse[..., : problem.q_len].contiguous()
        return out, lse if x.sink is None else sinks.join(out, lse, x.sink)


def _mask_sizes(problem: Problem) -> tuple[int, ...]:
    """A mask's sizes as the kernel takes it: each that is not 1 is the padded length."""
    *planes, rows, columns = problem.mask_sizes or (1, 1, 1, 1)
    lengths = ((rows, problem.q_len), (columns, problem.kv_len))
    return *planes, *(flash_blocks.padded_length(length) if size == length > 1 else 1 for size, length in lengths)


def _padded_mask(mask: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """A mask as the kernel takes it: itself where it lies so, else a copy; bool as uint8. What is padded is not set."""
    mask = collapsed(mask)
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    if mask.shape == sizes and mask.is_contiguous() and mask.data_ptr() % 16 == 0:
        return mask
    copy = mask.new_empty(sizes)
    copy[:, :, : mask.shape[2], : mask.shape[3]].copy_(mask)
    return copy


def full_refusal(problem: Problem) -> str:
    """Why kernels that multiply what is padded do not take what a problem shows of its keys, or nothing."""
    if problem.mask_dtype is not None:
        return "it takes no mask"
    if problem.low_diagonal is not None:
        return "it takes no window"
    if problem.softcap is not None:
        return "it takes no soft cap"
    if problem.diagonal is not None and (problem.diagonal != 0 or problem.q_len != problem.kv_len):
        lengths = f"Sq={problem.q_len}, Skv={problem.kv_len} and j <= i + {problem.diagonal}"
        return f"it takes causality of equal lengths, j <= i, got {lengths}"
    if problem.diagonal is None and problem.kv_len != full_length(problem.kv_len):
        return f"it takes {full_length(problem.kv_len)} keys that nothing hides, and no padding, got {problem.kv_len}"
    return ""


def full_length(length: int) -> int:
    """The length that such kernels are compiled for."""
    return flash_blocks.padded_length(length, _PER_DOUBLING, forms.WHOLE_KEYS)


def room_for(result: Tensor, length: int, width: int) -> Tensor:
    """Where a kernel writes a result that it pads to these: the result itself where that lies as the kernel's."""
    sizes = (*result.shape[:2], length, width)
    return result if result.shape == sizes and result.is_contiguous() else result.new_empty(sizes)


def take(result: Tensor, room: Tensor) -> None:
    """Copies what a kernel has written to its room without the padding, unless it is the result itself."""
    if room is not result:
        result.copy_(room[:, :, : result.shape[2], : result.shape[3]])


def padded(tensor: Tensor, length: int, width: int, zeros: int | None = None) -> Tensor:
    """A ``[B, H, S, D]`` tensor as ``[1, B * H, length, width]``: a view where that is possible, else a copy.

    Zeros follow each row, and the last row up to row ``zeros``, by default the end of its block of 128: rows of later
    blocks, which no list names, are not written.
    """
    batch, heads, rows, columns = tensor.shape
    folded = (1, batch * heads, length, width)
    if (rows, columns) == (length, width) and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor.view(folded)
    copy = tensor.new_empty((batch, heads, length, width))
    end = -(-rows // flash_blocks.BLOCK) * flash_blocks.BLOCK if zeros is None else zeros
    copy[:, :, :rows, :columns].copy_(tensor)
    if columns < width:
        copy[:, :, :rows, columns:].zero_()
    if rows < end:
        copy[:, :, rows:end].zero_()
    return copy.view(folded)

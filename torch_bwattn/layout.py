"""Memory layout of what the op returns: one rule, used by the fakes and by every backend.

An output follows the memory order of the input it mirrors (``out`` and ``dq`` the query's, ``dk`` the key's, ``dv`` the
value's): dense, the last dimension innermost, batch, head and sequence ordered as the input's strides order them. So a
query that is a transposed ``[B, S, H, D]`` view gives an output whose ``transpose(1, 2).reshape(B, S, H * D)`` is free.
Dimensions of stride 0 (expanded) or size 1 say nothing about order and keep their place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

IntLike = int | torch.SymInt


def dense_strides(like: Tensor, sizes: Sequence[IntLike]) -> tuple[IntLike, ...]:
    """Strides of a dense 4-D tensor of ``sizes`` whose outer three dimensions are ordered in memory as ``like``'s."""
    like_sizes, like_strides = like.shape, like.stride()
    order = [0, 1, 2]
    for i in (1, 2):  # insertion sort, outermost first: three elements, stable, few comparisons to guard on when traced
        j = i
        while j > 0 and _inside(order[j - 1], order[j], like_sizes, like_strides):
            order[j - 1], order[j] = order[j], order[j - 1]
            j -= 1
    strides: list[IntLike] = [0, 0, 0, 1]
    step: IntLike = max(1, sizes[3])
    for dim in reversed(order):
        strides[dim] = step
        step = step * max(1, sizes[dim])
    return tuple(strides)


def _inside(a: int, b: int, sizes: Sequence[IntLike], strides: Sequence[IntLike]) -> bool:
    """Whether dimension ``a``, now placed outside ``b``, belongs inside it."""
    if sizes[a] == 1 or sizes[b] == 1 or strides[a] == 0 or strides[b] == 0:
        return False
    return bool(strides[a] < strides[b])


def empty_like_order(like: Tensor, last: IntLike) -> Tensor:
    """An uninitialised tensor of ``like``'s sizes with ``last`` as its last size, in ``like``'s memory order."""
    sizes = (*like.shape[:3], last)
    return torch.empty_strided(sizes, dense_strides(like, sizes), dtype=like.dtype, device=like.device)


def conform(result: Tensor, like: Tensor) -> Tensor:
    """``result`` itself where it already lies as :func:`dense_strides` says, else a copy that does."""
    wanted = dense_strides(like, result.shape)
    if all(size == 1 or a == b for size, a, b in zip(result.shape, result.stride(), wanted, strict=True)):
        return result
    out = torch.empty_strided(result.shape, wanted, dtype=result.dtype, device=result.device)
    return out.copy_(result)


class Conforming:
    """:func:`conform` for results and inputs of one layout, decided at the first of them that needs no copy."""

    def __init__(self) -> None:
        self._fits: tuple[int, ...] = ()

    def __call__(self, result: Tensor, like: Tensor) -> Tensor:
        if result.stride() == self._fits:
            return result
        found = conform(result, like)
        if found is result:
            self._fits = result.stride()
        return found


def with_rows_apart(sizes: Sequence[int], apart: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor, dense but for its rows, which begin at multiples of so many elements."""
    *outer, columns = sizes
    return torch.empty((*outer, -(-columns // apart) * apart), dtype=dtype, device=device)[..., :columns]


def folded(tensor: Tensor, kv_heads: int) -> Tensor:
    """``[B, Hq, R, X]`` -> ``[B, Hkv, G * R, X]``: the rows of a group's heads under their key head."""
    batch, heads, rows, width = tensor.shape
    return tensor.reshape(batch, kv_heads, heads // kv_heads * rows, width)


def lse_dtype(operands: torch.dtype) -> torch.dtype:
    """Of scores' sums and logarithms beside operands of a dtype."""
    return torch.float64 if operands == torch.float64 else torch.float32


def collapsed(mask: Tensor) -> Tensor:
    """A view of a 4-D mask with size 1 where it is expanded, as it lies in memory."""
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if size > 1 and stride == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask

"""Batching rules of the primitives: the mapped dimension joins the batch.

A call with dropout is mapped one sample at a time, because a sample's dropout mask counts from its own batch: so equal
seeds (randomness="same") give equal masks. So is a call whose mask could only join the batch by a copy, and one whose
sink is mapped: a call has one sink for its whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .schema import NAMESPACE, library

Dims = Sequence[int | None]

# Where the primitives take the sink, their last argument, which callers leave out with the other defaults.
_FORWARD_SINK = 12
_BACKWARD_SINK = 17


def _front(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """The mapped dimension first: moved there, or expanded."""
    if tensor is None:
        return None
    return tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _dims(in_dims: Sequence[Any], count: int) -> list[int | None]:
    """One mapped dimension or None per argument: trailing defaults are left out, a list has a list of None."""
    dims = [dim if isinstance(dim, int) else None for dim in in_dims]
    return dims + [None] * (count - len(dims))


def _loop(op: Callable[..., tuple[Tensor, ...]], size: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    samples = []
    for i in range(size):
        one = [a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True)]
        samples.append(op(*one))
    results = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
    return results, (0,) * len(results)


def _mask_joins(mask: Tensor | None, dim: int | None, batch: int) -> bool:
    """Whether the mask's batch and the mapped dimension fold into one without a copy."""
    if mask is None:
        return True
    own_batch = mask.shape[0] if dim is None else mask.movedim(dim, 0).shape[1]
    return (own_batch == 1) if dim is None else (batch in (own_batch, 1))


def _fold(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.flatten(0, 1)


def _forward(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
    args = (*args, *(None,) * (_FORWARD_SINK + 1 - len(args)))
    dims = _dims(in_dims, len(args))
    op, size = torch.ops.bwattn.sdpa_forward.default, info.batch_size
    query, mask, rng_state = args[0], args[3], args[4]
    batch = query.shape[0] if dims[0] is None else query.movedim(dims[0], 0).shape[1]
    own_sinks = dims[_FORWARD_SINK] is not None
    if rng_state is not None or own_sinks or not _mask_joins(mask, dims[3], batch) or size == 0:
        return _loop(op, size, dims, args)
    q, k, v = (_fold(_front(t, d, size)) for t, d in zip(args[:3], dims[:3], strict=True))
    mask = mask if dims[3] is None else _fold(_front(mask, dims[3], size))
    results = op(q, k, v, mask, None, *args[5:])
    return tuple(r.unflatten(0, (size, batch)) for r in results), (0, 0)


def _backward(info: Any, in_dims: Dims, *args: Any) -> tuple[Any, Any]:
    args = (*args, *(None,) * (_BACKWARD_SINK + 1 - len(args)))
    dims = _dims(in_dims, len(args))
    op, size = torch.ops.bwattn.sdpa_backward.default, info.batch_size
    mask, rng_state, output_mask = args[5], args[8], args[13]
    query = args[2]
    batch = query.shape[0] if dims[2] is None else query.movedim(dims[2], 0).shape[1]
    # The gradients of a mask and of a sink are sums over a sample's own batch.
    summed = output_mask[3] or output_mask[4] or dims[_BACKWARD_SINK] is not None
    if rng_state is not None or summed or not _mask_joins(mask, dims[5], batch) or size == 0:
        return _loop(op, size, dims, args)
    folded = [_fold(_front(t, d, size)) if isinstance(t, Tensor) else t for t, d in zip(args, dims, strict=True)]
    folded[5] = mask if dims[5] is None else folded[5]
    folded[_BACKWARD_SINK] = args[_BACKWARD_SINK]
    results = op(*folded)
    unfolded = tuple(
        r.unflatten(0, (size, batch)) if want else r.unsqueeze(0).expand(size, *r.shape)
        for r, want in zip(results, output_mask, strict=True)
    )
    return unfolded, (0,) * 5


torch.library.register_vmap(f"{NAMESPACE}::sdpa_forward", _forward, lib=library)
torch.library.register_vmap(f"{NAMESPACE}::sdpa_backward", _backward, lib=library)

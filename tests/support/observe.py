"""Dispatch modes that watch what the package does."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OpCalls(TorchDispatchMode):
    """Records the calls of the package's primitives with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[dict[str, Any]] = []
        self.backward: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name()
        if name in ("bwattn::sdpa_forward", "bwattn::sdpa_backward"):
            bound = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            bound.update(kwargs)
            (self.forward if name.endswith("forward") else self.backward).append(bound)
        return func(*args, **kwargs)

    def seed(self) -> int | None:
        """The dropout seed of the only forward call; None if it drew none."""
        (call,) = self.forward
        return None if call["rng_state"] is None else int(call["rng_state"])

    def arguments(self, which: str) -> tuple:
        """The recorded arguments of the only call, in the schema's order, with the inputs detached."""
        (call,) = getattr(self, which)
        return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in call.values())


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor, in elements of its storage, that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.func = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel():
                numel = leaf.untyped_storage().nbytes() // leaf.element_size()
                if numel > self.numel:
                    self.numel, self.func = numel, f"{func.name()} {list(leaf.shape)}"
        return result


def dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill one block of memory, each at its own place, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return expected == math.prod(tensor.shape) or tensor.numel() == 0

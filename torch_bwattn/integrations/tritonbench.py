"""Attention for TritonBench's operators ``flash_attention`` and ``blackwell_attentions``.

A benchmark there is a method that is given the inputs and returns what is timed. Both functions here are such methods.
TritonBench tells the operator by the module of what it registers, so either a method of the operator calls one::

    @register_benchmark()
    def bwattn(self, *args):
        return torch_bwattn.integrations.tritonbench.forward_backward(self, *args)

or, from outside, ``Operator.bwattn = forward_backward`` and, so spelled,
``register_benchmark_mannually("flash_attention", "bwattn")``. Of the operator they read ``causal``, ``sm_scale``, and,
where it has them, ``local`` with ``window_size``, ``varlen`` and ``optims``. TritonBench itself is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..api import sdpa
from ..errors import expected

Triple = tuple[Tensor, Tensor, Tensor]


class Operator(Protocol):
    """What of an operator decides a call."""

    causal: bool
    sm_scale: float


class Timed(Protocol):
    """What is timed: a call gives the outputs, one for each query, key and value.

    Attributes:
        _grad_inputs: The tensors whose ``grad`` the operator's backward sets back before it runs, and compares.
    """

    _grad_inputs: list[Tensor]

    def __call__(self) -> list[Tensor]: ...


def forward(operator: Operator, *tensors: Tensor) -> Callable[[], list[Tensor]]:
    """The forward alone, without a graph of gradients whatever the inputs require.

    Args:
        operator: Whose benchmark this is.
        *tensors: ``query, key, value``, ``[B, Hq, Sq, D]``, ``[B, Hkv, Skv, D]``, ``[B, Hkv, Skv, Dv]``; where the
            operator has several inputs for one timing, three for each.

    Returns:
        What is timed.

    Raises:
        TypeError: The tensors are not threes.
        NotImplementedError: The operator wants ``varlen``; TritonBench passes such a benchmark over.
    """
    options, triples = _options(operator), _threes(tensors)

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [_attention(*triple, **options) for triple in triples]

    return run


def forward_backward(operator: Operator, *tensors: Tensor) -> Timed:
    """The forward with a graph of gradients, for TritonBench to run backward, or forward and backward.

    The arguments and what is raised are those of :func:`forward`. The inputs are not touched: gradients go to leaves on
    the same memory. ``blackwell_attentions`` finds them as ``_grad_inputs`` of the result, to set back their gradients
    before each run; ``flash_attention`` has an optimizer do that, in its ``optims``.
    """
    options = _options(operator)
    leaves: list[Triple] = []
    for query, key, value in _threes(tensors):
        q, k, v = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        leaves.append((q, k, v))

    def run() -> list[Tensor]:
        return [_attention(*triple, **options) for triple in leaves]

    run._grad_inputs = [tensor for triple in leaves for tensor in triple]  # type: ignore[attr-defined]
    optims = getattr(operator, "optims", None)
    if optims is not None:
        optims[run] = torch.optim.SGD(run._grad_inputs)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def _options(operator: Operator) -> dict[str, Any]:
    if getattr(operator, "varlen", False):
        raise NotImplementedError(expected("varlen", "False: sequences of one length", True))
    options: dict[str, Any] = {"is_causal": operator.causal, "scale": operator.sm_scale}
    if getattr(operator, "local", False):
        # Its windows end at the last key, as those of the kernels that it was made for.
        window = operator.window_size  # type: ignore[attr-defined]
        options.update(window_size=window, causal_alignment="bottom_right")
    return options


def _threes(tensors: tuple[Tensor, ...]) -> list[Triple]:
    if not tensors or len(tensors) % 3:
        raise TypeError(expected("tensors", "query, key and value, once or more often", f"{len(tensors)} tensors"))
    threes = iter(tensors)
    return list(zip(threes, threes, threes, strict=True))


def _attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return sdpa(query, key, value, enable_gqa=query.shape[1] != key.shape[1], **options)

"""``flex_attention`` inside ``torch.compile``: how a mod, a function, gets into a graph.

Dynamo traces mods for PyTorch's own ``flex_attention`` operator: as graphs of their own, with what they capture as
further arguments. :data:`flex_hop` is another operator of that kind to it, and nothing to what comes after: called, it
turns the graphs into text and calls ``bwattn::flex_forward``, so that is what AOTAutograd and Inductor see.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import higher_order_ops as dynamo_hops
from torch._ops import HigherOrderOperator

from ..layout import lse_dtype
from ..mods.program import POSITION, SCORE_INPUTS
from ..mods.trace import ModError, Traced, trace
from .attention import call

_NAME = "bwattn_flex_attention"


class _FlexHop(HigherOrderOperator):
    """Called with graphs for mods; see the module."""

    def __init__(self) -> None:
        # Graphs that have it may be cached, where there is such a switch: they say all of it.
        switches = (
            {"cacheable": True} if "cacheable" in inspect.signature(HigherOrderOperator.__init__).parameters else {}
        )
        super().__init__(_NAME, **switches)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any,
        block_mask: tuple[Any, ...],
        scale: float,
        kernel_options: dict[str, Any],
        score_captured: tuple[Any, ...] = (),
        mask_captured: tuple[Any, ...] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        score_dtype = lse_dtype(query.dtype)
        score = _traced(score_mod, "score_mod", SCORE_INPUTS, score_dtype, score_captured)
        mask = _traced(block_mask[-1], "mask_mod", POSITION, score_dtype, mask_captured)
        return call(query, key, value, score, mask, block_mask[:-1], scale, kernel_options["with_max_scores"])


def _traced(
    mod: torch.fx.GraphModule, what: str, inputs: Sequence[str], score_dtype: torch.dtype, given: Sequence[Any]
) -> Traced:
    """A mod's graph as a program; where it needs the value of a captured number or size, for this value alone."""
    mod = _without_items(mod, score_dtype)
    numbers = any(isinstance(one, torch.SymInt) for one in given)
    sizes = any(isinstance(size, torch.SymInt) for one in given if isinstance(one, Tensor) for size in one.shape)
    if numbers or sizes:
        try:
            found, other = (trace(mod, what, inputs, score_dtype, given, size) for size in _TWO_SIZES)
        except (ModError, TypeError, RuntimeError, IndexError, AssertionError):
            pass
        else:
            if found.program == other.program:  # no size is in it
                return found
    known = [int(one) if isinstance(one, torch.SymInt) else one for one in given]
    return trace(mod, what, inputs, score_dtype, known)


_TWO_SIZES = (7, 11)


def _without_items(mod: torch.fx.GraphModule, score_dtype: torch.dtype) -> torch.fx.GraphModule:
    """Captured floats come as float64 tensors of which graphs take the value: as tensors of the score's dtype instead.

    They are beside the score what a Python number is.
    """
    if not any(node.op == "call_method" and node.target == "item" for node in mod.graph.nodes):
        return mod
    graph = copy.deepcopy(mod.graph)
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target == "item":
            node.target, node.args = "to", (node.args[0], score_dtype)
    return torch.fx.GraphModule(mod, graph)


flex_hop = _FlexHop()
dynamo_hops._hop_name_to_variable_class[_NAME] = dynamo_hops.FlexAttentionHigherOrderVariable

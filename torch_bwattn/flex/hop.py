"""``flex_attention`` inside ``torch.compile``: how a mod, a function, gets into a graph.

Dynamo traces mods for PyTorch's own ``flex_attention`` operator: as graphs of their own, with what they capture as
further arguments. :data:`flex_hop` is another operator of that kind to it, and nothing to what comes after: called, it
turns the graphs into text and calls ``bwattn::flex_forward``, so that is what AOTAutograd and Inductor see.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import higher_order_ops as dynamo_hops
from torch._ops import HigherOrderOperator

from ..mods.program import POSITION, SCORE_INPUTS
from ..mods.trace import trace
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
        score_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        score = trace(score_mod, "score_mod", SCORE_INPUTS, score_dtype, score_captured)
        mask = trace(block_mask[-1], "mask_mod", POSITION, score_dtype, mask_captured)
        return call(query, key, value, score, mask, block_mask[:-1], scale, kernel_options["with_max_scores"])


flex_hop = _FlexHop()
dynamo_hops._hop_name_to_variable_class[_NAME] = dynamo_hops.FlexAttentionHigherOrderVariable

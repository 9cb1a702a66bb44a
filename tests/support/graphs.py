"""Backends for torch.compile that count and keep the graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition


class Graphs:
    """A torch.compile backend that runs graphs as they are, and records them."""

    def __init__(self) -> None:
        self.dynamo: list[torch.fx.GraphModule] = []
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self._aot = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def _keep(graphs: list[torch.fx.GraphModule]) -> Any:
        def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return compiler

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled = self._aot(graph, inputs)
        # Not before: Dynamo may give up a graph and restart, which is no second graph.
        self.dynamo.append(graph)
        return compiled

    @staticmethod
    def targets(graphs: list[torch.fx.GraphModule]) -> list[str]:
        """The names of the operators called in some graphs."""
        return [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]

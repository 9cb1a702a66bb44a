"""Activation checkpointing, with dropout replayed, and torch.export."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torch_bwattn
from tests.support.graphs import Graphs
from tests.support.observe import OpCalls


def attention(query, value, dropout_p=0.0):
    out = torch_bwattn.sdpa(query.sin(), query.cos(), value, dropout_p=dropout_p)
    return out.exp()


def leaves():
    torch.manual_seed(0)
    return torch.randn(2, 3, 12, 8).requires_grad_(), torch.randn(2, 3, 12, 8).requires_grad_()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_checkpoint_eager(use_reentrant, dropout_p):
    query, value = leaves()
    torch.manual_seed(7)
    plain = attention(query, value, dropout_p)
    expected = torch.autograd.grad(plain.sum(), (query, value))
    torch.manual_seed(7)
    out = checkpoint(attention, query, value, dropout_p, use_reentrant=use_reentrant)
    torch.testing.assert_close(out, plain)
    out.sum().backward()
    torch.testing.assert_close((query.grad, value.grad), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_checkpoint_compiled(backend, dropout_p):
    query, value = leaves()

    @torch.compile(fullgraph=True, backend=backend)
    def step(query, value):
        return checkpoint(attention, query, value, dropout_p, use_reentrant=False)

    torch.manual_seed(7)
    out = step(query, value)
    out.sum().backward()
    if dropout_p == 0.0:
        plain = attention(query, value)
        torch.testing.assert_close(out, plain)
        torch.testing.assert_close((query.grad, value.grad), torch.autograd.grad(plain.sum(), (query, value)))


def test_dropout_replays_under_compiled_checkpointing():
    value = torch.eye(16).expand(2, 2, 16, 16).contiguous().requires_grad_()
    query = torch.zeros(2, 2, 16, 8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(value):
        return checkpoint(
            lambda value: torch_bwattn.sdpa(query, query, value, dropout_p=0.5), value, use_reentrant=False
        )

    out = step(value)
    (dv,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close(dv, out.detach().sum(-2).unsqueeze(-1).expand_as(dv))


def policy(_, op, *args, **kwargs):
    saved = op == torch.ops.bwattn.sdpa_forward.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_checkpointing_saves_the_op():
    query, value = leaves()
    expected = torch.autograd.grad(attention(query, value).sum(), (query, value))
    with OpCalls() as calls:
        out = checkpoint(
            attention,
            query,
            value,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
        )
        found = torch.autograd.grad(out.sum(), (query, value))
    torch.testing.assert_close(found, expected)
    assert len(calls.forward) == 1, "the saved op ran again"
    assert len(calls.backward) == 1


def test_selective_checkpointing_in_a_graph():
    query, value = leaves()
    graphs = Graphs()

    @torch.compile(fullgraph=True, backend=graphs)
    def step(query, value):
        context = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(attention, query, value, use_reentrant=False, context_fn=context)

    step(query, value).sum().backward()
    assert "bwattn.sdpa_forward.default" not in graphs.targets(graphs.backward)


class Model(torch.nn.Module):
    """Attention with a mask, for export."""

    def forward(self, query, key, mask):
        out, lse = torch_bwattn.sdpa(query, key, key, mask, return_lse=True)
        return out, lse


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    query, key, mask = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 9, 8), torch.rand(6, 9) < 0.7
    rows, columns = torch.export.Dim("rows", min=2, max=4096), torch.export.Dim("columns", min=2, max=4096)
    shapes = ({2: rows}, {2: columns}, {0: rows, 1: columns})
    program = torch.export.export(Model(), (query, key, mask), dynamic_shapes=shapes, strict=strict)
    for size in ((6, 9), (17, 33), (3, 2)):
        args = torch.randn(2, 4, size[0], 8), torch.randn(2, 4, size[1], 8), torch.rand(size) < 0.7
        torch.testing.assert_close(program.module()(*args), Model()(*args))


def test_export_holds_the_op_and_saves(tmp_path):
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 9, 8)
    program = torch.export.export(Model(), (query, key, None))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any(target.startswith("bwattn.sdpa") for target in targets)
    lowered = program.run_decompositions()
    torch.testing.assert_close(lowered.module()(query, key, None), Model()(query, key, None))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    torch.testing.assert_close(loaded.module()(query, key, None), Model()(query, key, None))


def test_export_of_patched_code():
    class Plain(torch.nn.Module):
        def forward(self, query):
            return torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    query = torch.randn(2, 4, 6, 8)
    with torch_bwattn.patch_sdpa():
        program = torch.export.export(Plain(), (query,))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any(target.startswith("bwattn.sdpa") for target in targets)
    torch.testing.assert_close(program.module()(query), Plain()(query))

"""dynamic=True: one graph serves every length, and the values are right at each."""

from __future__ import annotations

import pytest
import torch

import torch_bwattn
from tests.support.graphs import Graphs

# The first one equals no other size of the inputs: Dynamo takes sizes that are equal in the first call for one.
LENGTHS = (11, 2, 3, 5, 7, 8, 9, 13, 16, 17, 23, 31, 32, 33, 48, 63, 64, 65, 100, 130)


def step_of(kind):
    def step(query, key, mask):
        options = {}
        if kind in ("causal", "bottom_right"):
            options = {"is_causal": True, "causal_alignment": "bottom_right" if kind == "bottom_right" else "top_left"}
        if kind == "gqa":
            options = {"enable_gqa": True}
        return torch_bwattn.sdpa(query, key, key, mask, return_lse=True, **options)

    return step


def inputs_of(kind, length, columns):
    query = torch.randn(6, 4, length, 8).requires_grad_()
    key = torch.randn(6, 2 if kind == "gqa" else 4, columns, 8).requires_grad_()
    mask = None
    if kind == "bool":
        mask = torch.rand(6, 1, length, columns) < 0.8
    if kind == "additive":
        mask = torch.randn(length, columns).requires_grad_()
    if kind == "row":
        mask = torch.randn(6, 1, 1, columns)
    return query, key, mask


@pytest.mark.parametrize("kind", ["plain", "causal", "bottom_right", "gqa", "bool", "additive", "row"])
def test_twenty_lengths_in_one_graph(kind):
    graphs = Graphs()
    step = step_of(kind)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=graphs)
    for index, length in enumerate(LENGTHS):
        args = inputs_of(kind, length, LENGTHS[-1 - index])
        leaves = [tensor for tensor in args if tensor is not None and tensor.requires_grad]
        out, lse = compiled(*args)
        expected_out, expected_lse = step(*args)
        torch.testing.assert_close(out, expected_out)
        torch.testing.assert_close(lse, expected_lse)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, leaves, grad)
        expected = torch.autograd.grad(expected_out, leaves, grad)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)
    assert len(graphs.dynamo) == 1, f"{len(graphs.dynamo)} graphs for {len(LENGTHS)} lengths"
    assert len(graphs.forward) == len(graphs.backward) == 1


def test_self_attention_and_batch_sizes_in_one_graph():
    graphs = Graphs()

    def step(x):
        query = x.unflatten(-1, (4, 8)).transpose(1, 2)
        out = torch_bwattn.sdpa(query, query, query, is_causal=True)
        return out.transpose(1, 2).flatten(2)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=graphs)
    for index, length in enumerate(LENGTHS):
        x = torch.randn(6 + index % 3, length, 32)
        torch.testing.assert_close(compiled(x), step(x))
    assert len(graphs.dynamo) == 1


def test_automatic_dynamic_compiles_twice_at_most():
    """Without dynamic=True the first length is static; the second makes it dynamic, and there it ends."""
    graphs = Graphs()
    compiled = torch.compile(lambda q: torch_bwattn.sdpa(q, q, q, is_causal=True), fullgraph=True, backend=graphs)
    for length in LENGTHS:
        query = torch.randn(6, 4, length, 8)
        torch.testing.assert_close(compiled(query), torch_bwattn.sdpa(query, query, query, is_causal=True))
    assert len(graphs.dynamo) <= 2


def test_patched_under_dynamic():
    graphs = Graphs()

    def step(query, key):
        return torch.nn.functional.scaled_dot_product_attention(query, key, key)

    with torch_bwattn.patch_sdpa():
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=graphs)
        for index, length in enumerate(LENGTHS):
            query, key = torch.randn(6, 4, length, 8), torch.randn(6, 4, LENGTHS[-1 - index], 8)
            torch.testing.assert_close(compiled(query, key), torch_bwattn.sdpa(query, key, key))
    assert len(graphs.dynamo) == 1
    assert "bwattn.sdpa_forward.default" in graphs.targets(graphs.forward)


def test_inductor_dynamic():
    compiled = torch.compile(step_of("causal"), fullgraph=True, dynamic=True, backend="inductor")
    for length in LENGTHS[::4]:
        query, key, _ = inputs_of("causal", length, 2 * length + 1)
        out, lse = compiled(query, key, None)
        expected = step_of("causal")(query, key, None)
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(lse, expected[1])
        out.sum().backward()

"""patch_sdpa and torch.compile: under it, inside it, and after it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_bwattn
from tests.support.attend import count
from tests.support.graphs import Graphs

OURS = "bwattn.sdpa_forward.default"


def attend(query):
    return F.scaled_dot_product_attention(query, query, query, is_causal=True)


QUERY = torch.randn(2, 4, 9, 8)


def test_compiled_under_the_patch():
    graphs, query = Graphs(), QUERY.clone().requires_grad_()
    with torch_bwattn.patch_sdpa():
        out = torch.compile(attend, fullgraph=True, backend=graphs)(query)
    torch.testing.assert_close(out, torch_bwattn.sdpa(query, query, query, is_causal=True))
    (found,) = torch.autograd.grad(out.sum(), query)
    (expected,) = torch.autograd.grad(torch_bwattn.sdpa(query, query, query, is_causal=True).sum(), query)
    torch.testing.assert_close(found, expected)
    assert OURS in graphs.targets(graphs.forward)
    assert len(graphs.dynamo) == 1


def test_patched_inside_the_graph():
    def step(query):
        with torch_bwattn.patch_sdpa():
            return attend(query)

    graphs = Graphs()
    out = torch.compile(step, fullgraph=True, backend=graphs)(QUERY)
    torch.testing.assert_close(out, torch_bwattn.sdpa(QUERY, QUERY, QUERY, is_causal=True))
    assert OURS in graphs.targets(graphs.forward)


def test_decorated():
    graphs = Graphs()
    step = torch.compile(torch_bwattn.patch_sdpa()(attend), fullgraph=True, backend=graphs)
    step(QUERY)
    assert OURS in graphs.targets(graphs.forward)


@pytest.mark.parametrize("patched_first", [False, True])
def test_the_patch_of_the_moment_decides(patched_first):
    """A function compiled under the patch must not stay patched, nor one compiled without it unpatched."""
    step = torch.compile(attend, fullgraph=True, backend="aot_eager")
    expected = attend(QUERY)
    for patched in (patched_first, not patched_first, patched_first):
        torch_bwattn.reset_call_counts()
        if patched:
            with torch_bwattn.patch_sdpa():
                out = step(QUERY)
        else:
            out = step(QUERY)
        torch.testing.assert_close(out, expected)
        assert count() == int(patched)


def test_entering_again_does_not_recompile():
    graphs = Graphs()
    step = torch.compile(attend, fullgraph=True, backend=graphs)
    for _ in range(4):
        with torch_bwattn.patch_sdpa():
            step(QUERY)
    assert len(graphs.dynamo) == 1


def test_a_module_in_training():
    module = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train()
    x = torch.randn(2, 9, 32)
    expected = module(x)
    with torch_bwattn.patch_sdpa():
        out = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
        out.sum().backward()
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    assert count() == 1


def test_inductor():
    with torch_bwattn.patch_sdpa():
        out = torch.compile(attend, fullgraph=True)(QUERY)
    torch.testing.assert_close(out, attend(QUERY))
    assert count() == 1

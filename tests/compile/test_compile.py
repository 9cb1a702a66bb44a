"""torch.compile: one graph, the right values, real strides, forward and backward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

import torch_bwattn
from tests.strategies import calls, share
from tests.support.calls import Call, Mask, Operand, Sink, build, run
from tests.support.check import check_call
from tests.support.graphs import Graphs

CALL = Call(Operand((2, 4, 9, 8), "bshd"), Operand((2, 2, 11, 8), "bshd"), Operand((2, 2, 11, 8)), enable_gqa=True)
KINDS = {
    "plain": {"with_lse_grad": True},
    "causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "bool": {"mask": Mask((2, 1, 9, 11), kind="bool")},
    "additive": {"mask": Mask((4, 9, 11), kind="own", needs_grad=True)},
    "mask_of_one_column": {"mask": Mask((2, 1, 9, 1), kind="own", needs_grad=True)},
    "scale": {"scale": -0.5},
    "window": {"window_size": (3, 2), "causal_alignment": "bottom_right"},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": Sink(), "with_lse_grad": True},
    "window_softcap_sink": {"window_size": (4, -1), "softcap": 2.0, "sink": Sink("float32"), "is_causal": True},
}


def compiled_run(call, tensors, entry, backend):
    """run(), with the forward compiled into one graph."""
    functions = {
        "function": lambda *a, **k: torch_bwattn.sdpa(*a, **k, return_lse=True),
        "op_lse": torch.ops.bwattn.sdpa_with_lse,
        "op": lambda *a, **k: (torch.ops.bwattn.sdpa(*a, **k), None),
    }
    function = torch.compile(functions[entry], fullgraph=True, backend=backend)
    out, lse = function(tensors.query, tensors.key, tensors.value, tensors.mask, **call.arguments(), **tensors.sinks())
    outputs = [(out, tensors.grad_out)]
    if lse is not None and tensors.grad_lse is not None:
        outputs.append((lse, tensors.grad_lse))
    leaves = [tensor for tensor in tensors.inputs() if tensor.requires_grad]
    grads = torch.autograd.grad([o for o, _ in outputs], leaves, [g for _, g in outputs]) if leaves else ()
    return [tensor for tensor in (out, lse, *grads) if tensor is not None]


@pytest.mark.parametrize("entry", ["function", "op_lse", "op"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_eager(kind, entry):
    call = dataclasses.replace(CALL, **KINDS[kind])
    if entry == "op":
        call = dataclasses.replace(call, with_lse_grad=False)
    graphs = Graphs()
    found = compiled_run(call, build(call), entry, graphs)
    expected = [tensor for _, tensor in run(call, build(call), entry).items()]
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    assert len(graphs.dynamo) == len(graphs.forward) == len(graphs.backward) == 1
    assert graphs.targets(graphs.forward).count("bwattn.sdpa_forward.default") == 1
    assert graphs.targets(graphs.backward).count("bwattn.sdpa_backward.default") == 1
    assert "bwattn.sdpa_forward.default" not in graphs.targets(graphs.backward), "the forward runs twice"


@pytest.mark.parametrize("kind", ["plain", "causal", "additive", "window_softcap_sink"])
def test_inductor(kind):
    """Inductor checks the real strides against the fake ones, and puts its own kernels around the op."""
    call = dataclasses.replace(CALL, **KINDS[kind])
    found = compiled_run(call, build(call), "function", "inductor")
    for got, (name, want) in zip(found, run(call, build(call)).items(), strict=True):
        torch.testing.assert_close(got, want, msg=name)


@settings(max_examples=share(0.25))
@given(call=calls())
def test_any_call_compiles(call):
    """Values are checked eagerly elsewhere: here, that compiled and eager agree and that nothing breaks the graph."""
    torch._dynamo.reset()
    call = dataclasses.replace(call, dropout_p=0.0 if call.dropout_p < 1.0 else 1.0, with_out_grad=True)
    found = compiled_run(call, build(call), "function", "aot_eager")
    expected = [tensor for _, tensor in run(call, build(call)).items()]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_free_reshape_of_the_output():
    """The output of a transposed B,S,H,D query reshapes to B,S,H*D without a copy, in the graph as well."""

    def block(x):
        query = x.view(2, 16, 4, 8).transpose(1, 2)
        out = torch_bwattn.sdpa(query, query, query, is_causal=True)
        return out.transpose(1, 2).reshape(2, 16, 32)

    x = torch.randn(2, 16, 32)
    graphs = Graphs()
    compiled = torch.compile(block, fullgraph=True, backend=graphs)
    torch.testing.assert_close(compiled(x), block(x))
    assert "aten.clone.default" not in graphs.targets(graphs.forward)


def test_transposed_query_has_the_real_strides():
    query = torch.randn(2, 9, 4, 8).transpose(1, 2)

    def strided(query):
        out, lse = torch_bwattn.sdpa(query, query, query, return_lse=True)
        return out, lse, torch.tensor(out.stride())

    _, _, fake = torch.compile(strided, fullgraph=True, backend="aot_eager")(query)
    assert tuple(fake.tolist()) == torch_bwattn.sdpa(query, query, query).stride()


def test_expanded_mask_of_one_column():
    query = torch.randn(2, 4, 9, 8)
    mask = torch.randn(2, 1, 9, 1)

    def step(query, mask):
        return torch_bwattn.sdpa(query, query, query, mask.expand(2, 4, 9, 9))

    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        found = torch.compile(step, fullgraph=True, backend=backend)(query, mask)
        torch.testing.assert_close(found, step(query, mask))


def test_calls_that_differ_in_one_thing():
    """Scale, alignment and strides each change the values; a cache keyed by less would mix them up."""
    query = torch.randn(1, 2, 5, 8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(query, key, **options):
        return torch_bwattn.sdpa(query, key, key, is_causal=True, **options)

    for options in ({}, {"scale": 0.3}, {"scale": 3.0}, {"causal_alignment": "bottom_right"}):
        for key in (torch.randn(1, 2, 7, 8), torch.randn(1, 7, 2, 8).transpose(1, 2)):
            expected = torch_bwattn.sdpa(query, key, key, is_causal=True, **options)
            torch.testing.assert_close(step(query, key, **options), expected)


def test_reduced_precision_and_module():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96)
            self.out = torch.nn.Linear(32, 32)

        def forward(self, x):
            query, key, value = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
            out = torch_bwattn.sdpa(query, key, value, is_causal=True)
            return self.out(out.transpose(1, 2).flatten(2))

    block = Block().bfloat16()
    x = torch.randn(2, 13, 32, dtype=torch.bfloat16)
    expected = block(x)
    found = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected)
    found.float().sum().backward()
    assert block.qkv.weight.grad is not None


def test_dropout_is_drawn_anew_each_call_and_seeded():
    query = torch.randn(1, 2, 16, 8)
    compiled = torch.compile(
        lambda query: torch_bwattn.sdpa(query, query, query, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    torch.manual_seed(3)
    first, second = compiled(query), compiled(query)
    torch.manual_seed(3)
    assert torch.equal(compiled(query), first)
    assert not torch.equal(first, second)


def test_dropout_mask_is_the_same_in_a_compiled_backward():
    value = torch.eye(16).expand(2, 2, 16, 16).contiguous().requires_grad_()
    query = torch.zeros(2, 2, 16, 8)
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        step = torch.compile(
            lambda value: torch_bwattn.sdpa(query, query, value, dropout_p=0.5), fullgraph=True, backend=backend
        )
        out = step(value)
        (dv,) = torch.autograd.grad(out.sum(), value)
        torch.testing.assert_close(dv, out.detach().sum(-2).unsqueeze(-1).expand_as(dv))


@pytest.mark.parametrize("compiled_under", [None, "reference", "aten"])
def test_pin_around_a_compiled_call(compiled_under):
    """The pin of the moment decides, not the one of the moment it was compiled."""
    query = torch.randn(2, 4, 160, 32)
    step = torch.compile(lambda query: torch_bwattn.sdpa(query, query, query), fullgraph=True, backend="aot_eager")
    if compiled_under is None:
        step(query)
    else:
        with torch_bwattn.backend(compiled_under):
            step(query)
    for name in ("reference", "aten"):
        torch_bwattn.reset_call_counts()
        with torch_bwattn.backend(name):
            step(query)
        assert set(torch_bwattn.call_counts()) == {name}


def test_check_call_still_works_afterwards():
    check_call(CALL)

"""The function that users call, which passes the dispatcher by where nobody watches it."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

import torch_bwattn
from torch_bwattn.layout import Conforming, conform
from torch_bwattn.ops import eager


def operands(needs_grad: bool = False) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 4, 5, 16, requires_grad=needs_grad) for _ in range(3))


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_size": (2, 1), "softcap": 3.0}, {"scale": 0.0}])
def test_it_gives_what_the_operator_gives(needs_grad, options):
    q, k, v = operands(needs_grad)
    results = []
    for call in (torch_bwattn.sdpa, torch.ops.bwattn.sdpa):
        out = call(q, k, v, **options)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v)) if needs_grad else ()
        results.append((out, *grads))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    out, lse = torch_bwattn.sdpa(q, k, v, return_lse=True, **options)
    other, other_lse = torch.ops.bwattn.sdpa_with_lse(q, k, v, **options)
    assert torch.equal(out, other)
    assert torch.equal(lse, other_lse)


def test_a_function_mode_sees_the_operator():
    names = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seeing():
        torch_bwattn.sdpa(*operands())
    assert any("bwattn.sdpa" in name for name in names)


def test_a_profiler_sees_the_operator():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        torch_bwattn.sdpa(*operands())
    assert "bwattn::sdpa" in {event.name for event in seen.events()}


@pytest.mark.filterwarnings("ignore")
def test_a_trace_sees_the_operator():
    traced = torch.jit.trace(torch_bwattn.sdpa, operands())
    assert "bwattn::sdpa" in str(traced.graph)
    q, k, v = (2.0 * tensor for tensor in operands())
    assert torch.equal(traced(q, k, v), torch_bwattn.sdpa(q, k, v))


def test_nobody_else_makes_it_take_the_dispatchers_way(monkeypatch):
    calls, call = [], eager.call
    monkeypatch.setattr(eager, "call", lambda *arguments: calls.append(1) or call(*arguments))
    monkeypatch.setattr(torch.ops.bwattn, "sdpa", None)
    torch_bwattn.sdpa(*operands())
    assert calls == [1]


def test_what_conforms_once_is_given_back_as_it_is():
    conforming, like = Conforming(), torch.empty(2, 5, 4, 16).transpose(1, 2)
    dense, other = torch.randn(2, 5, 4, 16).transpose(1, 2), torch.randn(2, 4, 5, 16)
    for result in (other, dense, dense, other):
        found = conforming(result, like)
        assert (found is result) == (result is dense)
        assert found.stride() == conform(result, like).stride() == dense.stride()
        assert torch.equal(found, result)

"""fp64 gradients against finite differences, and what happens beyond the first derivative."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad, gradcheck

import torch_bwattn
from torch_bwattn.testing import oracle

KINDS = (
    "plain",
    "causal",
    "bottom_right",
    "bool",
    "additive",
    "gqa",
    "dead_rows",
    "broadcast",
    "scale_negative",
    "window",
    "window_and_mask",
    "softcap",
    "sink",
    "sink_of_dead_rows",
    "all_features",
)


def inputs_of(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    query, key, value = leaf(2, 4, 3, 3), leaf(2, 4, 5, 3), leaf(2, 4, 5, 2)
    keywords, mask, sink = {}, None, None
    if kind in ("causal", "bottom_right"):
        keywords = {"is_causal": True, "causal_alignment": "bottom_right" if kind == "bottom_right" else "top_left"}
    elif kind == "bool":
        mask = torch.rand(2, 1, 3, 5, generator=generator) < 0.6
    elif kind == "dead_rows":
        mask = torch.rand(3, 5, generator=generator) < 0.6
        mask[1] = False
    elif kind == "additive":
        mask = leaf(4, 1, 5)
    elif kind == "gqa":
        key, value = leaf(2, 2, 5, 3), leaf(2, 2, 5, 2)
        keywords = {"enable_gqa": True}
    elif kind == "broadcast":
        key, value, mask = leaf(1, 5, 3), leaf(4, 5, 2), leaf(5)
    elif kind == "scale_negative":
        keywords = {"scale": -0.7}
    elif kind == "window":
        keywords = {"window_size": (1, 0), "causal_alignment": "bottom_right"}
    elif kind == "window_and_mask":
        keywords, mask = {"window_size": (-1, 1)}, leaf(3, 1)
    elif kind == "softcap":
        keywords = {"softcap": 0.8}
    elif kind == "sink":
        sink = leaf(4)
    elif kind == "sink_of_dead_rows":
        keywords, sink = {"window_size": (0, 0), "causal_alignment": "bottom_right"}, leaf(4)
        key, value = leaf(2, 4, 2, 3), leaf(2, 4, 2, 2)
    elif kind == "all_features":
        keywords, mask, sink = {"window_size": (2, 1), "softcap": 1.3}, leaf(4, 3, 5), leaf(4)
    tensors = (query, key, value, mask)
    return (tensors if sink is None else (*tensors, sink)), keywords


def attend(op, *args, **keywords):
    """Calls with the sink, if any, as the fifth argument."""
    return op(*args[:4], **keywords, **({"sink": args[4]} if len(args) > 4 else {}))


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_of_the_output(kind):
    args, keywords = inputs_of(kind)
    assert gradcheck(lambda *args: attend(torch.ops.bwattn.sdpa, *args, **keywords), args, fast_mode=False)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_of_output_and_lse(kind):
    args, keywords = inputs_of(kind)

    def both(*args):
        out, lse = attend(torch.ops.bwattn.sdpa_with_lse, *args, **keywords)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert gradcheck(both, args, fast_mode=False)


def test_gradcheck_with_dropout():
    args, _ = inputs_of("plain")

    def seeded(*args):
        torch.manual_seed(3)
        return torch.ops.bwattn.sdpa(*args, dropout_p=0.4)

    assert gradcheck(seeded, args, fast_mode=False)


def test_gradcheck_of_expanded_inputs():
    base = torch.randn(1, 1, 5, 3, dtype=torch.float64, requires_grad=True)
    query = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)

    def expanded(query, base):
        rows = base.expand(2, 4, 5, 3)
        return torch.ops.bwattn.sdpa(query, rows, rows)

    assert gradcheck(expanded, (query, base), fast_mode=False)


@pytest.mark.parametrize("kind", ["plain", "causal", "additive", "gqa"])
def test_double_backward_is_right_or_raises(kind):
    (query, key, value, mask), keywords = inputs_of(kind)
    leaves = [tensor for tensor in (query, key, value, mask) if tensor is not None and tensor.requires_grad]
    out = torch.ops.bwattn.sdpa(query, key, value, mask, **keywords)
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    try:
        second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
    except (RuntimeError, NotImplementedError) as error:
        message = str(error)
    else:
        step, direction = 1e-5, [torch.randn_like(leaf) for leaf in leaves]

        def norm_of_gradients(sign):
            moved = [
                (leaf + sign * step * d).detach().requires_grad_() for leaf, d in zip(leaves, direction, strict=True)
            ]
            args = moved if mask is None else [*moved[:3], moved[3]]
            out = oracle(*args, **keywords).out
            reference = oracle(*args, **keywords, grad_out=2 * out, needs_mask_grad=mask is not None)
            found = [reference.dq, reference.dk, reference.dv, reference.dmask]
            return sum(grad.square().sum() for grad in found if grad is not None)

        slope = (norm_of_gradients(1) - norm_of_gradients(-1)) / (2 * step)
        mine = sum((grad * d).sum() for grad, d in zip(second, direction, strict=True))
        torch.testing.assert_close(mine, slope, rtol=1e-4, atol=1e-4)
        return
    assert "sdpa" in message
    assert any(word in message.lower() for word in ("double backward", "second", "twice", "differentiable"))


def test_forward_mode_is_right_or_raises():
    (query, key, value, _), _ = inputs_of("plain")
    tangent = torch.randn_like(query)
    message = ""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query.detach(), tangent)
        try:
            found = forward_ad.unpack_dual(torch_bwattn.sdpa(dual, key.detach(), value.detach())).tangent
        except (RuntimeError, NotImplementedError) as error:
            message = str(error)
    if message:
        assert "forward" in message.lower()
        return
    assert found is not None, "a tangent went in and none came out: silently zero"
    step = 1e-6
    ends = [oracle(query + sign * step * tangent, key, value).out for sign in (1, -1)]
    torch.testing.assert_close(found, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-7)


def test_gradients_of_some_inputs_only():
    (query, key, value, _), _ = inputs_of("plain")
    whole = torch.autograd.grad(torch_bwattn.sdpa(query, key, value).sum(), (query, key, value))
    for index in range(3):
        leaves = [tensor.detach().requires_grad_(i == index) for i, tensor in enumerate((query, key, value))]
        (found,) = torch.autograd.grad(torch_bwattn.sdpa(*leaves).sum(), leaves[index])
        torch.testing.assert_close(found, whole[index])


def test_backward_twice_over_a_retained_graph():
    (query, key, value, _), _ = inputs_of("causal")
    out = torch_bwattn.sdpa(query, key, value, is_causal=True)
    first = torch.autograd.grad(out.sum(), (query, key, value), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_saved_tensors_notice_changes_in_place():
    (query, key, value, _), _ = inputs_of("plain")
    key = key * 1
    out = torch_bwattn.sdpa(query, key, value)
    with torch.no_grad():
        key.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_no_graph_without_need():
    query = torch.randn(1, 2, 3, 4)
    assert not torch_bwattn.sdpa(query, query, query).requires_grad
    leaf = query.clone().requires_grad_()
    with torch.no_grad():
        assert not torch_bwattn.sdpa(leaf, query, query).requires_grad
    with torch.inference_mode():
        out, lse = torch_bwattn.sdpa(leaf, query, query, return_lse=True)
        assert out.is_inference()
        assert not lse.requires_grad

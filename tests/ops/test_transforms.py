"""vmap and torch.func over the op."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, jacrev, vjp, vmap

import torch_bwattn
from torch_bwattn.testing import Results, judge, oracle, pt_reference


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def check(out, *args, **kwargs):
    judge(Results(out), oracle(*args, **kwargs), pt_reference(*args, **kwargs))[0].check()


@pytest.mark.parametrize("entry", [torch_bwattn.sdpa, torch.ops.bwattn.sdpa], ids=["function", "op"])
@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, 0, 1), (0, None, 0), (-1, 0, 0)], ids=str
)
def test_vmap(entry, in_dims):
    tensors = []
    for size, dim in zip((4, 6, 6), in_dims, strict=True):
        tensor = normal(2, 3, size, 8)
        tensors.append(
            tensor if dim is None else torch.stack([tensor * (i + 1) for i in range(5)], dim if dim >= 0 else 4)
        )
    out = vmap(entry, in_dims)(*tensors)
    for index in range(5):
        parts = [t if d is None else t.select(d, index) for t, d in zip(tensors, in_dims, strict=True)]
        check(out[index], *parts)


@pytest.mark.parametrize("kind", ["bool", "additive", "row", "scalar"])
@pytest.mark.parametrize("mask_dim", [None, 0])
def test_vmap_over_masks(kind, mask_dim):
    query, key = normal(5, 2, 3, 4, 8), normal(5, 2, 3, 6, 8)
    shape = {"bool": (3, 4, 6), "additive": (1, 4, 6), "row": (6,), "scalar": ()}[kind]
    mask = normal(*(() if mask_dim is None else (5,)), *shape)
    mask = mask > -0.5 if kind == "bool" else mask
    out = vmap(torch_bwattn.sdpa, (0, 0, 0, mask_dim))(query, key, key, mask)
    for index in range(5):
        check(out[index], query[index], key[index], key[index], mask if mask_dim is None else mask[index])


def test_vmap_of_two_dimensional_attention():
    query, key, value = normal(5, 4, 8), normal(5, 6, 8), normal(5, 6, 3)
    check(vmap(torch_bwattn.sdpa)(query, key, value), query, key, value)


def test_nested_vmap():
    query, key = normal(2, 3, 2, 4, 8), normal(2, 3, 2, 6, 8)
    out = vmap(vmap(torch_bwattn.sdpa))(query, key, key)
    check(out.flatten(0, 1), query.flatten(0, 1), key.flatten(0, 1), key.flatten(0, 1))


def test_vmap_of_options():
    query, key = normal(3, 2, 4, 5, 8), normal(3, 2, 2, 7, 8)

    def call(query, key):
        return torch_bwattn.sdpa(
            query,
            key,
            key,
            is_causal=True,
            enable_gqa=True,
            scale=0.0,
            causal_alignment="bottom_right",
            return_lse=True,
        )

    out, lse = vmap(call)(query, key)
    options = {"is_causal": True, "enable_gqa": True, "scale": 0.0, "causal_alignment": "bottom_right"}
    for index in range(3):
        args = (query[index], key[index], key[index])
        for verdict in judge(Results(out[index], lse[index]), oracle(*args, **options), pt_reference(*args, **options)):
            verdict.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_func_grad(dtype):
    query, key, value = (normal(2, 3, 5, 8, dtype=dtype) for _ in range(3))
    mask = normal(3, 1, 5, dtype=dtype)

    def loss(query, key, value, mask):
        return torch_bwattn.sdpa(query, key, value, mask).square().sum()

    found = grad(loss, (0, 1, 2, 3))(query, key, value, mask)
    out = oracle(query, key, value, mask).out
    options = {"grad_out": (2 * out).to(dtype), "needs_mask_grad": True}
    reference, pt = oracle(query, key, value, mask, **options), pt_reference(query, key, value, mask, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for got, want in zip(found, (reference.dq, reference.dk, reference.dv, reference.dmask), strict=True):
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
    assert pt.dq is not None


def test_vmap_of_grad_is_per_sample_gradients():
    query, key = normal(4, 2, 5, 8, dtype=torch.float64), normal(4, 2, 6, 8, dtype=torch.float64)

    def loss(query, key):
        out, lse = torch_bwattn.sdpa(query, key, key, return_lse=True)
        return out.square().sum() + lse.sum()

    found = vmap(grad(loss, (0, 1)))(query, key)
    for index in range(4):
        single = grad(loss, (0, 1))(query[index], key[index])
        for got, want in zip(found, single, strict=True):
            torch.testing.assert_close(got[index], want)


def test_vjp_and_jacrev():
    query, key = normal(1, 3, 4, dtype=torch.float64), normal(1, 5, 4, dtype=torch.float64)
    out, pull = vjp(lambda query: torch_bwattn.sdpa(query, key, key), query)
    cotangent = torch.randn_like(out)
    jacobian = jacrev(lambda query: torch_bwattn.sdpa(query, key, key))(query)
    torch.testing.assert_close(pull(cotangent)[0], torch.tensordot(cotangent, jacobian, 3))


def test_functional_call_of_a_module():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = torch.nn.Linear(8, 24)

        def forward(self, x):
            query, key, value = self.projection(x).chunk(3, -1)
            return torch_bwattn.sdpa(query, key, value, is_causal=True)

    module, x = Attention(), normal(2, 5, 8)
    parameters = dict(module.named_parameters())
    gradients, value = grad_and_value(lambda parameters: functional_call(module, parameters, (x,)).sum())(parameters)
    module(x).sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    torch.testing.assert_close(value, module(x).sum())


class TestRandomness:
    """Dropout under vmap follows PyTorch's three modes."""

    query = torch.ones(4, 2, 16, 8)

    def dropped(self, query):
        return torch_bwattn.sdpa(query, torch.zeros(2, 16, 8), torch.eye(16).expand(2, 16, 16), dropout_p=0.5)

    def test_error_is_the_default(self):
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(self.dropped)(self.query)

    def test_different(self):
        torch.manual_seed(0)
        out = vmap(self.dropped, randomness="different")(self.query)
        assert not any(torch.equal(out[0], out[index]) for index in range(1, 4))
        assert set(out.unique().tolist()) == {0.0, 2 / 16}

    def test_same(self):
        torch.manual_seed(0)
        out = vmap(self.dropped, randomness="same")(self.query)
        assert all(torch.equal(out[0], out[index]) for index in range(1, 4))
        assert set(out.unique().tolist()) == {0.0, 2 / 16}

    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_gradients_use_the_mask_of_the_forward(self, randomness):
        values = torch.eye(16).expand(4, 2, 16, 16)

        def loss(value, query):
            out = torch_bwattn.sdpa(query, torch.zeros(2, 16, 8), value, dropout_p=0.5)
            return out.sum(), out

        torch.manual_seed(1)
        found, out = vmap(grad(loss, has_aux=True), randomness=randomness)(values, self.query)
        # dV of a sum is the column sums of the dropped probabilities, which the identity shows as the output.
        torch.testing.assert_close(found, out.sum(-2).unsqueeze(-1).expand_as(found))

    def test_func_grad_with_dropout(self):
        def loss(value):
            out = torch_bwattn.sdpa(self.query[0], torch.zeros(2, 16, 8), value, dropout_p=0.5)
            return out.sum(), out

        found, out = grad(loss, has_aux=True)(torch.eye(16).expand(2, 16, 16))
        torch.testing.assert_close(found, out.sum(-2).unsqueeze(-1).expand_as(found))

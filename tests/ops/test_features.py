"""Windows, soft caps and sinks by their relations to calls without them, and through every entry point."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, vmap

import torch_bwattn
from tests.support.attend import judged, tensors
from torch_bwattn.testing import Results, judge, oracle, pt_reference


def band(rows, columns, left, right, offset=0):
    """What a window shows, as a bool mask."""
    first = torch.arange(rows).unsqueeze(1) + offset
    column = torch.arange(columns)
    return (column >= first - left) & (column <= first + right)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_a_window_is_a_band_of_a_mask(alignment):
    query, key, value = tensors(9, 14)
    out = torch_bwattn.sdpa(query, key, value, window_size=(3, 1), causal_alignment=alignment)
    judged(out, query, key, value, band(9, 14, 3, 1, 5 if alignment == "bottom_right" else 0))


def test_a_window_and_a_mask():
    query, key, value = tensors(9, 14)
    mask = torch.rand(9, 14) < 0.7
    out = torch_bwattn.sdpa(query, key, value, mask, window_size=(2, 4))
    judged(out, query, key, value, mask & band(9, 14, 2, 4))


@pytest.mark.parametrize("right", [-1, 0, 5])
def test_causal_ends_a_window_at_the_diagonal(right):
    query, key, value = tensors(9, 14)
    out = torch_bwattn.sdpa(query, key, value, is_causal=True, window_size=(3, right))
    assert torch.equal(out, torch_bwattn.sdpa(query, key, value, window_size=(3, 0)))


def test_an_unlimited_window_is_none(capsys):
    query = torch.randn(2, 4, 160, 32)  # enough scores for the fused kernel, which has no window
    for options in ({"window_size": (-1, -1)}, {"window_size": (-1, 7), "is_causal": True}):
        torch_bwattn.reset_call_counts()
        causal = options.get("is_causal", False)
        out = torch_bwattn.sdpa(query, query, query, **options)
        assert torch.equal(out, torch_bwattn.sdpa(query, query, query, is_causal=causal))
        assert torch_bwattn.call_counts() == {"aten": 2}
        assert torch_bwattn.explain(query, query, query, **options).forward.problem.low_diagonal is None
    assert "window" not in capsys.readouterr().out


def test_a_window_beyond_any_integer_of_a_kernel():
    query, key, value = tensors(9, 14)
    out = torch_bwattn.sdpa(query, key, value, window_size=(2**62, 2**62))
    judged(out, query, key, value)


def test_keys_outside_of_the_window_are_not_read():
    """By blocks of rows: a NaN value would spoil its whole block, were its weight of 0 multiplied."""
    query, key = torch.randn(1, 1, 2048, 8), torch.randn(1, 1, 2048, 8)
    spoilt = key.clone()
    spoilt[:, :, :512] = spoilt[:, :, 1536:] = math.nan
    out = torch_bwattn.sdpa(query, spoilt, spoilt, window_size=(9, 9))
    assert torch.equal(out[:, :, 768:1280], torch_bwattn.sdpa(query, key, key, window_size=(9, 9))[:, :, 768:1280])


def test_a_soft_cap_bounds_scores():
    query, key, value = tensors()
    _, lse = torch_bwattn.sdpa(query * 1e4, key, value, softcap=3.0, return_lse=True)
    assert lse.max() <= 3.0 + math.log(11) + 1e-5
    out = torch_bwattn.sdpa(query, key, value, softcap=1e7)
    judged(out, query, key, value)


@pytest.mark.parametrize("softcap", [1e-300, 1e300])
def test_a_soft_cap_beyond_float32(softcap):
    query = torch.randn(1, 2, 160, 16)
    judged(torch_bwattn.sdpa(query, query, query, softcap=softcap), query, query, query, softcap=softcap)


@pytest.mark.parametrize("dropout_p", [0.0, 1.0])
def test_a_sink_takes_its_share_of_each_row(dropout_p):
    query, key, value = tensors(dtype=torch.float64)
    sink = torch.randn(4, dtype=torch.float64)
    out, lse = torch_bwattn.sdpa(query, key, value, dropout_p=dropout_p, sink=sink, return_lse=True)
    plain_out, plain_lse = torch_bwattn.sdpa(query, key, value, dropout_p=dropout_p, return_lse=True)
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sink.view(4, 1)))
    torch.testing.assert_close(out, plain_out * (plain_lse - lse).exp().unsqueeze(-1))


def test_a_sink_of_minus_infinity_is_none():
    query, key, value = tensors()
    sink = torch.full((4,), -math.inf, requires_grad=True)
    out, lse = torch_bwattn.sdpa(query, key, value, sink=sink, window_size=(0, 0), return_lse=True)
    plain = torch_bwattn.sdpa(query, key, value, window_size=(0, 0), return_lse=True)
    assert torch.equal(out, plain[0])
    assert torch.equal(lse, plain[1])
    (dsink,) = torch.autograd.grad((out, lse), sink, (torch.ones_like(out), torch.ones_like(lse)))
    assert not dsink.any()


@pytest.mark.parametrize("columns", [0, 3])
def test_a_row_that_sees_the_sink_alone(columns):
    query, key, value = tensors(9, columns)
    sink = torch.randn(4, requires_grad=True)
    out, lse = torch_bwattn.sdpa(query, key, value, sink=sink, window_size=(1, 1), return_lse=True)
    alone = slice(columns + 1 if columns else 0, None)
    assert not out[:, :, alone].any()
    assert torch.equal(lse[:, :, alone], sink.view(1, 4, 1).expand(2, 4, 9)[:, :, alone])
    (dsink,) = torch.autograd.grad(lse[:, :, alone].sum(), sink)
    torch.testing.assert_close(dsink, torch.full((4,), 2.0 * lse[0, 0, alone].numel()))


@pytest.mark.parametrize("sink_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_a_sink_repeat(sink_dtype):
    query, key, value = (tensor.bfloat16() for tensor in tensors(70, 300))
    sink = torch.randn(4).to(sink_dtype).requires_grad_()
    found = [
        torch.autograd.grad(torch_bwattn.sdpa(query, key, value, sink=sink, softcap=9.0).float().sum(), sink)[0]
        for _ in range(2)
    ]
    assert found[0].dtype == sink_dtype
    assert torch.equal(*found)


@pytest.mark.parametrize("shape", [(9, 8), (4, 9, 8), (3, 2, 4, 9, 8)], ids=str)
def test_other_ranks(shape):
    query, sink = torch.randn(shape), torch.randn(shape[-3] if len(shape) > 2 else 1)
    options = {"window_size": (4, 0), "softcap": 2.0, "sink": sink}
    judged(torch_bwattn.sdpa(query, query, query, **options), query, query, query, **options)


def test_the_op_and_the_function_agree_with_each_other():
    query, key, value = tensors()
    options = {"window_size": [3, 2], "softcap": 2.0, "sink": torch.randn(4)}
    out, lse = torch_bwattn.sdpa(query, key, value, **options, return_lse=True)
    assert torch.equal(out, torch.ops.bwattn.sdpa(query, key, value, **options))
    assert all(map(torch.equal, (out, lse), torch.ops.bwattn.sdpa_with_lse(query, key, value, **options)))
    primitive = torch.ops.bwattn.sdpa_forward(
        query, key, value, None, None, 0.0, False, 8**-0.5, "top_left", **options
    )  # fmt: skip
    assert all(map(torch.equal, (out, lse), primitive))


@pytest.mark.parametrize(
    ("options", "word"),
    [({"window_size": (3, 2)}, "window"), ({"softcap": 2.0}, "caps"), ({"sink": torch.zeros(4)}, "sink")],
    ids=["window", "softcap", "sink"],
)
def test_aten_refuses(options, word):
    query = torch.randn(2, 4, 160, 32)
    with torch_bwattn.backend("aten"), pytest.raises(torch_bwattn.UnsupportedProblem, match=word):
        torch_bwattn.sdpa(query, query, query, **options)


def test_aten_refuses_a_right_side_beside_a_mask():
    query = torch.randn(2, 4, 160, 32)
    options = {"attn_mask": torch.ones(160, 160, dtype=torch.bool), "window_size": (-1, 0)}
    with torch_bwattn.backend("aten"), pytest.raises(torch_bwattn.UnsupportedProblem, match="window"):
        torch_bwattn.sdpa(query, query, query, **options)
    judged(torch_bwattn.sdpa(query, query, query, **options), query, query, query, **options)


def test_explain_shows_them(capsys):
    query = torch.randn(2, 4, 16, 8)
    torch_bwattn.explain(query, query, query, window_size=(3, 2), softcap=2.5, sink=torch.zeros(4))
    text = capsys.readouterr().out
    for piece in ("window (i + -3 <= j <= i + 2)", "softcap 2.5", "sink torch.float32"):
        assert piece in text


@pytest.mark.parametrize("sink_dim", [None, 0])
def test_vmap(sink_dim):
    query, key = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 2, 4, 7, 8)
    sink = torch.randn(4) if sink_dim is None else torch.randn(3, 4)

    def call(query, key, sink):
        return torch_bwattn.sdpa(query, key, key, window_size=(2, 3), softcap=2.0, sink=sink, return_lse=True)

    out, lse = vmap(call, (0, 0, sink_dim))(query, key, sink)
    for index in range(3):
        args = query[index], key[index], key[index]
        options = {"window_size": (2, 3), "softcap": 2.0, "sink": sink if sink_dim is None else sink[index]}
        for verdict in judge(Results(out[index], lse[index]), oracle(*args, **options), pt_reference(*args, **options)):
            verdict.check()


@pytest.mark.parametrize("sink_dim", [None, 0])
def test_per_sample_gradients(sink_dim):
    query, key = (torch.randn(3, 4, size, 8, dtype=torch.float64) for size in (5, 7))
    sink = torch.randn(4, dtype=torch.float64) if sink_dim is None else torch.randn(3, 4, dtype=torch.float64)

    def loss(query, key, sink):
        return torch_bwattn.sdpa(query, key, key, window_size=(2, 3), softcap=2.0, sink=sink).square().sum()

    found = vmap(grad(loss, (0, 1, 2)), (0, 0, sink_dim))(query, key, sink)
    for index in range(3):
        single = grad(loss, (0, 1, 2))(query[index], key[index], sink if sink_dim is None else sink[index])
        for got, want in zip(found, single, strict=True):
            torch.testing.assert_close(got[index], want)


@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.float16], ids=str)
def test_autocast(sink_dtype):
    """A float32 sink stays what it is; one in another 16-bit dtype is cast as the operands are."""
    query, key, value = tensors()
    sink = torch.randn(4).to(sink_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = torch_bwattn.sdpa(query, key, value, sink=sink)
    assert out.dtype == torch.bfloat16
    (dsink,) = torch.autograd.grad(out.float().sum(), sink)
    assert dsink.dtype == sink_dtype
    used = sink.detach() if sink_dtype == torch.float32 else sink.detach().bfloat16()
    judged(out, *(tensor.bfloat16() for tensor in (query, key, value)), sink=used)


def test_second_derivatives_are_refused():
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    sink = torch.randn(2, requires_grad=True)
    (dsink,) = torch.autograd.grad(torch_bwattn.sdpa(query, query, query, sink=sink).sum(), sink, create_graph=True)
    with pytest.raises(NotImplementedError, match="second"):
        dsink.sum().backward()

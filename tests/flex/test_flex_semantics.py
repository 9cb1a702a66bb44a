"""``flex_attention`` against a dense statement: shapes, lists of blocks, captured values, changes between calls."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from torch_bwattn.flex.attention import flex_attention

from .dense import check, close, dense, operands

_L = 40


def _lists(mask, q_len=_L, kv_len=None, *, block=16, batch=None, heads=None):
    return create_block_mask(mask, batch, heads, q_len, kv_len or q_len, device="cpu", BLOCK_SIZE=block)


def _sparse(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() % 7 < 3


def _parameter(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype).requires_grad_()


def _times_three(score, b, h, q_idx, kv_idx):
    return score * 3.0 + (h - b) * 0.1


def test_nothing_given():
    check(operands(2, _L, 50))


def test_scale():
    for scale in (0.3, 1, 0.0, -0.5):
        check(operands(2, _L, 50), _times_three, _lists(_sparse, _L, 50), scale=scale)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_gqa(kv_heads):
    q_k_v = operands(6, _L, kv_heads=kv_heads)
    check(q_k_v, _times_three, _lists(lambda b, h, q, k: (q + h) % 3 <= k % 3, heads=6), enable_gqa=True)
    check(q_k_v, None, _lists(lambda b, h, q, k: q >= k), enable_gqa=True)


@pytest.mark.parametrize("v_width", [1, 5, 24])
def test_value_width(v_width):
    check(operands(2, _L, v_width=v_width), _times_three, _lists(_sparse))


@pytest.mark.parametrize("block", [8, 17, (16, 40), (64, 8), 128, 1])
@pytest.mark.parametrize("lengths", [(40, 40), (33, 70), (70, 33), (1, 50), (50, 1)])
def test_block_sizes(block, lengths):
    check(operands(2, *lengths), _times_three, _lists(_sparse, *lengths, block=block))


@pytest.mark.parametrize("block", [64, 128, 500])
def test_many_blocks_of_rows(block):
    """Beside fewer rows at a time than a block has, and beside whole blocks."""
    mask = _lists(lambda b, h, q, k: (q // 90 == k // 90) | (k < 5), 700, block=block)
    for kv_heads in (1, 4):
        check(operands(4, 700, kv_heads=kv_heads), _times_three, mask, enable_gqa=True)


def test_batch_and_heads_of_mask():
    def mask(b, h, q, k):
        return (q + 3 * b) % (h + 2) >= (k % (h + 2))

    q_k_v = operands(3, _L, batch=2)
    for batch, heads in ((2, 3), (2, None)):
        check(
            q_k_v,
            None,
            _lists((lambda b, h, q, k: mask(b, 0 * h, q, k)) if heads is None else mask, batch=batch, heads=heads),
        )
    check(q_k_v, None, _lists(lambda b, h, q, k: mask(0 * b, h, q, k), heads=3))


def test_one_key_batch_for_all():
    q_k_v = operands(2, _L, batch=3, kv_batch=1)
    check(q_k_v, _times_three, _lists(_sparse))
    check(q_k_v, None, _lists(lambda b, h, q, k: q >= k))
    check(q_k_v, _times_three, _lists(lambda b, h, q, k: (q + b) % 2 == k % 2, batch=3))


def test_lists_decide_without_mask():
    counts = torch.tensor([[[1, 2, 0], [3, 1, 1]]], dtype=torch.int32)
    index = torch.tensor([[[[2, 0, 0], [1, 0, 0], [0, 0, 0]], [[0, 1, 2], [1, 0, 0], [2, 0, 0]]]], dtype=torch.int32)
    blocks = torch.zeros(1, 2, 3, 3, dtype=torch.bool)
    for h, rows in enumerate(index[0].tolist()):
        for row, listed in enumerate(rows):
            blocks[0, h, row, listed[: int(counts[0, h, row])]] = True
    shown = blocks.repeat_interleave(16, 2).repeat_interleave(16, 3)[:, :, :_L, :_L]
    lists = BlockMask.from_kv_blocks(counts, index, BLOCK_SIZE=16, seq_lengths=(_L, _L))
    check(operands(2, _L), None, lists, shown=shown)
    check(operands(2, _L), _times_three, lists, shown=shown)
    whole = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), index, counts, index, BLOCK_SIZE=16, mask_mod=lambda b, h, q, k: q < 0,
        seq_lengths=(_L, _L),
    )  # fmt: skip
    check(operands(2, _L), None, whole, shown=shown)


def test_lists_hide_what_a_recognised_mask_shows():
    counts, index = (
        torch.ones(1, 1, 3, dtype=torch.int32),
        torch.tensor([0, 1, 2]).view(1, 1, 3, 1).expand(-1, -1, -1, 3),
    )
    lists = BlockMask.from_kv_blocks(
        counts, index.int().contiguous(), BLOCK_SIZE=16, mask_mod=lambda b, h, q, k: q >= k, seq_lengths=(_L, _L)
    )
    i, j = torch.arange(_L)[:, None], torch.arange(_L)
    check(operands(2, _L), None, lists, shown=(i >= j) & (i // 16 == j // 16))


def test_index_narrower_than_blocks():
    index = torch.tensor([2, 0, 1], dtype=torch.int32).view(1, 1, 3, 1)
    lists = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 3, dtype=torch.int32), index, BLOCK_SIZE=16, seq_lengths=(_L, _L), compute_q_blocks=False
    )
    shown = torch.arange(_L) // 16 == index.flatten()[torch.arange(_L) // 16, None]
    check(operands(2, _L), None, lists, shown=shown)


def test_counts_change_beside_the_same_index():
    index = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3).contiguous()
    j = torch.arange(48) // 16
    for count in (3, 1):
        counts = torch.full((1, 1, 3), count, dtype=torch.int32)
        q, k, v = operands(2, 48)
        out, _, _ = torch.ops.bwattn.flex_forward(
            q, k, v, 0.5, None, [], [], None, [], [], [counts, index], [16, 16], False
        )
        close(out, dense(q, k, v, None, j < count, 0.5)[0], 2e-5, f"{count} blocks")


def test_adjusted_mask():
    check(operands(2, 20, 33), None, _lists(_sparse)._adjust(20, 33))


def test_order_within_lists_is_nothing():
    i = torch.arange(_L)[:, None] // 16
    index = torch.tensor([[2, 0, 1], [1, 2, 0], [2, 1, 0]], dtype=torch.int32).view(1, 1, 3, 3)
    lists = BlockMask.from_kv_blocks(
        torch.full((1, 1, 3), 2, dtype=torch.int32), index, BLOCK_SIZE=16, mask_mod=_sparse, seq_lengths=(_L, _L)
    )
    visited = (index[0, 0, :, :2] == torch.arange(3).view(3, 1, 1)).any(-1).T[i, torch.arange(_L) // 16]
    check(operands(2, _L), None, lists, shown=visited & _sparse(0, 0, torch.arange(_L)[:, None], torch.arange(_L)))


@pytest.mark.parametrize("lengths", [(0, 8), (8, 0), (0, 0)])
def test_empty_lengths(lengths):
    for score_mod in (None, _times_three):
        check(operands(2, *lengths), score_mod)


def test_empty_batch():
    q, k, v = (one[:0] for one in operands(2, 8))
    assert flex_attention(q, k, v, _times_three).shape == (0, 2, 8, 8)


def test_rows_that_see_nothing():
    check(operands(2, _L), None, _lists(lambda b, h, q, k: (q % 3 != 0) & (k < q)))
    check(operands(2, _L), _times_three, _lists(lambda b, h, q, k: q < 0))
    check(operands(2, 60, 20), None, _lists(lambda b, h, q, k: (k <= q) & (k > q - 5), 60, 20))


def test_mod_that_hides():
    check(operands(2, _L), lambda s, b, h, q, k: torch.where((q % 5 > 0) & (k % 2 == 0), s * 2, -math.inf))
    check(operands(2, _L), lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf))
    check(operands(2, _L), lambda s, b, h, q, k: s.masked_fill(k > q + 3, -math.inf), _lists(_sparse))


def test_float64():
    check(operands(2, _L, dtype=torch.float64), _times_three, _lists(_sparse), tolerance=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    table = _parameter(_L, dtype=dtype)
    check(operands(2, _L, dtype=dtype), lambda s, b, h, q, k: s + table[k], _lists(_sparse), [table], tolerance=1e-2)


def test_aux():
    q, k, v = operands(2, _L)
    mask = _lists(lambda b, h, q, k: (k < q) & _sparse(b, h, q, k))
    shown = mask.mask_mod(0, 0, torch.arange(_L)[:, None], torch.arange(_L))
    for score_mod, lists in ((_times_three, mask), (None, None), (None, mask)):
        out, aux = flex_attention(q, k, v, score_mod, lists, return_aux=AuxRequest(lse=True, max_scores=True))
        wanted = dense(q, k, v, score_mod, None if lists is None else shown)
        for found, one in zip((out, aux.lse, aux.max_scores), wanted, strict=True):
            close(found, one, 2e-5, "aux")
    assert flex_attention(q, k, v, return_aux=AuxRequest())[1] == (None, None)
    _, aux = flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None
    assert not aux.max_scores.requires_grad


def test_lse_alone_has_gradients():
    q, k, v = operands(2, _L)
    _, lse = flex_attention(q, k, v, _times_three, return_lse=True)
    found = torch.autograd.grad(lse.square().sum(), (q, k))
    wanted = torch.autograd.grad(dense(q, k, v, _times_three)[1].square().sum(), (q, k))
    for one, expected in zip(found, wanted, strict=True):
        close(one, expected, 2e-5, "by lse")


def test_temperature():
    temperature = torch.tensor(0.7, requires_grad=True)
    check(operands(2, _L), lambda s, b, h, q, k: s * temperature, _lists(_sparse), [temperature])
    check(operands(2, _L), lambda s, b, h, q, k: s * temperature.exp() + temperature, None, [temperature])
    check(operands(2, _L), lambda s, b, h, q, k: temperature, None, [temperature])


def test_table_through_functions():
    table = _parameter(_L, 2)
    check(operands(2, _L), lambda s, b, h, q, k: s + table.exp()[k, h], None, [table])
    check(operands(2, _L), lambda s, b, h, q, k: s * torch.sigmoid(table * 2)[q, h] + table[k, 1], None, [table])
    check(operands(2, _L), lambda s, b, h, q, k: table[q - k, -1], None, [table])


def test_table_that_is_computed():
    weight = _parameter(_L)
    table = weight.cumsum(0) / 10
    check(operands(2, _L), lambda s, b, h, q, k: s + table[(q - k).abs()], _lists(_sparse), [weight])


def test_table_of_other_dtype():
    for dtype in (torch.float64, torch.bfloat16):
        table = _parameter(_L, dtype=dtype)
        check(operands(2, _L), lambda s, b, h, q, k, t=table: s + t[k], None, [table], tolerance=5e-3)


def test_query_is_captured():
    q_k_v = operands(2, _L)
    check(q_k_v, lambda s, b, h, q, k: s + 0.3 * q_k_v[0][b, h, q, 1] * q_k_v[1][b, h, k, 2])


def test_captured_vectors():
    table, other = _parameter(_L, 4), torch.randn(_L, 4)
    check(operands(2, _L), lambda s, b, h, q, k: s + torch.dot(table[q], other[k]), None, [table])


def test_captured_vector_of_its_own():
    vector, table = _parameter(4), torch.randn(_L, 4)
    check(operands(2, _L), lambda s, b, h, q, k: s + torch.dot(vector, table[k]), None, [vector])


def test_rows_of_one_table_in_a_product():
    table = _parameter(_L, 4)
    check(operands(2, _L), lambda s, b, h, q, k: s + torch.dot(table[q], table[k]), None, [table])


@pytest.mark.parametrize("train", [False, True])
def test_row_then_element(train):
    table = _parameter(_L, 4).detach().requires_grad_(train)
    captured = [table] if train else []
    check(operands(2, _L), lambda s, b, h, q, k: s + table[k][3], None, captured)
    check(operands(2, _L), lambda s, b, h, q, k: s * table[k][-1] + table[q][k % 4], None, captured)


def test_sum_of_vectors():
    table = _parameter(_L, 4)
    check(operands(2, _L), lambda s, b, h, q, k: s + (table[q] * table[k]).sum(), None, [table])
    check(operands(2, _L), lambda s, b, h, q, k: (s * table[k]).tanh().sum(-1), None, [table])


def test_detached_table():
    table = _parameter(_L)
    q, k, v = operands(2, _L)
    check([q, k, v], lambda s, b, h, i, j: s + table.detach()[j])
    assert table.requires_grad
    check([q, k, v], lambda s, b, h, i, j: s + table.detach()[j] * table[i], None, [table])


def test_detached_score():
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * score.detach()

    q, k, v = (one.double().detach().requires_grad_() for one in operands(2, 8))
    s = q @ k.mT / 8**0.5
    wanted = torch.autograd.grad(((s * s.detach()).softmax(-1) @ v).square().sum(), (q, k, v))
    found = torch.autograd.grad(flex_attention(q, k, v, score_mod).square().sum(), (q, k, v))
    for one, expected in zip(found, wanted, strict=True):
        close(one, expected, 1e-10, "detached")


@pytest.mark.parametrize("train", [False, True])
def test_constants_on_the_score_device(train):
    q_k_v = [one.requires_grad_(train) for one in operands(2, _L)]
    check(q_k_v, lambda s, b, h, q, k: s * torch.tensor(0.7, device=s.device))
    check(q_k_v, lambda s, b, h, q, k: s * s.new_tensor(0.7) + torch.ones((), device=q.device))


POINTWISE = {
    "clamp": lambda s, o: s.clamp(-0.5, 0.7),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "copysign": torch.copysign,
    "atanh": lambda s, o: torch.atanh(s.tanh() * 0.9),
    "addcdiv": lambda s, o: torch.addcdiv(s, s, o.abs() + 1, value=0.5),
    "masked_fill": lambda s, o: s.masked_fill(s > o, torch.tensor(-1.0, dtype=s.dtype)),
    "mish": lambda s, o: functional.mish(s),
    "hardswish": lambda s, o: functional.hardswish(s),
    "hardsigmoid": lambda s, o: functional.hardsigmoid(s),
    "logsigmoid": lambda s, o: functional.logsigmoid(s),
    "softshrink": lambda s, o: functional.softshrink(s, 0.2),
    "hardshrink": lambda s, o: functional.hardshrink(s, 0.2),
    "gelu": lambda s, o: functional.gelu(s, approximate="tanh"),
    "softplus": lambda s, o: functional.softplus(s) * o,
    "selu": lambda s, o: functional.selu(s + o),
    "leaky_relu": lambda s, o: functional.leaky_relu(s) - o,
    "pow": lambda s, o: (s.abs() + 0.2) ** -0.5 * o + 2.0**s,
    "logaddexp": torch.logaddexp,
    "hypot": torch.hypot,
    "atan2": torch.atan2,
    "where": lambda s, o: torch.where(s > o, s * o, o - s),
    "half": lambda s, o: s + o.double(),
    "remainder": lambda s, o: torch.remainder(s, o.abs() + 1) + s % 1,
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name):
    table = _parameter(_L, 2)
    check(operands(2, _L, batch=1), lambda s, b, h, q, k: POINTWISE[name](s, table[k, h]), None, [table])


RECOGNISED = {
    "causal": lambda b, h, q, k: q >= k,
    "causal strict": lambda b, h, q, k: k < q,
    "causal shifted": lambda b, h, q, k: k <= q + 9,
    "window": lambda b, h, q, k: (q - k < 7) & (k <= q),
    "window around": lambda b, h, q, k: (q - k <= 5) & (k - q <= 11),
    "window ahead": lambda b, h, q, k: (k >= q + 4) & (k < q + 12),
    "window behind": lambda b, h, q, k: (k <= q - 4) & (k > q - 12),
    "window of nothing": lambda b, h, q, k: (q >= k) & (k > q + 3),
    "window of floats": lambda b, h, q, k: (q - k <= 4.5) & (k <= q),
    "no end": lambda b, h, q, k: (q - k <= math.inf) & (k <= q),
    "multiples": lambda b, h, q, k: (3 * k - 1 <= 3 * q) & (3 * (q - k) < 16),
    "negated": lambda b, h, q, k: -q <= -k,
    "all": lambda b, h, q, k: q >= 0,
}


@pytest.mark.parametrize("lengths", [(40, 40), (24, 50), (50, 24)])
@pytest.mark.parametrize("name", RECOGNISED)
def test_recognised_mask(name, lengths):
    q_k_v = operands(2, *lengths)
    check(q_k_v, None, _lists(RECOGNISED[name], *lengths))
    check(q_k_v, lambda s, b, h, q, k: torch.where(RECOGNISED[name](b, h, q, k), s, -math.inf))


def test_recognised_softcap():
    for cap in (2, 0.5, 30.0):
        check(operands(2, _L), lambda s, b, h, q, k, c=cap: c * torch.tanh(s / c), _lists(lambda b, h, q, k: q >= k))
        check(operands(2, _L), lambda s, b, h, q, k, c=cap: torch.tanh(s * (1.0 / c)) * c)
    check(operands(2, _L), lambda s, b, h, q, k: 2 * torch.tanh(torch.where(q >= k, s, -math.inf) / 2))
    check(operands(2, _L), lambda s, b, h, q, k: -2 * torch.tanh(s / -2))
    check(operands(2, _L), lambda s, b, h, q, k: 2 * torch.tanh(s / 3))


def test_noncontiguous_operands():
    q, k, v = (one.detach().mT.contiguous().mT.requires_grad_() for one in operands(2, _L))
    check([q, k, v], _times_three, _lists(_sparse))
    q, k, v = (one.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for one in operands(2, _L))
    check([q, k, v], _times_three, _lists(_sparse))


def test_autocast():
    q_k_v = operands(2, _L)
    with torch.autocast("cpu", torch.bfloat16):
        out = flex_attention(*q_k_v, _times_three)
    assert out.dtype == torch.bfloat16


_weight = 2.0
_module = types.SimpleNamespace()


class _Config:
    weight = 2.0

    @staticmethod
    def mod(score, b, h, q_idx, kv_idx):
        return score * _Config.weight


def _by_global(score, b, h, q_idx, kv_idx):
    return score * _weight


def _by_nested_function(score, b, h, q_idx, kv_idx):
    def of(one):
        return one * _weight

    return of(score)


def _by_comprehension(score, b, h, q_idx, kv_idx):
    return sum([score * one * _weight for one in (0.5, 0.25)])


def _by_keyword(score, b, h, q_idx, kv_idx, *, weight=2.0):
    return score * weight


def _by_its_attribute(score, b, h, q_idx, kv_idx):
    return score * _by_its_attribute.weight


_by_its_attribute.weight = 2.0
_this = sys.modules[__name__]


def _by_module(score, b, h, q_idx, kv_idx):
    return score * _this._weight


def _by_class(score, b, h, q_idx, kv_idx):
    return score * _Config.weight


_object = types.SimpleNamespace(weight=2.0)
_get = vars(_object).get


def _by_object(score, b, h, q_idx, kv_idx):
    return score * _object.weight


def _by_bound_builtin(score, b, h, q_idx, kv_idx):
    return score * _get("weight")


@pytest.mark.parametrize(
    ("score_mod", "where", "name"),
    [
        (_by_global, _this, "_weight"),
        (_by_nested_function, _this, "_weight"),
        (_by_comprehension, _this, "_weight"),
        (_by_module, _this, "_weight"),
        (_by_class, _Config, "weight"),
        (_Config.mod, _Config, "weight"),
        (_by_its_attribute, _by_its_attribute, "weight"),
        (_by_object, _object, "weight"),
        (_by_bound_builtin, _object, "weight"),
    ],
)
def test_change_between_calls(score_mod, where, name, monkeypatch):
    check(operands(2, 16), score_mod)
    monkeypatch.setattr(where, name, 5.0)
    check(operands(2, 16), score_mod)


def test_change_of_keyword_default(monkeypatch):
    check(operands(2, 16), _by_keyword)
    monkeypatch.setitem(_by_keyword.__kwdefaults__, "weight", 5.0)
    check(operands(2, 16), _by_keyword)


def test_closure_is_rebound():
    weight, table = 2.0, torch.randn(16)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * weight + table[kv_idx]

    check(operands(2, 16), score_mod)
    weight = 0.5
    check(operands(2, 16), score_mod)
    table = torch.randn(16)
    check(operands(2, 16), score_mod)
    table.mul_(3)
    check(operands(2, 16), score_mod)
    table.data = torch.randn(20)
    check(operands(2, 16), score_mod)


def test_shape_of_a_captured_tensor_changes():
    table = torch.randn(16, 2)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * table.shape[1] + table[kv_idx, 0]

    check(operands(2, 16), score_mod)
    table.data = torch.randn(16, 4)
    check(operands(2, 16), score_mod)


def test_lambdas_of_a_loop():
    for window in (3, 5, 9):
        check(operands(2, 16), None, _lists(lambda b, h, q, k: q - k < window, 16, block=8))  # noqa: B023
        check(operands(2, 16), lambda s, b, h, q, k: s * window)  # noqa: B023


def test_object_that_is_called():
    class Mod:
        weight = 2.0

        def __call__(self, score, b, h, q_idx, kv_idx):
            return score * self.weight

    mod = Mod()
    for weight in (2.0, 5.0):
        mod.weight = weight
        check(operands(2, 16), mod)
        check(operands(2, 16), mod.__call__)


def test_literals_of_other_kinds_are_other_mods():
    q_k_v = operands(2, 16)
    check(q_k_v, lambda s, b, h, q, k: s * ((k + 2147483000.0) / 2e9))
    check(q_k_v, lambda s, b, h, q, k: s * ((k + 2147483000) / 2e9))
    check(q_k_v, lambda s, b, h, q, k: s * 1 + k * True)
    check(q_k_v, lambda s, b, h, q, k: s * 1.0 + k * 1)


def test_operands_and_captured_tensors_stay():
    q_k_v, table = operands(2, _L), _parameter(_L)
    before = [one.detach().clone() for one in (*q_k_v, table)]
    check(q_k_v, lambda s, b, h, q, k: s + table[k], _lists(_sparse), [table])
    assert all(torch.equal(one, old) for one, old in zip((*q_k_v, table), before, strict=True))


def test_only_some_gradients():
    table = _parameter(_L)
    for wants in range(8):
        q_k_v = [one.detach().requires_grad_(bool(wants >> place & 1)) for place, one in enumerate(operands(2, _L))]
        q, k, v = q_k_v
        flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j]).sum().backward()
        assert [one.grad is not None for one in q_k_v] == [bool(wants >> place & 1) for place in range(3)]
    assert flex_attention(*(one.detach() for one in operands(2, _L)), lambda s, b, h, i, j: s + table[j]).requires_grad


def test_gradients_are_deterministic_about_reads():
    table = _parameter(3)
    check(operands(2, _L), lambda s, b, h, q, k: s + table[k % 3] * table[q % 2] + table[-1], _lists(_sparse), [table])


def test_a_mod_may_change_its_own_values():
    def in_place(s, b, h, q, k):
        s = s * 2
        s += 1
        distance = q - k
        distance *= 3
        shown = q >= k
        shown &= k > 3
        near = torch.isclose(distance * 1.0, torch.zeros(()))
        return torch.where(shown, s + distance, s.neg_()) + near

    def written_out(s, b, h, q, k):
        s = s * 2 + 1
        distance = (q - k) * 3
        return torch.where((q >= k) & (k > 3), s + distance, -s) + (distance == 0)

    q_k_v = operands(2, _L)
    check(q_k_v, written_out)
    wanted = flex_attention(*q_k_v, written_out)
    assert torch.equal(flex_attention(*q_k_v, in_place), wanted)
    compiled = torch.compile(lambda *q_k_v: flex_attention(*q_k_v, in_place), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*q_k_v), wanted)

"""``flex_attention`` inside ``torch.compile``."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.utils.checkpoint import checkpoint

from torch_bwattn.flex.attention import flex_attention

from .dense import check, close, dense, operands

_L = 24
BACKENDS = ("aot_eager", "inductor")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def _compiled(backend, function=flex_attention, **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def _sparse(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() % 7 < 3


def _lists(mask=_sparse, length=_L):
    return create_block_mask(mask, None, None, length, length, device="cpu", BLOCK_SIZE=8)


def _parameter(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


class _Graphs:
    """A backend that counts graphs, and what AOTAutograd's call."""

    def __init__(self):
        self.count, self.forwards, self.backwards = 0, [], []

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def keep(to):
            def compiler(graph, inputs):
                to.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
                return graph

            return compiler

        self.count += 1
        return aot_autograd(fw_compiler=keep(self.forwards), bw_compiler=keep(self.backwards))(graph, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mods_made_outside(backend):
    table = _parameter(_L, 2)
    check(operands(2, _L), lambda s, b, h, q, k: s + table.exp()[k, h], _lists(), [table], attend=_compiled(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_mods_made_inside(backend):
    table = _parameter(_L, 2)

    def attend(query, key, value, score_mod, block_mask, return_lse):
        scaled = table * 2

        def mod(score, b, h, q_idx, kv_idx):
            return score + scaled[kv_idx, h] * query[b, h, q_idx, 0]

        lists = create_block_mask(
            lambda b, h, q, k: _sparse(b, h, q, k) | (h > 9), None, None, _L, _L, device="cpu", BLOCK_SIZE=8
        )
        return flex_attention(query, key, value, mod, lists, return_lse=return_lse)

    q_k_v = operands(2, _L)

    def same(s, b, h, q, k):
        return s + 2 * table[k, h] * q_k_v[0][b, h, q, 0]

    check(q_k_v, same, _lists(), [table], attend=_compiled(backend, attend))


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_recognised(backend):
    attend = _compiled(backend)
    check(operands(2, _L), None, _lists(lambda b, h, q, k: q >= k), attend=attend)
    check(
        operands(2, _L), lambda s, b, h, q, k: 2 * torch.tanh(s / 2), _lists(lambda b, h, q, k: q >= k), attend=attend
    )


def test_options():
    attend = _compiled("aot_eager")
    check(operands(4, _L, kv_heads=2, v_width=5), lambda s, b, h, q, k: s + h * 0.1, attend=attend, enable_gqa=True)
    check(operands(2, _L), None, _lists(), attend=attend, scale=0.3)
    check(operands(2, _L, batch=3, kv_batch=1), None, _lists(), attend=attend)
    check(operands(2, _L, dtype=torch.float64), lambda s, b, h, q, k: s * 2, attend=attend, tolerance=1e-12)
    q, k, v = operands(2, _L)
    out, aux = attend(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
    for found, wanted in zip((out, aux.lse, aux.max_scores), dense(q, k, v), strict=True):
        close(found, wanted, 2e-5, "aux")


def test_captured_scalars():
    temperature = torch.tensor(0.7, requires_grad=True)
    check(
        operands(2, _L), lambda s, b, h, q, k: s * temperature.exp() * torch.tensor(0.5), None, [temperature],
        attend=_compiled("aot_eager"),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["inductor"])
def test_no_gradients(backend):
    q_k_v = [one.detach() for one in operands(2, _L)]
    check(q_k_v, lambda s, b, h, q, k: s * 2, _lists(), attend=_compiled(backend))
    with torch.inference_mode():
        out = _compiled(backend)(*q_k_v, lambda s, b, h, q, k: s * 2)
    close(out, dense(*q_k_v, lambda s, b, h, q, k: s * 2)[0], 2e-5, "inference")


def test_one_operator_in_each_graph():
    graphs, table = _Graphs(), _parameter(_L)
    check(operands(2, _L), lambda s, b, h, q, k: s + table[k], _lists(), [table], attend=_compiled(graphs))
    assert graphs.count == 1
    assert [names.count("bwattn.flex_forward.default") for names in graphs.forwards] == [1]
    assert [names.count("bwattn.flex_backward.default") for names in graphs.backwards] == [1]
    assert not [
        name for names in graphs.forwards + graphs.backwards for name in names if "matmul" in name or ".bmm" in name
    ]


def test_many_lengths_few_graphs():
    graphs, table = _Graphs(), _parameter(200)
    attend = _compiled(graphs, dynamic=True)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx]

    for length in range(16, 56, 4):
        check(operands(2, length), mod, _lists(length=length), [table], attend=attend)
    assert graphs.count <= 2


def test_many_lengths_few_graphs_without_lists():
    graphs = _Graphs()
    attend = _compiled(graphs, dynamic=True)
    for length in range(17, 57, 4):
        check(operands(2, length), lambda s, b, h, q, k: s - (q - k).abs() * 0.1, attend=attend)
    assert graphs.count <= 2


def test_lengths_become_dynamic_of_themselves():
    graphs = _Graphs()
    attend = _compiled(graphs)
    for length in (16, 24, 32, 40):
        check(operands(2, length), lambda s, b, h, q, k: s * 2, _lists(length=length), attend=attend)
    assert graphs.count <= 3


def test_lists_inside_with_dynamic_lengths():
    def attend(query, key, value, score_mod, block_mask, return_lse):
        lists = create_block_mask(
            lambda b, h, q, k: q >= k, None, None, query.shape[2], key.shape[2], device="cpu", BLOCK_SIZE=8
        )
        return flex_attention(query, key, value, score_mod, lists, return_lse=return_lse)

    compiled = _compiled("aot_eager", attend, dynamic=True)
    for length in (20, 51):
        shown = torch.ones(length, length, dtype=torch.bool).tril()
        check(operands(2, length), lambda s, b, h, q, k: s * 2, None, shown=shown, attend=compiled)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_dynamic(backend):
    attend = _compiled(backend, dynamic=True)
    for length, width in ((24, 8), (33, 16)):
        q_k_v = operands(2, length, width=width)
        check(q_k_v, lambda s, b, h, q, k: s + k * 0.1, _lists(length=length), attend=attend)


def _times(factor):
    return lambda s, b, h, q, k: s * factor


def _read(table):
    return lambda s, b, h, q, k: s + table[k % table.shape[0]]


def _read_at(table, place):
    return lambda s, b, h, q, k: s * table[place]


NUMBERS = {
    "position": lambda w: lambda s, b, h, q, k: s + (q // w - k % w) * 0.1,
    "branch": lambda w: lambda s, b, h, q, k: s * w if w > 4 else s,
    "float": lambda w: _times(w / 7),
    "float of it": lambda w: lambda s, b, h, q, k: s * (w / 2),
    "clamp": lambda w: lambda s, b, h, q, k: s + k.clamp(0, w - 1) * 0.1,
    "max": lambda w: lambda s, b, h, q, k: s + max(w, 6) * k * 0.1,
    "square root": lambda w: lambda s, b, h, q, k: s * w**0.5,
    "full": lambda w: lambda s, b, h, q, k: s + torch.full((), w) * k * 0.1,
    "tensor": lambda w: lambda s, b, h, q, k: s * torch.tensor(w),
    "table": lambda w: _read(torch.arange(w) * 0.1),
    "place": lambda w: _read_at(torch.arange(w) * 0.1, w - 2),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_captured_numbers_change(name):
    attend = _compiled("aot_eager")
    q_k_v = [one.detach() for one in operands(2, _L)]
    for number in (3, 5, 9):
        check(q_k_v, NUMBERS[name](number), attend=attend)


def test_captured_window_changes():
    attend = _compiled("aot_eager")
    for window in (3, 5, 9):
        check(operands(2, _L), None, _lists(lambda b, h, q, k: (q - k).abs() <= window), attend=attend)  # noqa: B023
        check(operands(2, _L), None, _lists(lambda b, h, q, k: (q - k <= window) & (q >= k)), attend=attend)  # noqa: B023


def test_counts_change_beside_the_same_index():
    from torch.nn.attention.flex_attention import BlockMask

    attend = _compiled("inductor")
    index = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3).contiguous()
    q_k_v = [one.detach() for one in operands(2, _L)]
    for count in (3, 1):
        counts = torch.full((1, 1, 3), count, dtype=torch.int32)
        lists = BlockMask.from_kv_blocks(counts, index, BLOCK_SIZE=8, seq_lengths=(_L, _L))
        check(q_k_v, None, lists, shown=(torch.arange(_L) // 8 < count).expand(_L, _L), attend=attend)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_activation_checkpointing(backend):
    table = _parameter(_L)

    def attend(query, key, value, score_mod, block_mask, return_lse):
        def inner(query, key, value):
            return flex_attention(query, key, value, score_mod, block_mask, return_lse=return_lse)

        return checkpoint(inner, query, key, value, use_reentrant=False)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx]

    check(operands(2, _L), mod, _lists(), [table], attend=_compiled(backend, attend))
    check(operands(2, _L), mod, _lists(), [table], attend=attend)


def test_in_a_layer():
    table = _parameter(2, _L)

    def layer(query, key, value, score_mod, block_mask, return_lse):
        out, lse = flex_attention(query * 2, key, value + 1, score_mod, block_mask, return_lse=return_lse)
        return out * 3, lse

    def wanted(query, key, value):
        shown = _sparse(0, 0, torch.arange(_L)[:, None], torch.arange(_L))
        out, _, _ = dense(query * 2, key, value + 1, lambda s, b, h, q, k: s + table[h, k], shown)
        return out * 3

    q_k_v = operands(2, _L)
    out, _ = _compiled("inductor", layer)(*q_k_v, lambda s, b, h, q, k: s + table[h, k], _lists(), True)
    close(out, wanted(*q_k_v), 2e-5, "out")
    found = torch.autograd.grad(out.square().sum(), (*q_k_v, table))
    for one, expected in zip(found, torch.autograd.grad(wanted(*q_k_v).square().sum(), (*q_k_v, table)), strict=True):
        close(one, expected, 5e-5, "gradient")


def test_global_that_changes():
    weight = torch.tensor(2.0)

    def mod(score, b, h, q_idx, kv_idx):
        return score * weight

    attend = _compiled("aot_eager")
    check(operands(2, _L), mod, attend=attend)
    weight.mul_(2)
    check(operands(2, _L), mod, attend=attend)
    weight = torch.tensor(0.1)
    check(operands(2, _L), mod, attend=attend)


def test_misuse_is_told():
    q_k_v = operands(2, _L)
    with pytest.raises(Exception, match="score_mod"):
        _compiled("aot_eager")(*q_k_v, lambda s, b, h, q, k: s[None])
    torch._dynamo.reset()
    with pytest.raises(Exception, match="block_mask"):
        _compiled("aot_eager")(*q_k_v, None, _lists(length=16))


@pytest.mark.parametrize("read", ["product", "table"])
def test_a_size_that_a_mod_computes_with_is_the_right_one(read):
    function = _compiled("aot_eager", dynamic=True)
    for length in (24, 30, 41):
        table = torch.randn(2, length)

        def score_mod(score, b, h, q_idx, kv_idx, table=table):
            if read == "product":
                return score * table.shape[1] + table[h, kv_idx]
            return score + table.flatten()[h * table.shape[1] + kv_idx]

        q, k, v = operands(2, length)
        close(function(q, k, v, score_mod), dense(q, k, v, score_mod)[0], 1e-4, "out")

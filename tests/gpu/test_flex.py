"""``flex_attention`` on a GPU: attention-gym, drawn mods, lists, compiled code, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import torch_bwattn
from tests.flex import drawn
from tests.flex.dense import check, close, dense, operands, shown_by
from tests.flex.drawn import MOST, Captured, masks, score_mods
from tests.flex.emitted import check as check_many
from tests.flex.emitted import drawn_mods
from torch_bwattn import UnsupportedProblem
from torch_bwattn.selection import trust

pytest.importorskip("attn_gym")

from tests.flex.gym import MASKS, MODS

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
_ROWS = {"flamingo", "vsa", "vsa padded", "mla rope"}
"""Mods that read rows of captured tensors, which the kernels do not take."""
_RECOGNISED = {"causal", "causal more keys", "causal fewer keys", "sliding window", "sliding window of nothing"}


def _is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _counts():
    """Of a call in float32 and one in bfloat16."""
    return {"helion": 1, "cute": 1} if _is_hopper() else {"helion": 2}


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_attention_gym(name, block, device):
    make, q_len, kv_len = MASKS[name]
    torch_bwattn.reset_call_counts()
    with torch.device(device):
        mask = make()
        heads = (2, 2) if name.startswith("vsa") else (None, None)
        lists = create_block_mask(mask, *heads, q_len, kv_len, device=device, BLOCK_SIZE=block)
        check(operands(2, q_len, kv_len, width=16, device=device), block_mask=lists, tolerance=5e-5)
        half = operands(2, q_len, kv_len, width=64, dtype=BF16, device=device)
        check(half, block_mask=lists, tolerance=2e-2)
    if name not in _ROWS | _RECOGNISED:
        assert torch_bwattn.call_counts() == _counts()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MODS)
def test_mods_of_attention_gym(name, masked, device):
    torch_bwattn.reset_call_counts()
    with torch.device(device):
        score_mod, captured = MODS[name]()
        lists = None
        if masked:
            lists = create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device=device, BLOCK_SIZE=16)
        check(operands(3, 64, width=16, device=device), score_mod, lists, captured, tolerance=5e-5)
        check(operands(3, 64, width=64, dtype=BF16, device=device), score_mod, lists, captured, tolerance=3e-2)
    if name not in _ROWS | {"softcap"}:
        assert torch_bwattn.call_counts() == _counts()


_hopper = pytest.mark.skipif(not _is_hopper(), reason="for Hopper")
_WIDE = ["document causal", "jetspec tree", "sandwich", "activation gelu"]


@_hopper
@pytest.mark.parametrize(
    ("name", "width"),
    [*((name, 64) for name in (*MASKS, *MODS)), *((name, width) for name in _WIDE for width in (96, 128, 192, 256))],
)
def test_attention_gym_on_the_hopper_kernels(name, width, device):
    with torch.device(device):
        if name in MASKS:
            make, q_len, kv_len = MASKS[name]
            heads = (2, 2) if name.startswith("vsa") else (None, None)
            score_mod, lists = None, create_block_mask(make(), *heads, q_len, kv_len, device=device, BLOCK_SIZE=128)
        else:
            (score_mod, captured), q_len, kv_len = MODS[name](), 64, 64
            lists = create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device=device, BLOCK_SIZE=32)
            for one in captured:
                one.requires_grad_(False)
        q_k_v = operands(3 if name in MODS else 2, q_len, kv_len, width=width, dtype=BF16, device=device)
        with torch_bwattn.backend("cute"):
            if name in _ROWS:
                with pytest.raises(UnsupportedProblem, match="mods of scalars"):
                    torch_bwattn.flex_attention(*q_k_v, score_mod, lists)
                return
            check(q_k_v, score_mod, lists, tolerance=3e-2)


LENGTHS = [(128, 128), (1, 700), (700, 1), (333, 1000), (1025, 130)]


@_hopper
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("block", [None, 128, 256, 96])
def test_lengths_on_the_hopper_kernels(lengths, block, width, device):
    q_k_v = operands(4, *lengths, kv_heads=2, width=width, dtype=BF16, device=device)

    def mask_mod(b, h, q, k):
        return ((q - k) % 37 < 30) | (h == 1)

    made = None if block is None else create_block_mask(mask_mod, None, 4, *lengths, device=device, BLOCK_SIZE=block)
    slopes = torch.rand(4, device=device)

    def score_mod(s, b, h, q, k):
        return torch.where(mask_mod(b, h, q, k), s * 2 + slopes[h], -torch.inf)

    with torch_bwattn.backend("cute"):
        check(q_k_v, score_mod, made, enable_gqa=True, tolerance=3e-2)


LEARNED = {
    "heads": lambda table, last: lambda s, b, h, q, k: s + table[h, 0] * (q - k) / last,
    "keys": lambda table, last: lambda s, b, h, q, k: s + table[h, k],
    "queries": lambda table, last: lambda s, b, h, q, k: s - table[h, q] * 0.5,
    "distances": lambda table, last: lambda s, b, h, q, k: s + table[h, q - k + last],
    "buckets": lambda table, last: lambda s, b, h, q, k: s + table[h, ((q - k) // 7).clamp(-9, 9) + 9],
    "scores": lambda table, last: lambda s, b, h, q, k: s + table[h, (q * 3 + k * 5) % 11],
    "two": lambda table, last: lambda s, b, h, q, k: s + table[h, k] + table[h, q - k + last],
}


@_hopper
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(128, 128), (333, 500)])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", LEARNED)
def test_learned_tables_on_the_hopper_kernels(name, listed, lengths, width, device):
    q_k_v = operands(4, *lengths, kv_heads=2, width=width, dtype=BF16, device=device)
    table = torch.randn(4, 1000, device=device).requires_grad_()
    lists = None
    if listed:
        lists = create_block_mask(lambda b, h, q, k: (q - k) % 200 < 150, None, None, *lengths, device=device)
    with torch_bwattn.backend("cute"):
        mod = LEARNED[name](table, lengths[1] - 1)
        check(q_k_v, mod, lists, [table], enable_gqa=True, tolerance=3e-2)


@_hopper
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_learned_factors_that_are_no_numbers_where_nothing_is_seen(dtype, device):
    """Above the diagonal and beyond the last key; in tables of half precision, and without dimensions."""
    length = 333
    q_k_v = operands(4, length, kv_heads=2, width=64, dtype=dtype, device=device)
    table = torch.randn(4, device=device, dtype=dtype).requires_grad_()
    number = torch.randn((), device=device).requires_grad_()
    lists = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device)

    def score_mod(s, b, h, q, k):
        return s + table[h] * (q - k).sqrt() + number * (length - k).log()

    with torch_bwattn.backend("cute"):
        check(q_k_v, score_mod, lists, [table, number], enable_gqa=True, tolerance=3e-2)


@_hopper
def test_learned_buckets_of_distances(device):
    """A table of half precision that another one, of int64, points into; heads that see nothing."""
    q_k_v = operands(4, 200, 300, kv_heads=2, width=128, dtype=BF16, device=device)
    buckets = (torch.arange(499, device=device) - 299).abs().add(1).log2().long()
    table = torch.randn(4, 9, device=device, dtype=BF16).requires_grad_()
    lists = create_block_mask(lambda b, h, q, k: (h != 1) & (q + 50 >= k), None, 4, 200, 300, device=device)
    with torch_bwattn.backend("cute"):
        mod = lambda s, b, h, q, k: s + table[h, buckets[q - k + 299]]  # noqa: E731
        check(q_k_v, mod, lists, [table], enable_gqa=True, tolerance=3e-2)


@pytest.mark.parametrize("part", range(15))
def test_drawn_mods_in_a_kernel(part, device):
    """Some 200 in each part, each with its derivative."""

    @seed(100 + part)
    @given(drawn_mods())
    @settings(max_examples=6, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def run_all(mods):
        check_many(mods, device)

    run_all()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("part", range(8))
def test_drawn_calls(part, dtype, device, monkeypatch):
    half = dtype == BF16
    for name in ("_FLAGS", "_LABELS", "_OF_HEADS"):
        monkeypatch.setattr(drawn, name, getattr(drawn, name).to(device))

    @seed(part)
    @given(score_mods(), masks())
    @settings(max_examples=3, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def run_all(mod, mask):
        captured = Captured(train=False)
        captured.all = [tensor.to(device).requires_grad_() for tensor in captured.all]
        lengths, block = (MOST - part, MOST - 3 * part), (8, 16, (16, 8), 128)[part % 4]
        with torch.device(device):
            lists = create_block_mask(mask, 2, 2, *lengths, device=device, BLOCK_SIZE=block)

            def score_mod(s, b, h, q, k):
                return mod(captured, s, b, h, q, k) * 1.0

            q_k_v = operands(2, *lengths, width=64 if half else 8, dtype=dtype, device=device)
            check(q_k_v, score_mod, lists, captured.all, tolerance=5e-2 if half else 2e-4)

    run_all()


def _alibi(device, heads=16):
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)
    return lambda s, b, h, q, k: s + slopes[h] * (k - q)


@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_as_good_as_compiled_flex(width, dtype, device):
    """By the accuracy rule: within twice of what compiled FlexAttention is from fp64, gradients thrice."""
    length = 1024
    documents = torch.arange(length, device=device) // 300
    mask = create_block_mask(lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k), None, None, length, length)
    q_k_v = operands(4, length, kv_heads=2, width=width, dtype=dtype, device=device)
    grad_out = torch.randn(2, 4, length, width, device=device, dtype=dtype)
    wanted, _, _ = dense(*q_k_v, _alibi(device, 4), shown_by(mask.mask_mod, *q_k_v[:2]))
    wanted_grads = torch.autograd.grad(wanted, q_k_v, grad_out.double())
    torch.compiler.reset()
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False, fullgraph=True)
    errors = {}
    for name, attend in (("ours", torch_bwattn.flex_attention), ("flex", compiled)):
        out = attend(*q_k_v, _alibi(device, 4), mask, enable_gqa=True)
        grads = torch.autograd.grad(out, q_k_v, grad_out)
        pairs = zip((out, *grads), (wanted, *wanted_grads), strict=True)
        errors[name] = [float((one.double() - other).abs().max()) for one, other in pairs]
    for factor, ours, theirs in zip((2, 3, 3, 3), errors["ours"], errors["flex"], strict=True):
        assert ours <= factor * theirs + 1e-5, errors


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_kernels_that_nobody_vouches_for_are_checked_first(dtype, listed, learned, device, monkeypatch, tmp_path):
    monkeypatch.setenv("BWATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trust, "passed_tests", lambda _: False)
    monkeypatch.setattr(trust, "_known", {})
    q_k_v = operands(4, 700, 900, kv_heads=2, width=64, dtype=dtype, device=device)
    table = torch.randn(4, 900, device=device).requires_grad_(learned)
    lists = None
    if listed:
        lists = create_block_mask(lambda b, h, q, k: (q - k) % 300 < 170, None, None, 700, 900, device=device)
    half = dtype == BF16
    captured = [table] if learned else []
    check(
        q_k_v, lambda s, b, h, q, k: s + table[h, k], lists, captured, enable_gqa=True, tolerance=3e-2 if half else 1e-4
    )
    backend = "cute" if half and _is_hopper() else "helion"
    assert sorted(features.split()[1] for features, _ in trust._known) == ["backward", "forward"]
    assert {tunable.backend for _, tunable in trust._known} == {backend}
    assert set(trust._known.values()) == {""}


def test_max_scores_and_lse(device):
    q_k_v = operands(4, 200, width=64, dtype=BF16, device=device)
    out, aux = torch_bwattn.flex_attention(*q_k_v, _alibi(device, 4), return_aux=AuxRequest(lse=True, max_scores=True))
    wanted, lse, most = dense(*q_k_v, _alibi(device, 4))
    close(out, wanted, 2e-2, "out")
    close(aux.lse, lse, 2e-3, "lse")
    close(aux.max_scores, most, 2e-3, "max_scores")
    grad_out = torch.randn_like(out)
    wanted_grads = torch.autograd.grad(wanted, q_k_v, grad_out.double())
    for one, other in zip(torch.autograd.grad(out, q_k_v, grad_out), wanted_grads, strict=True):
        close(one, other, 3e-2, "gradient")


def test_a_hundred_lengths_are_one_graph_and_few_kernels(device):
    from torch_bwattn.backends.cute import calls
    from torch_bwattn.backends.helion import flex

    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    mod = _alibi(device, 4)
    compiled = torch.compile(
        lambda q, k, v: torch_bwattn.flex_attention(q, k, v, mod), backend=count, dynamic=True, fullgraph=True
    )
    bound = []
    for length in range(130, 230):
        q_k_v = operands(4, length, width=64, dtype=BF16, device=device)
        close(compiled(*q_k_v), dense(*q_k_v, mod)[0], 2e-2, f"out at {length}")
        bound.append(len(calls._launched) if _is_hopper() else len(flex._family("flex_forward", (1,))._bound))
    assert len(graphs) == 1
    assert bound[-1] - bound[0] <= 1  # whole tiles of keys, and others


def test_in_a_graph(device):
    """Lists and operands change between replays."""
    length = 512
    low, high = (
        create_block_mask(lambda b, h, q, k, w=width: (q >= k) & (q - k < w) & (k % 7 != 3), None, None, length, length)
        for width in (100, 400)
    )
    q_k_v = [one.detach() for one in operands(4, length, width=64, dtype=BF16, device=device)]
    width = torch.tensor(100, device=device)

    def mask_mod(b, h, q, k):
        return (q >= k) & (q - k < width) & (k % 7 != 3)

    static = create_block_mask(mask_mod, None, None, length, length)
    torch_bwattn.flex_attention(*q_k_v, block_mask=static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch_bwattn.flex_attention(*q_k_v, block_mask=static)
    for number, (lists, wide) in enumerate(((low, 100), (high, 400))):
        names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        for name in names:
            getattr(static, name).copy_(getattr(lists, name))
        width.fill_(wide)
        q_k_v[0].normal_(generator=torch.Generator(device=device).manual_seed(number))
        graph.replay()
        close(out, dense(*q_k_v, None, shown_by(lists.mask_mod, *q_k_v[:2]))[0], 2e-2, f"out of replay {number}")


@pytest.mark.parametrize("how", ["by hand", "reduce-overhead"])
def test_a_backward_in_a_graph(how, device):
    length = 400
    q_k_v = operands(4, length, width=64, dtype=BF16, device=device)
    documents = torch.arange(length, device=device) // 90
    lists = create_block_mask(
        lambda b, h, q, k: documents[q] == documents[k], None, None, length, length, device=device
    )
    grad_out = torch.randn(2, 4, length, 64, device=device, dtype=BF16)

    def attend(q, k, v):
        return torch_bwattn.flex_attention(q, k, v, _alibi(device, 4), lists)

    def grads():
        return torch.autograd.grad(attend(*q_k_v), q_k_v, grad_out)

    if how == "by hand":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            grads()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = grads()
    else:
        torch.compiler.reset()
        attend = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
    for draw in range(4):
        with torch.no_grad():
            for one in q_k_v:
                one.normal_(generator=torch.Generator(device=device).manual_seed(draw))
        if how == "by hand":
            graph.replay()
        else:
            torch.compiler.cudagraph_mark_step_begin()
            found = grads()
        shown = shown_by(lists.mask_mod, *q_k_v[:2])
        wanted = torch.autograd.grad(dense(*q_k_v, _alibi(device, 4), shown)[0], q_k_v, grad_out.double())
        for name, one, other in zip("qkv", found, wanted, strict=True):
            close(one, other, 3e-2, f"gradient of {name}, {draw}")


def test_gradients_repeat_in_deterministic_mode(device):
    q_k_v = operands(4, 700, width=128, dtype=BF16, device=device)
    mask = create_block_mask(lambda b, h, q, k: (q >= k) | (k < 100), None, None, 700, 700)
    grad_out = torch.randn(2, 4, 700, 128, device=device, dtype=BF16)

    def grads():
        out = torch_bwattn.flex_attention(*q_k_v, _alibi(device, 4), mask)
        return torch.autograd.grad(out, q_k_v, grad_out)

    torch.use_deterministic_algorithms(True)
    try:
        first = grads()
        for _ in range(20):
            assert all(torch.equal(one, other) for one, other in zip(first, grads(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_learned_tables_in_deterministic_mode(device):
    table = torch.randn(4, 100, device=device).requires_grad_()
    q_k_v = operands(4, 100, width=64, device=device)

    def grad():
        out = torch_bwattn.flex_attention(*q_k_v, lambda s, b, h, q, k: s + table[h, k])
        return torch.autograd.grad(out.square().sum(), table)[0]

    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(grad(), grad())
    finally:
        torch.use_deterministic_algorithms(False)
    close(grad(), grad(), 1e-5, "gradient of the table")

"""Mods and lists of blocks in the Hopper forward: mods run on the host, the kernel is compiled, its launch looked at.

No test here runs the kernel.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import gelu, mish, silu, softplus

import torch_bwattn
from tests.flex.dense import operands
from tests.flex.drawn import MOST, Captured, masks, score_mods
from tests.flex.emitted import mod_of
from torch_bwattn.backends.cute import calls, configs, flex, loader
from torch_bwattn.backends.flex_blocks import transposed
from torch_bwattn.backends.flex_inputs import BlockLists, FlexInputs, visited
from torch_bwattn.errors import UnsupportedProblem
from torch_bwattn.mods.program import MAKES, SAME, along, evaluate, vectors
from torch_bwattn.problem import dtype_name

pytestmark = pytest.mark.skipif(loader.why_missing() is not None, reason=str(loader.why_missing()))

ROWS, COLUMNS = 24, 40
_TABLE = torch.randn(2, MOST, generator=torch.Generator().manual_seed(1))
_LABELS = torch.randint(3, (MOST,), generator=torch.Generator().manual_seed(1))
_FLAGS = _LABELS > 0


def _scores():
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4)) * 3


def _grid(scores, h):
    grid = along([torch.tensor([0]), torch.tensor([h]), torch.arange(ROWS), torch.arange(COLUMNS)])
    return {**grid, "score": scores[None, None]}


def _held(found):
    """Dtypes of what a mod captured, and its tensors as CuTe takes them."""
    from cutlass.cute.runtime import from_dlpack

    tensors = [one if one.dim() else one.view(1) for one in found.captured]
    held = [from_dlpack(one.view(torch.uint8) if one.dtype == torch.bool else one.contiguous()) for one in tensors]
    return tuple(one.dtype for one in tensors), held + [None] * (3 - len(held))


def slopes_on_the_host(mod, h=1):
    """A score mod's derivative as CuTe emits it, and what it should be."""
    loader.load()
    import mod_kernels
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    found, scores = mod_of(mod, "score_mod"), _scores()
    _, held = _held(found)
    tables = tuple((dtype_name(one.dtype), max(one.dim(), 1)) for one in found.captured)
    features = configs.ModFeatures(found.program.text, None, tables, 0, lists=False, full=False)
    out, slopes = torch.full_like(scores, torch.nan), torch.full_like(scores, torch.nan)
    arguments = (*map(from_dlpack, (out, slopes, scores)), Int32(0), Int32(h), *held)
    cute.compile(mod_kernels.slopes_on_grid, *arguments, features)(*arguments)
    leaf = scores.clone().requires_grad_()
    (expected,) = evaluate(found.program.steps, [found.program.result], _grid(leaf, h), found.captured)
    if not expected.requires_grad:
        return slopes, torch.zeros_like(leaf)
    (wanted,) = torch.autograd.grad(expected.expand(1, 1, ROWS, COLUMNS).sum(), leaf)
    return slopes, wanted


def on_the_host(mod, what, h=1):
    """What a mod gives as CuTe emits it, and what it should."""
    loader.load()
    import mod_kernels
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    found, scores = mod_of(mod, what), _scores()
    dtypes, held = _held(found)
    out = torch.full_like(scores, torch.nan)
    arguments = (from_dlpack(out), from_dlpack(scores), Int32(0), Int32(h), *held)
    cute.compile(mod_kernels.on_grid, *arguments, found.program.text, dtypes)(*arguments)
    grid = _grid(scores, h)
    (expected,) = evaluate(found.program.steps, [found.program.result], grid, found.captured)
    return out, expected.expand(1, 1, ROWS, COLUMNS)[0, 0].float()


OPERATORS = {
    "arithmetic": lambda s, b, h, q, k: (s + 2) * (q - k) / 3 - s / (k + 1) + 5 - torch.rsub(s, 2.0),
    "integers": lambda s, b, h, q, k: s + (q - k) // 3 + (q - k) % 5 + (k - 2 * q) // -4 + torch.remainder(q - k, -3),
    "towards 0": lambda s, b, h, q, k: s + torch.div(q - k, 3, rounding_mode="trunc"),
    "down": lambda s, b, h, q, k: torch.div(s, 0.7, rounding_mode="floor") + torch.remainder(s, 1.5) + s.floor(),
    "comparisons": lambda s, b, h, q, k: torch.where((q >= k) & (q != 3) | ~(k < 9) ^ (q == k), s, s * 2),
    "logic": lambda s, b, h, q, k: s * torch.logical_and(q > k, torch.logical_not(q > 9)) + torch.logical_or(q, k),
    "bits": lambda s, b, h, q, k: s + (q & 5) + (k | 2) + (q ^ k) + ~q + (k << 2) + ((q - k) >> 1),
    "bounds": lambda s, b, h, q, k: s.clamp(-1, 1) + s.clamp_min(0.5) + torch.maximum(s, q * 0.1) + s.clamp(max=0),
    "exponentials": lambda s, b, h, q, k: s.exp() + s.exp2() + (s.abs() + 1).log() + (s.abs() + 1).log2(),
    "roots": lambda s, b, h, q, k: s.abs().sqrt() + (s.abs() + 1).rsqrt() + s.square() + s**3 + (2 / s).reciprocal(),
    "waves": lambda s, b, h, q, k: s.sin() + s.cos() + s.tanh() * 1e-3 + (s * 1e-3).tanh(),
    "activations": lambda s, b, h, q, k: s.relu() + s.sigmoid() + silu(s) + gelu(s, approximate="tanh"),
    "soft ones": lambda s, b, h, q, k: softplus(s) + softplus(s, beta=2.0, threshold=3.0) + mish(s),
    "literals": lambda s, b, h, q, k: torch.zeros_like(s) + torch.ones(()) * 2 + torch.tensor(3.0) * s,
    "made integers": lambda s, b, h, q, k: s + (q + torch.full((), 3)) // torch.full((), 2) + torch.full((), 0.5),
    "tables": lambda s, b, h, q, k: s + _TABLE[h, -k - 1] + _LABELS[q] + _FLAGS[k],
    "dtypes": lambda s, b, h, q, k: (s.double() * 1.1).float() + (q - k).to(torch.int64) * 2 + (s > 0).int(),
    "fills": lambda s, b, h, q, k: s.masked_fill(q < k, -2.0) + torch.where(q < 5, 1.0, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    found, expected = on_the_host(OPERATORS[name], "score_mod")
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("name", OPERATORS)
def test_slopes(name):
    found, expected = slopes_on_the_host(OPERATORS[name])
    torch.testing.assert_close(found, expected, rtol=5e-6, atol=1e-5)


@given(score_mods())
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_drawn_slopes(mod):
    captured = Captured(train=False)
    found, expected = slopes_on_the_host(lambda s, b, h, q, k: mod(captured, s, b, h, q, k) * 1.0)
    torch.testing.assert_close(found, expected, rtol=5e-6, atol=1e-5)


@given(masks())
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_drawn_masks(mask):
    assert torch.equal(*on_the_host(mask, "mask_mod"))


@given(score_mods())
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_drawn_score_mods(mod):
    captured = Captured(train=False)
    found, expected = on_the_host(lambda s, b, h, q, k: mod(captured, s, b, h, q, k) * 1.0, "score_mod")
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-5)


def test_operators_are_those_with_a_form():
    loader.load()
    from torch_bwattn.backends.cute.parts import mods

    assert set(mods.FORMS) | set(SAME) | {"index", "_to_copy"} == flex.EMITTED
    assert not flex.EMITTED & MAKES


@pytest.mark.parametrize(
    ("mod", "words"),
    [
        (lambda s, b, h, q, k: torch.erfinv(s), "aten.erfinv"),
        (lambda s, b, h, q, k: s**0.5, "pow"),
        (lambda s, b, h, q, k: s.half() * 2, "float16"),
        (lambda s, b, h, q, k: torch.div(s, 2.0, rounding_mode="trunc"), "truncates"),
        (alibi := lambda s, b, h, q, k: s + _TABLE[h, k], ""),
    ],
)
def test_what_has_no_form_is_named(mod, words):
    found = mod_of(mod, "score_mod")
    said = flex.not_emitted(found.program.text, tuple((one.dtype, one.dim()) for one in found.captured), 0)
    assert words in said
    assert bool(said) == bool(words)


def inputs_of(score=None, mask=None, block=None, width=64, lengths=(256, 256), dtype=torch.bfloat16):
    q, k, v = (one.detach() for one in operands(2, *lengths, width=width, dtype=dtype))
    blocks = None
    if block is not None:
        made = create_block_mask(mask, None, None, *lengths, device="cpu", BLOCK_SIZE=block)
        blocks = BlockLists.of(made)
    return FlexInputs(q, k, v, 0.1, mod_of(score, "score_mod"), mod_of(mask, "mask_mod"), blocks)


def causal(b, h, q, k):
    return q >= k


def band(b, h, q, k):
    return (q >= k) & (q - k < 150) & _FLAGS[k % MOST]


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(flex, "target_of", lambda device: "sm_90a")


def test_all_of_attention_gym_but_rows_has_forms():
    pytest.importorskip("attn_gym")
    from tests.flex.gym import MASKS, MODS

    made = [(name, make(), "mask_mod") for name, (make, _, _) in MASKS.items()]
    made += [(name, make()[0], "score_mod") for name, make in MODS.items()]
    refused = set()
    for name, mod, what in made:
        found = mod_of(mod, what)
        if vectors(found.program, tuple(one.dim() for one in found.captured)):
            refused.add(name)
        else:
            kinds = tuple((one.dtype, max(one.dim(), 1)) for one in found.captured)
            assert flex.not_emitted(found.program.text, kinds, 0) == "", name
    assert refused == {"flamingo", "vsa", "vsa padded", "mla rope"}


def test_refusals(on_hopper):
    assert "for sm_90a, got sm_80" in _why_not_elsewhere(inputs_of(alibi))
    assert "multiples of 8" in flex.why_not(inputs_of(alibi, width=60))
    assert "bfloat16 and float16" in flex.why_not(inputs_of(alibi, dtype=torch.float32))
    assert "max_scores" in flex.why_not(inputs_of(alibi), with_max_scores=True)
    assert "aten.erfinv" in flex.why_not(inputs_of(OPERATORS["tables"], lambda b, h, q, k: torch.erfinv(q / 99) > 0))
    assert "above 0" in flex.why_not(dataclasses.replace(inputs_of(alibi), scale=-1.0))
    assert flex.why_not(inputs_of(OPERATORS["tables"], band, 128)) == ""


def test_refusals_of_a_backward(on_hopper, monkeypatch):
    def why_not(score, wanted=()):
        return flex.why_not(inputs_of(score, causal), backward=True, wanted=wanted)

    bias, wide = _TABLE.clone().requires_grad_(), _TABLE.double().requires_grad_()
    assert why_not(lambda s, b, h, q, k: s + bias[h, q] / 2, [True]) == ""
    assert why_not(lambda s, b, h, q, k: s * bias[h, q], [False]) == ""
    assert "only adds to scores" in why_not(lambda s, b, h, q, k: s * bias[h, q], [True])
    assert "one is float64" in why_not(lambda s, b, h, q, k: s + wide[h, q], [True])
    assert "digamma" in why_not(lambda s, b, h, q, k: s + torch.special.digamma(bias[h, q]), [True])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "no fixed order" in why_not(alibi)
    monkeypatch.setattr(configs, "LONGEST", 200)
    assert "up to 200" in why_not(alibi)


def _why_not_elsewhere(x):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "target_of", lambda device: "sm_80")
        return flex.why_not(x)


@pytest.mark.parametrize("block", [None, 128, 32])
def test_the_launch_is_what_was_compiled(block, monkeypatch):
    """Each argument is of the kind of the compiler's; blocks of no whole tiles become lists and a table."""
    launched = []
    monkeypatch.setattr(calls, "launch_of", lambda key: lambda *arguments: launched.append((key, arguments)))
    monkeypatch.setattr(calls, "programs_of", lambda device: 132)
    x = inputs_of(OPERATORS["tables"], band, block)
    out, lse, _ = flex.forward(x)
    ((key, arguments),) = launched
    _, fakes = calls.build_of(key)()
    assert len(arguments) == len(fakes) - 1
    assert [one is None for one in arguments] == [one is None for one in fakes[:-1]]
    ranks = [one.dim() if isinstance(one, torch.Tensor) else None for one in arguments]
    fake_ranks = [len(one.shape) if hasattr(one, "shape") else None for one in fakes[:-1]]
    assert ranks == fake_ranks
    mods = key.parts[0].mods
    assert mods.lists == (block is not None)
    assert len(mods.tables) == 4 + (block == 32)
    assert out.shape == x.q.shape
    assert lse.shape == x.q.shape[:3]


@pytest.mark.parametrize("block", [None, 128, 32])
def test_the_launches_of_a_backward_are_what_was_compiled(block, monkeypatch):
    launched = []
    monkeypatch.setattr(calls, "launch_of", lambda key: lambda *arguments: launched.append((key, arguments)))
    monkeypatch.setattr(calls, "programs_of", lambda device: 132)
    x = inputs_of(OPERATORS["tables"], band, block)
    out, lse = torch.zeros_like(x.q), torch.zeros(x.q.shape[:3])
    torch.set_default_dtype(torch.float64)  # in which nothing is made
    try:
        *grads, of_captured = flex.backward(x, out, None, out, lse, [True, False, False])
    finally:
        torch.set_default_dtype(torch.float32)
    assert [key.name for key, _ in launched] == ["backward_preprocess", "flex_backward_sm90", "backward_postprocess"]
    for key, arguments in launched:
        _, fakes = calls.build_of(key)()
        assert len(arguments) == len(fakes) - 1
        for one, fake in zip(arguments, fakes, strict=False):
            assert (one is None) == (fake is None)
            assert isinstance(one, torch.Tensor) == hasattr(fake, "shape")
            if isinstance(one, torch.Tensor):
                assert one.dim() == len(fake.shape)
                assert flex.dtype_name(one.dtype) in str(fake.element_type).lower() or one.dtype == torch.uint8
    assert [one.shape for one in grads] == [x.q.shape, x.k.shape, x.v.shape]
    assert [None if one is None else one.shape for one in of_captured] == [_TABLE.shape, None, None]


def test_a_pinned_backend_says_what_it_does_not_take():
    query = torch.randn(1, 2, 40, 16)
    with torch_bwattn.backend("cute"), pytest.raises(UnsupportedProblem, match=r"cute was pinned: its kernels are for"):
        torch_bwattn.flex_attention(query, query, query, lambda s, b, h, q, k: s + h)


@given(masks(), st.tuples(st.integers(1, MOST), st.integers(1, MOST)), st.booleans())
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_tiles_of_listed_blocks_are_visited(mask, lengths, with_full):
    loader.load()
    import mod_kernels
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    from torch_bwattn.backends.cute.flex_forward_sm90 import FlexForward

    lists = create_block_mask(mask, 1, 2, *lengths, device="cpu", BLOCK_SIZE=16)
    features = configs.ModFeatures(None, None, (), 0, lists=True, full=with_full)
    kernel = FlexForward(
        configs.ForwardFeatures("bfloat16", 64, 64, mods=features), configs.ForwardConfig(128, 128, 2, ping_pong=True)
    )
    full = (lists.full_kv_num_blocks, lists.full_kv_indices) if with_full else (None, None)
    tensors = [None if one is None else from_dlpack(one) for one in (lists.kv_num_blocks, lists.kv_indices, *full)]
    out = torch.zeros(64, dtype=torch.int32)
    numbers = [Int32(0)] * 3 + [Int32(2), Int32(4), Int32(0)]
    launch = cute.compile(mod_kernels.visited_in_lists, from_dlpack(out), *tensors, *numbers, kernel)
    for head in range(2):
        for m in range(-(-lengths[0] // 8)):  # two tiles of queries and four of keys in a block
            order, count = [], 1
            while len(order) < count:
                launch(from_dlpack(out), *tensors, m, 0, head, 2, 4, len(order))
                count, masked, n, *_ = out.tolist()
                order.append(n)
            listed = [(lists.kv_num_blocks, lists.kv_indices)] + ([full] if with_full else [])
            expected = [
                block * 4 + tile
                for counts, index in listed
                for block in index[0, head, m // 2, : counts[0, head, m // 2]].tolist()
                for tile in range(4)
            ]
            assert order[:count] == expected, (m, head)
            assert masked == 4 * lists.kv_num_blocks[0, head, m // 2]


@given(masks(), st.tuples(st.integers(1, MOST), st.integers(1, MOST)), st.booleans())
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_tiles_of_listed_columns_are_visited(mask, lengths, with_full):
    """Those of each head, once each, and none beyond the last query."""
    loader.load()
    import mod_kernels
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    from torch_bwattn.backends.cute.flex_backward_sm90 import FlexBackward

    made = create_block_mask(mask, 1, 2, *lengths, device="cpu", BLOCK_SIZE=16)
    lists = BlockLists.of(made)
    if not with_full:
        lists = dataclasses.replace(lists, full_count=None, full_index=None)
    columns = transposed(lists, *lengths)
    features = configs.ModFeatures(None, None, (), 0, lists=True, full=with_full)
    kernel = FlexBackward(
        configs.BackwardFeatures("bfloat16", 64, 64, mods=features), configs.BackwardConfig(64, 128, adders="groups")
    )
    parts = (columns.part_count, columns.part_index, columns.full_count, columns.full_index)
    tensors = [None if one is None else from_dlpack(one) for one in parts]
    m_tiles, out = -(-lengths[0] // 8), torch.zeros(64, dtype=torch.int32)  # two tiles of queries in a block
    launch = cute.compile(
        mod_kernels.visited_in_columns, from_dlpack(out), *tensors, *[Int32(0)] * 2, *[Int32(1)] * 4, kernel
    )
    part, full = visited(lists, lengths[1])
    for head in range(2):
        for n in range(-(-lengths[1] // 4)):  # and four of keys
            order, count = [], 1
            while len(order) < count:
                launch(from_dlpack(out), *tensors, n, head, m_tiles, 2, 4, len(order))
                count, m, masked, *_ = out.tolist()
                order.append((m, bool(masked)))
            expected = [
                (m, bool(part[0, head, m // 2, n // 4]))
                for m in range(m_tiles)
                if part[0, head, m // 2, n // 4] or full[0, head, m // 2, n // 4]
            ]
            assert sorted(order[:count]) == expected, (head, n)

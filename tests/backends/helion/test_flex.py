"""Kernels for mods and lists of blocks, through Triton's interpreter, against blockwise PyTorch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import torch_bwattn
from tests.flex.dense import check, operands
from tests.flex.drawn import MOST, masks
from tests.flex.emitted import mod_of
from torch_bwattn.backends import flex_blocks, flex_blockwise
from torch_bwattn.backends.flex_inputs import BlockLists, FlexInputs, Mod, visited
from torch_bwattn.backends.helion import configs, flex
from torch_bwattn.errors import UnsupportedProblem
from torch_bwattn.ops import flex as flex_op
from torch_bwattn.selection import trust

interpreted = pytest.mark.interpreted

pytestmark = pytest.mark.usefixtures("fast_row_maximum")

_SMALL = {
    "forward": configs.Config(32, 16, 4, 1),
    "dkv": configs.Config(16, 32, 4, 1, ("tile_n", "tile_m")),
    "dq": configs.Config(32, 16, 4, 1),
    "delta": configs.Config(16, 16, 4, 1, ("tile_m",)),
}
_GENERATOR = torch.Generator().manual_seed(2)
_SLOPES = torch.rand(4, generator=_GENERATOR) * 0.1
_BIAS = torch.randn(4, 80, 90, generator=_GENERATOR)
_OF_KEYS = torch.randn(90, 2, generator=_GENERATOR)[:, 0]
_DOCUMENTS = torch.randint(3, (2, 90), generator=_GENERATOR)
_HALF = torch.randn(4, 40, generator=_GENERATOR).half()
_COLUMNS = torch.randint(80, (80, 3), generator=_GENERATOR)
_TEMPERATURE = torch.tensor(0.7)


def lists_of(mask, lengths, block, heads=None, batch=None):
    """Lists as ``create_block_mask`` makes them."""
    return BlockLists.of(create_block_mask(mask, batch, heads, *lengths, device="cpu", BLOCK_SIZE=block))


@dataclasses.dataclass
class Case:
    """One call; lists of a block size where there is one."""

    score: object = None
    mask: object = None
    block: object = None
    lengths: tuple[int, int] = (70, 50)
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    kv_batch: int = 2
    scale: float = 0.3

    def inputs(self) -> FlexInputs:
        query, key, value = operands(
            self.heads[0], *self.lengths, kv_heads=self.heads[1], kv_batch=self.kv_batch, width=self.widths[0],
            v_width=self.widths[1], dtype=self.dtype,
        )  # fmt: skip
        blocks = None if self.block is None else lists_of(self.mask, self.lengths, self.block, self.heads[0], 2)
        mods = mod_of(self.score, "score_mod"), mod_of(self.mask, "mask_mod")
        return FlexInputs(query.detach(), key.detach(), value.detach(), self.scale, *mods, blocks)


def causal(b, h, q, k):
    return q >= k


def documents(b, h, q, k):
    return _DOCUMENTS[b, q] == _DOCUMENTS[b, k]


def band(b, h, q, k):
    return ((q - k) % 29 < 20) & (q + k > 11)


def by_head(b, h, q, k):
    return (q >= k) | (h % 2 == 0)


def alibi(s, b, h, q, k):
    return s * _TEMPERATURE + _SLOPES[h] * (k - q)


def biased(s, b, h, q, k):
    return s + _BIAS[h, q, k] + _OF_KEYS[-k - 1]


def capped(s, b, h, q, k):
    return 2.0 * torch.tanh(s / 2.0)


def lowest(s, b, h, q, k):
    return torch.where(q < 40, torch.finfo(torch.float32).min, s)


CASES = {
    "a score mod alone": Case(alibi),
    "a mask alone, whole tiles": Case(None, documents, lengths=(64, 48)),
    "a bias of every score": Case(biased),
    "a mask of rows that see nothing": Case(alibi, lambda b, h, q, k: (q > 30) & (k > q - 20), 32, lengths=(70, 90)),
    "lists of whole blocks": Case(None, causal, 32, lengths=(64, 96)),
    "lists by head": Case(capped, by_head, (32, 16)),
    "lists of blocks of no tiles": Case(alibi, band, 5),
    "lists of wide blocks": Case(None, documents, 128, widths=(24, 40), dtype=torch.float16),
    "keys of one batch entry": Case(capped, causal, 16, kv_batch=1, heads=(2, 1)),
    "a negative scale": Case(None, causal, 32, scale=-0.4, widths=(8, 16)),
    "the least number": Case(lowest, lengths=(64, 48)),
    "a table of what is in a column of another": Case(
        lambda s, b, h, q, k: s + _BIAS[h, _COLUMNS[q, torch.full((), 1)], k]
    ),
    "a table in half precision": Case(lambda s, b, h, q, k: s + _HALF[h, q] * (q - k), lengths=(37, 45)),
}


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_values(name, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    x = case.inputs()
    out, lse, most = flex_blockwise.forward(x)
    generator = torch.Generator().manual_seed(5)
    grad_out, grad_lse = (torch.randn(one.shape, generator=generator).to(one.dtype) for one in (out, lse))
    wanted = [] if x.score_mod is None else [tensor.is_floating_point() for tensor in x.score_mod.captured]
    expected = flex_blockwise.backward(x, grad_out, grad_lse, lse, wanted)
    torch.use_deterministic_algorithms(True)  # so that what is not written is NaN
    try:
        found = flex.forward(x, with_max_scores=True, chosen=_SMALL)
        grads = flex.backward(x, grad_out, grad_lse, out, lse, wanted, chosen=_SMALL)
    finally:
        torch.use_deterministic_algorithms(False)
    tolerance = 2e-5 if case.dtype == torch.float32 else 4e-3
    of_captured = zip(grads[3], expected[3], strict=True)
    pairs = [*zip(found, (out, lse, most), strict=True), *zip(grads[:3], expected[:3], strict=True), *of_captured]
    names = ["out", "lse", "max_scores", "dq", "dk", "dv", *(f"captured {place}" for place in range(len(wanted)))]
    for what, (one, other) in zip(names, pairs, strict=True):
        if other is None:
            assert one is None
            continue
        largest = max(1.0, float(other.nan_to_num(neginf=0.0).abs().max()))
        allowed = max(tolerance, 1e-3) if other.dtype == torch.float16 else tolerance  # it is rounded to it
        torch.testing.assert_close(
            one, other, rtol=allowed, atol=allowed * min(largest, 1e6), msg=lambda m, w=what: f"{w}: {m}"
        )
        assert one.stride() == other.stride() or what.startswith("captured")


@interpreted
def test_two_kernels_serve_every_length():
    family = flex._family("flex_forward", (1,))
    before = len(family._bound)
    for length in (32, 33, 64, 100, 160):
        x = Case(alibi, lengths=(length, length)).inputs()
        shift = torch.tensor([length // 3])
        mask = mod_of(lambda b, h, q, k, shift=shift: q + shift[0] >= k, "mask_mod")
        x = dataclasses.replace(x, mask_mod=mask, score_mod=None)
        out, _, _ = flex.forward(x, chosen=_SMALL)
        torch.testing.assert_close(out, flex_blockwise.forward(x)[0], rtol=2e-5, atol=2e-5)
    assert len(family._bound) - before == 2  # of whole tiles of keys, and of a last one that is not


@interpreted
def test_captured_integers():
    x = Case(alibi).inputs()
    text = (
        '{"format":1,"steps":[["aten.add.Tensor",[{"ref":"q_idx"},{"ref":"#1"}],{}],'
        '["aten.ge.Tensor",[{"ref":"%0"},{"ref":"kv_idx"}],{}]],"result":{"ref":"%1"}}'
    )
    from torch_bwattn.mods.program import parsed

    for numbers in ((5, 0), (9, 1), (3, 11)):
        shifted = dataclasses.replace(x, mask_mod=Mod(parsed(text), (), numbers))
        torch.testing.assert_close(
            flex.forward(shifted, chosen=_SMALL)[0], flex_blockwise.forward(shifted)[0], rtol=2e-5, atol=2e-5
        )


@interpreted
def test_through_the_operator(monkeypatch):
    monkeypatch.setattr(flex, "why_not", lambda x: "")
    monkeypatch.setattr(flex, "_chosen", lambda x: _SMALL)
    monkeypatch.setattr(trust, "passed_tests", lambda target: True)
    slopes = _SLOPES.clone().requires_grad_()
    q_k_v = operands(4, 40, 50, kv_heads=2, width=16)
    mask = create_block_mask(band, None, None, 40, 50, device="cpu", BLOCK_SIZE=32)
    torch_bwattn.reset_call_counts()
    with torch_bwattn.backend("helion"):
        check(q_k_v, lambda s, b, h, q, k: s + slopes[h] * (k - q), mask, [slopes], enable_gqa=True)
    assert torch_bwattn.call_counts() == {"helion": 1}
    text = torch_bwattn.explain_flex_attention(*q_k_v, lambda s, b, h, q, k: s + slopes[h], mask, enable_gqa=True)
    assert "forward: helion, forward 32x16" in text
    with (
        pytest.raises(UnsupportedProblem, match=r"helion was pinned: Helion does not lower"),
        torch_bwattn.backend("helion"),
    ):
        torch_bwattn.flex_attention(*q_k_v, lambda s, b, h, q, k: torch.special.digamma(s), mask, enable_gqa=True)
    said = []
    monkeypatch.setattr(flex_op.log, "debug", lambda text, *values: said.append(text % values))
    check(q_k_v, lambda s, b, h, q, k: torch.special.digamma(s.abs() + 1.0), mask, enable_gqa=True)
    assert any("Helion does not lower" in one for one in said)
    assert torch_bwattn.call_counts() == {"helion": 1, "reference": 1}


def test_why_not():
    x = Case(alibi).inputs()
    assert "CUDA device of sm_80" in flex.why_not(x)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(flex, "target_of", lambda device: "sm_90a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float64}, "bfloat16, float16 and float32"),
        ({"widths": (257, 16)}, "widths from 1 to 256"),
        ({"lengths": (0, 5)}, "nothing to attend"),
        ({"score": lambda s, b, h, q, k: s + torch.dot(_BIAS[0, 0], _BIAS[0, k])}, "score_mod calls aten"),
        ({"mask": lambda b, h, q, k: _BIAS[h, q].sum() > 0}, "mask_mod calls aten"),
        ({"score": lambda s, b, h, q, k: s + sum(_BIAS[:, :, n + 1].clone()[h, q] for n in range(9))}, "8 captured"),
    ],
    ids=["dtype", "width", "empty", "vectors", "rows", "many"],
)  # fmt: skip
def test_refusals_name_what_is_not_taken(change, words, on_hopper):
    assert words in flex.why_not(dataclasses.replace(Case(alibi), **change).inputs())
    assert flex.why_not(Case(alibi, causal, 32).inputs()) == ""


def test_gradients_in_a_fixed_order_are_not_the_kernels(on_hopper):
    x = Case(alibi).inputs()
    torch.use_deterministic_algorithms(True)
    try:
        assert "no fixed order" in flex_op.way("backward", x, [True])
        assert flex_op.way("backward", x, [False]).startswith("helion")
        assert flex_op.way("forward", x, [True]).startswith("helion")
    finally:
        torch.use_deterministic_algorithms(False)


def _shown(x: FlexInputs) -> torch.Tensor:
    """What the lists and the mask show, dense."""
    sizes = (*x.q.shape[:3], x.k.shape[2])
    total = torch.zeros(sizes, dtype=torch.bool)
    for block in flex_blockwise._blocks_of_rows(x):
        keys = slice(None) if block.keys is None else block.keys
        total[:, :, block.rows, keys] = block.shown.expand(*sizes[:2], -1, -1)
    return total


@given(masks(), st.tuples(st.integers(1, MOST), st.integers(1, MOST)), st.sampled_from([8, 5, (16, 3), (7, 32)]))
@settings(max_examples=60, deadline=None)
def test_aligned_blocks_show_the_same(mask, lengths, block):
    query, key, value = operands(2, *lengths)
    x = FlexInputs(query, key, value, 1.0, None, mod_of(mask, "mask_mod"), lists_of(mask, lengths, block, 2))
    found = flex_blocks.aligned(x, (16, 8))
    assert all(size % tile == 0 for size, tile in zip(found.blocks.sizes, (16, 8), strict=True))
    assert torch.equal(_shown(found), _shown(x))
    columns = flex_blocks.transposed(x.blocks, *lengths)
    rows = -(-lengths[0] // x.blocks.sizes[0])
    width = visited(x.blocks, lengths[1])[0].shape[-1]
    back = dataclasses.replace(columns, sizes=x.blocks.sizes[::-1])
    for one, other in zip(visited(back, lengths[0]), visited(x.blocks, lengths[1]), strict=True):
        assert torch.equal(one[:, :, :width, :rows].mT, other[:, :, :rows])


def test_lists_alone_show_what_they_list():
    x = Case(None, band, 5).inputs()
    alone = dataclasses.replace(x, mask_mod=None)
    assert torch.equal(_shown(flex_blocks.aligned(alone, (16, 16))), _shown(alone))
    assert math.prod(x.blocks.sizes) == 25

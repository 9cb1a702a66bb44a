"""What becomes of a mod: its program, its captured tensors, and when it is recorded anew."""

from __future__ import annotations

import itertools

import pytest
import torch

from torch_bwattn.mods import program, trace
from torch_bwattn.mods.trace import ModError, traced

TABLE = torch.randn(4, 16)


def biased(score, b, h, q_idx, kv_idx):
    return score * 0.5 + TABLE[h, (q_idx - kv_idx).clamp(0, 15)]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_a_program_is_its_text():
    for mod, what in ((biased, "score_mod"), (causal, "mask_mod")):
        found = traced(mod, what).program
        assert program.parsed(found.text) == found
        assert program.parsed(found.text).text == found.text
    with pytest.raises(ValueError, match="format"):
        program.parsed('{"format":0,"steps":[],"result":{"ref":"score"}}')


def test_what_computes_the_same_way_is_one_mod():
    def same(score, b, h, q_idx, kv_idx):
        table = TABLE
        return score * 0.5 + table[h, torch.clamp(q_idx - kv_idx, 0, 15)]

    assert traced(same, "score_mod").program == traced(biased, "score_mod").program
    assert [tensor is TABLE for tensor in traced(same, "score_mod").captured] == [True]


def test_it_is_recorded_once(monkeypatch):
    calls = []

    def counted(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    original = trace.trace
    monkeypatch.setattr(trace, "trace", lambda *args: calls.append(args) or original(*args))
    assert traced(counted, "mask_mod") is traced(counted, "mask_mod")
    assert len(calls) == 1


@pytest.mark.parametrize("rebound", [7, torch.randn(5), lambda x: x + 1], ids=["number", "tensor", "function"])
def test_it_is_recorded_anew_where_its_closure_was_rebound(rebound):
    first = {int: 3, torch.Tensor: torch.randn(9), type(lambda: 0): lambda x: x + 2}[type(rebound)]
    seen = first

    def mod(score, b, h, q_idx, kv_idx):
        if isinstance(seen, torch.Tensor):
            return score + seen[h]
        return score + (seen(h) if callable(seen) else seen)

    before = traced(mod, "score_mod")
    seen = rebound
    after = traced(mod, "score_mod")
    assert before.program != after.program or before.captured[0] is not after.captured[0]


def test_it_is_recorded_anew_where_it_sees_an_object():
    class Holder:
        slope = 1.0

    holder = Holder()

    def mod(score, b, h, q_idx, kv_idx):
        return score * holder.slope

    before = traced(mod, "score_mod").program
    holder.slope = 2.0
    assert traced(mod, "score_mod").program != before


def test_it_is_recorded_anew_where_it_imports():
    def mod(score, b, h, q_idx, kv_idx):
        import math

        return score * math.pi

    first = traced(mod, "score_mod")
    assert first.program == traced(mod, "score_mod").program
    assert first is not traced(mod, "score_mod")


def looks(score, b, h, q_idx, kv_idx):
    return score if score > 0 else -score


def changes(score, b, h, q_idx, kv_idx):
    return score.mul_(2)


def fills_a_captured_one(score, b, h, q_idx, kv_idx):
    TABLE.zero_()
    return score


@pytest.mark.parametrize(
    ("mod", "what", "word"),
    [
        (looks, "score_mod", "looking at their values"), (changes, "score_mod", "changes nothing"),
        (fills_a_captured_one, "score_mod", "changes nothing"),
        (lambda s, b, h, i, j: 3, "score_mod", "int"), (lambda s, b, h, i, j: i, "score_mod", "torch.int32"),
        (lambda s, b, h, i, j: s + torch.ones(3), "score_mod", r"shape \[3\]"),
        (lambda s, b, h, i, j: torch.linalg.norm(TABLE[h]) + s, "score_mod", "linalg_vector_norm"),
        (lambda s, b, h, i, j: s * TABLE.tolist()[0][0], "score_mod", "tolist"),
        (lambda b, h, i, j: i - j, "mask_mod", "bool"), (lambda b, h, i, j: True, "mask_mod", "bool"),
    ],
)  # fmt: skip
def test_what_is_no_mod_is_refused_by_name(mod, what, word):
    with pytest.raises(ModError, match=word) as error:
        traced(mod, what)
    assert str(error.value).startswith((f"{what}: expected", "mod: expected"))
    assert not TABLE.eq(0.0).all()


@pytest.mark.parametrize("sizes", list(itertools.product((1, 3), (1, 2), (5,), (1, 7))), ids=str)
def test_values_over_a_grid(sizes):
    vectors = torch.randn(2, 7, 3)

    def mod(score, b, h, q_idx, kv_idx):
        row = vectors[h % 2, kv_idx]
        first, _, last = row
        return (
            torch.where(q_idx == kv_idx, score, first * last + torch.dot(row, vectors[0, 2])) + row[h % 3] * row.sum()
        )

    found = traced(mod, "score_mod")
    axes = [torch.arange(size, dtype=torch.int32) for size in sizes]
    grid = {name: axis.view([-1 if own == place else 1 for place in range(4)])
            for own, (name, axis) in enumerate(zip(program.POSITION, axes, strict=True))}  # fmt: skip
    score = torch.randn(sizes)
    first, wanted, rest = program.hoisted(found.program)
    captured = program.run(first, wanted, found.captured)
    (result,) = program.evaluate(rest.steps, [rest.result], {"score": score, **grid}, captured)
    expected = torch.stack([
        mod(score[at], *(torch.tensor(one) for one in at)) for at in itertools.product(*map(range, sizes))
    ])  # fmt: skip
    torch.testing.assert_close(result.expand(sizes).flatten(), expected)

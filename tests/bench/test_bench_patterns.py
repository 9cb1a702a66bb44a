"""The ``flex`` suite, on the CPU: each pattern is checked before it is timed, and what is wrong is not timed."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import torch_bwattn
from torch_bwattn.bench import document, patterns, report, suite
from torch_bwattn.bench.rows import Row
from torch_bwattn.bench.timing import Budget

ROW = Row(batch=1, heads=2, kv_heads=2, length=256, head_dim=16, causal=False)


def measured(monkeypatch, providers=(patterns.OUR_PROVIDER,), names=tuple(patterns.PATTERNS)):
    monkeypatch.setattr(patterns, "PATTERNS", {name: patterns.PATTERNS[name] for name in names})
    monkeypatch.setattr(patterns, "_PROVIDERS", providers)
    plan = suite.Plan(
        rows=[], suites=("flex",), device=torch.device("cpu"), budget=Budget(warmup_ms=1, rep_ms=1, rounds=1),
        flex_row=ROW,
    )  # fmt: skip
    return suite.run(plan, [], [], log=lambda _: None, commit="none")


def test_every_pattern_is_right_in_both_directions(monkeypatch):
    made = measured(monkeypatch)
    document.validate(made)
    records = made["flex"]
    assert [record["status"] for record in records] == ["ok"] * 14, [record.get("reason") for record in records]
    assert {record["pattern"] for record in records} == set(patterns.PATTERNS)
    assert all(record["tflops"] > 0 and record["check"] for record in records)
    assert "| documents |" in report.render([made])


def test_what_is_wrong_is_not_timed(monkeypatch):
    right = torch_bwattn.flex_attention
    monkeypatch.setattr(torch_bwattn, "flex_attention", lambda *args: right(*args) * 1.1)
    records = measured(monkeypatch, names=["alibi"])["flex"]
    assert {record["status"] for record in records} == {"wrong"}
    assert not any("ms" in record for record in records)


def test_a_peer_that_raises_leaves_its_reason(monkeypatch):
    opened = patterns._opened

    def opens_but_the_peer(name, *rest):
        if name == "flex_flash":
            raise ImportError("no such package")
        return opened(name, *rest)

    monkeypatch.setattr(patterns, "_opened", opens_but_the_peer)
    records = measured(monkeypatch, ("flex_flash", patterns.OUR_PROVIDER), ["documents"])["flex"]
    by_peer = [record for record in records if record["provider"] == "flex_flash"]
    assert {record["status"] for record in by_peer} == {"failed"}
    assert all("no such package" in record["reason"] for record in by_peer)
    assert {record["status"] for record in records if record not in by_peer} == {"ok"}


@pytest.mark.parametrize(("length", "share"), [(256, 0.75), (512, 0.625)])
def test_density_is_of_blocks(length, share):
    mask = create_block_mask(patterns._causal, None, None, length, length, "cpu", 128)
    assert patterns.density_of(mask) == share
    assert patterns.density_of(None) == 1.0

"""Which backend runs: the pin, the environment, the default, and what explain says of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
import torch

import torch_bwattn

QUERY = torch.randn(2, 4, 160, 32)
SMALL = torch.randn(1, 2, 5, 8)


@pytest.fixture(autouse=True)
def _counts():
    torch_bwattn.reset_call_counts()


def chosen(*args, **kwargs) -> str:
    torch_bwattn.reset_call_counts()
    torch_bwattn.sdpa(*args, **kwargs)
    (name,) = torch_bwattn.call_counts()
    return name


class TestPin:
    @pytest.mark.parametrize("name", ["aten", "reference"])
    def test_pins(self, name):
        with torch_bwattn.backend(name):
            assert chosen(QUERY, QUERY, QUERY) == name

    def test_inner_pin_wins_and_outer_returns(self):
        default = chosen(QUERY, QUERY, QUERY)
        with torch_bwattn.backend("reference"):
            with torch_bwattn.backend("aten"):
                assert chosen(QUERY, QUERY, QUERY) == "aten"
            assert chosen(QUERY, QUERY, QUERY) == "reference"
        assert chosen(QUERY, QUERY, QUERY) == default

    def test_ends_with_an_exception(self):
        default = chosen(QUERY, QUERY, QUERY)
        with pytest.raises(ZeroDivisionError), torch_bwattn.backend("reference"):
            raise ZeroDivisionError
        assert chosen(QUERY, QUERY, QUERY) == default

    def test_unknown_name(self):
        with (
            pytest.raises((ValueError, KeyError), match=r"(?s)nonsense.*aten|aten.*nonsense"),
            torch_bwattn.backend("nonsense"),
        ):
            pass

    def test_refusal_raises_and_names_the_backend(self):
        with (
            torch_bwattn.backend("helion"),
            pytest.raises(torch_bwattn.UnsupportedProblem, match=r"(?i)helion.*cpu|cpu.*helion"),
        ):
            torch_bwattn.sdpa(QUERY, QUERY, QUERY)
        assert issubclass(torch_bwattn.UnsupportedProblem, NotImplementedError)

    def test_refusal_is_the_same_compiled(self):
        with torch_bwattn.backend("helion"):
            with pytest.raises(torch_bwattn.UnsupportedProblem) as eager:
                torch_bwattn.sdpa(QUERY, QUERY, QUERY)
            torch._dynamo.reset()
            step = torch.compile(lambda q: torch_bwattn.sdpa(q, q, q), fullgraph=True, backend="aot_eager")
            with pytest.raises(Exception) as compiled:  # noqa: PT011 (Dynamo wraps it)
                step(QUERY)
        chain, texts = compiled.value, []
        while chain is not None:
            texts.append(str(chain))
            chain = chain.__cause__
        assert any(str(eager.value) in text for text in texts)

    def test_the_backward_uses_the_pin_of_its_forward(self):
        query = QUERY.clone().requires_grad_()
        with torch_bwattn.backend("reference"):
            out = torch_bwattn.sdpa(query, query, query)
            (inside,) = torch.autograd.grad(out.sum(), query, retain_graph=True)
        (outside,) = torch.autograd.grad(out.sum(), query)
        assert torch.equal(inside, outside)


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess:
    prelude = "import torch, torch_bwattn\nquery = torch.randn(2, 4, 160, 32)\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


class TestEnvironment:
    @pytest.mark.parametrize("name", ["aten", "reference"])
    def test_pins(self, name):
        code = "torch_bwattn.sdpa(query, query, query)\nprint(torch_bwattn.call_counts())"
        assert f"{{'{name}': 1}}" in in_a_process(code, BWATTN_BACKEND=name).stdout

    def test_the_context_manager_is_stronger(self):
        code = """
with torch_bwattn.backend("aten"):
    torch_bwattn.sdpa(query, query, query)
print(torch_bwattn.call_counts())
"""
        assert "{'aten': 1}" in in_a_process(code, BWATTN_BACKEND="reference").stdout

    def test_unknown_name_says_so(self):
        done = in_a_process("torch_bwattn.sdpa(query, query, query)", BWATTN_BACKEND="nonsense")
        assert done.returncode != 0
        assert "BWATTN_BACKEND" in done.stderr
        assert "nonsense" in done.stderr
        assert "aten" in done.stderr


class TestExplain:
    def test_prints_and_gives_its_text(self, capsys):
        text = str(torch_bwattn.explain(QUERY, QUERY, QUERY, is_causal=True))
        assert text.strip() in capsys.readouterr().out
        for piece in ("aten", "reference", "helion" if torch.cuda.is_available() else "cpu", "float32", "160"):
            assert piece in text
        assert isinstance(torch_bwattn.explain(QUERY, QUERY, QUERY), torch_bwattn.Explanation)

    def test_runs_nothing(self):
        torch_bwattn.explain(QUERY, QUERY, QUERY)
        assert torch_bwattn.call_counts() == {}

    @pytest.mark.parametrize("args", [(QUERY, QUERY, QUERY), (SMALL, SMALL, SMALL)], ids=["large", "small"])
    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": -1.0}, {"dropout_p": 0.5}], ids=str)
    def test_says_what_is_done(self, args, options):
        assert f"forward: {chosen(*args, **options)}" in str(torch_bwattn.explain(*args, **options))

    def test_gives_the_reason_of_a_refusal(self):
        with torch_bwattn.backend("helion"):
            text = str(torch_bwattn.explain(QUERY, QUERY, QUERY))
        assert "helion" in text
        assert "refuse" in text.lower()

    def test_takes_every_argument_and_checks_it(self):
        mask = torch.rand(160, 160) < 0.5
        text = str(
            torch_bwattn.explain(QUERY, QUERY[:, :2], QUERY[:, :2], mask, 0.1, False, scale=0.5, enable_gqa=True)
        )
        assert "bool" in text
        with pytest.raises((ValueError, TypeError), match="attn_mask"):
            torch_bwattn.explain(QUERY, QUERY, QUERY, mask[:3])

    def test_meta_tensors(self):
        query = torch.empty(2, 4, 160, 32, device="meta")
        out, lse = torch_bwattn.sdpa(query, query, query, return_lse=True)
        assert out.device.type == lse.device.type == "meta"
        assert out.shape == query.shape


class TestDeterminism:
    @pytest.mark.parametrize("name", [None, "aten", "reference"])
    @pytest.mark.parametrize("needs_mask_grad", [False, True])
    def test_bitwise_repeatable(self, name, needs_mask_grad):
        leaves = [QUERY.clone(), torch.randn(2, 2, 160, 32), torch.randn(2, 2, 160, 32)]
        mask = torch.randn(160, 160).requires_grad_(needs_mask_grad and name != "aten")
        leaves = [leaf.requires_grad_() for leaf in leaves]
        wanted = [*leaves, mask] if mask.requires_grad else leaves
        grad = torch.randn(2, 4, 160, 32)
        torch.use_deterministic_algorithms(True)
        try:
            with torch_bwattn.backend(name) if name else contextlib.nullcontext():
                results = []
                for _ in range(3):
                    out = torch_bwattn.sdpa(*leaves, mask, enable_gqa=True)
                    results.append((out, *torch.autograd.grad(out, wanted, grad)))
        finally:
            torch.use_deterministic_algorithms(False)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))

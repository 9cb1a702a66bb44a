"""The backward that is lowered to tcgen05: what it takes, and its values through Triton."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_bwattn.backends import reference
from torch_bwattn.backends.base import BackwardInputs, ForwardInputs
from torch_bwattn.backends.helion import flash, flash_backward
from torch_bwattn.backends.helion.backend import HelionBackend
from torch_bwattn.problem import Problem, describe

CAUSAL = Problem("sm_100a", torch.bfloat16, 2, 8, 2, 300, 300, 96, 64, 0.3, diagonal=0, backward=True)
DENSE = dataclasses.replace(CAUSAL, q_len=130, kv_len=1280, head_dim=64, diagonal=None)
PAIR, ONE = flash_backward.CONFIGS


@pytest.fixture(autouse=True)
def cute_is_there(monkeypatch):
    monkeypatch.setattr(flash.cute_loader, "why_missing", lambda: None)


@pytest.mark.parametrize(
    ("problem", "changes", "word"),
    [
        (CAUSAL, {}, ""), (DENSE, {}, ""), (CAUSAL, {"sink_dtype": torch.float32, "lse_grad": True}, ""),
        (CAUSAL, {"kv_len": 301}, "Skv=301"), (CAUSAL, {"diagonal": 1}, "i + 1"),
        (CAUSAL, {"low_diagonal": -9}, "window"),
        (DENSE, {"kv_len": 1281}, "1281"), (DENSE, {"kv_len": 2304 + 256}, ""), (DENSE, {"kv_len": 4352}, "4608 keys"),
        (CAUSAL, {"deterministic": True}, "differs from run to run"), (CAUSAL, {"softcap": 9.0}, "soft cap"),
        (CAUSAL, {"scale": 0.0}, "above 0"), (CAUSAL, {"dropout_p": 0.5}, "dropout"),
        (CAUSAL, {"head_dim": 129}, "D=129"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_name_their_reason(problem, changes, word):
    problem = dataclasses.replace(problem, **changes)
    offer, *others = HelionBackend().offers(problem)
    assert bool(offer) == (not word)
    assert word in offer.reason
    assert HelionBackend().supports(problem) == (offer or others[0])


def test_pairs_of_programs_are_for_width_128():
    backend = HelionBackend()
    assert [offer.config for offer in backend.offers(CAUSAL)][:2] == [PAIR, ONE]
    assert [offer.config for offer in backend.offers(DENSE)][:1] == [ONE]
    assert isinstance(backend.backward(CAUSAL, ONE), flash_backward.Backward)
    usual = backend.offers(CAUSAL)[2].config
    assert not isinstance(backend.backward(CAUSAL, usual), flash_backward.Backward)


@pytest.mark.interpreted
def test_values_through_triton():
    cases = (
        ((2, 1, 300, 300), (40, 64), {"is_causal": True, "sink": torch.randn(2)}),
        ((2, 2, 70, 256), (64, 64), {"contiguous": True}),
    )
    for (heads, kv_heads, q_len, kv_len), widths, options in cases:
        torch.manual_seed(0)
        sink, contiguous = options.pop("sink", None), options.pop("contiguous", False)
        q, k, v = (
            torch.randn(1, length, count, width).transpose(1, 2)
            for count, length, width in (
                (heads, q_len, widths[0]),
                (kv_heads, kv_len, widths[0]),
                (kv_heads, kv_len, widths[1]),
            )
        )
        if contiguous:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        settings = {"scale": 0.3, "is_causal": False, "causal_alignment": "top_left", "dropout_p": 0.0, **options}
        problem = describe(q, k, v, None, sink=sink, backward=True, **settings)
        out, lse = reference.forward(problem, ForwardInputs(q, k, v, None, None, sink))
        x = BackwardInputs(torch.randn_like(out), torch.randn_like(lse), q, k, v, None, out, lse, None, sink)
        wanted = (True, True, True, False, sink is not None)
        got = flash_backward.Backward(problem, ONE)(x, wanted)
        for grad, expected in zip(got, reference.backward(problem, x, wanted), strict=True):
            assert (grad is None) == (expected is None)
            if grad is not None:
                torch.testing.assert_close(grad, expected, atol=5e-5, rtol=5e-5)
                assert grad.stride() == expected.stride()


@pytest.mark.compile_only
def test_helion_recognises_it():
    from torch_bwattn.backends.helion import cute_lowering, flash_cute_backward, pretend

    def rows(count, dtype=torch.bfloat16):
        return torch.empty(count, 128, dtype=dtype)

    q, k, v, do, dq, dk, dv = (
        rows(1024),
        rows(512),
        rows(512),
        rows(1024),
        rows(1024, torch.float32),
        rows(512),
        rows(512),
    )
    arguments = (q, k, v, do, torch.empty(1024), torch.empty(1024), dq, dk, dv, 0.3, 0.2, 512, 256, 256, True)
    with pretend.pretend_cuda((10, 0)):
        assert callable(
            cute_lowering.lowered(flash_cute_backward.FLASH_BACKWARD, arguments, {"cute_flash_bwd_two_cta": 1})
        )

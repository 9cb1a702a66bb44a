"""Every config that may compete is right, and what the choice does with them on a device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torch_bwattn
from torch_bwattn.problem import Problem
from torch_bwattn.selection import attempts, drawn, trust
from torch_bwattn.selection.choose import get_backend, plan
from torch_bwattn.target import target_of
from torch_bwattn.tuning import tuner, worker

pytestmark = pytest.mark.gpu

PROBLEMS = {
    "plain": {},
    "causal": {"diagonal": 0},
    "few queries": {"q_len": 17, "diagonal": 500},
    "grouped": {"kv_heads": 1, "diagonal": 0},
    "bool mask": {"q_len": 60, "mask_dtype": torch.bool, "mask_sizes": (1, 1, 60, 517)},
    "additive mask": {
        "kv_heads": 2,
        "dtype": torch.float16,
        "mask_dtype": torch.float16,
        "mask_sizes": (1, 1, 517, 517),
    },
    "additive mask in bfloat16": {"kv_heads": 2, "mask_dtype": torch.bfloat16, "mask_sizes": (1, 1, 517, 517)},
    "mask of keys": {"mask_dtype": torch.bool, "mask_sizes": (2, 1, 1, 517)},
    "mask of all": {"mask_dtype": torch.bool, "mask_sizes": (1, 1, 517, 517), "head_dim": 128, "value_dim": 128},
    "wide": {"head_dim": 128, "value_dim": 128},
    "fp32": {"dtype": torch.float32},
    "short": {"q_len": 8, "kv_len": 8, "head_dim": 32, "value_dim": 32, "diagonal": 0},
    "one query": {"q_len": 1, "kv_len": 300, "head_dim": 32, "value_dim": 32},
    "beyond 256": {"head_dim": 264, "value_dim": 264},
}


def described(device, **fields) -> Problem:
    plain = Problem(target_of(device), torch.bfloat16, 2, 4, 4, 517, 517, 64, 64, 0.125)
    return dataclasses.replace(plain, **fields)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_pytorchs_kernels_are_right(name, backward, device):
    problem = described(device, **PROBLEMS[name], backward=backward)
    backend = get_backend("aten")
    taken = [offer.config for offer in backend.offers(problem) if offer]
    for config in taken:
        assert drawn.failure(backend, config, drawn.draw(problem, device)) == "", config
    assert taken or name == "fp32" or ("mask" in name and backward)
    assert "cudnn" in taken or "mask" not in name or "bfloat16" in name or backward


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("width", [64, 96, 128])
def test_every_config_of_cute_is_right(width, backward, device):
    masks = [{"mask_dtype": dtype, "mask_sizes": (1, 1, 517, 517)} for dtype in (torch.bool, torch.bfloat16)]
    masks.append({"mask_dtype": torch.bool, "mask_sizes": (2, 1, 1, 517)})
    for fields in ({}, {"diagonal": 0}, {"diagonal": 0, "low_diagonal": -100}, *masks):
        problem = described(device, head_dim=width, value_dim=width, backward=backward, **fields)
        backend = get_backend("cute")
        for offer in backend.offers(problem):
            if offer:
                assert drawn.failure(backend, offer.config, drawn.draw(problem, device)) == "", offer.config


def test_all_competitors_are_timed(device):
    problem = described(device, q_len=16, diagonal=501)
    tunables = tuner.competitors(problem)
    assert ("aten", "math") in tunables
    times, failures = worker.measure(problem, tunables, {"warmup_ms": 1.0, "rep_ms": 2.0, "rounds": 1})
    assert not any(failures)
    assert all(ms is not None and ms > 0.0 for ms in times)


def test_a_config_that_lacks_memory_is_passed_over(device, monkeypatch):
    query = torch.randn(1, 3, 75, 40, device=device, dtype=torch.bfloat16)
    problem = described(device, batch=1, heads=3, kv_heads=3, q_len=75, kv_len=75, head_dim=40, value_dim=40)
    first = plan(problem, None).chosen
    assert first is not None

    def lacks_memory(*_):
        raise torch.OutOfMemoryError("too little memory")

    told = []
    monkeypatch.setattr(attempts.storage, "tell_once", lambda _log, text, about=None: told.append(text))
    monkeypatch.setattr(get_backend(first.backend), "forward", lacks_memory)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    torch.testing.assert_close(torch_bwattn.sdpa(query, query, query), expected, atol=2e-2, rtol=2e-2)
    assert told
    assert all("too little memory" in line for line in told)  # one for each of the backend's configs


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_whose_kernels_nobody_vouches_for_is_checked_first(device, monkeypatch, tmp_path, compiled):
    """In autograd's own thread, which the check's references would wait for."""
    monkeypatch.setenv("BWATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trust, "passed_tests", lambda _: False)
    monkeypatch.setattr(trust, "_known", {})
    torch._dynamo.reset()
    attend = torch.compile(torch_bwattn.sdpa, fullgraph=True) if compiled else torch_bwattn.sdpa
    width = 56 if compiled else 48  # each of its own, which nothing was chosen for before
    leaves = [torch.randn(1, 2, 91, width, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    attend(*leaves).float().square().sum().backward()
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": 91, "kv_len": 91, "head_dim": width, "value_dim": width}
    plans = [plan(described(device, **sizes, backward=backward), None) for backward in (False, True)]
    assert {tunable for _, tunable in trust._known} == {made.chosen.tunable for made in plans}
    assert set(trust._known.values()) == {""}

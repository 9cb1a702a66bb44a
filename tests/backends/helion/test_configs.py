"""The table of configs: bounded by features, and every config fits the GPU that it is for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_bwattn.backends.base import BackwardInputs, ForwardInputs
from torch_bwattn.backends.helion import configs
from torch_bwattn.backends.helion.backend import HelionBackend
from torch_bwattn.problem import Problem, describe
from torch_bwattn.target import capability

HOPPER = Problem("sm_90a", torch.bfloat16, 2, 8, 2, 128, 128, 64, 64, 0.125)


def changed(**changes: object) -> Problem:
    return dataclasses.replace(HOPPER, **changes)


def test_the_number_of_configs_does_not_depend_on_lengths():
    lengths = [(1, 1), (1, 4096), (777, 3), (8192, 8192), (513, 1024), (1, 1025), (9, 100_000)]
    assert len({configs.forward(changed(q_len=m, kv_len=n)) for m, n in lengths}) == 2
    assert len({str(configs.backward(changed(q_len=m, kv_len=n))) for m, n in lengths}) == 1


def test_padding_goes_to_powers_of_two_from_16():
    assert [configs.padded(width) for width in (1, 16, 17, 64, 72, 129, 256)] == [16, 16, 32, 64, 128, 256, 256]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("width", [1, 64, 72, 128, 256])
def test_every_kind_of_problem_has_one(width, target, mask_dtype, dropout_p, dtype):
    problem = changed(
        target=target, dtype=dtype, dropout_p=dropout_p, mask_dtype=mask_dtype, head_dim=width, value_dim=width
    )
    assert configs.forward(problem).tile_m >= 16
    additive = mask_dtype == torch.float32
    backward = configs.backward(dataclasses.replace(problem, backward=True, mask_grad=additive))
    assert set(backward) == {"dkv", "dq", "delta"} | ({"excess", "mask_grad"} if additive else set())


@pytest.mark.compile_only
def test_the_busiest_problem_fits_shared_memory(monkeypatch):
    """A float32 mask, its gradient and dropout, where there is least of it: whatever asks for less fits too."""
    target, width, shared = "sm_86", 256, 99 * 1024
    from torch_bwattn.backends.helion import report, runtime

    compiled = {}

    def prepare(family, arguments, config):
        compiled[family.name] = report.compile_report(family, arguments, config, capability=capability(target))
        return lambda *arguments: None

    monkeypatch.setattr(runtime.KernelFamily, "prepare", prepare)
    rows = (torch.zeros(2, 200, 4, width, dtype=torch.bfloat16).transpose(1, 2) for _ in range(5))
    query, key, value, out, grad_out = rows
    mask, seed, lse = torch.zeros(200, 200)[None, None], torch.tensor([1]), torch.zeros(2, 4, 200)
    options = {"scale": 0.1, "is_causal": False, "causal_alignment": "top_left", "dropout_p": 0.1}
    problem = dataclasses.replace(describe(query, key, value, mask, **options), target=target)
    HelionBackend().forward(problem)(ForwardInputs(query, key, value, mask, seed))
    described = describe(query, key, value, mask, backward=True, more=(grad_out, out), **options)
    problem = dataclasses.replace(described, target=target, mask_grad=True)
    inputs = BackwardInputs(grad_out, None, query, key, value, mask, out, lse, seed)
    HelionBackend().backward(problem)(inputs, (True, True, True, True, False))
    assert len(compiled) == 6
    for name, kernel in compiled.items():
        assert kernel.shared_bytes <= shared, f"{name}: {kernel}"

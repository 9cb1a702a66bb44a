"""PyTorch's own kernels as candidates on CUDA: what each is refused, and the path that materialises the scores."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_bwattn.backends import aten_cuda, materialised
from torch_bwattn.backends.aten import AtenBackend
from torch_bwattn.problem import Problem
from torch_bwattn.selection import drawn

PROBLEM = Problem("sm_90a", torch.bfloat16, 2, 4, 4, 1024, 1024, 64, 64, 0.125)
BACKEND = AtenBackend()


def offer(config, **fields):
    problem = dataclasses.replace(PROBLEM, **fields)
    return next(verdict for verdict in BACKEND.offers(problem) if verdict.config == config)


@pytest.mark.parametrize(
    ("config", "report", "fields"),
    [
        ("cudnn", "1072", {"backward": True, "q_len": 1}),
        ("cudnn", "160", {"backward": True, "kv_len": 63}),
        ("efficient", "125674", {"backward": True, "dtype": torch.float32}),
        ("efficient", "142228", {"batch": 65536}),
    ],
)
def test_known_bad_combinations_are_refused_with_their_report(config, report, fields):
    verdict = offer(config, **fields)
    assert not verdict
    assert report in verdict.reason


@pytest.mark.parametrize(("config", "report"), [("cudnn", "196678"), ("efficient", "162588"), ("flash", "no mask")])
def test_masks_are_refused_with_what_is_known(config, report):
    assert report in offer(config, mask_dtype=torch.bool, mask_sizes=(1, 1, 1024, 1024), backward=True).reason


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ("cudnn", {}), ("cudnn", {"diagonal": 0}), ("cudnn", {"kv_heads": 2}), ("cudnn", {"q_len": 512}),
        ("flash", {}), ("flash", {"q_len": 512, "diagonal": 512}), ("efficient", {"q_len": 512, "diagonal": 0}),
        ("efficient", {"dtype": torch.float32}), ("efficient", {"value_dim": 128}), ("math", {"q_len": 64}),
        ("cudnn", {"mask_dtype": torch.bool, "mask_sizes": (2, 1, 1, 1024)}),
        ("cudnn", {"mask_dtype": torch.float16, "mask_sizes": (1, 1, 1024, 1024), "dtype": torch.float16}),
    ],
)  # fmt: skip
def test_taken(config, fields):
    verdict = offer(config, **fields)
    assert verdict
    assert not verdict.last_resort


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ("cudnn", {"q_len": 512, "diagonal": 0}), ("flash", {"q_len": 512, "diagonal": 0}),
        ("efficient", {"kv_heads": 2}), ("flash", {"dropout_p": 0.1}), ("math", {"dropout_p": 0.1}),
        ("cudnn", {"softcap": 3.0}), ("cudnn", {"backward": True, "deterministic": True}),
        ("cudnn", {"low_diagonal": -3, "diagonal": 0}), ("math", {"dtype": torch.float32}),
        ("efficient", {"backward": True, "lse_grad": True}), ("math", {"mask_grad": True}),
        ("cudnn", {"mask_dtype": torch.float32, "mask_sizes": (1, 1, 1024, 1024)}),
        ("cudnn", {"mask_dtype": torch.bool, "mask_sizes": (1, 1, 1024, 1)}),
        ("cudnn", {"mask_dtype": torch.bfloat16, "mask_sizes": (1, 1, 1024, 1024)}),
        ("cudnn", {"mask_dtype": torch.bool, "mask_sizes": (2, 4, 1024, 1024)}),
    ],
)  # fmt: skip
def test_refused(config, fields):
    assert offer(config, **fields).reason


@pytest.mark.parametrize("columns", [16, 13])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_a_mask_is_added_as_it_lies_where_its_rows_suit_cudnn(columns, dtype):
    mask = torch.randn(2, 1, 5, columns).to(dtype)
    added = aten_cuda._added(mask, torch.bfloat16)
    assert (added is mask) == (dtype == torch.bfloat16 and columns == 16)
    assert added.stride(3) == 1
    assert all(stride % 8 == 0 for stride in added.stride()[:3])
    expected = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if dtype == torch.bool else mask
    assert torch.equal(added, expected.to(torch.bfloat16))
    assert not aten_cuda._added(mask[:, :, :, 1:], torch.bfloat16).data_ptr() % 16


@pytest.mark.parametrize(("q_len", "bounded"), [(1, True), (64, True), (65, False), (8192, False)])
def test_the_materialising_path_competes_while_its_scores_are_no_larger_than_an_activation(q_len, bounded):
    verdict = offer("math", q_len=q_len)
    assert verdict
    assert bool(verdict.last_resort) is not bounded
    assert materialised.within_bound(dataclasses.replace(PROBLEM, q_len=q_len)) is bounded


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"diagonal": 0}, {"diagonal": 30}, {"diagonal": 5, "low_diagonal": -10}, {"kv_heads": 1},
        {"mask_dtype": torch.bool, "mask_sizes": (1, 1, 40, 70)}, {"dtype": torch.float16, "value_dim": 24},
        {"mask_dtype": torch.bfloat16, "mask_sizes": (2, 1, 1, 70), "diagonal": 0}, {"sink_dtype": torch.float32},
        {"mask_dtype": torch.bfloat16, "mask_sizes": (1, 1, 40, 70)},
        {"lse_grad": True}, {"q_len": 1, "diagonal": 69}, {"diagonal": -7}, {"scale": -0.3},
    ],
    ids=str,
)  # fmt: skip
def test_the_materialising_path_is_right(fields, backward):
    fields = {"batch": 2, "heads": 4, "q_len": 40, "kv_len": 70, "backward": backward, **fields}
    problem = dataclasses.replace(PROBLEM, **fields)
    if backward and problem.sink_dtype is not None:
        assert "sink" in materialised.refuse(problem)
        return
    grad_out, x = None, drawn.inputs(problem, "cpu")
    if backward:
        grad_out = drawn.gradient_of(problem, x)
    drawing = drawn.Drawing(problem, x, grad_out, *drawn.references(problem, x, grad_out))
    assert drawn.failure(BACKEND, "math", drawing) == ""

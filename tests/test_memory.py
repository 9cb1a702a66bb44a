"""No path allocates a matrix of query length by key length."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import torch_bwattn

from .support.observe import LargestTensor

LENGTH = 8192
KINDS = ("plain", "causal", "bool_row", "bool_column", "additive_row", "additive_column", "scalar", "dropout")


def inputs_of(kind, length, heads=1, width=8):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, length, width).requires_grad_() for _ in range(3))
    shape = {"row": (1, 1, 1, length), "column": (length, 1), "scalar": ()}.get(kind.split("_")[-1])
    mask = None if shape is None else torch.randn(shape)
    if kind.startswith("bool"):
        mask = mask > -1
    elif mask is not None:
        mask.requires_grad_()
    return (query, key, value, mask), {"is_causal": kind == "causal", "dropout_p": 0.1 if kind == "dropout" else 0.0}


def step(kind, length, heads=1):
    args, options = inputs_of(kind, length, heads)
    out, lse = torch_bwattn.sdpa(*args, **options, return_lse=True)
    leaves = [tensor for tensor in args if tensor is not None and tensor.requires_grad]
    torch.autograd.grad((out, lse), leaves, (torch.randn_like(out), torch.randn_like(lse)))


@pytest.mark.parametrize("kind", KINDS)
def test_largest_tensor(kind):
    """Linear in the length: what is allowed for double the length is double, not fourfold."""
    largest = []
    for length in (1024, 2048):
        with LargestTensor() as watch:
            step(kind, length, heads=3)
        largest.append(watch)
    small, large = largest
    assert large.numel <= 2.1 * small.numel or large.numel <= 2048 * 2048 // 16, large.func


# What the operators allocate inside is seen by the process alone. One plane of scores is 256 MiB here.
_SCRIPT = """
    import resource, sys, torch
    from tests.test_memory import LENGTH, step
    torch.set_num_threads(1)
    kind = sys.argv[1]
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "linux" else 1024**2)
    step(kind, 256)
    before = peak()
    step(kind, LENGTH)
    print(peak() - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="resource is a Unix module")
@pytest.mark.parametrize("kind", ["plain", "causal", "bool_row", "additive_row", "additive_column", "dropout"])
def test_peak_of_the_process(kind):
    script = textwrap.dedent(_SCRIPT)
    done = subprocess.run([sys.executable, "-c", script, kind], capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < LENGTH * LENGTH * 4 // 2**20 // 2, f"{done.stdout} MiB"

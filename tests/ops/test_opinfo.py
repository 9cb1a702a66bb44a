"""PyTorch's own sample inputs for scaled_dot_product_attention, through this package instead."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_bwattn
from tests.support.observe import OpCalls
from tests.support.philox import keep_mask
from torch_bwattn.testing import Results, judge, oracle, pt_reference

NAME = "nn.functional.scaled_dot_product_attention"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def op_infos():
    """Imported when a test runs: torch.testing._internal takes seconds to import."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = [info for info in op_db if info.name == NAME]
    assert found
    return found


def patched(*args, **kwargs):
    with torch_bwattn.patch_sdpa():
        return F.scaled_dot_product_attention(*args, **kwargs)


ENTRIES = {"op": torch.ops.bwattn.sdpa, "function": torch_bwattn.sdpa, "patched": patched}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entry", ENTRIES)
def test_sample_inputs(entry, dtype, requires_grad, device):
    count = 0
    for info in op_infos():
        assert dtype in info.dtypes
        for sample in info.sample_inputs(device, dtype, requires_grad):
            count += 1
            tensors = [sample.input, *sample.args]
            with OpCalls() as calls:
                out = ENTRIES[entry](*tensors, **sample.kwargs)
                results = Results(out)
                if requires_grad:
                    grad_out = torch.randn_like(out)
                    results.dq, results.dk, results.dv = torch.autograd.grad(out, tensors, grad_out)
            arguments = dict(sample.kwargs)
            if arguments.get("dropout_p"):
                arguments["keep_mask"] = keep_mask(
                    calls.seed(), (*out.shape[:-1], tensors[1].shape[-2]), arguments["dropout_p"]
                ).to(device)
            arguments["grad_out"] = grad_out if requires_grad else None
            for verdict in judge(results, oracle(*tensors, **arguments), pt_reference(*tensors, **arguments)):
                verdict.check()
    assert count >= 25


def test_error_inputs(device):
    """PyTorch has none for this operator today; a version that brings some is tested with them."""
    for info in op_infos():
        for error in info.error_inputs(device) if info.error_inputs_func else ():
            sample = error.sample_input
            with pytest.raises((TypeError, ValueError, RuntimeError)):
                torch_bwattn.sdpa(sample.input, *sample.args, **sample.kwargs)

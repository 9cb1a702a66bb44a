"""CausalBias as a mask: both kinds, under the patch and without it, eager and compiled."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import torch_bwattn
from tests.support.attend import count, judged, tensors
from torch_bwattn.testing import Results


@pytest.mark.parametrize("size", [(9, 11), (11, 9), (8, 8), (1, 5), (5, 1)], ids=str)
@pytest.mark.parametrize("bias", ["lower_right", "upper_left"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_causal_bias(bias, size, compiled):
    make = {"lower_right": causal_lower_right, "upper_left": causal_upper_left}[bias]
    leaves = [tensor.requires_grad_() for tensor in tensors(*size)]
    grad = torch.randn(2, 4, size[0], 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own gives NaN where rows see nothing
        mask = make(*size)

    def attend(*leaves):
        return F.scaled_dot_product_attention(*leaves, mask)

    torch._dynamo.reset()
    with torch_bwattn.patch_sdpa():
        out = (torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend)(*leaves)
    results = Results(out, None, *torch.autograd.grad(out, leaves, grad))
    alignment = "bottom_right" if bias == "lower_right" else "top_left"
    options = {"is_causal": True, "causal_alignment": alignment, "grad_out": grad}
    judged(results, *leaves, **options)
    assert count() == 1


def test_causal_bias_made_inside_a_compiled_function():
    args = tensors(5, 9)

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, causal_lower_right(query.shape[-2], key.shape[-2]))

    torch._dynamo.reset()
    with torch_bwattn.patch_sdpa():
        out = torch.compile(attend, backend="aot_eager")(*args)
    judged(out, *args, is_causal=True, causal_alignment="bottom_right")


def test_causal_bias_with_gqa_and_scale():
    args = tensors(5, 9, heads=(4, 2))
    with torch_bwattn.patch_sdpa():
        out = F.scaled_dot_product_attention(*args, causal_lower_right(5, 9), scale=0.2, enable_gqa=True)
    judged(out, *args, is_causal=True, causal_alignment="bottom_right", scale=0.2, enable_gqa=True)


def test_causal_bias_with_is_causal_raises():
    args = tensors(5, 9)
    with pytest.raises(ValueError, match="causal"):
        F.scaled_dot_product_attention(*args, causal_lower_right(5, 9), is_causal=True)
    with torch_bwattn.patch_sdpa(), pytest.raises(ValueError, match="causal"):
        F.scaled_dot_product_attention(*args, causal_lower_right(5, 9), is_causal=True)


def test_causal_bias_of_another_size_raises():
    args = tensors(5, 9)
    with torch_bwattn.patch_sdpa(), pytest.raises((ValueError, RuntimeError)):
        F.scaled_dot_product_attention(*args, causal_lower_right(6, 9))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_bias_in_the_functions_own_arguments(bias, heads):
    args = tensors(5, 9, heads=(heads, heads))
    out = torch_bwattn.sdpa(*args, bias(5, 9))
    assert type(out) is torch.Tensor
    judged(out, *args, is_causal=True, causal_alignment="bottom_right" if bias is causal_lower_right else "top_left")


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_bias_given_to_the_op(bias, heads):
    """Its own elements are unwritten memory: right, or refused."""
    args = tensors(5, 9, heads=(heads, heads))
    try:
        out = torch.ops.bwattn.sdpa(*args, bias(5, 9))
    except (TypeError, ValueError, NotImplementedError) as error:
        refusal = str(error)
    else:
        alignment = "bottom_right" if bias is causal_lower_right else "top_left"
        judged(out.as_subclass(torch.Tensor), *args, is_causal=True, causal_alignment=alignment)
        return
    assert "attn_mask" in refusal

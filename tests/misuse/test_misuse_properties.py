"""Random calls, most of them invalid: what PyTorch's math path refuses, this refuses, and the other way round."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_bwattn
from tests.strategies import calls, share
from tests.support.calls import build

from .test_misuse import error_of

SIZES = st.integers(0, 3)
RANKS = st.sampled_from((1, 2, 3, 4, 4, 4, 5))
DTYPES = st.sampled_from(
    (torch.float32,) * 8 + (torch.float64, torch.bfloat16, torch.int32, torch.bool, torch.complex64)
)
NAMES = ("query", "key", "value", "attn_mask")


def math_path(**arguments):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(**arguments)


@st.composite
def any_shape(draw: st.DrawFn, like: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """A shape; mostly one a dimension or two away from ``like``, so that one thing is wrong and not everything."""
    if like is None or draw(st.integers(0, 5)) == 0:
        return tuple(draw(st.lists(SIZES, min_size=0, max_size=5)))
    shape = list(like)
    for _ in range(draw(st.integers(0, 2))):
        change = draw(st.sampled_from(("size", "drop", "add")))
        if change == "size" and shape:
            shape[draw(st.integers(0, len(shape) - 1))] = draw(SIZES)
        elif change == "drop":
            shape = shape[1:]
        elif change == "add":
            shape.insert(0, draw(SIZES))
    return tuple(shape)


@st.composite
def arguments(draw: st.DrawFn) -> dict:
    """Arguments of F.scaled_dot_product_attention that need not fit together."""
    base = draw(any_shape((2, 2, 3, 4)))
    key = draw(any_shape(base))
    result: dict = {"query": base, "key": key, "value": draw(any_shape(key))}
    if draw(st.booleans()):
        result["attn_mask"] = draw(any_shape((*base[:-1], key[-2]) if base and len(key) > 1 else None))
    dtype = draw(DTYPES)
    for name, shape in list(result.items()):
        own = dtype if draw(st.integers(0, 9)) else draw(DTYPES)
        if name == "attn_mask" and draw(st.booleans()):
            own = torch.bool
        result[name] = torch.ones(shape).to(own)
    result["dropout_p"] = draw(st.sampled_from((0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.5)))
    result["is_causal"] = draw(st.sampled_from((False, False, False, True)))
    result["scale"] = draw(st.sampled_from((None, None, 0.0, 2.0)))
    result["enable_gqa"] = draw(st.sampled_from((False, False, False, True)))
    return result


def shown(call: dict) -> dict:
    return {k: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for k, v in call.items()}


def differs_on_purpose(call: dict) -> bool:
    """Where SEMANTICS.md and PyTorch's math path part.

    A mask of more dimensions than the query: PyTorch takes it if key or value bring as many. A head count of 0 in key
    and value with grouped heads: PyTorch divides by it or not, by rank. Empty inputs: the shape and dtype checks of
    its matrix product are skipped for some of them.
    """
    mask = call.get("attn_mask")
    if mask is not None and mask.dim() > call["query"].dim():
        return True
    return any(call[name].numel() == 0 for name in ("query", "key", "value"))


@settings(max_examples=share(4.0))
@given(call=arguments())
def test_refused_alike(call):
    theirs, ours = error_of(math_path, call), error_of(torch_bwattn.sdpa, call)
    if theirs is not None and not differs_on_purpose(call):
        assert ours is not None, f"PyTorch says {theirs}; accepted: {shown(call)}"
    if ours is not None:
        assert isinstance(ours, (TypeError, ValueError, RuntimeError, NotImplementedError))
        assert any(name in str(ours) for name in (*NAMES, "dropout_p", "is_causal", "enable_gqa")), ours
        if not differs_on_purpose(call):
            assert theirs is not None, f"PyTorch takes it; {ours}: {shown(call)}"


CORRUPTIONS = ("value_length", "key_width", "key_heads", "key_dtype", "mask_columns", "mask_and_causal", "dropout")


@settings(max_examples=share(2.0))
@given(call=calls(ndims=(4,)), corruption=st.sampled_from(CORRUPTIONS))
def test_one_thing_wrong(call, corruption):
    """A valid call with one thing broken raises whatever the rest of it is, and names what was broken."""
    tensors = build(call)
    broken = {"query": tensors.query, "key": tensors.key, "value": tensors.value, "attn_mask": tensors.mask}
    broken |= {k: v for k, v in call.arguments().items() if k != "causal_alignment"}
    value, key = broken["value"], broken["key"]
    names = {"value_length": ("value",), "key_width": ("key",), "key_heads": ("key",), "key_dtype": ("key",)}
    if corruption == "value_length":
        broken["value"] = value.new_zeros((*value.shape[:-2], value.shape[-2] + 1, value.shape[-1]))
    elif corruption == "key_width":
        broken["key"] = key.new_zeros((*key.shape[:-1], key.shape[-1] + 1))
    elif corruption == "key_heads":
        heads = 7 if not call.enable_gqa else call.query.shape[-3] + 1
        broken["key"] = key.new_zeros((call.batch[0], heads, *key.shape[-2:]))
        broken["query"] = broken["query"].detach().expand(*call.batch, -1, -1)
        if call.batch[1] in (1, 7) or 0 in call.batch:
            return
    elif corruption == "key_dtype":
        broken["key"] = key.double() if call.dtype != torch.float64 else key.float()
    elif corruption == "mask_columns":
        broken["attn_mask"] = torch.zeros(call.key.shape[-2] + 2, dtype=call.dtype)
        broken["is_causal"] = False
        if call.key.shape[-2] == 1:
            return  # grows the keys instead, which PyTorch's math path refuses too, for another reason
    elif corruption == "mask_and_causal":
        broken["attn_mask"] = torch.ones(call.scores_shape[-2:], dtype=torch.bool)
        broken["is_causal"] = True
    else:
        broken["dropout_p"] = 1.25
    error = error_of(torch_bwattn.sdpa, broken)
    assert error is not None, f"accepted: {shown(broken)}"
    wanted = names.get(corruption, {"dropout": ("dropout_p",)}.get(corruption, ("attn_mask",)))
    assert all(name in str(error) for name in wanted), error

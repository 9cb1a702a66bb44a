"""Each misuse raises before anything runs, with the argument's name, what was expected and what was given."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_bwattn

ENTRIES = {
    "function": torch_bwattn.sdpa,
    "op": torch.ops.bwattn.sdpa,
    "op_lse": torch.ops.bwattn.sdpa_with_lse,
}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@dataclasses.dataclass(frozen=True)
class Misuse:
    """What is wrong, which argument the error must name, and pieces of its text: what was given."""

    name: str
    argument: str
    given: tuple[str, ...]
    changes: dict[str, Any]
    torch_raises: bool = True

    def call(self) -> dict[str, Any]:
        arguments = {"query": normal(2, 4, 3, 8), "key": normal(2, 4, 5, 8), "value": normal(2, 4, 5, 8)}
        return {**arguments, **self.changes}


def cast(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.ones(2, 4, 3, 8).to(dtype) for name in ("query", "key", "value")}


def heads(count: int, **others: Any) -> dict[str, Any]:
    return {"key": normal(2, count, 5, 8), "value": normal(2, count, 5, 8), **others}


def mask(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"attn_mask": torch.zeros(shape, dtype=dtype)}


MISUSES = [
    Misuse("value_length", "value", ("5", "6"), {"value": normal(2, 4, 6, 8)}),
    Misuse("key_width", "key", ("8", "7"), {"key": normal(2, 4, 5, 7)}),
    Misuse("query_1d", "query", ("1",), {"query": normal(8)}),
    Misuse("key_1d", "key", ("1",), {"key": normal(8)}),
    Misuse("value_1d", "value", ("1",), {"value": normal(8)}),
    Misuse("query_0d", "query", ("0",), {"query": normal()}),
    Misuse("batch", "key", ("2", "3"), {"key": normal(3, 4, 5, 8), "value": normal(3, 4, 5, 8)}),
    Misuse("value_batch", "value", ("2", "3"), {"value": normal(3, 4, 5, 8)}),
    Misuse("heads", "key", ("4", "2"), heads(2)),
    Misuse("gqa_no_multiple", "key", ("4", "3"), heads(3, enable_gqa=True)),
    Misuse("gqa_more_kv_heads", "key", ("4", "8"), heads(8, enable_gqa=True)),
    Misuse("gqa_2d", "enable_gqa", ("2",), {
        "query": normal(3, 8), "key": normal(5, 8), "value": normal(5, 8), "enable_gqa": True
    }),
    Misuse("key_dtype", "key", ("float64", "float32"), {"key": normal(2, 4, 5, 8, dtype=torch.float64)}),
    Misuse("value_dtype", "value", ("bfloat16", "float32"), {"value": normal(2, 4, 5, 8, dtype=torch.bfloat16)}),
    Misuse("int", "query", ("int32",), cast(torch.int32)),
    Misuse("bool", "query", ("bool",), cast(torch.bool)),
    Misuse("complex", "query", ("complex64",), cast(torch.complex64)),
    Misuse("float8", "query", ("float8_e4m3fn",), cast(torch.float8_e4m3fn)),
    Misuse("mask_float64", "attn_mask", ("float64",), mask(3, 5, dtype=torch.float64)),
    Misuse("mask_int", "attn_mask", ("int32",), mask(3, 5, dtype=torch.int32)),
    Misuse("mask_uint8", "attn_mask", ("uint8",), mask(3, 5, dtype=torch.uint8)),
    Misuse("mask_half", "attn_mask", ("float16", "float32"), mask(3, 5, dtype=torch.float16)),
    Misuse("mask_keys", "attn_mask", ("(3, 4)",), mask(3, 4)),
    Misuse("mask_queries", "attn_mask", ("(4, 5)",), mask(4, 5)),
    Misuse("mask_heads", "attn_mask", ("(3, 3, 5)",), mask(3, 3, 5)),
    Misuse("mask_of_kv_heads", "attn_mask", ("(2, 3, 5)",), heads(2, enable_gqa=True, **mask(2, 3, 5))),
    Misuse("mask_batch", "attn_mask", ("(3, 1, 3, 5)",), mask(3, 1, 3, 5)),
    Misuse("mask_rank", "attn_mask", ("(1, 2, 4, 3, 5)",), mask(1, 2, 4, 3, 5)),
    Misuse("mask_larger_batch", "attn_mask", ("(2, 1, 3, 5)",), {
        "query": normal(1, 4, 3, 8), "key": normal(1, 4, 5, 8), "value": normal(1, 4, 5, 8), **mask(2, 1, 3, 5)
    }),
    Misuse("mask_and_causal", "is_causal", ("attn_mask",), {**mask(3, 5), "is_causal": True}),
    Misuse("bool_mask_and_causal", "is_causal", ("attn_mask",), {**mask(3, 5, dtype=torch.bool), "is_causal": True}),
    Misuse("dropout_above_1", "dropout_p", ("1.5",), {"dropout_p": 1.5}),
    # PyTorch's math path takes a negative probability for 0, and NaN for something; SEMANTICS refuses both.
    Misuse("dropout_negative", "dropout_p", ("-0.1",), {"dropout_p": -0.1}, torch_raises=False),
    Misuse("dropout_nan", "dropout_p", ("nan",), {"dropout_p": math.nan}, torch_raises=False),
    Misuse("key_device", "key", ("meta", "cpu"), {"key": torch.empty(2, 4, 5, 8, device="meta")}),
    Misuse("mask_device", "attn_mask", ("meta", "cpu"), {"attn_mask": torch.empty(3, 5, device="meta")}),
    Misuse("alignment", "causal_alignment", ("middle",), {
        "is_causal": True, "causal_alignment": "middle"
    }, torch_raises=False),
    Misuse("alignment_alone", "causal_alignment", ("bottom_right",), {
        "causal_alignment": "bottom_right"
    }, torch_raises=False),
    Misuse("window_of_one", "window_size", ("(3,)",), {"window_size": (3,)}, torch_raises=False),
    Misuse("window_of_three", "window_size", ("(1, 2, 3)",), {"window_size": (1, 2, 3)}, torch_raises=False),
    Misuse("window_negative", "window_size", ("(-2, 0)",), {"window_size": (-2, 0)}, torch_raises=False),
    Misuse("window_negative_right", "window_size", ("(0, -3)",), {
        "window_size": (0, -3), "is_causal": True
    }, torch_raises=False),
    Misuse("softcap_zero", "softcap", ("0.0",), {"softcap": 0.0}, torch_raises=False),
    Misuse("softcap_negative", "softcap", ("-2.0",), {"softcap": -2.0}, torch_raises=False),
    Misuse("softcap_infinite", "softcap", ("inf",), {"softcap": math.inf}, torch_raises=False),
    Misuse("softcap_nan", "softcap", ("nan",), {"softcap": math.nan}, torch_raises=False),
    Misuse("sink_heads", "sink", ("(4,)", "(3,)"), {"sink": normal(3)}, torch_raises=False),
    Misuse("sink_of_kv_heads", "sink", ("(4,)", "(2,)"), heads(2, enable_gqa=True, sink=normal(2)), torch_raises=False),
    Misuse("sink_scalar", "sink", ("(4,)", "()"), {"sink": normal()}, torch_raises=False),
    Misuse("sink_2d", "sink", ("(4,)", "(4, 1)"), {"sink": normal(4, 1)}, torch_raises=False),
    Misuse("sink_dtype", "sink", ("float32", "float64"), {"sink": normal(4, dtype=torch.float64)}, torch_raises=False),
    Misuse("sink_half", "sink", ("float32", "float16"), {"sink": normal(4, dtype=torch.float16)}, torch_raises=False),
    Misuse("sink_int", "sink", ("float32", "int64"), {"sink": torch.ones(4, dtype=torch.int64)}, torch_raises=False),
    Misuse("sink_device", "sink", ("meta", "cpu"), {"sink": torch.empty(4, device="meta")}, torch_raises=False),
]  # fmt: skip
BY_NAME = {misuse.name: misuse for misuse in MISUSES}


def error_of(function: Any, arguments: dict[str, Any]) -> BaseException | None:
    try:
        function(**arguments)
    except Exception as error:  # noqa: BLE001 (which kind it is, is what the tests look at)
        return error
    return None


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", BY_NAME)
def test_raises_and_says_why(name, entry):
    misuse = BY_NAME[name]
    error = error_of(ENTRIES[entry], misuse.call())
    assert error is not None, "accepted"
    assert isinstance(error, (TypeError, ValueError, RuntimeError, NotImplementedError)), type(error)
    text = str(error)
    assert misuse.argument in text
    assert "expected" in text.lower()
    for piece in misuse.given:
        assert piece in text, f"{piece!r} is not in {text!r}"


@pytest.mark.parametrize("name", [misuse.name for misuse in MISUSES if misuse.torch_raises])
def test_torch_raises_too(name):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert error_of(F.scaled_dot_product_attention, BY_NAME[name].call()) is not None


@pytest.mark.parametrize("entry", ["function", "op"])
@pytest.mark.parametrize("name", BY_NAME)
def test_the_same_text_compiled(name, entry):
    misuse = BY_NAME[name]
    torch._dynamo.reset()
    compiled = torch.compile(lambda arguments: ENTRIES[entry](**arguments), fullgraph=True, backend="eager")
    eager = error_of(ENTRIES[entry], misuse.call())
    error = error_of(lambda **arguments: compiled(arguments), misuse.call())
    assert error is not None, "accepted when compiled"
    chain, texts = error, []
    while chain is not None:
        texts.append(str(chain))
        chain = chain.__cause__
    assert any(str(eager) in text for text in texts), f"{eager!s} is not in {texts}"


@pytest.mark.parametrize("entry", ["function", "op", "op_lse"])
@pytest.mark.parametrize(
    "changes",
    [{"query": None}, {"query": [1.0]}, {"attn_mask": [1.0]}, {"dropout_p": None}, {"dropout_p": "x"}, {"scale": "x"},
     {"is_causal": "yes"}, {"enable_gqa": "yes"}, {"causal_alignment": 3},
     {"softcap": "x"}, {"window_size": 3}, {"window_size": (1.5, 2)}, {"window_size": "ab"}, {"sink": [1.0]},
     {"sink": 1.0}, {"unknown": 30.0}],
    ids=str,
)  # fmt: skip
def test_wrong_kinds_of_argument(entry, changes):
    arguments = {name: normal(1, 2, 3, 8) for name in ("query", "key", "value")}
    error = error_of(ENTRIES[entry], {**arguments, **changes})
    assert isinstance(error, (TypeError, ValueError, RuntimeError)), error
    assert next(iter(changes)) in str(error)


@pytest.mark.parametrize("argument", ["is_causal", "enable_gqa"])
@pytest.mark.parametrize("value", [0, 1, None])
def test_flags_take_a_bool(argument, value):
    query = normal(1, 2, 3, 8)
    with pytest.raises(TypeError, match=argument):
        F.scaled_dot_product_attention(query, query, query, **{argument: value})
    with pytest.raises(TypeError, match=argument):
        torch_bwattn.sdpa(query, query, query, **{argument: value})
    with torch_bwattn.patch_sdpa(), pytest.raises(TypeError, match=argument):
        F.scaled_dot_product_attention(query, query, query, **{argument: value})


@pytest.mark.parametrize("entry", ENTRIES)
def test_scale_is_keyword_only(entry):
    query = normal(1, 2, 3, 8)
    with pytest.raises((TypeError, RuntimeError)):
        ENTRIES[entry](query, query, query, None, 0.0, False, 1.0)


def test_sparse_and_nested_raise():
    query = normal(1, 2, 3, 8)
    with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError), match="query"):
        torch_bwattn.sdpa(query.to_sparse(), query, query)
    nested = torch.nested.nested_tensor([normal(2, 3, 8), normal(2, 4, 8)], layout=torch.jagged)
    with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError)):
        torch_bwattn.sdpa(nested, nested, nested)


def test_nothing_ran():
    torch_bwattn.reset_call_counts()
    for misuse in MISUSES:
        error_of(torch_bwattn.sdpa, misuse.call())
    assert sum(torch_bwattn.call_counts().values()) == 0


def test_errors_leave_the_random_state_alone():
    arguments = {**BY_NAME["mask_keys"].call(), "dropout_p": 0.5}
    state = torch.get_rng_state()
    error_of(torch_bwattn.sdpa, arguments)
    assert torch.equal(torch.get_rng_state(), state)

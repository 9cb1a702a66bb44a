"""Mods in CuTe-DSL: a program's steps as expressions of one score, emitted while a kernel is traced.

A value is a CuTe number with the dtype that PyTorch gives it: Boolean, Int32 (all narrower integers too), Int64,
Float32 (16-bit floats that were loaded, too) or Float64. :data:`FORMS` has an expression for each operator, so many as
the mods need that people write; :mod:`..flex` says beforehand what has none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import Boolean, Float32, Float64, Int32, Int64, Uint32, cute
from cutlass.cutlass_dsl import select_

from ....mods.program import MAKES, POSITION, SAME, Ref, Step, dtype_made, literal
from ..configs import LONGEST

LOG2_E = 1.4426950408889634
_EXACT = 2**24
"""Integers up to this are what they are in float32."""


class Linear(NamedTuple):
    """An Int32 as ``base + offset``, of which many scores share the base, and whose parts are at most so large."""

    base: Any
    offset: int
    most: int


class Value(NamedTuple):
    """A number, and its dtype in PyTorch; as a sum too where it is one of positions."""

    number: Any
    dtype: torch.dtype
    linear: Linear | None = None


def kind_of(dtype: torch.dtype) -> Any:
    """What holds values of a dtype."""
    if dtype == torch.bool:
        return Boolean
    if dtype in (torch.int64, torch.float64):
        return Int64 if dtype == torch.int64 else Float64
    return Float32 if dtype.is_floating_point else Int32


def cast(value: Value, dtype: torch.dtype) -> Value:
    """A value as another dtype has it."""
    if value.dtype == dtype:
        return value
    if dtype == torch.bool:
        return Value(value.number != kind_of(value.dtype)(0), dtype)
    if kind_of(dtype) is Float32 and value.linear is not None and value.linear.most < _EXACT:
        # Conversions cost as much as four additions, and this one is the same for many scores.
        return Value(value.linear.base.to(Float32) + float(value.linear.offset), dtype)
    return Value(value.number.to(kind_of(dtype)), dtype)


def chosen(condition: Any, one: Value, other: Value) -> Value:
    """``one`` where a Boolean holds, else ``other``, of the same dtype."""
    kind = kind_of(one.dtype)
    return Value(kind(select_(condition, one.number, other.number)), one.dtype)


def _literal(value: float, dtype: torch.dtype) -> Value:
    return Value(kind_of(dtype)(value), dtype)


def _promoted(a: Any, b: Any) -> list[Value]:
    """Two values, or a value and Python's number, as the dtype that PyTorch computes in."""
    dummies = (torch.empty((), dtype=one.dtype, device="meta") if isinstance(one, Value) else one for one in (a, b))
    dtype = torch.result_type(*dummies)
    return [cast(one, dtype) if isinstance(one, Value) else _literal(one, dtype) for one in (a, b)]


def _floating(value: Value) -> Value:
    return value if value.dtype.is_floating_point else cast(value, torch.float32)


def _arithmetic(apply: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    def form(a: Any, b: Any) -> Value:
        a, b = _promoted(a, b)
        return Value(apply(a.number, b.number), a.dtype)

    return form


def _comparison(apply: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    def form(a: Any, b: Any) -> Value:
        a, b = _promoted(a, b)
        if a.dtype == torch.bool:
            a, b = cast(a, torch.int32), cast(b, torch.int32)
        return Value(apply(a.number, b.number), torch.bool)

    return form


def _logic(apply: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    def form(a: Any, b: Any) -> Value:
        a, b = (cast(one, torch.bool) if isinstance(one, Value) else _literal(bool(one), torch.bool) for one in (a, b))
        return Value(Boolean(apply(a.number, b.number)), torch.bool)

    return form


def _bitwise(apply: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    def form(a: Any, b: Any) -> Value:
        a, b = _promoted(a, b)
        return Value(kind_of(a.dtype)(apply(a.number, b.number)), a.dtype)

    return form


def _math(apply: Callable[[Any], Any]) -> Callable[[Value], Value]:
    def form(a: Value) -> Value:
        a = _floating(a)
        return Value(apply(a.number), a.dtype)

    return form


def _truncated(a: Value, b: Value) -> Value:
    """Of integers, the quotient towards 0."""
    quotient = _absolute(a).number // _absolute(b).number
    negative = (a.number < 0) != (b.number < 0)
    return chosen(negative, Value(-quotient, a.dtype), Value(quotient, a.dtype))


def _floor_divide(a: Any, b: Any) -> Value:
    a, b = _promoted(a, b)
    if a.dtype.is_floating_point:
        return Value(cute.math.floor(a.number / b.number), a.dtype)
    quotient = _truncated(a, b)
    below = (a.number - quotient.number * b.number != 0) & ((a.number < 0) != (b.number < 0))
    return chosen(below, Value(quotient.number - 1, a.dtype), quotient)


def _remainder(a: Any, b: Any) -> Value:
    a, b = _promoted(a, b)
    return Value(a.number - _floor_divide(a, b).number * b.number, a.dtype)


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    a, b = _promoted(a, b)
    if rounding_mode == "trunc" and not a.dtype.is_floating_point:
        return _truncated(a, b)
    a, b = _floating(a), _floating(b)
    return Value(a.number / b.number, a.dtype)


def _absolute(a: Value) -> Value:
    return chosen(a.number < 0, Value(-a.number, a.dtype), a)


def _larger(a: Any, b: Any) -> Value:
    a, b = _promoted(a, b)
    return chosen(a.number < b.number, b, a)


def _smaller(a: Any, b: Any) -> Value:
    a, b = _promoted(a, b)
    return chosen(a.number > b.number, b, a)


def _clamp(a: Value, low: Any = None, high: Any = None) -> Value:
    found = a if low is None else _larger(a, low)
    return found if high is None else _smaller(found, high)


def _where(condition: Value, one: Any, other: Any) -> Value:
    if not isinstance(one, Value) and not isinstance(other, Value):
        floating = isinstance(one, float) or isinstance(other, float)
        dtype = torch.float32 if floating else torch.int64
        one, other = _literal(one, dtype), _literal(other, dtype)
    one, other = _promoted(one, other)
    return chosen(cast(condition, torch.bool).number, one, other)


def _masked_fill(a: Value, mask: Value, value: Any) -> Value:
    filling = cast(value, a.dtype) if isinstance(value, Value) else _literal(value, a.dtype)
    return chosen(mask.number, filling, a)


def _power(a: Value, exponent: float) -> Value:
    found = a
    for digit in bin(int(exponent))[3:]:
        found = Value(found.number * found.number, a.dtype)
        if digit == "1":
            found = Value(found.number * a.number, a.dtype)
    return found


def _exp(x: Any) -> Any:
    return cute.math.exp2(x * LOG2_E)


def _tanh(x: Any) -> Any:
    """To about 4e-7 of its value, as :func:`.softmax.cap_scores`: near 0 by a series."""
    far = 1.0 - 2.0 / (cute.math.exp2(x * (2.0 * LOG2_E)) + 1.0)
    u = x * x
    near = x * (1.0 + u * (-1.0 / 3.0 + u * (2.0 / 15.0 - u * (17.0 / 315.0))))
    return Float32(select_(u < 0.0625, near, far))


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + _exp(-x))


def _gelu(a: Value, approximate: str = "none") -> Value:
    x = a.number
    if approximate == "tanh":
        return Value(0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))), a.dtype)
    return Value(0.5 * x * (1.0 + cute.math.erf(x * 0.7071067811865476)), a.dtype)


def _softplus(a: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    x = a.number * beta
    size = _absolute(Value(x, a.dtype)).number
    found = _larger(Value(x, a.dtype), 0.0).number + cute.math.log(1.0 + _exp(-size))
    return chosen(x > threshold, a, Value(found / beta, a.dtype))


def _gelu_backward(grad: Value, a: Value, approximate: str = "none") -> Value:
    x = a.number
    if approximate == "tanh":
        inner = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        return Value(grad.number * 0.5 * (1.0 + inner + x * (1.0 - inner * inner) * slope), a.dtype)
    density = 0.3989422804014327 * _exp(-0.5 * x * x)
    return Value(grad.number * (0.5 * (1.0 + cute.math.erf(x * 0.7071067811865476)) + x * density), a.dtype)


def _silu_backward(grad: Value, a: Value) -> Value:
    sigmoid = _sigmoid(a.number)
    return Value(grad.number * sigmoid * (1.0 + a.number * (1.0 - sigmoid)), a.dtype)


def _softplus_backward(grad: Value, a: Value, beta: float, threshold: float) -> Value:
    x = a.number * beta
    return chosen(x > threshold, grad, Value(grad.number * _sigmoid(x), a.dtype))


def _sign(a: Value) -> Value:
    below = chosen(a.number < 0, _literal(-1, a.dtype), a)
    return chosen(a.number > 0, _literal(1, a.dtype), below)


def _as_linear(value: Any) -> Linear | None:
    """A sum of positions and Python's numbers as one."""
    if isinstance(value, Value):
        return value.linear
    return Linear(Int32(0), value, abs(value)) if type(value) is int and abs(value) < LONGEST else None


def _added(apply: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    """Sums and differences, whose second operand a number may multiply."""
    plain, product = _arithmetic(apply), _arithmetic(operator.mul)

    def form(a: Any, b: Any, alpha: Any = 1) -> Value:
        b = b if alpha == 1 else product(b, alpha)
        one, other = _as_linear(a), _as_linear(b)
        if one is None or other is None:
            return plain(a, b)
        base, offset = apply(one.base, other.base), apply(one.offset, other.offset)
        return Value(base + offset, torch.int32, Linear(base, offset, one.most + other.most))

    return form


FORMS: dict[str, Callable[..., Value]] = {
    "add": _added(operator.add),
    "sub": _added(operator.sub),
    "rsub": lambda a, b, alpha=1: FORMS["sub"](b, a, alpha),
    "mul": _arithmetic(operator.mul),
    "div": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "neg": lambda a: Value(-a.number, a.dtype),
    "abs": _absolute,
    "reciprocal": _math(lambda x: 1.0 / x),
    "square": lambda a: _power(a, 2),
    "pow": _power,
    "eq": _comparison(operator.eq),
    "ne": _comparison(operator.ne),
    "lt": _comparison(operator.lt),
    "le": _comparison(operator.le),
    "gt": _comparison(operator.gt),
    "ge": _comparison(operator.ge),
    "logical_and": _logic(operator.and_),
    "logical_or": _logic(operator.or_),
    "logical_xor": _logic(operator.ne),
    "logical_not": lambda a: _comparison(operator.eq)(a, 0),
    "bitwise_and": _bitwise(operator.and_),
    "bitwise_or": _bitwise(operator.or_),
    "bitwise_xor": _bitwise(operator.xor),
    "bitwise_not": lambda a: _comparison(operator.eq)(a, 0) if a.dtype == torch.bool else Value(~a.number, a.dtype),
    "__lshift__": _bitwise(operator.lshift),
    "__rshift__": _bitwise(operator.rshift),
    "where": _where,
    "masked_fill": _masked_fill,
    "maximum": _larger,
    "minimum": _smaller,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda a, high: _clamp(a, None, high),
    "relu": lambda a: _larger(a, 0),
    "exp": _math(_exp),
    "exp2": _math(cute.math.exp2),
    "log": _math(cute.math.log),
    "log2": _math(cute.math.log2),
    "sqrt": _math(cute.math.sqrt),
    "rsqrt": _math(cute.math.rsqrt),
    "sin": _math(cute.math.sin),
    "cos": _math(cute.math.cos),
    "floor": _math(cute.math.floor),
    "tanh": _math(_tanh),
    "sigmoid": _math(_sigmoid),
    "silu": _math(lambda x: x * _sigmoid(x)),
    "gelu": _gelu,
    "softplus": _softplus,
    "mish": lambda a: Value(a.number * _tanh(_softplus(a).number), a.dtype),
    "sgn": _sign,
    "fill": lambda a, value: cast(value, a.dtype) if isinstance(value, Value) else _literal(value, a.dtype),
    "tanh_backward": lambda grad, out: Value(grad.number * (1.0 - out.number * out.number), out.dtype),
    "sigmoid_backward": lambda grad, out: Value(grad.number * out.number * (1.0 - out.number), out.dtype),
    "silu_backward": _silu_backward,
    "gelu_backward": _gelu_backward,
    "softplus_backward": _softplus_backward,
    "threshold_backward": lambda grad, a, low: chosen(a.number <= low, _literal(0, a.dtype), grad),
}
"""By an operator's name without its overload."""


def evaluated(
    steps: Sequence[Step], results: Sequence[Ref], inputs: Mapping[str, Value], tables: Sequence[Any],
    table_dtypes: Sequence[torch.dtype], numbers: Sequence[Any],
) -> list[Value]:  # fmt: skip
    """What steps give for one score.

    Args:
        steps: Of a program, or of a derivative.
        results: What of their values is asked for.
        inputs: By name.
        tables: Captured tensors as CuTe's; those of bool as of uint8, those without dimensions of one element.
        table_dtypes: What they are in PyTorch.
        numbers: Captured integers, Int32.
    """
    values: dict[str, Value] = dict(inputs)

    def look_up(argument: Any) -> Any:
        if not isinstance(argument, Ref):
            return argument
        name = argument.name
        if name not in values:
            place = int(name[1:])
            if name[0] == "@":
                values[name] = _loaded(tables[place], (Int32(0),), table_dtypes[place])
            else:
                values[name] = Value(numbers[place].to(Int64), torch.int64)
        return values[name]

    for place, step in enumerate(steps):
        values[f"%{place}"] = _step(step, look_up, tables, table_dtypes)
    return [look_up(result) for result in results]


def _step(
    step: Step, look_up: Callable[[Any], Any], tables: Sequence[Any], table_dtypes: Sequence[torch.dtype]
) -> Value:
    base, kwargs = step.base, dict(step.kwargs)
    if base == "index":
        place = int(step.args[0].name[1:])
        index = [in_bounds(look_up(ref), ref, tables[place].shape[dim]) for dim, ref in enumerate(step.args[1])]
        return _loaded(tables[place], tuple(index), table_dtypes[place])
    if base in SAME:
        found: Value = look_up(step.args[0])
        return found
    if base == "_to_copy":
        copied: Value = look_up(step.args[0])
        return cast(copied, kwargs["dtype"]) if "dtype" in kwargs else copied
    if base in MAKES:
        return _made(step, look_up)
    return FORMS[base](*map(look_up, step.args), **{name: look_up(value) for name, value in kwargs.items()})


def in_bounds(index: Value, ref: Ref, size: Any) -> Any:
    """A position from the beginning: indices may count from the end.

    A tile of scores may go on beyond the last query and key, where no score counts, but nothing else is to be read.
    """
    number = index.number.to(Int32)
    if ref.name in ("b", "h"):
        return number
    if ref.name not in POSITION:
        number = Int32(select_(number < 0, number + size, number))
    return cutlass.min(number.to(Uint32), (Int32(size) - 1).to(Uint32)).to(Int32)


def _loaded(table: cute.Tensor, index: tuple[Any, ...], dtype: torch.dtype) -> Value:
    value = table[index]
    if dtype == torch.bool:
        return Value(value != cutlass.Uint8(0), dtype)
    return Value(value.to(kind_of(dtype)), dtype)


def _made(step: Step, look_up: Callable[[Any], Any]) -> Value:
    return _literal(literal(step), dtype_made(step) or look_up(step.args[0]).dtype)


def position(b: Int32, h: Int32, q_idx: tuple[Int32, int], kv_idx: tuple[Int32, int]) -> dict[str, Value]:
    """A program's inputs but the score; what tells apart the queries and keys of a thread comes apart."""
    pairs = (b, 0), (h, 0), q_idx, kv_idx
    return {
        name: Value(Int32(base) + offset, torch.int32, Linear(Int32(base), offset, LONGEST))
        for name, (base, offset) in zip(POSITION, pairs, strict=True)
    }

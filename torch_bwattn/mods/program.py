"""A ``score_mod`` or ``mask_mod`` as data: the PyTorch operators that it calls on scalars, one after the other.

A mod is a Python function of a score and its position::

    score_mod(score, b, h, q_idx, kv_idx) -> score        mask_mod(b, h, q_idx, kv_idx) -> whether it counts

each a tensor without dimensions. Recorded once (:mod:`.trace`), it is a :class:`Program`: steps, each an operator with
arguments, which are inputs by name, results of earlier steps (``%3``; ``%3.1`` the second of several), captured tensors
(``@0``), captured integers (``#0``), or literals. Its text, JSON, says all of it but the captured values. So it is what
an operator takes as an argument, what graphs show, and the key of whatever is made from it: two functions that compute
the same way are one mod.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

POSITION = ("b", "h", "q_idx", "kv_idx")
SCORE_INPUTS = ("score", *POSITION)
INDEX_DTYPE = torch.int32

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Ref:
    """A value by name: an input's, ``%3``, ``%3.1``, ``@0`` or ``#0``."""

    name: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of an operator.

    Attributes:
        op: Its name with namespace and overload, ``"aten.mul.Tensor"``.
        args: Literals, :class:`Ref` and tuples of them.
        kwargs: Likewise, by name.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def base(self) -> str:
        """The operator's name alone, ``"mul"``."""
        return self.op.split(".")[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Steps, and what of them is the result; equal where their texts are, which tell 1 from 1.0 and 0.0 from -0.0."""

    steps: tuple[Step, ...]
    result: Ref

    @functools.cached_property
    def text(self) -> str:
        """All of it as JSON, of which :func:`parsed` is the inverse."""
        steps = [
            [step.op, _packed(step.args), {name: _packed(value) for name, value in step.kwargs}] for step in self.steps
        ]
        return json.dumps({"format": _FORMAT, "steps": steps, "result": _packed(self.result)}, separators=(",", ":"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def refs(step: Step) -> list[Ref]:
    """Every value that a step reads."""
    found: list[Ref] = []

    def look(value: Any) -> None:
        if isinstance(value, Ref):
            found.append(value)
        elif isinstance(value, tuple):
            for one in value:
                look(one)

    look(step.args)
    look(tuple(value for _, value in step.kwargs))
    return found


def named(place: int, found: Any) -> dict[str, Any]:
    """A step's result, or several, by the names that later steps read."""
    if isinstance(found, (tuple, list)):
        return {f"%{place}.{number}": one for number, one in enumerate(found)}
    return {f"%{place}": found}


def _packed(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return [_packed(one) for one in value]
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unpacked(one) for one in value)
    if isinstance(value, dict):
        return Ref(value["ref"]) if "ref" in value else getattr(torch, value["dtype"])
    return value


@functools.lru_cache(maxsize=1024)
def parsed(text: str) -> Program:
    """The program that a text says.

    Raises:
        ValueError: The text is of another format.
    """
    found = json.loads(text)
    if found.get("format") != _FORMAT:
        raise ValueError(f"text: expected a program of format {_FORMAT}, got {found.get('format')}")
    steps = tuple(
        Step(op, _unpacked(args), tuple((name, _unpacked(value)) for name, value in kwargs.items()))
        for op, args, kwargs in found["steps"]
    )
    return Program(steps, _unpacked(found["result"]))


def operator(name: str) -> Callable[..., Any]:
    """The operator of a name."""
    namespace, base, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    return found


_ELEMENTWISE = {
    "__and__", "__lshift__", "__or__", "__rshift__", "__xor__", "_to_copy", "alias", "clamp", "clamp_max",
    "clamp_min", "clone", "detach", "elu_backward", "fill", "floor_divide", "hardshrink_backward",
    "hardsigmoid_backward", "hardswish", "hardswish_backward", "hardtanh_backward", "leaky_relu_backward",
    "log_sigmoid_backward", "log_sigmoid_forward", "lift_fresh", "lift_fresh_copy", "masked_fill", "rsub",
    "sigmoid_backward", "softplus_backward", "softshrink_backward", "tanh_backward", "threshold_backward", "where",
}  # fmt: skip
"""Pointwise operators that PyTorch has not tagged so, all of them or an overload."""
MAKES = {
    "full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "zeros",
    "zeros_like",
}  # fmt: skip
SAME = ("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy")
"""Operators that give what they take."""
_REDUCE = {"all", "amax", "amin", "any", "mean", "prod", "sum"}
_OF_VECTORS = {"dot", "expand", "index", "index_put", "select", "select_backward", "unbind", "unsqueeze"} | _REDUCE


@functools.lru_cache(maxsize=4096)
def is_known(name: str) -> bool:
    """Whether a mod may call an operator: it is pointwise, makes a tensor, or is one of a few that take vectors."""
    base = name.split(".")[1]
    if base in _ELEMENTWISE or base in MAKES or base in _OF_VECTORS:
        return True
    return torch.Tag.pointwise in operator(name).tags  # type: ignore[attr-defined]


def literal(step: Step) -> Any:
    """The number that a step of :data:`MAKES` makes a tensor of."""
    base = step.base
    if "zeros" in base or "ones" in base:
        return int("ones" in base)
    return step.args[0 if base == "scalar_tensor" else 1 if base in ("full", "full_like") else 2]


def dtype_made(step: Step) -> torch.dtype | None:
    """The dtype of what a step of :data:`MAKES` makes; None for that of its first argument."""
    given: torch.dtype | None = dict(step.kwargs).get("dtype")
    if given is not None or isinstance(step.args[0], Ref):
        return given
    number = step.args[1] if step.base == "full" else 0.0
    return torch.bool if isinstance(number, bool) else torch.int64 if isinstance(number, int) else torch.float32


def along(axes: Sequence[Tensor]) -> dict[str, Tensor]:
    """Vectors of positions by their names, each along its own of a grid's four dimensions."""
    return {
        name: axis.to(INDEX_DTYPE).view([-1 if place == own else 1 for place in range(4)])
        for own, (name, axis) in enumerate(zip(POSITION, axes, strict=True))
    }


@functools.lru_cache(maxsize=1024)
def vectors(program: Program, ranks: tuple[int, ...]) -> str:
    """The first operator of a mod that takes or gives more than scalars; nothing where all values are scalars.

    Args:
        program: Its program.
        ranks: How many dimensions each captured tensor has.
    """
    for step in program.steps:
        whole = [ref.name for ref in refs(step)]
        if step.base == "index":
            table = step.args[0]
            if table.name[0] != "@" or len(step.args[1]) != ranks[int(table.name[1:])]:
                return step.op
            whole.remove(table.name)
        if step.base in _OF_VECTORS - {"index"} or any(name[0] == "@" and ranks[int(name[1:])] for name in whole):
            return step.op
    return ""


@dataclasses.dataclass(frozen=True)
class _Value:
    """Values of a grid: dimensions [B, H, M, N], each possibly 1, then those of the value itself."""

    tensor: Tensor
    own: int = 0


def evaluate(
    steps: Sequence[Step],
    results: Sequence[Ref],
    grid: Mapping[str, Tensor],
    captured: Sequence[Tensor],
    numbers: Sequence[int | torch.SymInt] = (),
) -> tuple[Tensor, ...]:
    """Results for a whole grid of scalars at once, each [B, H, M, N] (sizes may be 1), then its own dimensions.

    Args:
        steps: Of a mod.
        results: What is wanted of them.
        grid: Inputs by name, four dimensions each, of sizes that broadcast.
        captured: Captured tensors.
        numbers: Captured integers.
    """
    device = next(tensor.device for tensor in (*grid.values(), *captured))
    values: dict[str, _Value] = {name: _Value(tensor) for name, tensor in grid.items()}
    values |= {f"@{place}": _alone(tensor) for place, tensor in enumerate(captured)}
    values |= {f"#{place}": _alone(torch.full((), int(number), device=device)) for place, number in enumerate(numbers)}
    last = {ref.name: place for place, step in enumerate(steps) for ref in refs(step)}
    last |= dict.fromkeys((ref.name for ref in results), len(steps))
    for place, step in enumerate(steps):
        values |= named(place, _evaluated(step, values, device))
        for ref in refs(step):  # a whole grid each
            if last[ref.name] == place:
                values.pop(ref.name, None)
    return tuple(values[ref.name].tensor for ref in results)


def _alone(tensor: Tensor) -> _Value:
    """What no scalar decides."""
    return _Value(tensor.view(1, 1, 1, 1, *tensor.shape), tensor.dim())


def _evaluated(step: Step, values: Mapping[str, _Value], device: torch.device) -> _Value | list[_Value]:
    def value(argument: Any) -> _Value:
        return values[argument.name]

    base = step.base
    if base == "index":
        return _indexed(value(step.args[0]), [value(one) for one in step.args[1]])
    if base == "dot":
        return _Value((value(step.args[0]).tensor * value(step.args[1]).tensor).sum(-1))
    if base in _REDUCE:
        return _reduced(step, value(step.args[0]))
    if base in ("select", "unbind"):
        one, dim = value(step.args[0]), int(step.args[1]) if len(step.args) > 1 else 0
        parts = one.tensor.unbind(dim if dim < 0 else dim + 4)
        found = [_Value(part, one.own - 1) for part in parts]
        return found[int(step.args[2])] if base == "select" else found
    if base == "log_sigmoid_forward":  # whose second result is for its backward, and of other sizes on other devices
        one = value(step.args[0])
        return [_Value(torch.nn.functional.logsigmoid(one.tensor), one.own), one]
    if base == "log_sigmoid_backward":
        grad, one = value(step.args[0]), value(step.args[1])
        return _Value(grad.tensor * torch.sigmoid(-one.tensor), one.own)
    if base == "index_put":
        return _put(value(step.args[0]), [value(one) for one in step.args[1]], value(step.args[2]))
    if base == "select_backward":
        one, sizes, dim, at = value(step.args[0]), *step.args[1:]
        whole = one.tensor.new_zeros((*one.tensor.shape[:4], *sizes))
        whole.select(dim if dim < 0 else dim + 4, at).copy_(one.tensor)
        return _Value(whole, len(sizes))
    if base == "unsqueeze":
        one, dim = value(step.args[0]), int(step.args[1])
        return _Value(one.tensor.unsqueeze(dim if dim < 0 else dim + 4), one.own + 1)
    if base == "expand":
        one, sizes = value(step.args[0]), step.args[1]
        grid, own_sizes = one.tensor.shape[:4], one.tensor.shape[4:]
        return _Value(
            one.tensor.view(*grid, *(1,) * (len(sizes) - one.own), *own_sizes).expand(*grid, *sizes), len(sizes)
        )
    own = max((value(ref).own for ref in refs(step)), default=0)

    def look_up(argument: Any) -> Any:
        if isinstance(argument, Ref):
            one = value(argument)
            # A scalar beside a vector is one for each of its elements.
            return one.tensor.view(*one.tensor.shape[:4], *(1,) * (own - one.own), *one.tensor.shape[4:])
        return [look_up(one) for one in argument] if isinstance(argument, tuple) else argument

    args, kwargs = [look_up(one) for one in step.args], {name: look_up(one) for name, one in step.kwargs}
    if step.op == "aten.masked_fill.Tensor":  # which takes a value without dimensions
        return _Value(torch.where(args[1], args[2].to(args[0].dtype), args[0]), own)
    if base in MAKES:
        kwargs["device"] = device
        sizes = next((place for place, one in enumerate(step.args) if isinstance(one, tuple)), None)
        if sizes is not None:  # of the value alone, not of the grid
            args[sizes] = [1, 1, 1, 1, *args[sizes]]
            own = len(args[sizes]) - 4
        elif base == "scalar_tensor":
            return _alone(operator(step.op)(*args, **kwargs))
    return _Value(operator(step.op)(*args, **kwargs), own)


def _put(one: _Value, index: Sequence[_Value], added: _Value) -> _Value:
    """A vector with something added at a position: the gradient of reading it there."""
    (at,) = (position.tensor.to(torch.int64) for position in index)
    sizes = torch.broadcast_shapes(one.tensor.shape[:4], at.shape, added.tensor.shape[:4])
    whole = one.tensor.expand(*sizes, *one.tensor.shape[4:])
    added_there = added.tensor.expand(*sizes, *whole.shape[5:]).unsqueeze(4)
    return _Value(whole.scatter_add(4, _one_of(whole, at), added_there), one.own)


def _one_of(vectors: Tensor, position: Tensor) -> Tensor:
    """Positions in the first dimension of a grid's own vectors, as ``gather`` and ``scatter_add`` take them."""
    sizes = vectors.shape[:4]
    at = torch.where(position < 0, position + vectors.shape[4], position).expand(sizes)
    return at.view(*sizes, *(1,) * (vectors.dim() - 4)).expand(*sizes, 1, *vectors.shape[5:])


def _reduced(step: Step, one: _Value) -> _Value:
    """Over some dimensions of the value itself, by default all."""
    dims = next((argument for argument in step.args[1:2] if argument not in (None, ())), tuple(range(one.own)))
    dims = sorted((dim % one.own for dim in (dims if isinstance(dims, tuple) else (dims,))), reverse=True)
    keeps = len(step.args) > 2 and step.args[2] is True
    found, kwargs = one.tensor, dict(step.kwargs)
    for dim in dims:
        found = getattr(torch, step.base)(found, dim=dim + 4, keepdim=keeps, **kwargs)
    return _Value(found, one.own if keeps else one.own - len(dims))


def _indexed(table: _Value, index: Sequence[_Value]) -> _Value:
    if any(one.own for one in index):
        raise NotImplementedError("flex_attention: a mod's tensor indexed by a vector; nearest: by scalars")
    positions = [one.tensor.to(torch.int64) for one in index]
    if table.tensor.shape[:4] == (1, 1, 1, 1):
        return _Value(table.tensor[0, 0, 0, 0][tuple(positions)], table.own - len(index))
    found = table.tensor
    for position in positions:
        sizes = torch.broadcast_shapes(found.shape[:4], position.shape)
        found = found.expand(*sizes, *found.shape[4:])
        found = found.gather(4, _one_of(found, position)).squeeze(4)
    return _Value(found, table.own - len(index))


def call_step(step: Step, values: Mapping[str, Any]) -> Tensor | Sequence[Tensor]:
    """One step's results for tensors as they are, by name."""

    def look_up(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.name]
        return [look_up(one) for one in value] if isinstance(value, tuple) else value

    kwargs = {name: look_up(value) for name, value in step.kwargs}
    device = next((tensor.device for tensor in values.values() if isinstance(tensor, Tensor)), None)
    if device is not None and any(argument.name == "device" for argument in operator(step.op)._schema.arguments):  # type: ignore[attr-defined]
        kwargs["device"] = device
    result: Tensor | Sequence[Tensor] = operator(step.op)(*map(look_up, step.args), **kwargs)
    return result


def run(steps: Sequence[Step], results: Sequence[Ref], captured: Sequence[Tensor]) -> list[Tensor]:
    """Results of steps that no scalar decides, with gradients."""
    values: dict[str, Any] = {f"@{place}": tensor for place, tensor in enumerate(captured)}
    for place, step in enumerate(steps):
        values |= named(place, call_step(step, values))
    return [values[ref.name] for ref in results]


@functools.lru_cache(maxsize=1024)
def hoisted(program: Program) -> tuple[tuple[Step, ...], tuple[Ref, ...], Program]:
    """What of a mod no scalar decides, apart: (its steps, what the rest reads of them, the rest).

    The rest has these as its captured tensors, in that order, so that they are computed once a call, with gradients.
    """
    fixed: set[str] = set()
    before: list[Step] = []
    new_names: dict[str, str] = {}  # of results, in whichever part they end up
    after: list[Step] = []
    for place, step in enumerate(program.steps):
        read = [ref.name for ref in refs(step)]
        if read and all(name[0] == "@" or name.split(".")[0] in fixed for name in read):
            fixed.add(f"%{place}")
            new_names[f"%{place}"] = f"%{len(before)}"
            before.append(step)
        else:
            new_names[f"%{place}"] = f"%{len(after)}"
            after.append(step)
    wanted: dict[str, str] = {}

    def renamed(ref: Ref, of_rest: bool) -> Ref:
        head, dot, tail = ref.name.partition(".")
        if of_rest and (head[0] == "@" or head in fixed):
            return Ref(wanted.setdefault(ref.name, f"@{len(wanted)}"))
        return Ref(new_names.get(head, head) + dot + tail)

    rest = tuple(_mapped(step, lambda ref: renamed(ref, True)) for step in after)
    result = renamed(program.result, True)
    first = tuple(_mapped(step, lambda ref: renamed(ref, False)) for step in before)
    return first, tuple(renamed(Ref(name), False) for name in wanted), Program(rest, result)


@functools.lru_cache(maxsize=1024)
def moved(program: Program, tensors: int, numbers: int) -> Program:
    """The program where so many tensors and integers are captured before its own."""
    by = {"@": tensors, "#": numbers}

    def change(ref: Ref) -> Ref:
        kind = ref.name[0]
        return Ref(f"{kind}{int(ref.name[1:]) + by[kind]}") if kind in by else ref

    return Program(tuple(_mapped(step, change) for step in program.steps), change(program.result))


def _mapped(step: Step, change: Callable[[Ref], Ref]) -> Step:
    def of(value: Any) -> Any:
        if isinstance(value, Ref):
            return change(value)
        return tuple(map(of, value)) if isinstance(value, tuple) else value

    return Step(step.op, of(step.args), tuple((name, of(value)) for name, value in step.kwargs))

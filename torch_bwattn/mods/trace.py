"""From a Python function to a :class:`.program.Program`: it is called once, on scalars, and its operators are recorded.

The scalars have a dtype and no value, so a function that would look at one (``if score > 0``) is found out, as is one
that changes a tensor. Tensors that it reads but was not given are its captured ones.

A function is recorded anew only where something it can see has changed: its code, and what its closure, its defaults
and the globals that it names hold. Tensors there count by identity, numbers by value, functions by what they can see in
turn. A function that sees anything else (an object, whose attributes may change) is recorded at each call.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .program import INDEX_DTYPE, POSITION, SCORE_INPUTS, Program, Ref, Step, is_known

_SAME = ("aten.alias.default", "aten.lift_fresh_copy.default", "aten.clone.default")
_MEANS = {
    "approx.tanh.default": "aten.tanh.default",  # attention-gym's, by one instruction
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten._efficientzerotensor.default": "aten.zeros.default",
}
"""Operators that compute what others do, for a mod's purposes."""


class ModError(ValueError):
    """A mod is none: it is not pointwise, it changes something, or its result is no score or no mask."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A mod's program and what it captured.

    Attributes:
        program: Its program.
        captured: The tensors ``@0``, ``@1``, ...
        numbers: The integers ``#0``, ``#1``, ...
    """

    program: Program
    captured: tuple[Tensor, ...]
    numbers: tuple[int | torch.SymInt, ...] = ()


class _WithoutValues(TorchFunctionMode):
    """What Python does with a scalar's value or device, done without: these scalars have none."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(one, Tensor) for one in index) and all(isinstance(one, (Tensor, int)) for one in index):
                tensors = [one if isinstance(one, Tensor) else torch.full((), one) for one in index]
                return torch.ops.aten.index.Tensor(table, tensors)
        if func in (Tensor.tolist, Tensor.numpy):
            raise ModError(f"mod: expected a function that computes with tensors, got one that calls {func.__name__}")
        if func is Tensor.new_tensor:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype))
        if func is torch.tensor and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    return [leaf for one in value for leaf in _leaves(one)] if isinstance(value, (tuple, list)) else [value]


def _functional(func: Any) -> Any:
    """The operator that makes a tensor of what another one changes; None where there is none."""
    _, name = func._schema.name.split("::")
    bare = f"__{name[3:]}" if name.startswith("__i") else name.rstrip("_")
    return getattr(getattr(torch.ops.aten, bare, None), func._overloadname, None)


def _looks(func: Any) -> bool:
    """Whether an operator's result depends on values in more than its own values."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


class Recorder(TorchDispatchMode):
    """Runs operators on the meta device and writes them down.

    Of a user's function (not ``internal``) it takes those that a mod may call, of which one may change what an earlier
    one gave: it is recorded as the operator that makes a new tensor. So is all that autograd changes.
    """

    def __init__(self, what: str, known: Mapping[int, str], internal: bool = False) -> None:
        super().__init__()
        self.internal = internal
        self.what = what
        self.steps: list[Step] = []
        self.captured: list[Tensor] = []
        self.names: dict[int, str] = dict(known)
        self._fixed: set[int] = set()  # what captured tensors alone decide
        self._kept: list[Tensor] = []  # a name is by identity, which only lasts as long as the tensor
        self._stand_ins: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        changed = None
        if func._schema.is_mutable:
            functional = _functional(func) if self.internal or self._is_own(args[0]) else None
            if functional is None or not func._schema.name.endswith("_"):
                wanted = "a function that changes nothing but its own values"
                raise ModError(f"{self.what}: expected {wanted}, got one that calls {func}")
            func, changed = functional, args[0]
        schema, name = func._schema, _MEANS.get(str(func), str(func))
        by_mask = name == "aten.index.Tensor" and any(one is not None and one.dtype == torch.bool for one in args[1])
        if by_mask or (name != "aten.index.Tensor" and _looks(func)):
            raise ModError(
                f"{self.what}: expected a function that computes with its scalars without looking at their values "
                f"(torch.where chooses between two), got one that calls {name}"
            )
        tensors = [one for one in _leaves((args, kwargs)) if isinstance(one, Tensor)]
        fixed = bool(tensors) and all(self._is_fixed(one) for one in tensors)
        if not (fixed or is_known(name)):
            raise ModError(f"{self.what}: expected a pointwise function, got one that calls {name}")
        if name == "aten.lift_fresh.default":
            return self._constant(args[0])
        if name in _SAME and not self.internal:
            return args[0]
        kwargs = dict(kwargs or {})
        recorded = {
            key: self._ref(value) for key, value in kwargs.items() if key not in ("device", "pin_memory", "layout")
        }
        if any(argument.name == "device" for argument in schema.arguments):
            kwargs["device"] = "meta"
        refs = tuple(self._ref(value) for value in args)
        with _disable_current_modes():
            result = func(*map(self._stand_in, args), **{key: self._stand_in(value) for key, value in kwargs.items()})
        self.steps.append(Step(name, refs, tuple(recorded.items())))
        place = len(self.steps) - 1
        if fixed:
            self._fixed.update(id(one) for one in _leaves(result))
        if changed is not None:
            if result.dtype != changed.dtype:  # the tensor that is changed keeps its own
                self.steps.append(Step("aten._to_copy.default", (Ref(f"%{place}"),), (("dtype", changed.dtype),)))
                place += 1
            (self._fixed.add if fixed else self._fixed.discard)(id(changed))
            return self.name(changed, f"%{place}")
        if isinstance(result, Tensor):
            return self.name(result, f"%{place}")
        if isinstance(result, (tuple, list)) and all(isinstance(one, Tensor) for one in result):
            return type(result)(self.name(one, f"%{place}.{number}") for number, one in enumerate(result))
        raise ModError(f"{self.what}: expected operators that give tensors, got {name}")

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether a scalar is what an operator gave, so that to change it changes nothing else."""
        return tensor.dim() == 0 and self.names.get(id(tensor), "@")[0] == "%"

    def _is_fixed(self, tensor: Tensor) -> bool:
        name = self.names.get(id(tensor), "@")
        return name[0] == "@" or id(tensor) in self._fixed

    def name(self, tensor: Tensor, name: str) -> Tensor:
        """Gives a tensor its name in the program."""
        self._kept.append(tensor)
        self.names[id(tensor)] = name
        return tensor

    def _constant(self, tensor: Tensor) -> Tensor:
        """A tensor that the function has just made from a number is that number; a larger one is captured."""
        if tensor.dim() or tensor.device.type == "meta":
            return tensor
        value = tensor.item()
        self.steps.append(Step("aten.full.default", ((), value), (("dtype", tensor.dtype),)))
        stand_in = torch.empty_strided((), (), dtype=tensor.dtype, device="meta")
        return self.name(stand_in, f"%{len(self.steps) - 1}")

    def _ref(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Ref(self._name_of(value))
        if isinstance(value, (tuple, list)):
            return tuple(self._ref(one) for one in value)
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            return value
        if isinstance(value, (torch.layout, torch.device, torch.memory_format)):
            return None
        raise ModError(
            f"{self.what}: expected numbers and tensors as arguments of operators, got {type(value).__name__}"
        )

    def _name_of(self, tensor: Tensor) -> str:
        name = self.names.get(id(tensor))
        if name is None:
            name = self.names[id(tensor)] = f"@{len(self.captured)}"
            self.captured.append(tensor)
        return name

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._stand_in(one) for one in value)
        if not isinstance(value, Tensor) or value.device.type == "meta":
            return value
        found = self._stand_ins.get(id(value))
        if found is None:
            found = self._stand_ins[id(value)] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return found


def trace(
    function: Callable[..., Any],
    what: str,
    inputs: Sequence[str],
    score_dtype: torch.dtype,
    given: Sequence[Tensor | int | torch.SymInt] = (),
    unknown_size: int | None = None,
) -> Traced:
    """Records a mod.

    Args:
        function: Called with ``inputs``, then with what is ``given``.
        what: Its argument's name, for messages.
        inputs: :data:`.program.SCORE_INPUTS` or :data:`.program.POSITION`.
        score_dtype: Of the score.
        given: Further arguments, which the caller has found it to capture: tensors, integers of unknown value, which
            stay so, and known ones.
        unknown_size: Stands for each size of these tensors that a compiler does not fix; None fixes it.

    Raises:
        ModError: It is no mod.
    """
    with _disable_current_modes(), torch.no_grad():
        scalars = [
            torch.empty((), dtype=score_dtype if name == "score" else INDEX_DTYPE, device="meta") for name in inputs
        ]
        known = {id(scalar): name for scalar, name in zip(scalars, inputs, strict=True)}
        arguments: list[Tensor | int] = []
        numbers: list[int | torch.SymInt] = []
        tensors: list[Tensor] = []
        for one in given:
            if isinstance(one, Tensor):
                sizes = [
                    unknown_size if unknown_size and not isinstance(size, int) else int(size) for size in one.shape
                ]
                stand_in = torch.empty(sizes, dtype=one.dtype, device="meta")
                known[id(stand_in)] = f"@{len(tensors)}"
                tensors.append(one)
            elif isinstance(one, torch.SymInt):
                stand_in = torch.empty((), dtype=torch.int64, device="meta")
                known[id(stand_in)] = f"#{len(numbers)}"
                numbers.append(one)
            else:
                arguments.append(one)
                continue
            arguments.append(stand_in)
        recorder = Recorder(what, known)
        recorder.captured = tensors
        with recorder, _WithoutValues():
            result = function(*scalars, *arguments)
    return Traced(_finished(recorder, result), tuple(recorder.captured), tuple(numbers))


def _finished(recorder: Recorder, result: Any) -> Program:
    what = recorder.what
    wanted = "a bool" if what == "mask_mod" else "a floating-point"
    if isinstance(result, (tuple, list)) and len(result) == 1:
        (result,) = result  # as graphs of torch.compile return
    if not isinstance(result, Tensor):
        raise ModError(f"{what}: expected a function that returns {wanted} tensor, got {type(result).__name__}")
    if result.dim():
        shape = list(result.shape)
        raise ModError(
            f"{what}: expected a function that returns a tensor without dimensions, got one of shape {shape}"
        )
    if what == "mask_mod" and result.dtype != torch.bool:
        raise ModError(f"{what}: expected a function that returns a bool tensor, got {result.dtype}")
    if what == "score_mod" and not result.dtype.is_floating_point:
        raise ModError(f"{what}: expected a function that returns a floating-point tensor, got {result.dtype}")
    return Program(tuple(recorder.steps), Ref(recorder._name_of(result)))


_traced: weakref.WeakKeyDictionary[Callable[..., Any], tuple[Hashable, Traced]] = weakref.WeakKeyDictionary()


def traced(function: Callable[..., Any], what: str, score_dtype: torch.dtype = torch.float32) -> Traced:
    """:func:`trace` of a function that nothing is known of, remembered while what it sees is the same.

    Args:
        function: The mod.
        what: ``"score_mod"`` or ``"mask_mod"``.
        score_dtype: Of the score.

    Raises:
        ModError: It is no mod.
        TypeError: It is no function.
    """
    if not callable(function):
        raise TypeError(f"{what}: expected a function or None, got {type(function).__name__}")
    try:
        seen: Hashable = (what, score_dtype, torch.get_default_dtype(), _sight(function, set()))
        found = _traced.get(function)
    except _Unseen:
        seen, found = None, None
    if found is not None and found[0] == seen:
        return found[1]
    new = trace(function, what, SCORE_INPUTS if what == "score_mod" else POSITION, score_dtype)
    if seen is not None:
        _traced[function] = seen, new
    return new


class _Unseen(Exception):
    """Something can change without notice."""


_CONSTANT = ("torch", "math", "cmath", "operator", "builtins")
"""Packages whose modules, classes and functions see what does not change."""


def _is_constant(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in _CONSTANT


def _sight(value: Any, open_functions: set[int]) -> Hashable:
    """What a value is as far as a program goes."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), repr(value)  # repr: 0.0 is not -0.0, and nan is nan
    if type(value) in (Tensor, torch.nn.Parameter):
        return Tensor, id(value), tuple(value.shape), value.dtype, value.device
    if isinstance(value, types.ModuleType) and _is_constant(value.__name__):
        return id(value)
    if isinstance(value, type) and _is_constant(value.__module__):
        return id(value)
    if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType):
        return id(value)
    if type(value) in (tuple, list):
        return type(value), tuple(_sight(one, open_functions) for one in value)
    if not isinstance(value, types.FunctionType) or value.__dict__:
        raise _Unseen
    if id(value) in open_functions:
        return id(value)
    if _imports(value.__code__):
        raise _Unseen
    open_functions.add(id(value))
    try:
        cells = tuple(_sight(cell.cell_contents, open_functions) for cell in value.__closure__ or ())
    except ValueError:  # a cell that is empty yet
        raise _Unseen from None
    found = [value.__code__, cells, _sight(value.__defaults__, open_functions)]
    found += [(name, _sight(default, open_functions)) for name, default in sorted((value.__kwdefaults__ or {}).items())]
    if not _is_constant(value.__module__):
        names = [name for name in sorted(_names(value.__code__)) if name in value.__globals__]
        found += [(name, _sight(value.__globals__[name], open_functions)) for name in names]
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _imports(code: types.CodeType) -> bool:
    """Whether a function's code imports something, or code within it."""
    within = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return any(one.opname == "IMPORT_NAME" for one in dis.get_instructions(code)) or any(map(_imports, within))


def _names(code: types.CodeType) -> set[str]:
    """The names that a function's code and the code within it look up."""
    return set(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, types.CodeType)))

"""The derivative of a ``score_mod``, as steps too.

With ``g`` the gradient of what the mod returns, autograd's own operators are recorded as they compute::

    g * d mod / d score        and for each value that the mod reads of a captured tensor,  g * d mod / d value

so a kernel needs no autograd, only to evaluate steps; the gradient of a captured tensor is the second, added up where
the value was read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .program import INDEX_DTYPE, POSITION, Ref, Step, call_step, named, parsed, refs
from .trace import Recorder

GRAD = "grad"
"""The input that is ``g``, beside those of the mod."""


@dataclasses.dataclass(frozen=True)
class Load:
    """A value that a mod reads of a captured tensor.

    Attributes:
        captured: Which tensor.
        index: Where it is read, an integer scalar for each of the leading dimensions.
        gradient: Of the value.
    """

    captured: int
    index: tuple[Ref, ...]
    gradient: Ref


@dataclasses.dataclass(frozen=True)
class Derivative:
    """Steps, which begin with the mod's own, and what of them the gradients are.

    Attributes:
        steps: Read the mod's inputs and :data:`GRAD`.
        own: How many of them are the mod's own; they do not read :data:`GRAD`.
        result: What the mod returns.
        score: The gradient of the score; None where it decides nothing.
        loads: Of the captured tensors that were asked for.
    """

    steps: tuple[Step, ...]
    own: int
    result: Ref
    score: Ref | None
    loads: tuple[Load, ...]


@functools.lru_cache(maxsize=1024)
def derivative(
    text: str,
    kinds: tuple[tuple[torch.dtype, tuple[int, ...]], ...],
    wanted: tuple[int, ...],
    score_dtype: torch.dtype,
    numbers: int = 0,
) -> Derivative:
    """Of a mod, by its score and by the values that it reads of some captured tensors.

    Args:
        text: The mod's program, nothing of which only captured tensors decide (:func:`.program.hoisted`).
        kinds: (dtype, shape) of each captured tensor.
        wanted: Which of these need gradients.
        score_dtype: Of the score.
        numbers: How many captured integers there are.

    Raises:
        NotImplementedError: An operator has no derivative.
    """
    program = parsed(text)
    recorder = Recorder("score_mod", {}, internal=True)
    with _disable_current_modes(), torch.enable_grad():
        score, grad = _meta(score_dtype, requires_grad=True), _meta(score_dtype)
        captured = [_meta(dtype, shape) for dtype, shape in kinds]
        values = {name: _meta(INDEX_DTYPE) for name in POSITION}
        values |= {"score": score, GRAD: grad}
        values |= {f"@{place}": tensor for place, tensor in enumerate(captured)}
        values |= {f"#{place}": _meta(torch.int64) for place in range(numbers)}
        for name, tensor in values.items():
            recorder.name(tensor, name)
        leaves: list[tuple[Tensor, int, tuple[Ref, ...]]] = []

        def leaf(tensor: Tensor, place: int, index: tuple[Ref, ...]) -> Tensor:
            """The value as one that autograd ends at, under the name that it has."""
            with _disable_current_modes():
                fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=True)
            recorder.name(fresh, recorder.names[id(tensor)])
            leaves.append((fresh, place, index))
            return fresh

        tables = {f"@{place}": captured[place] for place in wanted}
        whole = {ref.name for step in program.steps for ref in refs(step) if _read_table(step) != ref.name}
        whole.add(program.result.name)
        for name in sorted(whole & set(tables)):
            values[name] = leaf(tables[name], int(name[1:]), ())
        with recorder:
            for number, step in enumerate(program.steps):
                name = _read_table(step)
                result = call_step(step, {**values, name: tables[name]} if name in tables else values)
                if name in tables and isinstance(result, Tensor):
                    result = leaf(result, int(name[1:]), step.args[1])
                values |= named(number, result)
            # The recorder has numbered steps by itself: it knows the indices of loads by their tensors.
            result = values[program.result.name]
            own, named_result = len(recorder.steps), Ref(recorder.names[id(result)])
            inputs = [score, *(tensor for tensor, _, _ in leaves)]
            found: Sequence[Tensor | None] = (None,) * len(inputs)
            if result.requires_grad:
                found = torch.autograd.grad(result, inputs, grad.to(result.dtype), allow_unused=True)
    loads = [
        Load(
            place, tuple(Ref(recorder.names[id(values[ref.name])]) for ref in index), Ref(recorder.names[id(gradient)])
        )
        for (_, place, index), gradient in zip(leaves, found[1:], strict=True)
        if gradient is not None
    ]
    by_score = None if found[0] is None else Ref(recorder.names[id(found[0])])
    return Derivative(tuple(recorder.steps), own, named_result, by_score, tuple(loads))


def of_scalars(text: str, dtypes: Sequence[torch.dtype], wanted: tuple[int, ...], numbers: int) -> Derivative:
    """The derivative of a mod whose values are all scalars.

    Args:
        text: Its program.
        dtypes: Of the captured tensors that it reads.
        wanted: Which of these need gradients.
        numbers: How many captured integers there are.
    """
    ranks = {step.args[0].name: len(step.args[1]) for step in parsed(text).steps if step.base == "index"}
    kinds = tuple((dtype, (2,) * ranks.get(f"@{place}", 0)) for place, dtype in enumerate(dtypes))
    return derivative(text, kinds, wanted, torch.float32, numbers)


def _read_table(step: Step) -> str:
    """The captured tensor of which a step reads one value or row, if it does."""
    table = step.args[0] if step.base == "index" else None
    return table.name if isinstance(table, Ref) and table.name[0] == "@" else ""


def _meta(dtype: torch.dtype, shape: tuple[int, ...] = (), requires_grad: bool = False) -> Tensor:
    """A tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)

"""Mods in Helion kernels: a program's steps, called on tiles while Helion traces the kernel.

Every value is a tile of two dimensions, each a block or 1: a score is ``[block_m, block_n]``, a position of queries
``[block_m, 1]`` and one of keys ``[1, block_n]``, ``b`` and ``h`` and what is computed of literals are ``[1, 1]``. In
a transposed tile of scores keys come first. So PyTorch's own operators apply, with its promotion of dtypes; what only a
row decides is computed once for the row. A value read of a captured tensor is a gather at such tiles of indices.

The gradient of a value that was read goes by atomic additions into a float32 (or float64) tensor of zeros, after it was
summed over the dimension in which the index does not differ: one addition a tile for a number of each head, one a row
for a bias of each query, one a score for a table of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import helion.language as hl
import torch

from ...mods.derivative import GRAD, of_scalars
from ...mods.program import MAKES, POSITION, SAME, Ref, Step, dtype_made, literal, named, operator, parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .parts import Int

Position = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Tiles of b, h, q_idx and kv_idx."""
Tables = tuple[torch.Tensor | None, ...]
"""Captured tensors, those without dimensions as one of one element."""
Numbers = tuple[Any, ...]
"""Captured integers."""


def position(b: Int, h: Int, row: torch.Tensor, col: torch.Tensor) -> Position:
    """Of a tile of scores, or with ``row`` and ``col`` across instead of down and across a transposed one.

    Args:
        b: Batch.
        h: Query head.
        row: Query positions, [block_m, 1] or [1, block_m].
        col: Key positions, [1, block_n] or [block_n, 1].
    """
    return _number(b, torch.int32), _number(h, torch.int32), row, col


def bounded(positions: torch.Tensor, size: Int, ragged: bool) -> torch.Tensor:
    """Positions that exist: a mod may use them as an index."""
    return torch.minimum(positions, torch.zeros_like(positions) + size - 1) if ragged else positions


def modified(text: str | None, score: torch.Tensor, at: Position, tables: Tables, numbers: Numbers) -> torch.Tensor:
    """Scores after ``score_mod``, float32; as they are without one."""
    if text is None:
        return score
    program = parsed(text)
    values = _Values({"score": score, **dict(zip(POSITION, at, strict=True))}, tables, numbers)
    values.run(program.steps)
    return torch.zeros_like(score) + values.of(program.result).to(torch.float32)


def shown(text: str | None, at: Position, tables: Tables, numbers: Numbers) -> torch.Tensor | None:
    """What ``mask_mod`` shows, a bool tile that broadcasts; None for all without one."""
    if text is None:
        return None
    program = parsed(text)
    values = _Values(dict(zip(POSITION, at, strict=True)), tables, numbers)
    values.run(program.steps)
    return values.of(program.result)


def differentiated(
    text: str,
    score: torch.Tensor,
    at: Position,
    tables: Tables,
    numbers: Numbers,
    grads: Tables,
    grad_of: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``score_mod`` and its derivative on one tile; adds the gradients of captured tensors.

    Args:
        text: The mod's program.
        score: Before it.
        at: Their position.
        tables: Captured tensors.
        numbers: Captured integers.
        grads: Of the captured tensors, None of those that need none.
        grad_of: Takes scores after the mod; gives what the caller wants of them, and their gradient: 0 where nothing
            shows one, for there the mod's derivative may be no number.

    Returns:
        What the caller wants, and the gradient of the scores before the mod.
    """
    wanted = tuple(place for place, one in enumerate(grads) if one is not None)
    dtypes = [table.dtype for table in tables if table is not None]
    found = of_scalars(text, dtypes, wanted, sum(number is not None for number in numbers))
    values = _Values({"score": score, **dict(zip(POSITION, at, strict=True))}, tables, numbers)
    values.run(found.steps[: found.own])
    p, grad = grad_of(torch.zeros_like(score) + values.of(found.result).to(torch.float32))
    values.known[GRAD] = grad
    values.run(found.steps, done=found.own)
    hidden = grad == 0.0
    for load in found.loads:
        total = grads[load.captured]
        if total is not None:
            gradient = torch.where(hidden, 0.0, values.of(load.gradient))
            _add(total, values.index(load.captured, load.index), gradient)
    if found.score is None:
        return p, torch.zeros_like(grad)
    return p, torch.where(hidden, 0.0, values.of(found.score)).to(torch.float32)


def _add(total: torch.Tensor, index: list[torch.Tensor], gradient: torch.Tensor) -> None:
    """Adds a tile of gradients where values were read, summed in the dtype of the total, not in the table's."""
    gradient = gradient.to(total.dtype)
    for dim in (0, 1):
        if all(_is_one(one.shape[dim]) for one in index):
            gradient = gradient.sum(dim).unsqueeze(dim)
    hl.atomic_add(total, _alike(index), gradient)


def _is_one(size: Any) -> bool:
    return type(size) is int and size == 1


def _alike(index: list[torch.Tensor]) -> list[torch.Tensor]:
    """Indices of one shape."""
    if len(index) == 1:
        return index
    whole = index[0]
    for one in index[1:]:
        whole = whole + one
    zero = torch.zeros_like(whole)
    return [one + zero for one in index]


def _number(value: Any, dtype: torch.dtype) -> torch.Tensor:
    return hl.full([1, 1], 0, dtype=dtype) + value


def _truth(value: torch.Tensor) -> torch.Tensor:
    return value if value.dtype == torch.bool else value != 0


def _power(base: Any, exponent: Any) -> torch.Tensor:
    """By multiplications for a small integer, else in Triton source: Helion does not lower ``pow``."""
    dtype = torch.result_type(base, exponent)
    if not isinstance(exponent, torch.Tensor) and exponent in range(1, 17):
        found: torch.Tensor = base.to(dtype)
        for digit in bin(int(exponent))[3:]:  # from the second on
            found = found * found * base.to(dtype) if digit == "1" else found * found
        return found
    tile = base if isinstance(base, torch.Tensor) else exponent
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if isinstance(base, torch.Tensor) and isinstance(exponent, torch.Tensor):
        tile = base + exponent
    zero = torch.zeros_like(tile, dtype=wide)
    return hl.inline_triton("libdevice.pow({0}, {1})", (zero + base, zero + exponent), zero).to(dtype)


def _silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(x)
    return grad * sigmoid * (1.0 + x * (1.0 - sigmoid))


_OWN_FORMS: dict[str, Callable[..., Any]] = {
    "logical_and": lambda a, b: _truth(a) & _truth(b),
    "logical_or": lambda a, b: _truth(a) | _truth(b),
    "logical_xor": lambda a, b: _truth(a) ^ _truth(b),
    "logical_not": lambda a: torch.bitwise_not(_truth(a)),
    "pow": _power,
    "silu_backward": _silu_backward,
    # Its second result is for its backward, which takes the first's operand here.
    "log_sigmoid_forward": lambda x: [torch.minimum(x, torch.zeros_like(x)) - torch.log1p(torch.exp(-x.abs())), x],
    "log_sigmoid_backward": lambda grad, x, _: grad * torch.sigmoid(-x),
}
"""Operators whose own forms Helion does not lower, or not without a GPU."""


class _Values:
    """Tiles by the names of a program's values."""

    def __init__(self, inputs: Mapping[str, torch.Tensor], tables: Tables, numbers: Numbers) -> None:
        self.known: dict[str, Any] = dict(inputs)
        self.tables = tables
        self.numbers = numbers

    def run(self, steps: Sequence[Step], done: int = 0) -> None:
        """Adds the steps' results, of which the first ones are there."""
        for place, step in enumerate(steps[done:], done):
            self.known |= named(place, self._step(step))

    def of(self, ref: Ref) -> torch.Tensor:
        """A value; a captured one is loaded when it is first asked for."""
        name = ref.name
        if name not in self.known:
            place = int(name[1:])
            if name[0] == "@":
                table = self._table(place)
                self.known[name] = hl.load(table, self.index(place, ()))
            else:
                self.known[name] = _number(self.numbers[place], torch.int64)
        found: torch.Tensor = self.known[name]
        return found

    def _table(self, place: int) -> torch.Tensor:
        table = self.tables[place]
        if table is None:
            raise ValueError(f"tables: expected one at {place}, which the program reads, got None")
        return table

    def index(self, place: int, refs: Sequence[Ref]) -> list[torch.Tensor]:
        """Where a captured tensor is read, from its beginning; a number of none dimensions at 0."""
        if not refs:
            return [hl.full([1, 1], 0, dtype=torch.int32)]
        found = []
        for dim, ref in enumerate(refs):
            one = self.of(ref)
            if one.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
                one = one.to(torch.int32)
            if ref.name not in POSITION:
                one = torch.where(one < 0, one + self._table(place).size(dim), one)
            found.append(one)
        return found

    def _step(self, step: Step) -> Any:
        base = step.base
        if base == "index":
            place = int(step.args[0].name[1:])
            return hl.load(self._table(place), _alike(self.index(place, step.args[1])))
        if base in MAKES:
            return self._made(step)
        if base in SAME:
            return self.of(step.args[0])
        if base == "_to_copy":
            dtype = dict(step.kwargs).get("dtype")
            return self.of(step.args[0]) if dtype is None else self.of(step.args[0]).to(dtype)
        if base == "fill":
            like, value = step.args
            made = torch.zeros_like(self.of(like))
            return made + self.of(value).to(made.dtype) if isinstance(value, Ref) else made + value
        if base == "masked_fill":
            one, where, value = (self._argument(argument) for argument in step.args)
            return torch.where(where, value.to(one.dtype) if isinstance(value, torch.Tensor) else value, one)
        args = [self._argument(one) for one in step.args]
        if base in _OWN_FORMS:
            return _OWN_FORMS[base](*args)
        return operator(step.op)(*args, **{name: self._argument(value) for name, value in step.kwargs})

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.of(value)
        return [self._argument(one) for one in value] if isinstance(value, tuple) else value

    def _made(self, step: Step) -> torch.Tensor:
        """A tile of a literal."""
        dtype, value = dtype_made(step) or self.of(step.args[0]).dtype, literal(step)
        if dtype == torch.bool:
            return hl.full([1, 1], int(bool(value)), dtype=torch.int32) != 0
        return hl.full([1, 1], value, dtype=dtype)

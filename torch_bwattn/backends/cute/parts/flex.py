"""Mods and lists of blocks as kernels take them, and what a mod gives for one score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import select_

from ....mods.derivative import GRAD, Derivative, Load, of_scalars
from ....mods.program import parsed
from ...flex_inputs import MOST_NUMBERS, MOST_TENSORS
from ..configs import ModFeatures
from . import mods

_HELD = {
    "bool": cutlass.Uint8, "uint8": cutlass.Uint8, "int8": cutlass.Int8, "int32": cutlass.Int32,
    "int64": cutlass.Int64, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32,
    "float64": cutlass.Float64,
}  # fmt: skip
"""How captured tensors come, by PyTorch's names."""

Tables = tuple[cute.Tensor | None, ...]
Numbers = tuple[Int32 | None, ...]
At = Mapping[str, mods.Value]
"""A score's position, and the score where it is read."""
Change = Callable[[Float32, At], Float32]
"""Takes a score and its position."""


class Flex(NamedTuple):
    """What of mods and lists is not code.

    Lists are Int32 [B, Hq, R] and [B, Hq, R, C] with unit last strides: of a row of blocks which columns are visited,
    or of a column which rows. A block has ``down`` tiles of queries and ``across`` tiles of keys. ``grads``, Float32,
    are those of learned tables, to which the backward adds.
    """

    part_count: cute.Tensor | None
    part_index: cute.Tensor | None
    full_count: cute.Tensor | None
    full_index: cute.Tensor | None
    tables: Tables
    numbers: Numbers
    down: Int32
    across: Int32
    scale: Float32
    grads: Tables = ()


def given(mods: ModFeatures | None) -> ModFeatures:
    """The features of kernels for mods.

    Raises:
        ValueError: There are none.
    """
    if mods is None:
        raise ValueError("features: expected those of mods, got None")
    return mods


def _fake(kind: Any, rank: int, last: int | None = None) -> cute.Tensor:
    sizes = tuple(cute.sym_int() for _ in range(rank))
    strides = (*(cute.sym_int64() for _ in range(rank - 1)), cute.sym_int64() if last is None else last)
    return cute.runtime.make_fake_tensor(kind, sizes, strides, assumed_align=kind.width // 8)


def fake_arguments(features: ModFeatures) -> tuple[Any, ...]:
    """Lists, tables and numbers of any sizes and strides, for the compiler, and the tiles of a block."""
    lists = [_fake(Int32, rank, 1) if features.lists else None for rank in (3, 4)]
    lists += [_fake(Int32, rank, 1) if features.full else None for rank in (3, 4)]
    tables = [_fake(_HELD[name], rank) for name, rank in features.tables]
    tables += [None] * (MOST_TENSORS - len(tables))
    numbers = [Int32(0)] * features.numbers + [None] * (MOST_NUMBERS - features.numbers)
    return *lists, *tables, *numbers, Int32(1), Int32(1)


def fake_grads(features: ModFeatures) -> list[cute.Tensor | None]:
    """Gradients of learned tables, for the compiler."""
    ranks = dict.fromkeys(range(MOST_TENSORS), 0) | {place: rank for place, (_, rank) in enumerate(features.tables)}
    return [_fake(Float32, rank) if place in features.learned else None for place, rank in ranks.items()]


def derivative_of(features: ModFeatures) -> Derivative:
    """Of the score mod, by its score and by what it reads of learned tables."""
    dtypes = [getattr(torch, name) for name, _ in features.tables]
    return of_scalars(features.score_mod or "", dtypes, features.learned, features.numbers)


def is_sloped(features: ModFeatures) -> bool:
    """Whether the score mod changes the gradient of a score: a bias does not."""
    if features.score_mod is None:
        return False
    by_score = derivative_of(features).score
    return by_score is None or by_score.name != GRAD


def _shown_if(condition: Any, score: Float32) -> Float32:
    """A score, or -inf where a Boolean does not hold."""
    return Float32(select_(condition, score, Float32(-Float32.inf)))


def up_to(q_len: Int32) -> Change:
    """Hides queries beyond the last one."""
    return lambda score, at: _shown_if(at["q_idx"].number < q_len, score)


@cute.jit
def add_unless_0(pointer: cute.Pointer, offset: Int64, value: Float32) -> None:
    """Adds a number in memory."""
    if value != 0.0:
        address = (pointer + offset).toint()
        cute.arch.inline_ptx("red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};", read_only_args=[address, value])


class Mods:
    """The mods of one kernel, emitted where they are asked for."""

    def __init__(self, features: ModFeatures, flex: Flex) -> None:
        self.features, self.flex = features, flex

    def score(self, number: Float32) -> dict[str, mods.Value]:
        """What a score mod reads of a product of a query and a key."""
        return {"score": mods.Value(number * self.flex.scale, torch.float32)}

    def modified(self, number: Float32, at: At) -> Float32:
        """A score after ``score_mod``."""
        program = parsed(self.features.score_mod or "")
        (found,) = self._evaluated(program.steps, [program.result], {**self.score(number), **at})
        return mods.cast(found, torch.float32).number

    def modified_with_slope(self, number: Float32, at: At) -> tuple[Float32, Float32]:
        """A score after ``score_mod``, and the derivative."""
        rule = derivative_of(self.features)
        inputs = {**self.score(number), GRAD: mods.Value(Float32(1.0), torch.float32), **at}
        if rule.score is None:
            (found,) = self._evaluated(rule.steps[: rule.own], [rule.result], inputs)
            return mods.cast(found, torch.float32).number, Float32(0.0)
        found, slope = self._evaluated(rule.steps, [rule.result, rule.score], inputs)
        return mods.cast(found, torch.float32).number, mods.cast(slope, torch.float32).number

    def learned(self, load: Load, grad: Float32, at: At) -> Float32:
        """The gradient of a value that was read, by that of the score after a mod that only adds to scores."""
        inputs = {**self.score(Float32(0.0)), GRAD: mods.Value(grad, torch.float32), **at}
        (found,) = self._evaluated(derivative_of(self.features).steps, [load.gradient], inputs)
        return mods.cast(found, torch.float32).number  # 16-bit floats are Float32 too, so nothing was rounded

    def offset(self, load: Load, at: At) -> Int64:
        """Where the gradient of a value that was read at a position is added, in its table."""
        inputs = {**self.score(Float32(0.0)), GRAD: mods.Value(Float32(0.0), torch.float32), **at}
        found = self._evaluated(derivative_of(self.features).steps, load.index, inputs)
        grads = self.flex.grads[load.captured]
        index = [
            mods.in_bounds(one, ref, grads.shape[dim])
            for dim, (one, ref) in enumerate(zip(found, load.index, strict=True))
        ]
        return cute.crd2idx(tuple(index or [Int32(0)]), grads.layout).to(Int64)

    def masked(self, number: Float32, at: At) -> Float32:
        """A score, or -inf where ``mask_mod`` hides it."""
        program = parsed(self.features.mask_mod or "")
        (shown,) = self._evaluated(program.steps, [program.result], at)
        return _shown_if(shown.number, number)

    def _evaluated(self, steps: Any, results: Any, inputs: At) -> list[mods.Value]:
        dtypes = [getattr(torch, name) for name, _ in self.features.tables]
        return mods.evaluated(steps, results, inputs, self.flex.tables, dtypes, self.flex.numbers)

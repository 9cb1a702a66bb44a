"""What of a mod is a feature that kernels have anyway: causality, windows, soft caps, by structure and not by name.

A mask that is a conjunction of comparisons between positions, each of the form ``t * (i - j) >= c``, shows query ``i``
the keys ``low <= j - i <= high``. A score that is ``c * tanh(score / c)`` is capped; one that is ``-inf`` where such a
mask hides is masked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from .program import Program, Ref, Step


@dataclasses.dataclass(frozen=True)
class Features:
    """What mods mean in terms of kernels.

    Attributes:
        high: Query i sees key j where j <= i + high, or None for all.
        low: And where j >= i + low, or None.
        softcap: The bound of scores, or None.
    """

    high: int | None = None
    low: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        words = [f"j <= i + {self.high}"] if self.high is not None else []
        words += [f"j >= i + {self.low}"] if self.low is not None else []
        words += [f"soft cap {self.softcap:g}"] if self.softcap is not None else []
        return ", ".join(words) or "all of it"


class _Unknown(Exception):
    """A part of a mod that is no such feature, named."""


_NUMBERS = ("full", "full_like", "new_full", "new_ones", "ones", "ones_like", "scalar_tensor")


class _Reader:
    def __init__(self, program: Program) -> None:
        self.program = program

    def step(self, value: Any) -> Step:
        if not isinstance(value, Ref) or value.name[0] != "%" or "." in value.name:
            raise _Unknown(f"it reads {value.name}" if isinstance(value, Ref) else f"it has {value}")
        step = self.program.steps[int(value.name[1:])]
        makes = step.base in _NUMBERS
        if not makes and any((name, given) != ("alpha", 1) for name, given in step.kwargs):
            raise _Unknown(f"it calls {step.op} with {step.kwargs[0][0]}")
        return step

    def constant(self, value: Any) -> float | bool:
        """A literal, or a scalar that is made from one."""
        if isinstance(value, (bool, int, float)):
            return value
        step = self.step(value)
        if step.base in _NUMBERS:
            numbers = [one for one in step.args if isinstance(one, (bool, int, float))]
            if not (numbers or "ones" in step.base):
                raise _Unknown(f"{step.op} is of no literal")
            found: float | bool = True if "ones" in step.base else numbers[-1]
            dtype = dict(step.kwargs).get("dtype")
            if dtype is not None and not dtype.is_floating_point and found not in (True, False, math.floor(found)):
                raise _Unknown(f"it has {found} as {dtype}")
            return found
        if step.base == "neg":
            return -self.constant(step.args[0])
        raise _Unknown(f"{step.op} is no number")

    def linear(self, value: Any) -> tuple[int, int, int]:
        """(x, y, c) of ``x * q_idx + y * kv_idx + c``."""
        if isinstance(value, Ref) and value.name in ("q_idx", "kv_idx"):
            return int(value.name == "q_idx"), int(value.name == "kv_idx"), 0
        try:
            number = self.constant(value)
        except _Unknown:
            return self._of_step(self.step(value))
        if not math.isfinite(number) or number != int(number):
            raise _Unknown(f"{number} is no integer")
        return 0, 0, int(number)

    def _of_step(self, step: Step) -> tuple[int, int, int]:
        if step.base == "neg":
            return _times(self.linear(step.args[0]), -1)
        if step.base in ("add", "sub", "rsub"):
            a, b = self.linear(step.args[0]), self.linear(step.args[1])
            if len(step.args) > 2:
                raise _Unknown(f"it calls {step.op} with {step.args[2]}")
            if step.base == "rsub":
                a, b = b, a
            return _plus(a, b) if step.base == "add" else _plus(a, _times(b, -1))
        if step.base == "mul":
            a, b = self.linear(step.args[0]), self.linear(step.args[1])
            if a[:2] != (0, 0) and b[:2] != (0, 0):
                raise _Unknown("it multiplies positions with each other")
            return _times(a, b[2]) if b[:2] == (0, 0) else _times(b, a[2])
        raise _Unknown(f"it computes positions by {step.op}")

    def mask(self, value: Any) -> Features:
        """What a mask shows."""
        try:
            if self.constant(value) is True:
                return Features()
        except _Unknown:
            pass
        step = self.step(value)
        if step.base in ("bitwise_and", "logical_and"):
            return _both(self.mask(step.args[0]), self.mask(step.args[1]))
        if step.base not in ("ge", "gt", "le", "lt"):
            raise _Unknown(f"it combines or makes masks by {step.op}")
        x, y, c = _plus(self.linear(step.args[0]), _times(self.linear(step.args[1]), -1))
        if step.base in ("le", "lt"):
            x, y, c = -x, -y, -c
        c -= step.base in ("gt", "lt")  # x q + y k + c >= 0, in integers
        if x == 0 or x != -y:
            raise _Unknown("it compares other than j - i with a number")
        # x (q - k) >= -c
        return Features(high=c // x) if x > 0 else Features(low=-(c // -x))

    def score(self, value: Any) -> Features:
        """What a score becomes."""
        if value == Ref("score"):
            return Features()
        step = self.step(value)
        if step.base == "where" and len(step.args) == 3:
            condition, kept, other = step.args
            if self.constant(other) != -math.inf:
                raise _Unknown("it puts other than -inf in a score's place")
            return _both(self.mask(condition), self.score(kept))
        if step.base == "mul":
            for factor, inner in (step.args, step.args[::-1]):
                try:
                    cap = float(self.constant(factor))
                    tanh = self.step(inner)
                    if tanh.base == "tanh" and cap > 0.0 and math.isfinite(cap) and self._is_over(tanh.args[0], cap):
                        return Features(softcap=cap)
                except _Unknown:
                    continue
        raise _Unknown(f"it computes scores by {step.op}")

    def _is_over(self, value: Any, cap: float) -> bool:
        """Whether a value is ``score / cap``."""
        step = self.step(value)
        if step.base not in ("div", "mul") or Ref("score") not in step.args:
            return False
        place = step.args.index(Ref("score"))
        by = float(self.constant(step.args[1 - place]))
        return (by == cap and place == 0) if step.base == "div" else by == 1.0 / cap


def _times(line: tuple[int, int, int], factor: int) -> tuple[int, int, int]:
    return line[0] * factor, line[1] * factor, line[2] * factor


def _plus(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _both(a: Features, b: Features) -> Features:
    highs = [one.high for one in (a, b) if one.high is not None]
    lows = [one.low for one in (a, b) if one.low is not None]
    return Features(min(highs, default=None), max(lows, default=None), a.softcap or b.softcap)


@functools.lru_cache(maxsize=1024)
def _read(score_mod: Program | None, mask_mod: Program | None) -> Features | str:
    """The features that mods are together, or what first keeps them from being any."""
    found = Features()
    for what, mod, read in (("score_mod", score_mod, _Reader.score), ("mask_mod", mask_mod, _Reader.mask)):
        if mod is not None:
            try:
                found = _both(found, read(_Reader(mod), mod.result))
            except _Unknown as error:
                return f"{what}: {error}"
    return found


def recognized(score_mod: Program | None, mask_mod: Program | None) -> Features | None:
    """The features that mods are together; None where one is something else.

    What a ``score_mod`` hides stands around its cap, so it is one mask with that of ``mask_mod``.
    """
    found = _read(score_mod, mask_mod)
    return None if isinstance(found, str) else found


def why_not(score_mod: Program | None, mask_mod: Program | None) -> str:
    """What first keeps mods from being features, or nothing."""
    found = _read(score_mod, mask_mod)
    return found if isinstance(found, str) else ""

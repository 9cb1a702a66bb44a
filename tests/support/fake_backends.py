"""Backends that do what their configs are called: for tests of the choice and of the tuner, on the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from torch_bwattn.backends import reference
from torch_bwattn.backends.base import Backend, Verdict, named, no, yes
from torch_bwattn.selection import choose


def _right(problem, run):
    return run


def _raises(problem, run):
    def fail(*_):
        raise RuntimeError("this config always fails")

    return fail


def _does_not_compile(problem, run):
    raise RuntimeError("this config does not compile")


def _lacks_memory(problem, run):
    def fail(*_):
        raise torch.OutOfMemoryError("too little memory")

    return fail


def _gives_nan(problem, run):
    return lambda *args: tuple(None if t is None else torch.full_like(t, torch.nan) for t in run(*args))


def _is_wrong(problem, run):
    return lambda *args: tuple(None if t is None else t * 1.1 for t in run(*args))


def _hangs(problem, run):
    def hang(*_):
        time.sleep(600)

    return hang


def _dies(problem, run):
    return lambda *_: os._exit(7)


def _is_slow(problem, run):
    def wait(*args):
        time.sleep(0.1)
        return run(*args)

    return wait


BEHAVIOURS: dict[str, Callable] = {
    "right": _right, "raises": _raises, "does not compile": _does_not_compile, "lacks memory": _lacks_memory,
    "nan": _gives_nan, "wrong": _is_wrong, "hangs": _hangs, "dies": _dies, "slow": _is_slow,
}  # fmt: skip


class Fake(Backend):
    """Offers what it was told to; computes with the reference."""

    name = "fake"
    told: ClassVar[dict[str, tuple[Verdict, ...]]] = {}

    def __init__(self, name: str, can_hang: bool = False) -> None:
        self.name, self.can_hang = name, can_hang

    def supports(self, problem):
        return self.offers(problem)[0]

    def offers(self, problem):
        return self.told.get(self.name, (no("not in this test"),))

    def _make(self, problem, config, run):
        offers = self.offers(problem)
        return BEHAVIOURS[offers[named(offers, config)].config](problem, run)

    def forward(self, problem, config=""):
        return self._make(problem, config, lambda x: reference.forward(problem, x))

    def backward(self, problem, config=""):
        return self._make(problem, config, lambda x, wanted: reference.backward(problem, x, wanted))


def offers(configs: Sequence[str]) -> tuple[Verdict, ...]:
    """Verdicts from words: a config's name, ``-reason`` for a refusal, ``config!`` for a last resort."""
    return tuple(
        no(word[1:]) if word.startswith("-") else yes(word[:-1], "too large") if word.endswith("!") else yes(word)
        for word in configs
    )


def install(
    told: dict[str, Sequence[str]],
    set_attribute: Callable[[object, str, object], None] = setattr,
    can_hang: Sequence[str] = (),
) -> None:
    """Puts fakes in the place of the backends that are named; the others stay."""
    Fake.told = {name: offers(configs) for name, configs in told.items()}
    real, made = choose.get_backend, {name: Fake(name, name in can_hang) for name in told}
    set_attribute(choose, "get_backend", lambda name: made.get(name) or real(name))

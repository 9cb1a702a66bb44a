"""The backend pinned by the caller, if any: a context, or the environment variable ``BWATTN_BACKEND``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import expected

NAMES = ("cute", "helion", "aten", "reference")
ENVIRONMENT_VARIABLE = "BWATTN_BACKEND"

_pinned: ContextVar[str | None] = ContextVar("bwattn_backend", default=None)


def check_name(argument: str, name: str) -> str:
    """The name itself, or ValueError."""
    if name not in NAMES:
        raise ValueError(expected(argument, f"one of {', '.join(NAMES)} or auto", repr(name)))
    return name


def pinned() -> str | None:
    """The name in force for this thread or task: the innermost context's, else the environment's, else None."""
    name = _pinned.get()
    if name is None:
        name = os.environ.get(ENVIRONMENT_VARIABLE)
        if name:
            name = name if name == "auto" else check_name(ENVIRONMENT_VARIABLE, name)
    return None if name in (None, "", "auto") else name


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Pin every call inside the context to one backend, backward passes of those calls included.

    A pinned backend that refuses a problem raises instead of falling back. The pin belongs to the current thread (or
    task). ``torch.compile`` graphs obey the pin in force when they run; their backward, which autograd may run in a
    thread of its own, obeys the one in force when they were traced. As a decorator:
    ``@torch_bwattn.backend("helion")``.

    Args:
        name: ``"helion"``, ``"aten"``, ``"reference"``, ``"cute"``, or ``"auto"`` to lift an outer pin.

    Raises:
        ValueError: an unknown name.
    """
    token = _pinned.set(name if name == "auto" else check_name("backend", name))
    try:
        yield
    finally:
        _pinned.reset(token)

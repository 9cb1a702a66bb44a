"""What patches have in common: they nest, end in any order and from any thread, and can begin in a traced region."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import ContextDecorator
from types import TracebackType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing_extensions import Self

_lock = threading.Lock()


class Patch(ContextDecorator, ABC):
    """A handle on a process-wide patch: a context manager, a decorator, or ``install`` and ``remove``."""

    def __init__(self) -> None:
        self._depth = 0

    def _recreate_cm(self) -> Self:
        return type(self)()

    def install(self) -> Self:
        """Turn the patch on (once more); returns self."""
        if torch.compiler.is_dynamo_compiling():  # a traced region holds no lock; its stores are replayed in order
            self._install()
        else:
            with _lock:
                self._install()
        return self

    def remove(self) -> None:
        """Undo one ``install`` of this handle; more removals than installs do nothing."""
        if torch.compiler.is_dynamo_compiling():
            self._remove()
        else:
            with _lock:
                self._remove()

    def _install(self) -> None:
        self._depth += 1
        self._begin()

    def _remove(self) -> None:
        if self._depth:
            self._depth -= 1
            self._end()

    @abstractmethod
    def _begin(self) -> None:
        """After one more install of this handle."""

    @abstractmethod
    def _end(self) -> None:
        """After one of them was undone."""

    def __enter__(self) -> Self:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

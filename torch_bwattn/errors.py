"""What the package raises beyond Python's own exceptions, and the one form of its messages.

Misuse raises ``ValueError`` (a value or shape) or ``TypeError`` (a kind or dtype); what no backend can do yet raises
:class:`UnsupportedProblem`; a missing optional package raises ``ImportError``. Every message reads
``sdpa: <argument>: expected <what>, got <what>``.
"""

from __future__ import annotations


class UnsupportedProblem(NotImplementedError):
    """The pinned backend, or every backend, refuses this problem; the message carries each refusal's reason."""


class NotCompiled(RuntimeError):
    """A kernel would have to be compiled, loaded or checked while a CUDA graph is captured, which would break that."""


class SettingError(ValueError):
    """A variable of the environment has a value that it cannot have."""


def expected(argument: str, wanted: str, given: object) -> str:
    """The one wording of a misuse message: the argument's name, what was expected and what was given."""
    return f"sdpa: {argument}: expected {wanted}, got {given}"

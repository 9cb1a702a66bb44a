"""Loads Helion (and with it Triton) on demand, and says why when it cannot.

Nothing else in the package may import Helion or Triton at module level, except the kernel modules of this folder, which
are themselves imported only after :func:`load` succeeded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
from types import ModuleType
from typing import Any

#: The one Helion release whose internals this package knows (generated code, binding, launcher).
HELION_VERSION = "1.5.1"
#: Oldest Triton whose compile and launch interface is known here.
TRITON_MINIMUM = (3, 6)

_lock = threading.Lock()
_loaded: Any = None


@functools.cache
def why_missing() -> str | None:
    """Says why Helion cannot be used on this machine, without importing it.

    Returns:
        A sentence for users, or None when :func:`load` is expected to succeed.
    """
    if not sys.platform.startswith("linux"):
        return f"Helion kernels need Triton, which exists for Linux only (this is {sys.platform})"
    for name, requirement in (("triton", "triton>=3.6"), ("helion", f"helion=={HELION_VERSION}")):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (pip install '{requirement}')"
    version = _version("helion")
    if version.split("+")[0] != HELION_VERSION:
        return f"helion {version} is installed, but these kernels need helion=={HELION_VERSION} exactly"
    version = _version("triton")
    if _numbers(version) < TRITON_MINIMUM:
        return f"triton {version} is installed, but these kernels need triton>=3.6"
    return None


def load() -> Any:
    """Imports Helion, once, and returns the module.

    Thread safe. Makes Helion importable on PyTorch 2.11, which lacks one name that Helion 1.5.1 imports; under
    ``TRITON_INTERPRET=1`` also gives Inductor's table of device maths a form that can be interpreted, and mends the
    interpreter of Triton 3.6.

    Returns:
        The ``helion`` module.

    Raises:
        ImportError: Helion or Triton is missing, of another version, or failed to import. The text says which.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    reason = why_missing()
    if reason is not None:
        raise ImportError(f"the helion backend cannot be used: {reason}")
    with _lock:
        if _loaded is None:
            compat = importlib.import_module("torch._inductor.runtime.triton_compat")
            if not hasattr(compat, "IntelGPUError"):
                # Helion's autotuner names it in an `except`; PyTorch has it from 2.12 on.
                compat.IntelGPUError = type("IntelGPUError", (RuntimeError,), {})  # type: ignore[attr-defined]
            try:
                helion = importlib.import_module("helion")
                importlib.import_module("helion.language")
            except Exception as error:
                raise ImportError(
                    f"the helion backend cannot be used: importing helion failed ({type(error).__name__}: {error}); "
                    f"it needs helion=={HELION_VERSION} with torch>=2.11 and triton>=3.6"
                ) from error
            if interpreting():
                compat.libdevice = _InterpretedLibdevice()  # type: ignore[attr-defined]
                _mend_interpreter()
            _loaded = helion
    return _loaded


@functools.cache
def kernels(name: str) -> ModuleType:
    """A module of kernels beside this one, imported once Helion itself is known to load.

    Raises:
        ImportError: As :func:`load`.
    """
    load()
    return importlib.import_module(f"{__package__}.{name}")


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter in this process.

    Triton decides for each function at the moment it is decorated, its own library at import. So the answer is the
    environment variable before Triton is imported, and what its library really became afterwards.
    """
    standard = sys.modules.get("triton.language.standard")
    if standard is not None:
        return type(standard.cdiv).__name__ == "InterpretedFunction"
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "y", "yes", "t", "true", "on")


def _mend_interpreter() -> None:
    """Lets one-element tensors be loop bounds: Triton 3.6 calls ``int`` on the array, which NumPy 2.4 refuses."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


_OF_NUMPY = {
    **{name: name for name in ("tanh", "log1p", "expm1", "sinh", "cosh", "tan", "hypot", "nextafter")},
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
    "atan2": "arctan2", "nearbyint": "rint", "trunc": "trunc", "mul_rn": "multiply",
}  # fmt: skip
"""Functions of libdevice, and NumPy's that stand for them in the interpreter."""


class _InterpretedLibdevice:
    """Stands for ``libdevice`` in the interpreter, which cannot call into that bitcode library.

    Looks every function up in ``triton.language`` at the time of the call: the interpreter patches that module only
    while a kernel runs.
    """

    def __getattr__(self, name: str) -> Any:
        language = importlib.import_module("triton.language")
        if name == "isnan":
            return lambda x: x != x  # noqa: PLR0124
        if name == "isinf":
            return lambda x: language.abs(x) == float("inf")
        if name in _OF_NUMPY:
            # Its tanh, log1p and the like are small where x is, to an ulp or two, as the real ones are.
            function = getattr(importlib.import_module("numpy"), _OF_NUMPY[name])

            def call(*values: Any) -> Any:
                first = values[0]
                data = function(*(value.handle.data for value in values))
                return language.tensor(type(first.handle)(data, first.handle.dtype), first.type)

            return call
        if name == "pow":
            return lambda x, y: language.exp2(y * language.log2(x))
        function = getattr(language, name, None)
        if function is None:
            raise NotImplementedError(f"libdevice.{name} has no form in Triton's interpreter")
        return function


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(name), "__version__", "0"))


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split("+", maxsplit=1)[0].split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)

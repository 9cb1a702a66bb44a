"""Loads CUTLASS's Python package and TVM-FFI on demand, and says why when it cannot.

There are two levels, because they cost differently. :func:`load_tvm_ffi` is all that a kernel from the disk cache
needs: about 30 ms, plus the runtime library that compiled host code calls into. :func:`load` brings the compiler
itself, ``cutlass``: 0.3 to 1 s, paid only where something must be compiled.

No environment variable has to be set before the import. ``CUTE_DSL_ARCH`` would fix one architecture for the process
and for everybody else's kernels in it; :mod:`.compile` names the architecture in each compile's options instead, which
outranks the variable and needs no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

#: The one release of nvidia-cutlass-dsl whose compiler and exported objects this package knows.
CUTLASS_VERSION = "4.7.0"

_RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
_REQUIREMENTS = (
    ("nvidia_cutlass_dsl", f"nvidia-cutlass-dsl[cu13]=={CUTLASS_VERSION}"),
    ("cutlass", f"nvidia-cutlass-dsl[cu13]=={CUTLASS_VERSION}"),
    ("tvm_ffi", "apache-tvm-ffi"),
)


@functools.cache
def why_missing() -> str | None:
    """Says why CuTe-DSL kernels cannot be used on this machine, without importing anything heavy.

    Returns:
        A sentence for users, or None when :func:`load` is expected to succeed.
    """
    if not sys.platform.startswith("linux"):
        return f"CuTe-DSL kernels need nvidia-cutlass-dsl, which exists for Linux only (this is {sys.platform})"
    for name, requirement in _REQUIREMENTS:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (pip install '{requirement}')"
    try:
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    if version != CUTLASS_VERSION:
        return f"nvidia-cutlass-dsl {version} is installed, but these kernels need {CUTLASS_VERSION} exactly"
    origin = importlib.util.find_spec("cutlass").origin or ""  # type: ignore[union-attr]
    if not any(Path(origin).is_relative_to(folder) for folder in _package_folders()):
        return f"the cutlass that Python finds ({origin}) is not the one of nvidia-cutlass-dsl"
    if runtime_library() is None:
        return f"nvidia-cutlass-dsl has no {_RUNTIME_LIBRARY} for this driver (pip install '{_REQUIREMENTS[0][1]}')"
    return None


@functools.cache
def load() -> Any:
    """Imports CUTLASS's Python package and returns the module ``cutlass``.

    Raises:
        ImportError: It is missing, of another version, or failed to import. The text says which.
    """
    _refuse_if_missing()
    _import("cutlass.cute")
    return _import("cutlass")


@functools.cache
def load_tvm_ffi() -> Any:
    """Imports TVM-FFI, loads the library that exported kernels call into, and returns the module ``tvm_ffi``.

    Raises:
        ImportError: As for :func:`load`.
    """
    _refuse_if_missing()
    # Exported kernels name it without a folder: the dynamic loader then takes the one that is there already.
    ctypes.CDLL(runtime_library())
    return _import("tvm_ffi")


@functools.cache
def runtime_library() -> str | None:
    """Path of the library that exported kernels call into, or None where there is none.

    The one that ``cutlass`` takes for itself when it is imported, and that belongs to the compiler it takes: built for
    the newest CUDA that the driver knows, or for the newest of all where there is no driver.
    """
    flavors = {
        int(path.parents[1].name.removeprefix("cu")): str(path)
        for folder in _package_folders()
        for path in folder.glob(f"cu[0-9]*/lib/{_RUNTIME_LIBRARY}")
    }
    newest = _driver_cuda_major()
    usable = [flavor for flavor in flavors if newest is None or flavor <= newest]
    if usable:
        return flavors[max(usable)]
    # An installation from source has none of these folders, and this variable instead.
    named = os.environ.get("CUTE_DSL_LIBS", "").split(":")
    return next((path for path in named if path.endswith(_RUNTIME_LIBRARY)), None)


def _driver_cuda_major() -> int | None:
    """The newest CUDA that the driver knows; asks the driver's library, and starts nothing on a device."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def link_libraries() -> tuple[str, ...]:
    """Paths of the libraries that an exported kernel is linked against."""
    return (runtime_library() or _RUNTIME_LIBRARY, str(load_tvm_ffi().libinfo.find_libtvm_ffi()))


def _package_folders() -> tuple[Path, ...]:
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    return tuple(map(Path, spec.submodule_search_locations or ())) if spec is not None else ()


def _refuse_if_missing() -> None:
    reason = why_missing()
    if reason is not None:
        raise ImportError(f"the cute backend cannot be used: {reason}")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ImportError(
            f"the cute backend cannot be used: importing {name} failed ({type(error).__name__}: {error}); it needs "
            f"nvidia-cutlass-dsl[cu13]=={CUTLASS_VERSION} and apache-tvm-ffi"
        ) from error

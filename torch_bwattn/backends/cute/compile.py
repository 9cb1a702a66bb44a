"""From a CuTe-DSL kernel to a callable: compile once, keep on disk, launch with one foreign call.

    key = KernelKey("forward_sm90", "sm_90a", (config, "bfloat16", causal))
    launch = compiled(key, lambda: (Forward(config, causal), fake_arguments()))
    launch(q, k, v, out, lse, scale)

A kernel is compiled for *fake* arguments (``cute.runtime.make_fake_tensor``, numbers, ``None``, and last the stream,
``make_fake_stream(use_tvm_ffi_env_stream=True)``), so one compile serves all lengths and strides. Look the callable up
once for each kind of call and keep it: a hit costs a dictionary lookup, but making a key costs some microseconds.

This module is for Linux only: ask :func:`.loader.why_missing` before importing it.

**Misses.** First the disk (:mod:`.disk`): a kernel found there is loaded in under a millisecond, without ``cutlass``.
Only then is ``build`` called and the result compiled, under a lock: two compiles at once in one process end it (code
that calls ``cute.compile`` by itself has to keep out of the way). No GPU is needed, and the architecture need not be
this machine's. What runs is always the exported kernel, the same in this process as in the next. Whether a stream is
being captured is for callers to ask, with :func:`ready`: neither a compile nor the first launch of a kernel, which
loads it onto every visible device, belongs in a capture.

**What a launch does.** The callable takes exactly the compiled arguments without the stream, by position: tensors,
numbers, ``None`` where ``None`` was compiled. TVM-FFI and the compiled host code do the rest, so nothing is wrapped
around them (read in the sources of apache-tvm-ffi 0.1.15 and nvidia-cutlass-dsl 4.7.0):

- *Stream.* The first tensor that is not on the CPU decides. TVM-FFI asks PyTorch for that device's current stream
  through the DLPack exchange table of ``torch.Tensor`` (``current_work_stream``, which is
  ``at::cuda::getCurrentCUDAStream(device)``), sets it as TVM-FFI's own current stream for the length of the call, and
  puts the earlier one back. Compiled code reads it from there. So callers set nothing, a ``torch.cuda.stream`` block
  and graph capture are respected, and ``tvm_ffi.use_torch_stream`` is needed only by calls without PyTorch tensors.
- *Device.* Compiled code compares the CUDA device with that of its first CUDA tensor, switches where they differ, and
  switches back after the launch, also after a failed one. Callers need no ``torch.cuda.device`` block. All tensors
  must be on one device; that is checked.
- *Checks.* Number of arguments, kind, dtype, rank, fixed sizes, sizes and strides declared equal, divisibility of
  strides, alignment, device: an error names the argument by position and shows the signature (``TypeError``,
  ``ValueError``). The stride of a dimension of size 1 is not checked.
- *What is not checked.* Tensors that require gradients, lazily negated or conjugated views and fake tensors pass as
  plain memory. PyTorch's dispatcher has dealt with all of these before an op's implementation runs.
- *Threads.* The interpreter lock is released during the call. The one-time loading of a kernel is guarded in C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ... import storage
from . import disk, loader

log = logging.getLogger(__name__)

#: Makes the object to compile and its fake arguments; called on a miss only, so it may import ``cutlass``.
Build = Callable[[], tuple[Any, Sequence[Any]]]

_SYMBOL = "launch"

_functions: dict[str, Callable[..., None]] = {}
_lock = threading.RLock()


class DoesNotCompile(RuntimeError):
    """The compiler refuses a kernel."""


@dataclasses.dataclass(frozen=True)
class KernelKey:
    """All that decides a kernel's code; equal keys mean the same code, in every process and on disk.

    Attributes:
        name: Of the kernel, an identifier: shown in messages, and part of the name of its file.
        arch: Architecture to compile for, as in :mod:`torch_bwattn.target`: ``"sm_90a"``.
        parts: Whatever else shapes the code: None, bool, int, float, str, bytes, enum members, ``torch.dtype``, and
            tuples and frozen dataclasses of these. Kinds count: 1, True and 1.0 make three different keys.
        text: The key in writing, made from the others; what is compared and hashed.

    Raises:
        ValueError: The name or the architecture is not of that form.
        TypeError: A part is of another kind, whose text need not say all about it.
    """

    name: str = dataclasses.field(compare=False)
    arch: str = dataclasses.field(compare=False)
    parts: tuple[Any, ...] = dataclasses.field(default=(), compare=False)
    text: str = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*", self.name, re.ASCII):
            raise ValueError(f"name: expected an identifier, got {self.name!r}")
        if not re.fullmatch(r"sm_\d{2,3}[af]?", self.arch):
            raise ValueError(f"arch: expected a CUDA architecture such as 'sm_90a', got {self.arch!r}")
        object.__setattr__(self, "text", f"{self.name} {self.arch} {_written(self.parts)}")


def compiled(key: KernelKey, build: Build) -> Callable[..., None]:
    """The launchable kernel of a key: from this process, else from disk, else compiled now. Thread safe.

    Args:
        key: What decides the code.
        build: Returns an object with a ``@cute.jit`` call (or such a function) and its fake arguments. It must depend
            on the key alone.

    Returns:
        A callable for positional arguments as described in the module's text; it returns nothing.

    Raises:
        ImportError: CuTe-DSL is missing (:func:`.loader.why_missing`).
        DoesNotCompile: The compiler refuses the kernel.
    """
    function = _functions.get(key.text)
    return _missed(key, build) if function is None else function


def alone() -> contextlib.AbstractContextManager[Any]:
    """Held while something compiles: for code that calls ``cute.compile`` by itself."""
    return _lock


def ready(key: KernelKey) -> bool:
    """Whether :func:`compiled` would answer at once, from this process."""
    return key.text in _functions


def compile_object(key: KernelKey, build: Build, options: str = "") -> Any:
    """Compiles anew, whatever is cached, and returns CUTLASS's compiled object: to export or to read, not to call.

    Args:
        key: Gives the architecture, and the name in messages.
        build: As for :func:`compiled`.
        options: Further options of ``cute.compile``.

    Raises:
        ImportError: CuTe-DSL is missing.
        DoesNotCompile: The compiler refuses the kernel.
    """
    with _lock:
        loader.load()
        from cutlass import cute

        start = time.perf_counter()
        function, arguments = build()
        try:
            result = cute.compile(
                function,
                *arguments,
                options=f"--enable-tvm-ffi --gpu-arch {key.arch} {options}",
                no_jit_engine=True,  # the object is exported and loaded, so an engine of its own is 0.1 s for nothing
            )
        except Exception as error:
            raise DoesNotCompile(
                f"{key.name} does not compile for {key.arch} ({type(error).__name__}: {error}); key: {key.text}"
            ) from error
        log.info("compiled %s for %s in %.2f s", key.name, key.arch, time.perf_counter() - start)
        return result


def _missed(key: KernelKey, build: Build) -> Callable[..., None]:
    with _lock:
        function = _functions.get(key.text)
        if function is None:
            loader.load_tvm_ffi()
            folder = disk.folder()
            if folder is None:
                function = _make(key, build, None)
            else:
                stem = folder / disk.file_name(key.name, key.text)
                with storage.exclusive(stem.with_suffix(".lock")):
                    function = _from_disk(key, stem) or _make(key, build, stem)
            _functions[key.text] = function
        return function


def _from_disk(key: KernelKey, stem: Path) -> Callable[..., None] | None:
    for suffix in disk.SUFFIXES:
        path = stem.with_suffix(suffix)
        try:
            reason = disk.why_distrusted(path, key.text)
            if reason is None:
                return _load(path)
        except FileNotFoundError:
            continue
        except Exception as error:  # noqa: BLE001 (whatever a file does to the loaders, it is no kernel of ours)
            reason = f"it cannot be loaded ({type(error).__name__}: {error})"
        log.warning("compiling %s anew, because %s was not used: %s", key.name, path, reason)
        disk.discard(path)
    return None


def _make(key: KernelKey, build: Build, stem: Path | None) -> Callable[..., None]:
    """Compiles, stores under ``stem`` if given, and loads what was stored."""
    compiled_object = compile_object(key, build)
    with tempfile.TemporaryDirectory(prefix="bwattn-") as folder:
        exported = Path(folder) / "kernel.o"
        compiled_object.export_to_c(str(exported), function_name=_SYMBOL, export_only_tvm_ffi_symbols=True)
        linked = _linked(exported)
        if linked is not None:
            try:
                return _load(_stored(key, linked, stem))
            except (AttributeError, OSError, RuntimeError) as error:
                # A folder that may hold no executable code, say. An object file needs no more than to be read.
                log.warning("%s was linked but cannot be loaded, so its object file is used: %s", key.name, error)
                if stem is not None:
                    disk.discard(stem.with_suffix(".so"))
        return _load(_stored(key, exported, stem))


def _stored(key: KernelKey, made: Path, stem: Path | None) -> Path:
    target = None if stem is None else stem.with_suffix(made.suffix)
    return target if target is not None and disk.store(made, target, key.text) else made


def _linked(exported: Path) -> Path | None:
    """Links an exported kernel to a shared object beside it; None where no C compiler does that."""
    named = shlex.split(os.environ.get("CC", ""))
    found = [path for path in map(shutil.which, ("cc", "gcc", "clang")) if path is not None]
    compiler = named or found[:1]
    if not compiler:
        return None
    target = exported.with_suffix(".so")
    command = [*compiler, "-shared", "-o", str(target), str(exported), *loader.link_libraries()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (the user's compiler)
    except OSError as error:
        log.info("kernels are kept as object files, because %s did not start: %s", command[0], error)
        return None
    if done.returncode != 0:
        log.info("kernels are kept as object files, because %s failed: %s", command[0], done.stderr[:2000])
        return None
    return target


def _load(path: Path) -> Callable[..., None]:
    if path.suffix == ".so":
        return loader.load_tvm_ffi().load_module(str(path))[_SYMBOL]
    loader.load()
    from cutlass import cute

    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_SYMBOL]


def _written(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if type(value) is torch.dtype:
        return str(value)
    if type(value) is tuple:
        return f"({', '.join(map(_written, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return f"{type(value).__qualname__}({', '.join(_fields_written(value))})"
    raise TypeError(
        f"parts: expected None, bool, int, float, str, bytes, enum members, torch.dtype, tuples or frozen dataclasses, "
        f"got {type(value).__name__} {value!r}"
    )


def _fields_written(value: Any) -> Iterator[str]:
    for field in dataclasses.fields(value):
        yield f"{field.name}={_written(getattr(value, field.name))}"


def _renew_lock() -> None:
    """In a forked child: a thread that held the lock does not exist there, and would never release it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)

"""A pretended CUDA device: bind Helion kernels and generate their Triton code on a machine without a GPU.

Helion asks the CUDA device of its arguments for everything it needs to know (capability, number of SMs, registers,
...). Inside :func:`pretend_cuda` those questions are answered from a small table instead, and CPU tensors given to a
Helion kernel are treated as if they lived on ``cuda:0``. Nothing is ever launched by this module.

This is for compile reports and for tests under Triton's interpreter. It changes process-wide functions of
``torch.cuda`` for the length of the ``with`` block, so other threads see the pretence as well: never use it in
a program that also uses a real GPU. Pass *real* CPU tensors, not fake ones: Helion judges alignment on the argument.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

import torch

from . import loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

# name, SMs, shared memory of a block (opt-in), total memory: what the data sheets say of the usual part of each family.
_DEVICES: dict[tuple[int, int], tuple[str, int, int, int]] = {
    (8, 0): ("NVIDIA A100-SXM4-80GB", 108, 166912, 80 << 30),
    (8, 6): ("NVIDIA A10", 72, 101376, 24 << 30),
    (8, 9): ("NVIDIA L4", 58, 101376, 24 << 30),
    (9, 0): ("NVIDIA H100 80GB HBM3", 132, 232448, 80 << 30),
    (10, 0): ("NVIDIA B200", 148, 232448, 180 << 30),
    (10, 3): ("NVIDIA B300", 148, 232448, 270 << 30),
    (12, 0): ("NVIDIA RTX PRO 6000 Blackwell", 188, 101376, 96 << 30),
}

# Modules whose cached answers depend on the device: cleared on the way in and on the way out.
_CACHED_MODULES = (
    "helion._compat",
    "helion._hardware",
    "helion._utils",
    "helion._compiler.backend",
    "helion._compiler.device_function",
    "helion._compiler.reduction_strategy",
    "helion._compiler.indexing_strategy",
    "helion.language.matmul_ops",
    "helion.autotuner.config_spec",
    "torch._inductor.runtime.hints",
    "torch._inductor.utils",
    "torch._dynamo.device_interface",
)

_lock = threading.RLock()
_depth = 0
_announced: set[tuple[int, int]] = set()  # warn once for each, not once a kernel


def active() -> bool:
    """Whether some thread is inside :func:`pretend_cuda`."""
    return _depth > 0


def _properties(capability: tuple[int, int]) -> types.SimpleNamespace:
    name, sms, shared, memory = _DEVICES[capability]
    return types.SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=sms,
        total_memory=memory,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048 if capability[0] in (8, 9, 10) and capability[1] in (0, 3) else 1536,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024,
        L2_cache_size=50 << 20,
        is_integrated=False,
        is_multi_gpu_board=False,
        uuid="pretended",
        gcnArchName="",
    )


def _clear_caches() -> None:
    for name in _CACHED_MODULES:
        module = sys.modules.get(name)
        if module is None:
            continue
        for value in list(vars(module).values()):
            for function in (value, *(vars(value).values() if isinstance(value, type) else ())):
                clear = getattr(getattr(function, "__func__", function), "cache_clear", None)
                if callable(clear) and getattr(function, "__module__", None) == name:
                    clear()


@contextlib.contextmanager
def pretend_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Answers Helion's questions about the CUDA device from a table, without a GPU.

    Args:
        capability: Compute capability to pretend, one of (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0).

    Yields:
        Nothing. Inside the block ``torch.cuda.is_available()`` is True and CPU tensors count as ``cuda:0`` for Helion.

    Raises:
        ImportError: Helion or Triton cannot be used here (:func:`.loader.load` says why).
        RuntimeError: A real CUDA device is present and in use, or another capability is already pretended.
        ValueError: The capability is not in the table.
    """
    global _depth
    if capability not in _DEVICES:
        raise ValueError(f"capability: expected one of {sorted(_DEVICES)}, got {capability}")
    loader.load()
    with _lock:
        if _depth:
            raise RuntimeError("pretend_cuda cannot be nested")
        if torch.cuda.is_initialized():
            raise RuntimeError("pretend_cuda refused: this process already uses a real CUDA device")
        log.log(
            logging.INFO if capability in _announced else logging.WARNING,
            "pretending a %s (sm_%d%d) to bind Helion kernels: nothing runs on it",
            _DEVICES[capability][0],
            *capability,
        )
        _announced.add(capability)
        with contextlib.ExitStack() as stack:
            stack.callback(_clear_caches)
            for owner, name, value in _replacements(capability):
                # The raw attribute, so that a staticmethod comes back as one.
                stack.callback(setattr, owner, name, inspect.getattr_static(owner, name))
                setattr(owner, name, value)
            _clear_caches()
            _depth = 1
            try:
                yield
            finally:
                _depth = 0


def _replacements(capability: tuple[int, int]) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, pretended value) for everything that Helion and Inductor ask."""
    properties = _properties(capability)
    device = torch.device("cuda", 0)
    runtime_kernel = sys.modules["helion.runtime.kernel"]
    cute_launcher = sys.modules["helion.runtime.cute.launcher"]
    environment = importlib.import_module("helion._compiler.compile_environment").CompileEnvironment
    interface = importlib.import_module("torch._dynamo.device_interface").CudaInterface
    fake_tensor = importlib.import_module("torch._subclasses.fake_tensor")
    to_fake: Callable[..., torch.Tensor] = environment._to_fake_tensor

    def to_fake_on_cuda(self: Any, tensor: torch.Tensor, source: Any) -> torch.Tensor:
        fake: Any = to_fake(self, tensor, source)
        fake.fake_device = device
        return fake

    cuda = torch.cuda
    return [
        (cuda, "is_available", lambda: True),
        (cuda, "device_count", lambda: 1),
        (cuda, "current_device", lambda: 0),
        (cuda, "get_device_capability", lambda *_: capability),
        (cuda, "get_device_properties", lambda *_: properties),
        (cuda, "get_device_name", lambda *_: properties.name),
        (cuda, "is_current_stream_capturing", lambda: False),
        (torch.version, "cuda", "13.0"),
        (interface, "is_available", staticmethod(lambda: True)),
        (interface, "current_device", staticmethod(lambda: 0)),
        (interface, "get_device_properties", staticmethod(lambda *_: properties)),
        (interface, "get_compute_capability", staticmethod(lambda *_: capability[0] * 10 + capability[1])),
        (interface.Worker, "get_device_properties", staticmethod(lambda *_: properties)),
        (interface.Worker, "current_device", staticmethod(lambda: 0)),
        (fake_tensor, "init_gpu_context", lambda *_: None),
        (runtime_kernel, "_find_device", lambda *_: device),
        (cute_launcher, "_validate_cute_launcher_tensor", lambda *_: None),
        (environment, "_to_fake_tensor", to_fake_on_cuda),
    ]

"""Helion's other lowering: a kernel function to CuTe-DSL with tcgen05, for sm_100a and sm_103a.

Helion has such bodies for functions of a few forms and takes one where a function's graph is of such a form. Where it
is not, Helion makes scalar code and says nothing; here that is an error, which names what does not match. What is
compiled is for fixed sizes: callers pad theirs to few (:mod:`.flash_blocks`).

Launches are Helion's own, which is how its maintainers test these bodies on a B200. Nothing of it has run on hardware
by way of this package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from ..cute import compile as compiling
from ..cute import loader as cute_loader
from ..cute import report as reporting
from . import forms, loader, pretend, runtime

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

log = logging.getLogger(__name__)

_PLANS = "_helion_cute_wrapper_plans"
_MOVED = ("CUTE_DSL_ARCH", "CUTE_DSL_CACHE_DIR", "TRITON_CACHE_DIR")

_lock = threading.Lock()
_lowered: dict[Hashable, Lowered] = {}


def prepare(
    family: runtime.KernelFamily, args: Sequence[Any], config: Mapping[str, Any], device: torch.device
) -> Lowered:
    """The kernel for arguments of these sizes, which compiles at its first call.

    Args:
        family: The kernel, which fits the arguments.
        args: All arguments; tensors contiguous and at multiples of 16 bytes.
        config: What to change in the config that Helion chooses.
        device: The tensors', of compute capability 10.0 or 10.3.
    """
    features = (
        _signature(value, name in family.constexprs) for name, value in zip(family.parameters, args, strict=True)
    )
    key = (family.name, device, tuple(config.items()), *features)
    with _lock:
        return _lowered.setdefault(key, Lowered(family, config, device))


def _signature(value: Any, constexpr: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    return value if constexpr else type(value)


class Lowered:
    """A kernel for fixed sizes on a device. Call it with all arguments of the kernel function."""

    def __init__(self, family: runtime.KernelFamily, config: Mapping[str, Any], device: torch.device) -> None:
        self.family, self.config, self.device = family, config, device
        self._host: Any = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> None:
        """Launches on the current stream of the tensors' device, which need not be the current device.

        Raises:
            RuntimeError: It would have to be compiled while a CUDA graph is captured, or Helion does not recognise it.
        """
        with torch.cuda.device(self.device):
            if self._host is None:
                self._first(args)
            else:
                self._host(*args)

    def _first(self, args: tuple[Any, ...]) -> None:
        runtime.refuse_during_capture(self.family.name, self.device)
        with self._lock:
            if self._host is not None:
                self._host(*args)
                return
            start = time.perf_counter()
            with runtime.environment_unmoved(*_MOVED), compiling.alone():
                host = lowered(self.family, args, self.config)
                host(*args)
            self._host = host
            log.info("compiled %s with tcgen05 in %.2f s", self.family.name, time.perf_counter() - start)


def lowered(family: runtime.KernelFamily, args: Sequence[Any], config: Mapping[str, Any]) -> Any:
    """Helion's host function for a kernel on the current device, found to have a tcgen05 body.

    Raises:
        ImportError: CuTe-DSL is missing.
        RuntimeError: Helion does not recognise the kernel function.
        ValueError: The kernel has no form to be recognised.
    """
    form = family.cute
    if form is None:
        raise ValueError(f"family: expected one with a CuTe form, got {family}")
    cute_loader.load()
    helion = loader.load()
    kernel = helion.kernel(family.function, backend="cute", static_shapes=True, autotune_effort="none")
    device = args[family.tensors[0]].device

    def bind() -> Any:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            bound = kernel.bind(tuple(args))
            if not getattr(bound.config_spec, form.flag):
                why = _miss(bound, form)
                raise RuntimeError(f"{family.name}: expected Helion to recognise it, which it does not: {why}")
            chosen = bound.config_spec.default_config()
            chosen.config.update(config)
            return bound.compile_config(chosen, allow_print=False)

    with runtime.binding():
        host = runtime.in_new_thread(bind)
    kinds = [plan["kind"] for plan in getattr(_launched(host, args)[0], _PLANS, ())]
    if kinds != [form.kind]:
        raise RuntimeError(f"{family.name}: expected Helion to make {form.kind}, got {kinds or 'scalar code'}")
    return host


def _miss(bound: Any, form: forms.CuteForm) -> str:
    """What first keeps a bound kernel from matching; of the forms, one has a matcher that says it."""
    if form.kind != "helion_flash":
        return "it does not say why"
    matcher = importlib.import_module("helion._compiler.cute.flex_match")
    reasons: list[str] = []
    ir = bound.host_function.device_ir
    with bound.env, bound.host_function:
        matcher.match_flex_envelope(ir.graphs, ir.grid_block_ids[0], env=bound.env, reasons=reasons)
    return reasons[0] if reasons else "its graph matches, so Helion's tcgen05 bodies are switched off"


def _launched(host: Any, args: Sequence[Any]) -> tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """Kernel, grid, arguments and options of what a host function would launch."""
    found: list[Any] = []
    host(*args, _launcher=lambda kernel, grid, *values, **options: found.append((kernel, grid, values, options)))
    (launched,) = found
    return launched


def compile_report(
    family: runtime.KernelFamily, args: Sequence[Any], config: Mapping[str, Any], target: tuple[int, int], arch: str
) -> reporting.KernelReport:
    """Binds and compiles for a GPU that is not there, and reads the result's resources.

    Args:
        family: The kernel.
        args: Arguments as for a call, on the CPU; their values are not read.
        config: What to change in the config that Helion chooses.
        target: Compute capability to pretend.
        arch: Its name, ``"sm_100a"``.

    Raises:
        RuntimeError: Helion does not recognise the kernel, it does not compile, or this process runs Triton's
            interpreter.
    """
    if loader.interpreting():
        raise RuntimeError("TRITON_INTERPRET=1 replaced Triton's compiler in this process: nothing can be compiled")
    family.check(args)
    start = time.perf_counter()
    with pretend.pretend_cuda(target), runtime.environment_unmoved(*_MOVED):
        kernel, grid, values, options = _launched(lowered(family, args, config), args)
        launcher = importlib.import_module("helion.runtime.cute.launcher")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        entry = launcher._build_cute_schema_and_args(kernel, values, (*grid, 1, 1)[:3], bake_tensor_shapes=True)

        def build() -> tuple[Any, tuple[Any, ...]]:
            function = launcher._create_cute_wrapper(kernel, entry.schema, options["block"], num_sm=sms)
            stream = importlib.import_module("cuda.bindings.driver").CUstream(0)
            return function, (*entry.launch_args, stream)

        (found,) = reporting.compile_report(compiling.KernelKey(family.name, arch), build)
    return dataclasses.replace(found, seconds=time.perf_counter() - start)

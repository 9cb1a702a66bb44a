"""From a Helion kernel to launches: bind once, compile what is new, replay.

Helion would bind anew for every kind of call and Triton would compile anew for every combination of arguments that are
1 or multiples of 16 (1 to 3 s each). Attention meets new lengths all the time, so both keys are ours here:

- *Binding.* A kernel is bound once per **feature key**: dtypes, which tensors are None, widths (D, Dv), compile-time
  flags, config, index width, capability. It is bound on made-up *canonical* sizes, because Helion specializes on sizes
  0 and 1 and on sizes that happen to be equal. Lengths and strides are run-time values of the bound kernel.
- *Compiling.* The Triton function is compiled by us, once per feature key and **layout class** (at most three per
  tensor group, see :mod:`.specialization`), with divisibility facts for strides and pointers but never for sizes.
- *Replaying.* Helion's host wrapper runs once per call signature to learn grid and arguments.
  :class:`PreparedLaunch` then substitutes pointers and scalars and launches.

Thread safe. Nothing is bound, compiled or loaded during CUDA graph capture: such a call raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from ...errors import NotCompiled, SettingError
from . import forms, loader, pretend, specialization

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

log = logging.getLogger(__name__)

specialization.INT32_MAX = 2**31 - 1

#: Sizes that kernels are bound on: all >= 2 and different, long ones at least one tile (256) and multiples of 16.
CANONICAL_SIZES: dict[str, int] = {"B": 2, "Hkv": 3, "Hq": 6, "M": 272, "N": 528}

# Helion and Inductor's code cache keep global state while they bind and generate: one binding at a time.
_bind_lock = threading.RLock()


def binding() -> contextlib.AbstractContextManager[Any]:
    """Held while something is bound: for code that binds by itself."""
    return _bind_lock


def use_triton_launcher() -> bool:
    """Whether launches go through Triton's own ``kernel.run`` instead of ours (``BWATTN_HELION_LAUNCHER=triton``).

    A way around this module's launch code: slower, and Triton then specializes, so it compiles for new lengths.
    """
    value = os.environ.get("BWATTN_HELION_LAUNCHER", "direct")
    if value not in ("direct", "triton"):
        raise SettingError(f"BWATTN_HELION_LAUNCHER: expected 'direct' or 'triton', got {value!r}")
    return value == "triton"


class KernelFamily:
    """A Helion kernel function together with what its arguments mean; the unit that backends prepare and launch.

    Args:
        function: The plain, undecorated kernel function. Tensors (outputs too), numbers and ``hl.constexpr`` flags are
            positional parameters; it allocates nothing.
        dims: For each tensor parameter its dimensions by name, for example ``{"q": "B Hq M D", "seed": "1"}``. Equal
            names must have equal sizes in a call. A literal number is a fixed size. Any tensor may be None.
        specialized: The names whose sizes are compile-time constants (those the function passes to ``hl.specialize``).
        canonical: Sizes to bind on, for names not in :data:`CANONICAL_SIZES`.
        settings: Further settings of ``helion.kernel``. The default dot precision is ``ieee``: fp32 inputs must never
            be rounded to tf32, and 16-bit inputs do not read it.
        cute: For a function that is lowered to CuTe-DSL where there is tcgen05, to Triton elsewhere.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        dims: Mapping[str, str],
        specialized: Sequence[str] = ("D", "Dv"),
        canonical: Mapping[str, int] | None = None,
        settings: Mapping[str, Any] | None = None,
        cute: forms.CuteForm | None = None,
    ) -> None:
        self.function = function
        self.cute = cute
        self.name = function.__name__
        self.parameters = tuple(inspect.signature(function).parameters)
        self.dims = {name: tuple(text.split()) for name, text in dims.items()}
        self.specialized = tuple(specialized)
        self.canonical = {**CANONICAL_SIZES, **(canonical or {})}
        self.settings = {"dot_precision": "ieee", **(settings or {})}
        unknown = set(self.dims) - set(self.parameters)
        if unknown:
            raise ValueError(f"dims: {self.name} has no parameters {sorted(unknown)}")
        annotations = {name: str(p.annotation) for name, p in inspect.signature(function).parameters.items()}
        self.constexprs = frozenset(
            name for name, text in annotations.items() if "constexpr" in text.lower() and name not in self.dims
        )
        self.tensors = tuple(i for i, name in enumerate(self.parameters) if name in self.dims)
        self._kernels: dict[torch.dtype, Any] = {}
        self._bound: dict[Hashable, _Bound] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"KernelFamily({self.name}, {len(self._bound)} bound, {self.binary_count()} compiled)"

    def binary_count(self) -> int:
        """Number of Triton binaries compiled so far, over all features."""
        return sum(len(bound.binaries) for bound in list(self._bound.values()))

    def prepare(self, args: Sequence[Any], config: Mapping[str, Any]) -> Callable[..., None]:
        """Makes a launch for the shapes, strides and flags of ``args``; binds and compiles only what is new.

        Args:
            args: All arguments of the kernel function, in order.
            config: A Helion config (``helion.Config`` or a dict of its keys); with a ``cute`` form what to change in
                the one that Helion chooses.

        Returns:
            A callable for arguments of the same shapes, strides, dtypes and flags; pointers and float or int scalars
            may differ.

        Raises:
            ValueError: Arguments do not fit ``dims``, or tensors are on several devices.
            RuntimeError: Something had to be compiled during CUDA graph capture, or the tensors are on the CPU outside
                Triton's interpreter.
        """
        self.check(args)
        device = self._device(args)
        index_dtype = self.index_dtype(args)
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
        elif loader.interpreting():
            capability = (9, 0)
        else:
            raise RuntimeError(
                f"{self.name}: expected CUDA tensors, got {device.type} ones; without a GPU use "
                "report.compile_report, or TRITON_INTERPRET=1 (set before triton is imported) to run in the interpreter"
            )
        if self.cute is not None:
            if capability in forms.TCGEN05:
                return importlib.import_module(f"{__package__}.cute_lowering").prepare(self, args, config, device)
            config = self.cute.triton
        bound = self.bind(args, config, capability, index_dtype, device)
        return PreparedLaunch(self, bound, args, device)

    def bind(
        self,
        args: Sequence[Any],
        config: Mapping[str, Any],
        capability: tuple[int, int],
        index_dtype: torch.dtype,
        device: torch.device,
    ) -> _Bound:
        """The bound kernel for the features of ``args``; used by :meth:`prepare` and by :mod:`.report`."""
        if type(config) is dict:
            config = loader.load().Config(**config)
        key = (self._features(args), config, index_dtype, capability)
        bound = self._bound.get(key)
        if bound is None:
            refuse_during_capture(self.name, device)
            with _bind_lock:
                bound = self._bound.get(key)
                if bound is None:
                    bound = self._bind(args, config, capability, index_dtype, device)
                    self._bound[key] = bound
        return bound

    def _bind(
        self,
        args: Sequence[Any],
        config: Any,
        capability: tuple[int, int],
        index_dtype: torch.dtype,
        device: torch.device,
    ) -> _Bound:
        start = time.perf_counter()
        kernel = self._kernels.get(index_dtype)
        if kernel is None:
            kernel = self._kernels[index_dtype] = loader.load().kernel(
                self.function, static_shapes=False, autotune_effort="none", index_dtype=index_dtype, **self.settings
            )

        def bind() -> Any:
            world = torch.cuda.device(device) if device.type == "cuda" else pretend.pretend_cuda(capability)
            with world, environment_unmoved("TRITON_CACHE_DIR"):
                return kernel.bind(self.canonical_args(args, device)).compile_config(config, allow_print=False)

        host = in_new_thread(bind)
        log.info("bound %s for sm_%d%d in %.2f s", self.name, *capability, time.perf_counter() - start)
        return _Bound(self, host, capability, index_dtype)

    def canonical_args(self, args: Sequence[Any], device: torch.device | str) -> tuple[Any, ...]:
        """Arguments of the same features as ``args`` with canonical sizes and contiguous tensors, uninitialized."""
        sizes = self._sizes(args)
        used: dict[int, str] = {size: name for name, size in sizes.items() if name in self.specialized}
        chosen = {name: sizes[name] for name in sizes if name in self.specialized}
        for name in sizes:
            if name in chosen:
                continue
            if name not in self.canonical:
                raise ValueError(f"canonical: {self.name} needs a size to bind on for dimension {name}")
            size = self.canonical[name]
            while size in used:
                # Equal sizes would share a symbol, and a specialized width would freeze the length equal to it.
                size += 16 if size >= 16 else 1
            used[size] = name
            chosen[name] = size
        canonical = list(args)
        for index in self.tensors:
            tensor = args[index]
            if tensor is not None:
                shape = [int(d) if d.isdigit() else chosen[d] for d in self.dims[self.parameters[index]]]
                canonical[index] = torch.empty(shape, dtype=tensor.dtype, device=device)
        return tuple(canonical)

    def _sizes(self, args: Sequence[Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for index in self.tensors:
            if args[index] is not None:
                for name, size in zip(self.dims[self.parameters[index]], args[index].shape, strict=True):
                    if not name.isdigit():
                        sizes.setdefault(name, int(size))
        return sizes

    def check(self, args: Sequence[Any]) -> None:
        """Raises ValueError where ``args`` do not fit ``dims``."""
        if len(args) != len(self.parameters):
            raise ValueError(f"{self.name}: expected {len(self.parameters)} arguments, got {len(args)}")
        sizes: dict[str, int] = {}
        for index in self.tensors:
            name, tensor = self.parameters[index], args[index]
            if tensor is None:
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != len(self.dims[name]):
                raise ValueError(f"{name}: expected a tensor [{', '.join(self.dims[name])}], got {_describe(tensor)}")
            for dim, size in zip(self.dims[name], tensor.shape, strict=True):
                expected = int(dim) if dim.isdigit() else sizes.setdefault(dim, size)
                if size != expected:
                    raise ValueError(f"{name}: expected {dim} = {expected}, got {size} in {_describe(tensor)}")

    def _device(self, args: Sequence[Any]) -> torch.device:
        devices = {args[index].device for index in self.tensors if args[index] is not None}
        if len(devices) != 1:
            raise ValueError(f"{self.name}: expected tensors of one device, got {sorted(map(str, devices))}")
        return devices.pop()

    def index_dtype(self, args: Sequence[Any]) -> torch.dtype:
        """The width of indices that a call needs (:func:`.specialization.needs_int64`)."""
        return torch.int64 if specialization.needs_int64(*(args[index] for index in self.tensors)) else torch.int32

    def _features(self, args: Sequence[Any]) -> Hashable:
        features: list[Any] = []
        sizes = self._sizes(args)
        for index, name in enumerate(self.parameters):
            value = args[index]
            if value is None or name in self.constexprs:
                features.append(value)
            elif index in self.tensors:
                features.append(value.dtype)
            else:
                features.append(type(value))
        return (*features, *(sizes.get(name) for name in self.specialized))


class _Bound:
    """A bound kernel: its host wrapper, its Triton function and the binaries compiled from it."""

    def __init__(
        self, family: KernelFamily, host: Callable[..., Any], capability: tuple[int, int], index_dtype: torch.dtype
    ) -> None:
        self.family = family
        self.host = host
        self.capability = capability
        self.integer = "i64" if index_dtype == torch.int64 else "i32"
        self.roles, self.derived_from = specialization.read_wrapper(host, family)
        self.passed = tuple(
            (position, role[1]) for position, role in enumerate(self.roles) if role[0] is specialization.Role.PARAMETER
        )
        self.binaries: dict[Hashable, Any] = {}
        self._constexprs: tuple[int, ...] | None = None
        self._lock = threading.Lock()

    def capture(self, args: Sequence[Any]) -> _Captured:
        """Runs the host wrapper for ``args`` without launching anything."""
        captured: list[_Captured] = []

        def record(function: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
            captured.append(_Captured(function, tuple(map(int, grid)), list(values), options))

        self.host(*args, _launcher=record)
        if len(captured) != 1:
            raise RuntimeError(f"{self.family.name}: expected one launch from Helion's wrapper, got {len(captured)}")
        return captured[0]

    def binary(
        self,
        captured: _Captured,
        args: Sequence[Any],
        layouts: Mapping[int, specialization.Layout],
        device: torch.device,
    ) -> Any:
        """The compiled kernel for layout classes, loaded for ``device`` (a CUDA device each has its own)."""
        if self._constexprs is None:
            parameters = captured.function.params
            self._constexprs = tuple(i for i, parameter in enumerate(parameters) if parameter.is_constexpr)
        # Everything else about the Triton function's arguments follows from the features.
        key = (tuple(layouts.values()), device, *(captured.values[i] for i in self._constexprs))
        binary = self.binaries.get(key)
        if binary is None:
            refuse_during_capture(self.family.name, device)
            with self._lock:
                binary = self.binaries.get(key)
                if binary is None:
                    binary = self.binaries[key] = self._compile(captured, args, layouts, device)
        return binary

    def _compile(
        self,
        captured: _Captured,
        args: Sequence[Any],
        layouts: Mapping[int, specialization.Layout],
        device: torch.device,
    ) -> Any:
        start = time.perf_counter()
        spec = specialization.specialize(
            self.family, captured.function, self.roles, args, captured.values, layouts, integer=self.integer
        )
        binary = _compile(captured.function, spec, captured.options, self.capability)
        if device.type == "cuda":
            with torch.cuda.device(device):
                _ = binary.run  # loads it
        names = ", ".join(f"{self.family.parameters[i]} {layout.name.lower()}" for i, layout in layouts.items())
        log.info("compiled %s in %.2f s: %s", self.family.name, time.perf_counter() - start, names)
        return binary


@dataclasses.dataclass(frozen=True)
class _Captured:
    """A call of Helion's launcher: Triton function, grid, arguments, options."""

    function: Any
    grid: tuple[int, ...]
    values: list[Any]
    options: dict[str, Any]


class PreparedLaunch:
    """A launch with everything but pointers and scalars decided.

    Call it with all arguments of the kernel function. Shapes, strides, dtypes, flags and the device must be those it
    was prepared with: that is the caller's key, and only the alignment of pointers is looked at here. Holds no tensor.
    """

    __slots__ = (
        "_alignable",
        "_binaries",
        "_bound",
        "_captured",
        "_direct",
        "_grid",
        "_index",
        "_layouts",
        "_numbers",
        "_other",
        "_scalars",
        "_template",
        "device",
        "family",
    )

    def __init__(self, family: KernelFamily, bound: _Bound, args: Sequence[Any], device: torch.device) -> None:
        self.family = family
        self.device = device
        self._bound = bound
        self._index = device.index if device.type == "cuda" else -1
        self._direct = device.type == "cuda" and not use_triton_launcher()
        self._binaries: list[Any] = [None, None]  # for misaligned and for aligned bases
        self._captured = self._capture(args)
        self._template, self._grid = self._captured.values, self._captured.grid
        # What the wrapper computes from numbers (a scale times log2 e, say) must be computed anew when they change.
        self._numbers = tuple(args[i] for i in bound.derived_from) if bound.derived_from else None
        self._scalars = tuple(pair for pair in bound.passed if not isinstance(args[pair[1]], torch.Tensor))
        pointers = [pair for pair in bound.passed if pair not in self._scalars]
        for _, index in self._scalars:
            if bound.integer == "i32" and isinstance(args[index], int) and not _fits_int32(args[index]):
                raise ValueError(f"{family.parameters[index]}: expected a signed 32-bit number, got {args[index]}")
        layouts = self._layouts = specialization.layouts_of(family, args)
        aligned = specialization.Layout.ALIGNED
        self._alignable = tuple(pair for pair in pointers if self._direct and layouts[pair[1]] is aligned)
        self._other = tuple(pair for pair in pointers if pair not in self._alignable)
        if self._direct:
            self._binary(args, aligned=specialization.bases_aligned(layouts, args))

    def _capture(self, args: Sequence[Any]) -> _Captured:
        """The launch without tensors and scalars, and with strides that are never used made harmless."""
        captured = self._bound.capture(args)
        values = list(captured.values)
        for position, role in enumerate(self._bound.roles):
            if role[0] is specialization.Role.PARAMETER:
                if values[position] is not args[role[1]]:
                    raise RuntimeError(f"{self.family.name}: Helion's wrapper changed argument {role[1]}")
                values[position] = None
            elif role[0] is specialization.Role.STRIDE:
                if args[role[1]].size(role[2]) <= 1:
                    values[position] = specialization.effective_strides(args[role[1]])[role[2]]
            elif not isinstance(values[position], (bool, int, float)):
                raise RuntimeError(f"{self.family.name}: launch argument {position} is made by Helion's wrapper")
        grid = (*captured.grid, 1, 1)[:3]
        if grid[0] > specialization.INT32_MAX or max(grid[1:]) > 65535:
            raise ValueError(f"{self.family.name}: the launch grid {grid} is larger than CUDA allows")
        return dataclasses.replace(captured, grid=grid, values=values)

    def _binary(self, args: Sequence[Any], *, aligned: bool) -> Any:
        """The compiled kernel for aligned or misaligned bases, made the first time that such bases come."""
        layouts = self._layouts if aligned else specialization.weaken(self._layouts)
        binary = self._binaries[aligned] = self._bound.binary(self._captured, args, layouts, self.device)
        return binary

    def __call__(self, *args: Any) -> None:
        """Launches on the current stream of the tensors' device, which need not be the current device."""
        values, grid = self._template.copy(), self._grid
        if self._numbers is not None and self._numbers != tuple(args[i] for i in self._bound.derived_from):
            captured = self._capture(args)
            values, grid = captured.values, captured.grid
        if not (grid[0] and grid[1] and grid[2]):
            return
        for position, index in self._scalars:
            values[position] = args[index]
        if not self._direct:
            for position, index in self._other:
                values[position] = args[index]
            with torch.cuda.device(self._index) if self._index >= 0 else contextlib.nullcontext():
                self._captured.function.run(*values, grid=grid, warmup=False, **_triton_options(self._captured.options))
            return
        bits = 0
        for position, index in self._alignable:
            values[position] = pointer = args[index].data_ptr()
            bits |= pointer
        for position, index in self._other:
            values[position] = args[index].data_ptr()
        aligned = not bits & 15
        binary = self._binaries[aligned] or self._binary(args, aligned=aligned)
        device = self._index
        if torch._C._cuda_getDevice() == device:
            _launch(binary, grid, device, values)
        else:
            with torch.cuda.device(device):
                _launch(binary, grid, device, values)


def _fits_int32(value: int) -> bool:
    return -specialization.INT32_MAX - 1 <= value <= specialization.INT32_MAX


def _launch(binary: Any, grid: tuple[int, ...], device: int, values: list[Any]) -> None:
    """Calls the launcher of a compiled Triton kernel. Its form is the same from Triton 3.6 to 3.9."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    enter, leave = _launch_hooks()
    metadata = binary.launch_metadata(grid, stream, *values) if enter is not None else None
    binary.run(*grid, stream, binary.function, binary.packed_metadata, metadata, enter, leave, *values)


def compile_only(
    family: KernelFamily,
    args: Sequence[Any],
    config: Mapping[str, Any],
    capability: tuple[int, int],
    *,
    aligned: bool = True,
) -> Any:
    """Binds and compiles for a GPU that is not there; :mod:`.report` reads the result.

    Args:
        family: The kernel.
        args: Arguments as for a call, on the CPU; their layouts choose the layout class, their values are not read.
        config: A Helion config.
        capability: Compute capability to compile for.
        aligned: False compiles the binary for misaligned bases.

    Returns:
        Triton's ``CompiledKernel``, not loaded.

    Raises:
        RuntimeError: This process runs Triton's interpreter, which compiles nothing.
    """
    if loader.interpreting():
        raise RuntimeError("TRITON_INTERPRET=1 replaced Triton's compiler in this process: nothing can be compiled")
    family.check(args)
    device = torch.device("cpu")
    bound = family.bind(args, config, capability, family.index_dtype(args), device)
    layouts = specialization.layouts_of(family, args)
    if not aligned or not specialization.bases_aligned(layouts, args):
        layouts = specialization.weaken(layouts)
    return bound.binary(bound.capture(args), args, layouts, device)


@contextlib.contextmanager
def environment_unmoved(*names: str) -> Iterator[None]:
    """Undoes what Helion does to the environment: it moves caches of the whole process to its own folder, and more."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def in_new_thread(call: Callable[[], Any]) -> Any:
    """Calls in a thread of its own, where no caller's mode is in force.

    Tracing must not see the inference mode, autocast, default device, dispatch modes or backward pass of the call that
    happens to be first; PyTorch keeps all of these per thread.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 (raised below, in the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=work, name="bwattn-bind")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def refuse_during_capture(name: str, device: torch.device) -> None:
    """Raises when the current stream of ``device`` is being captured into a CUDA graph.

    Raises:
        NotCompiled: A capture is under way; compiling or loading code would break it.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            raise NotCompiled(
                f"{name} is not compiled yet for these arguments and cannot be compiled during CUDA graph capture: "
                "call it once with the same shapes, strides and flags before capturing (warm up)"
            )


def _launch_hooks() -> tuple[Any, Any]:
    """Triton's launch hooks (profilers set them), or None where there are none, which spares their cost."""
    knobs = _knobs()
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return (enter if getattr(enter, "calls", enter) else None), (leave if getattr(leave, "calls", leave) else None)


@functools.cache
def _knobs() -> Any:
    return importlib.import_module("triton").knobs.runtime


def _triton_options(options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in options if name.startswith("_")]
    if unknown:
        raise RuntimeError(f"launch options {unknown} of Helion are not supported here")
    # Fusion is the default up to Triton 3.9 (with a warning), and no longer in 3.10.
    return {"enable_fp_fusion": True, **{name: value for name, value in options.items() if value is not None}}


def _compile(
    function: Any, spec: specialization.Specialization, options: Mapping[str, Any], capability: tuple[int, int]
) -> Any:
    triton = importlib.import_module("triton")
    source = importlib.import_module("triton.compiler").ASTSource(
        function, spec.signature, spec.constants, spec.attributes
    )
    target = importlib.import_module("triton.backends.compiler").GPUTarget(
        "cuda", capability[0] * 10 + capability[1], 32
    )
    return triton.compile(source, target=target, options=_triton_options(options))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"

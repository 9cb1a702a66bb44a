"""What Triton may assume of a launch: which arguments are what, layout classes, index width.

Triton would compile anew for every combination of integer arguments that are 1 or multiples of 16. Here the facts come
from a few layout classes instead, and sizes carry none, so that lengths never cause a compilation.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .runtime import KernelFamily

INT32_MAX = 2**31 - 1

_POINTER_TYPES: dict[torch.dtype, str] = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


class Layout(enum.IntEnum):
    """What a compiled kernel may assume of the strides and the base of a tensor."""

    GENERIC = 0
    UNIT = 1  # the last stride is 1
    ALIGNED = 2  # and the base and every other stride are multiples of 16 bytes


def needs_int64(*tensors: torch.Tensor | None) -> bool:
    """Whether some element lies past 2**31 - 1 elements from its tensor's base.

    That is decided by the extent, ``sum((size - 1) * stride)``, not by the number of elements: a view with few elements
    and large strides (packed QKV, a cache) overflows 32-bit offsets just the same.

    Args:
        tensors: The tensors of a call; None is skipped.
    """
    for tensor in tensors:
        if tensor is None or tensor.numel() == 0:
            continue
        extent = 0
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            extent += (size - 1) * stride
            if size > INT32_MAX:
                return True
        if extent > INT32_MAX:
            return True
    return False


class Role(enum.Enum):
    """What one argument of the Triton function is, read off the host wrapper's launch expression."""

    PARAMETER = "parameter"  # a parameter of the kernel function, by index
    STRIDE = "stride"  # a stride of a tensor parameter, by index and dimension
    VALUE = "value"  # anything else: sizes, constants


@dataclasses.dataclass(frozen=True)
class Specialization:
    """How the Triton function is compiled, in the form that ``triton.compiler.ASTSource`` takes."""

    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]


def read_wrapper(host: Callable[..., Any], family: KernelFamily) -> tuple[tuple[tuple[Any, ...], ...], tuple[int, ...]]:
    """Reads off Helion's host wrapper what each argument of its ``_launcher`` call is.

    Returns:
        The roles of the launch arguments after function and grid; and the number parameters (by index) from which the
        wrapper computes anything that it launches with, which a replay could not know.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(host)))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_launcher"
    ]
    if len(calls) != 1 or any(isinstance(arg, ast.Starred) for arg in calls[0].args):
        raise RuntimeError(f"{family.name}: expected one plain _launcher call in Helion's wrapper, got {len(calls)}")
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    index = {name: position for position, name in enumerate(family.parameters) if name not in assigned}
    roles: list[tuple[Any, ...]] = []
    computed: list[ast.expr] = [calls[0].args[1]]
    for arg in calls[0].args[2:]:
        stride = re.fullmatch(r"(\w+)\.stride\((\d+)\)", ast.unparse(arg))
        if isinstance(arg, ast.Name) and arg.id in index:
            roles.append((Role.PARAMETER, index[arg.id]))
        elif stride is not None and stride[1] in index and stride[1] in family.dims:
            roles.append((Role.STRIDE, index[stride[1]], int(stride[2])))
        else:
            roles.append((Role.VALUE,))
            computed.append(arg)
    # Everything that flows into a computed value, whatever the order of statements: too much is only slower.
    needed = {node.id for arg in computed for node in ast.walk(arg) if isinstance(node, ast.Name)}
    statements = [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))]
    for _ in statements:
        for statement in statements:
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            stored = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            if stored & needed:
                needed |= names
    numbers = [
        position
        for position, name in enumerate(family.parameters)
        if name in needed and name not in family.dims and name not in family.constexprs
    ]
    return tuple(roles), tuple(numbers)


def effective_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides with those of dimensions of size <= 1, which are never used, set to 0 (1 for the last).

    PyTorch allows any value there; left alone they would cost an alignment class or overflow 32 bits.
    """
    strides = list(tensor.stride())
    last = tensor.dim() - 1
    for dim, size in enumerate(tensor.shape):
        if size <= 1:
            strides[dim] = 1 if dim == last else 0
    return tuple(strides)


def _layout(tensor: torch.Tensor) -> Layout:
    *outer, last = effective_strides(tensor)
    if last != 1:
        return Layout.GENERIC
    # Row vectors (lse, delta) have small loads, and lengths for strides: telling aligned ones apart would double the
    # number of binaries for nothing.
    size = tensor.element_size()
    if tensor.dim() < 4 or any(stride * size % 16 for stride in outer):
        return Layout.UNIT
    return Layout.ALIGNED


def layouts_of(family: KernelFamily, args: Sequence[Any]) -> dict[int, Layout]:
    """The layout class of each tensor, by parameter, judged on strides alone (bases may change from call to call).

    The tensors whose last dimension is a specialized width (q, k, v, o and their gradients) share one class, the
    weakest of them; every other tensor has its own. So a call without a mask has few binaries.
    """
    layouts = {index: _layout(args[index]) for index in family.tensors if args[index] is not None}
    main = [i for i in layouts if family.dims[family.parameters[i]][-1] in family.specialized]
    weakest = min((layouts[i] for i in main), default=Layout.GENERIC)
    layouts.update(dict.fromkeys(main, weakest))
    return layouts


def weaken(layouts: Mapping[int, Layout]) -> dict[int, Layout]:
    """The layouts when some base is not a multiple of 16 bytes: none is ALIGNED."""
    return {index: min(layout, Layout.UNIT) for index, layout in layouts.items()}


def bases_aligned(layouts: Mapping[int, Layout], args: Sequence[Any]) -> bool:
    """Whether the tensors of class ALIGNED have bases that are multiples of 16 bytes."""
    return all(args[i].data_ptr() % 16 == 0 for i, layout in layouts.items() if layout is Layout.ALIGNED)


def specialize(
    family: KernelFamily,
    function: Any,
    roles: Sequence[tuple[Any, ...]],
    args: Sequence[Any],
    values: Sequence[Any],
    layouts: Mapping[int, Layout],
    *,
    integer: str,
) -> Specialization:
    """Writes the layout classes of a call as Triton's signature, constants and attributes.

    Args:
        family: The kernel.
        function: Its Triton function.
        roles: Of its arguments, as :func:`read_wrapper` found them.
        args: Arguments of the kernel function.
        values: Launch arguments; those that are kernel parameters are taken from ``args``.
        layouts: By parameter. Bases of tensors of class ALIGNED must be multiples of 16 bytes (see :func:`weaken`).
        integer: Triton's type of sizes and strides, ``i32`` or ``i64``.
    """
    names = list(function.arg_names)
    constexpr = {parameter.name for parameter in function.params if parameter.is_constexpr}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, (name, role, value) in enumerate(zip(names, roles, values, strict=True)):
        if role[0] is Role.PARAMETER:
            value = args[role[1]]  # noqa: PLW2901 (a template holds None there)
        if name in constexpr:
            signature[name] = "constexpr"
            constants[(position,)] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTER_TYPES[value.dtype]
            if layouts[role[1]] is Layout.ALIGNED:
                attributes[(position,)] = [["tt.divisibility", 16]]
        elif role[0] is Role.STRIDE and layouts[role[1]] > Layout.GENERIC and role[2] == args[role[1]].dim() - 1:
            signature[name] = "constexpr"
            constants[(position,)] = 1
        elif isinstance(value, bool):
            signature[name] = "u1"
        elif isinstance(value, int):
            signature[name] = integer
            if role[0] is Role.STRIDE and layouts[role[1]] is Layout.ALIGNED:
                attributes[(position,)] = [["tt.divisibility", 16 // args[role[1]].element_size()]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            raise TypeError(f"{family.name}: cannot launch with {name} = {value!r} of type {type(value).__name__}")
    return Specialization(signature, constants, attributes)

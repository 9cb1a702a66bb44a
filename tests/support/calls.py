"""One attention call as data: printable, so that a failing example can be repeated, and buildable on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import torch_bwattn
from torch_bwattn.testing import Results

LAYOUTS = (
    "contiguous",
    "bshd",
    "sliced",
    "stepped",
    "offset",
    "transposed",
    "permuted",
    "expanded_lead",
    "expanded_rows",
    "expanded_columns",
    "expanded_all",
)


@dataclass(frozen=True)
class Operand:
    """A tensor's shape and how it lies in memory."""

    shape: tuple[int, ...]
    layout: str = "contiguous"


@dataclass(frozen=True)
class Mask(Operand):
    """An attention mask: ``kind`` is bool, own (the query's dtype) or float32."""

    kind: str = "bool"
    content: str = "random"
    needs_grad: bool = False


@dataclass(frozen=True)
class Sink:
    """A logit for each query head: ``kind`` is own (the query's dtype) or float32."""

    kind: str = "own"
    content: str = "random"
    needs_grad: bool = True


@dataclass(frozen=True)
class Call:
    """Everything that determines one call, its inputs and its incoming gradients."""

    query: Operand
    key: Operand
    value: Operand
    mask: Mask | None = None
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0
    is_causal: bool = False
    causal_alignment: str = "top_left"
    scale: float | None = None
    enable_gqa: bool = False
    magnitude: float = 1.0
    seed: int = 0
    grad_out: str = "contiguous"
    with_out_grad: bool = True
    with_lse_grad: bool = False
    needs_grad: tuple[bool, bool, bool] = (True, True, True)
    window_size: tuple[int, int] | None = None
    softcap: float | None = None
    sink: Sink | None = None

    def _broadcast(self, *operands: Operand) -> tuple[int, ...]:
        leads = [operand.shape[:-2] for operand in operands]
        if self.enable_gqa:
            leads = [lead[:-1] + self.query.shape[-3:-2] for lead in leads]
        return tuple(torch.broadcast_shapes(*leads))

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading dimensions of the output, heads included."""
        return self._broadcast(self.query, self.key, self.value)

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """What a mask broadcasts to: the batch is that of query and key, which the value's may exceed."""
        return (*self._broadcast(self.query, self.key), self.query.shape[-2], self.key.shape[-2])

    @property
    def scores_shape(self) -> tuple[int, ...]:
        return (*self.batch, self.query.shape[-2], self.key.shape[-2])

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.batch, self.query.shape[-2], self.value.shape[-1])

    def arguments(self) -> dict[str, Any]:
        """The arguments besides the tensors."""
        return {
            "dropout_p": self.dropout_p,
            "is_causal": self.is_causal,
            "scale": self.scale,
            "enable_gqa": self.enable_gqa,
            "causal_alignment": self.causal_alignment,
            **({} if self.window_size is None else {"window_size": self.window_size}),
            **({} if self.softcap is None else {"softcap": self.softcap}),
        }


@dataclass
class Tensors:
    """The inputs of a call, and the gradients that come in."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    grad_out: torch.Tensor | None
    grad_lse: torch.Tensor | None
    sink: torch.Tensor | None = None

    def named_inputs(self) -> dict[str, torch.Tensor]:
        """The inputs by the name of their gradient."""
        named = {"dq": self.query, "dk": self.key, "dv": self.value, "dmask": self.mask, "dsink": self.sink}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def inputs(self) -> list[torch.Tensor]:
        return list(self.named_inputs().values())

    def sinks(self) -> dict[str, torch.Tensor]:
        """The sink as a keyword argument, if there is one."""
        return {} if self.sink is None else {"sink": self.sink}


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values (for expanded layouts: the first ones, repeated) lying in memory as ``layout`` says.

    The gaps of a buffer hold NaN (True for bool), so that a read outside the view shows.
    """
    gap = True if tensor.dtype == torch.bool else math.nan
    dims = tensor.dim()
    if layout == "bshd" and dims >= 3:
        return tensor.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "sliced":
        buffer = tensor.new_full([size + 2 for size in tensor.shape], gap)
        view = buffer[tuple(slice(1, 1 + size) for size in tensor.shape)]
        return view.copy_(tensor)
    if layout == "stepped" and dims:
        buffer = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), gap)
        return buffer[..., ::2].copy_(tensor)
    if layout == "offset":
        shift = 1 + tensor.numel() % 3
        buffer = tensor.new_full((tensor.numel() + shift,), gap)
        return buffer[shift:].view(tensor.shape).copy_(tensor)
    if layout == "transposed" and dims >= 2:
        return tensor.mT.contiguous().mT
    if layout == "permuted" and dims:
        order = tuple(reversed(range(dims)))
        return tensor.permute(order).contiguous().permute(order)
    if layout.startswith("expanded"):
        which = {
            "expanded_lead": range(dims - 2),
            "expanded_rows": range(max(dims - 2, 0), dims - 1),
            "expanded_columns": range(max(dims - 1, 0), dims),
            "expanded_all": range(dims),
        }[layout]
        base = tensor
        for dim in which:
            base = base.narrow(dim, 0, min(1, base.shape[dim]))
        return base.contiguous().expand(tensor.shape)
    return tensor.contiguous()


def build(call: Call, device: torch.device | str = "cpu") -> Tensors:
    """Makes the tensors of a call; the values depend on the call alone, not on the device."""
    generator = torch.Generator().manual_seed(call.seed)

    def normal(shape: tuple[int, ...], dtype: torch.dtype, magnitude: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * magnitude).to(dtype).to(device)

    operands = []
    for operand, needs_grad in zip((call.query, call.key, call.value), call.needs_grad, strict=True):
        values = normal(operand.shape, call.dtype, call.magnitude)
        operands.append(lay_out(values, operand.layout).detach().requires_grad_(needs_grad))
    mask = None
    if call.mask is not None:
        mask = _mask_values(call, call.mask, generator).to(device)
        mask = lay_out(mask, call.mask.layout).detach().requires_grad_(call.mask.needs_grad)
    grad_out = lay_out(normal(call.out_shape, call.dtype), call.grad_out) if call.with_out_grad else None
    lse_dtype = torch.float64 if call.dtype == torch.float64 else torch.float32
    grad_lse = normal(call.scores_shape[:-1], lse_dtype) if call.with_lse_grad else None
    sink = None
    if call.sink is not None:
        values = _sink_values(call.batch[-1] if call.batch else 1, call.sink, generator)
        sink = values.to(call.dtype if call.sink.kind == "own" else torch.float32).to(device)
        sink.requires_grad_(call.sink.needs_grad)
    return Tensors(*operands, mask, grad_out, grad_lse, sink)


def _sink_values(heads: int, sink: Sink, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(heads, generator=generator)
    if sink.content == "large":
        values = 6.0 + 6.0 * values
    elif sink.content == "infinite":
        values = values.masked_fill(torch.rand(heads, generator=generator) < 0.5, -math.inf)
    return values


def _mask_values(call: Call, mask: Mask, generator: torch.Generator) -> torch.Tensor:
    chance = torch.rand(mask.shape, generator=generator)
    # Rows as the mask has them: a 1-D mask has one, a mask with a row dimension of 1 has one a batch entry.
    row = torch.rand((*mask.shape[:-1], 1) if mask.shape else (), generator=generator) < 0.3
    if mask.kind == "bool":
        keep = chance < {"random": 0.6, "sparse": 0.1, "dead_rows": 0.7}.get(mask.content, 0.9)
        return keep & ~row if mask.content == "dead_rows" else keep
    dtype = torch.float32 if mask.kind == "float32" else call.dtype
    values = torch.randn(mask.shape, generator=generator).to(dtype)
    lowest = torch.finfo(dtype).min
    if mask.content == "infinite":
        values = values.masked_fill(chance < 0.4, -math.inf)
    elif mask.content == "dead_rows":
        values = values.masked_fill((chance < 0.2) | row, -math.inf)
    elif mask.content == "lowest":
        values = values.masked_fill((chance < 0.4) | row, lowest)
    return values


def run(call: Call, tensors: Tensors, entry: str = "function") -> Results:
    """Calls the package through one of its entry points, backward included.

    ``function`` is torch_bwattn.sdpa with return_lse, ``op_lse`` the op that returns both, ``op`` the op that returns
    the output alone.
    """
    args = (tensors.query, tensors.key, tensors.value, tensors.mask)
    arguments = {**call.arguments(), **tensors.sinks()}
    if entry == "function":
        out, lse = torch_bwattn.sdpa(*args, **arguments, return_lse=True)
    elif entry == "op_lse":
        out, lse = torch.ops.bwattn.sdpa_with_lse(*args, **arguments)
    else:
        out, lse = torch.ops.bwattn.sdpa(*args, **arguments), None
    results = Results(out=out, lse=lse)
    pairs = [(out, tensors.grad_out), (lse, tensors.grad_lse)]
    outputs = [(result, grad) for result, grad in pairs if result is not None and grad is not None]
    wanted = {name: tensor for name, tensor in tensors.named_inputs().items() if tensor.requires_grad}
    if outputs and wanted:
        grads = torch.autograd.grad(
            [result for result, _ in outputs],
            list(wanted.values()),
            [grad for _, grad in outputs],
            allow_unused=entry == "op" and not call.with_out_grad,
        )
        for name, grad in zip(wanted, grads, strict=True):
            setattr(results, name, grad)
    return results

"""PyTorch's own fused kernels as a backend, wherever they are right.

CPU: the fused flash kernel, which returns ``out`` and ``lse``. Known to be wrong, measured on torch 2.13: NaN for
causal problems with a scale of 0 or less; a float32 mask read as float64 beside float64 operands; a row of ``out`` 0
and of ``lse`` 0 both for a row that sees nothing and for a NaN query; NaN for a last stride other than 1; a backward
that trusts ``lse`` where it has lost the row's sum (rows of huge negative logits), and that sums dK and dV in 16 bits
for 16-bit inputs, which adds up over long sequences and groups of heads. The first is refused by ``supports``; the
others show in ``lse``, in the strides or in the dtype and are answered by the reference or a copy.

CUDA: cuDNN's kernel, flash and the efficient one (:mod:`.aten_cuda`), and matrix products with the score matrix between
them (:mod:`.materialised`), which compete only while that is small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import Conforming, conform
from ..problem import Problem
from ..target import capability
from . import aten_cuda, materialised, reference
from .base import Backend, BackwardFn, BackwardInputs, ForwardFn, ForwardInputs, Grads, Verdict, Wanted, named, no, yes

_LSE_KEEPS_SUM = 4096.0
"""Up to this |lse|, fp32 still resolves the log of a row's sum to 2**-12: exp(s - lse) is good to bf16's rounding and,
for natural logits of ordinary size, to fp32's."""


def ordinary(lse: Tensor) -> bool:
    """Whether no row of a CPU flash ``lse`` is suspect: masked out or NaN (both leave 0 or NaN) or too large."""
    magnitude = lse.abs()
    return bool(((magnitude > 0.0) & (magnitude <= _LSE_KEEPS_SUM)).all())


def _unit_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _row_chunks(problem: Problem, mask: Tensor, dtype: torch.dtype) -> list[slice]:
    """Query rows of each call, so that a mask converted for ``dtype`` takes no more elements than the query."""
    step = problem.q_len
    if mask.shape[2] != 1 and _converts(mask, dtype):
        per_row = mask.shape[0] * mask.shape[1] * mask.shape[3]
        budget = max(2**18, problem.batch * problem.heads * problem.q_len * problem.head_dim)
        step = max(1, min(step, budget // per_row))
    return [slice(start, min(start + step, problem.q_len)) for start in range(0, problem.q_len, step)]


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    """Those rows, which lie in dimension 2, unless one row is broadcast to all."""
    return tensor if tensor.shape[2] == 1 else tensor[:, :, rows]


def _converts(mask: Tensor, dtype: torch.dtype) -> bool:
    """Whether the CPU kernel cannot read the mask as it is: bool, or float32 beside float64 (misread as float64)."""
    return mask.dtype not in (dtype, torch.float32) or (dtype == torch.float64 and mask.dtype != dtype)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as the CPU kernel takes it: added to the scores, in the query's dtype or float32."""
    if not _converts(mask, dtype):
        return mask
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _cpu_forward(problem: Problem, x: ForwardInputs) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q, k, v = _unit_last(x.q), _unit_last(x.k), _unit_last(x.v)
    causal = problem.diagonal is not None
    if x.mask is None:
        out, lse = flash(q, k, v, 0.0, causal, scale=problem.scale)
    else:
        parts = []
        for rows in _row_chunks(problem, x.mask, problem.dtype):
            bias = _additive(_rows(x.mask, rows), problem.dtype)
            parts.append(flash(_rows(q, rows), k, v, attn_mask=bias, scale=problem.scale))
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(results, 2) for results in zip(*parts, strict=True))
    if not ordinary(lse):
        return reference.forward(problem, x)
    return conform(out, x.q), lse.contiguous()


def _cpu_backward(problem: Problem, x: BackwardInputs, wanted: Wanted) -> Grads:
    if x.grad_lse is not None or not ordinary(x.lse):
        return reference.backward(problem, x, wanted)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    # float32 for 16-bit inputs is also several times faster where the CPU has no 16-bit matrix units.
    dtype = torch.promote_types(problem.dtype, torch.float32)
    q, k, v, out, grad_out = (_unit_last(tensor.to(dtype)) for tensor in (x.q, x.k, x.v, x.out, x.grad_out))
    if x.mask is None:
        causal = problem.diagonal is not None
        dq, dk, dv = flash(grad_out, q, k, v, out, x.lse, 0.0, causal, scale=problem.scale)
    else:
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows in _row_chunks(problem, x.mask, dtype):
            g, q_rows, o, lse = (_rows(tensor, rows) for tensor in (grad_out, q, out, x.lse))
            bias = _additive(_rows(x.mask, rows), dtype)
            parts = flash(g, q_rows, k, v, o, lse.contiguous(), 0.0, False, attn_mask=bias, scale=problem.scale)
            dq[:, :, rows] = parts[0]
            dk += parts[1]
            dv += parts[2]
    dq, dk, dv = (grad.to(problem.dtype) for grad in (dq, dk, dv))
    return conform(dq, x.q), conform(dk, x.k), conform(dv, x.v), None, None


class AtenBackend(Backend):
    """PyTorch's fused kernels, and its matrix products with the scores in memory between them."""

    name = "aten"

    def supports(self, problem: Problem) -> Verdict:
        return _choice(self.offers(problem))

    def offers(self, problem: Problem) -> tuple[Verdict, ...]:
        cpu, cuda = problem.target == "cpu", capability(problem.target) is not None
        if not (cpu or cuda):
            return (no(f"no fused kernel is known for target {problem.target}"),)
        if problem.empty or problem.head_dim == 0:
            return (no("a size is 0; reference answers it without a kernel"),)
        if cpu:
            refusal = _refuse_fused(problem) or _refuse_on_cpu(problem)
            return (no(refusal) if refusal else yes("flash for CPU"),)
        return (*(self._fused(problem, kernel) for kernel in aten_cuda.FUSED), self._materialised(problem))

    def _fused(self, problem: Problem, kernel: aten_cuda.Fused) -> Verdict:
        refusal = _refuse_fused(problem) or kernel.refuse(problem)
        return no(refusal, kernel.name) if refusal else yes(kernel.name)

    def _materialised(self, problem: Problem) -> Verdict:
        refusal = _refuse_all(problem) or materialised.refuse(problem)
        if refusal:
            return no(refusal, materialised.CONFIG)
        if materialised.within_bound(problem):
            return yes(materialised.CONFIG)
        return yes(materialised.CONFIG, last_resort=materialised.beyond_bound(problem))

    def forward(self, problem: Problem, config: str = "") -> ForwardFn:
        if problem.target == "cpu":
            return lambda x: _cpu_forward(problem, x)
        name = self._kernel(problem, config)
        if name == materialised.CONFIG:
            return lambda x: materialised.forward(problem, x)
        kernel, conforming = _KERNELS[name], Conforming()

        def forward(x: ForwardInputs) -> tuple[Tensor, Tensor]:
            out, lse = kernel.forward(problem, x)
            return conforming(out, x.q), lse

        return forward

    def backward(self, problem: Problem, config: str = "") -> BackwardFn:
        if problem.target == "cpu":
            return lambda x, wanted: _cpu_backward(problem, x, wanted)
        name = self._kernel(problem, config)
        if name == materialised.CONFIG:
            return lambda x, wanted: materialised.backward(problem, x)
        kernel = _KERNELS[name]
        return lambda x, wanted: _cuda_backward(problem, kernel, x)

    def _kernel(self, problem: Problem, config: str) -> str:
        """The kernel that a config's name means, or that the backend chooses."""
        offers = self.offers(problem)
        return offers[named(offers, config or _choice(offers).config)].config


_KERNELS = {kernel.name: kernel for kernel in aten_cuda.FUSED}


def _choice(offers: tuple[Verdict, ...]) -> Verdict:
    """The first offer that may compete, or all refusals as one."""
    taken = next((offer for offer in offers if offer and not offer.last_resort), None)
    if taken is not None or len(offers) == 1:
        return taken or offers[0]
    return no("; ".join(f"{offer.config}: {offer.reason or offer.last_resort}" for offer in offers))


def _refuse_all(problem: Problem) -> str:
    """Why nothing here takes a problem, or nothing."""
    if problem.dropout_p > 0.0:
        return "its dropout mask is not the counter-based one; helion and reference draw it"
    if problem.mask_grad:
        return "it gives no gradient for the mask; helion and reference do"
    if problem.softcap is not None:
        return "it caps no scores; helion and reference do"
    return ""


def _refuse_fused(problem: Problem) -> str:
    """Why no fused kernel takes a problem, or nothing."""
    refusal = _refuse_all(problem)
    if refusal:
        return refusal
    if problem.sink_dtype is not None:
        return "it has no sink; helion and reference do"
    if problem.low_diagonal is not None or (problem.diagonal is not None and problem.mask_dtype is not None):
        return "it has no window; helion and reference do"
    if problem.diagonal is not None and not problem.scale > 0.0:
        return f"it gives NaN for a causal problem with scale {problem.scale}"
    return ""


def _refuse_on_cpu(problem: Problem) -> str:
    if problem.head_dim != problem.value_dim:
        return f"it needs equal widths, got D={problem.head_dim} and Dv={problem.value_dim}"
    if problem.score_count < reference.SMALL_SCORE_COUNT:
        return f"below {reference.SMALL_SCORE_COUNT} scores its rounding can break the accuracy rule"
    if problem.diagonal not in (None, 0):
        return "its causal rule is top-left only, and it has no other window"
    return ""


def _cuda_backward(problem: Problem, kernel: aten_cuda.Fused, x: BackwardInputs) -> Grads:
    dq, dk, dv = kernel.backward(problem, x._replace(grad_out=_unit_last(x.grad_out)))
    return conform(dq, x.q), conform(dk, x.k), conform(dv, x.v), None, None

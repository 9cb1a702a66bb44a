"""The ``flex`` suite: patterns of ``flex_attention``, forward and backward, beside PyTorch's own.

Seven patterns that models use, on one shape. PyTorch's runs twice, compiled anew for each pattern: with its Triton
template and with its FLASH backend, which is FlashAttention's. Each result is checked before it is timed, some (batch,
head) slices of it, by the rule of :mod:`torch_bwattn.testing` with the scores written out: mods are called on whole
grids there, so that nothing of this package's tracing is in the reference.

A pattern's *density* is the share of its blocks that are visited; TFLOP/s counts those alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..testing import Results, judge
from . import check, document
from .peers import FLEX_PEERS, OURS, undonated
from .rows import BACKWARD, DIRECTIONS, FORWARD, Inputs, Row, make_inputs
from .timing import Contender, Stopwatch, Timing, describe_failure, time_interleaved

if TYPE_CHECKING:
    from .suite import Plan

FLEX_ROW = Row(batch=4, heads=16, kv_heads=16, length=8192, head_dim=128, causal=False)
_BLOCK = 128

Mod = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Mods on one device for one length.

    Attributes:
        score_mod: Or None.
        mask_mod: Or None.
        learned: Captured tensors that get gradients in a backward.
    """

    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    learned: tuple[torch.Tensor, ...] = ()


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _window(row: Row, device: torch.device) -> Pattern:
    width = row.length // 8
    return Pattern(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= width))


def _documents(row: Row, device: torch.device) -> Pattern:
    document_of = torch.arange(row.length, device=device) // (row.length // 16)
    return Pattern(mask_mod=lambda b, h, q_idx, kv_idx: document_of[q_idx] == document_of[kv_idx])


def _prefix(row: Row, device: torch.device) -> Pattern:
    length = row.length // 8
    return Pattern(mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx < length) | (q_idx >= kv_idx))


def _alibi(row: Row, device: torch.device) -> Pattern:
    slopes = torch.exp2(-8.0 * torch.arange(1, row.heads + 1, device=device) / row.heads)
    return Pattern(lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx), _causal)


def _softcap(row: Row, device: torch.device) -> Pattern:
    return Pattern(lambda score, b, h, q_idx, kv_idx: 30.0 * torch.tanh(score / 30.0), _causal)


def _relative_bias(row: Row, device: torch.device) -> Pattern:
    generator = torch.Generator(device=device).manual_seed(1)
    size, last = (row.heads, 2 * row.length - 1), row.length - 1
    table = torch.randn(size, device=device, generator=generator).to(getattr(torch, row.dtype))
    return Pattern(lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + last], None, (table,))


PATTERNS: dict[str, Callable[[Row, torch.device], Pattern]] = {
    "causal": lambda row, device: Pattern(mask_mod=_causal),
    "window": _window,
    "documents": _documents,
    "prefix": _prefix,
    "alibi": _alibi,
    "softcap": _softcap,
    "relative bias": _relative_bias,
}
"""By name, each made for a row and a device: a window and a prefix of an eighth of the length, sixteen documents."""

OUR_PROVIDER = f"{OURS}.flex"
_PROVIDERS = (OUR_PROVIDER, *FLEX_PEERS)

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _opened(name: str, pattern: Pattern, block_mask: Any) -> Attention:
    if name == OUR_PROVIDER:
        import torch_bwattn

        return lambda q, k, v: torch_bwattn.flex_attention(q, k, v, pattern.score_mod, block_mask)  # type: ignore[return-value]
    from torch.nn.attention.flex_attention import flex_attention

    backend = name.removeprefix("flex_").upper()
    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compiled(q, k, v, pattern.score_mod, block_mask, kernel_options={"BACKEND": backend})
        return out

    return attention


def density_of(block_mask: Any) -> float:
    """The share of blocks that a block mask visits."""
    if block_mask is None:
        return 1.0
    visited = int(block_mask.kv_num_blocks.sum())
    if block_mask.full_kv_num_blocks is not None:
        visited += int(block_mask.full_kv_num_blocks.sum())
    rows = block_mask.kv_num_blocks
    return visited / (rows.numel() * math.ceil(block_mask.seq_lengths[1] / block_mask.BLOCK_SIZE[1]))


def written_out(
    pattern: Pattern, inputs: Inputs, place: tuple[int, int], dtype: torch.dtype, backward: bool
) -> Results:
    """One (batch, head) of a pattern with its scores in memory: sums in fp32, in fp64 where all of it is.

    Args:
        pattern: Its mods.
        inputs: Of all of it.
        place: Batch and head.
        dtype: Of operands and of P.
        backward: Whether to give gradients too.
    """
    q, k, v = (tensor[place][None, None].detach().to(dtype).requires_grad_(backward) for tensor in inputs.qkv)
    length, width = q.shape[2:]
    i = torch.arange(length, device=q.device)
    at = (*(torch.tensor(one, device=q.device) for one in place), i[:, None], i[None, :])
    s = (q @ k.mT)[0, 0].to(torch.promote_types(dtype, torch.float32)) / math.sqrt(width)
    if pattern.score_mod is not None:
        s = pattern.score_mod(s, *at).to(s.dtype)
    if pattern.mask_mod is not None:
        s = s.masked_fill(~pattern.mask_mod(*at), -torch.inf)
    out = s.softmax(-1).to(dtype)[None, None] @ v
    found = Results(out=out.detach())
    if backward:
        grads = torch.autograd.grad(out, (q, k, v), inputs.grad_out[place][None, None].to(dtype))
        found.dq, found.dk, found.dv = grads
    return found


class _Reference:
    """What a pattern's slices should be."""

    def __init__(self, pattern: Pattern, inputs: Inputs, places: Sequence[tuple[int, int]], backward: bool) -> None:
        self.places = places
        self.exact = [written_out(pattern, inputs, place, torch.float64, backward) for place in places]
        self.usual = [written_out(pattern, inputs, place, inputs.query.dtype, backward) for place in places]

    def check(self, results: Mapping[str, torch.Tensor]) -> check.Check:
        found = []
        for name, tensor in results.items():
            if not bool(torch.isfinite(tensor).all()):
                return check.Check((), f"{name}: expected finite values everywhere, got NaN or infinity")
        for number, place in enumerate(self.places):
            parts = Results()
            for name, tensor in results.items():
                setattr(parts, name, tensor[place][None, None].detach())
            judged = judge(parts, self.exact[number], self.usual[number])
            found += [dataclasses.replace(one, name=f"{one.name}[{place[0]},{place[1]}]") for one in judged]
        return check.Check(tuple(found))


def measure(plan: Plan, stopwatch: Stopwatch, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Checks and times every provider on every pattern, in each direction of ``plan``."""
    from torch.nn.attention.flex_attention import create_block_mask

    from .suite import release

    row = plan.flex_row
    inputs = make_inputs(row, plan.device, plan.seed)
    records = []
    for name, make in PATTERNS.items():
        pattern = make(row, plan.device)
        mask = None
        if pattern.mask_mod is not None:
            mask = create_block_mask(pattern.mask_mod, None, None, row.length, row.length, plan.device, _BLOCK)
        places = [(0, 0), (row.batch - 1, row.heads - 1)]
        reference = _Reference(pattern, inputs, places, BACKWARD in plan.directions)
        for direction in (one for one in DIRECTIONS if one in plan.directions):
            records += _measure_direction(name, pattern, mask, direction, row, inputs, reference, plan, stopwatch, log)
            release(plan.device)
        del reference
        release(plan.device)
    return records


def _measure_direction(
    name: str, pattern: Pattern, mask: Any, direction: str, row: Row, inputs: Inputs, reference: _Reference, plan: Plan,
    stopwatch: Stopwatch, log: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    import torch_bwattn

    density = density_of(mask)
    records: dict[str, dict[str, Any]] = {}
    contenders: dict[str, Contender] = {}
    for table in pattern.learned:  # FLASH takes none that needs a gradient, and a forward needs none
        table.requires_grad_(direction == BACKWARD)
    for provider in _PROVIDERS:
        record = records[provider] = {
            "provider": provider, "status": document.OK, "pattern": name, "direction": direction, "shape": row.shape,
            "dtype": row.dtype, "density": density,
        }  # fmt: skip
        try:
            with undonated():
                prepare = _prepare_forward if direction == FORWARD else _prepare_backward
                torch_bwattn.reset_call_counts()
                work, results = prepare(_opened(provider, pattern, mask), inputs, pattern)
                record["backend"] = "+".join(torch_bwattn.call_counts()) or "pytorch"
                verdict = reference.check(results)
        except Exception as error:  # a peer may not take the pattern
            record.update(status=document.FAILED, reason=describe_failure(error))
            continue
        record["check"] = verdict.as_record()
        if verdict.ok:
            contenders[provider] = Contender(work, undonated)
        else:
            record.update(status=document.WRONG, reason=verdict.reason)
    flops = row.flops(direction) * density
    for provider, timing in time_interleaved(contenders, stopwatch, plan.budget).items():
        if isinstance(timing, Timing):
            records[provider].update(dataclasses.asdict(timing), tflops=flops / timing.ms * 1e-9)
        else:
            records[provider].update(status=document.FAILED, reason=timing)
    for provider, record in records.items():
        ok = record["status"] == document.OK
        figures = f"{record['ms']:8.3f} ms {record['tflops']:6.1f} TFLOP/s" if ok else record["reason"]
        log(f"flex {name:<14} {direction:<8} {provider:<16} {figures}")
    return list(records.values())


def _prepare_forward(
    attention: Attention, inputs: Inputs, pattern: Pattern
) -> tuple[Callable[[], object], dict[str, torch.Tensor]]:
    def work() -> torch.Tensor:
        with torch.no_grad():
            return attention(*inputs.qkv)

    return work, {"out": work()}


def _prepare_backward(
    attention: Attention, inputs: Inputs, pattern: Pattern
) -> tuple[Callable[[], object], dict[str, torch.Tensor]]:
    leaves = inputs.with_grad()
    out = attention(*leaves.qkv)

    def work() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (*leaves.qkv, *pattern.learned), leaves.grad_out, retain_graph=True)

    return work, dict(zip(("dq", "dk", "dv"), work(), strict=False))

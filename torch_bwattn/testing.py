"""The accuracy rule, and the references that it compares with.

Every test, benchmark, tuner and self-check of this package judges a result by one rule, :func:`accuracy`::

    max|out - ref| <= factor * max|pt - ref| + floor + rounding

``ref`` is PyTorch's math path in fp64 (:func:`oracle`), ``pt`` is PyTorch's math path in the input's own precision
(:func:`pt_reference`), ``factor`` is 2 for outputs and 3 for gradients, and
``floor = 2 * max|(ref + 0.3 - 0.3) - ref|`` in the precision of the result.
Both references are the math path's formula, written out, where a soft cap or a sink goes beyond that path.

``rounding`` is zero unless the caller passes a figure. :func:`judge` passes the one that :func:`oracle` computes where
a score matrix has at most 2**24 elements: the first-order size of the roundings that a fused attention makes (see
:func:`_rounding`), about as large as the rest of the bound. ``max|pt - ref|`` alone does not say what such an algorithm
can reach: over a handful of elements it can be zero by luck or by structure. With one visible key, for example, ``pt``
has ``dQ == 0`` exactly, while every algorithm that forms ``dS = P * (dP - rowsum(O * dO))`` subtracts two sums taken
in different orders. PyTorch's own fused CPU attention breaks the bare rule on two fifths of the fp32 problems with one
to three keys, and on one in fifty with a thousand.

The LSE of fp16 and bf16 inputs is allowed a quarter of their unit roundoff besides: its error is a relative error of P,
which is held in that precision itself.

Nothing here needs hypothesis or pytest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

__all__ = [
    "GRADIENT_FACTOR",
    "OUTPUT_FACTOR",
    "Accuracy",
    "Results",
    "accuracy",
    "check_accuracy",
    "judge",
    "oracle",
    "pt_reference",
]

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0

_ROUNDING_MAX_SCORES = 1 << 24
_SWAMPED = 1e6
_LSE_ITEMSIZE = 4
_CHUNK_BYTES = 1 << 28
_RESULT_NAMES = ("out", "lse", "dq", "dk", "dv", "dmask", "dsink")


@dataclass(frozen=True)
class Accuracy:
    """What :func:`accuracy` found: the figures of the rule, and whether the result passes.

    Attributes:
        name: which result this is (``out``, ``dq``, ...).
        error: ``max|out - ref|`` over the positions that are finite in both.
        pt_error: ``max|pt - ref|`` over the positions that are finite in both.
        floor: ``2 * max|(ref + 0.3 - 0.3) - ref|`` in the precision of ``out``.
        rounding: the slack of small problems (see the module's text); 0 for others.
        factor: how many times the error of ``pt`` is allowed.
        worst: index of the largest error.
        mismatch: what is wrong besides the size of the error (shape, dtype, NaN or infinity); empty if nothing is.
    """

    name: str
    error: float
    pt_error: float
    floor: float
    rounding: float
    factor: float
    worst: tuple[int, ...] = ()
    mismatch: str = ""

    @property
    def bound(self) -> float:
        """The largest error that passes."""
        return self.factor * self.pt_error + self.floor + self.rounding

    @property
    def passed(self) -> bool:
        """True if the error is within the bound and nothing else differs."""
        return not self.mismatch and self.error <= self.bound

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        text = (
            f"{self.name}: {verdict}: max|out - ref| {self.error:.3e} at {list(self.worst)}, allowed {self.bound:.3e}"
            f" = {self.factor:g} * max|pt - ref| {self.pt_error:.3e} + floor {self.floor:.3e}"
        )
        if self.rounding:
            text += f" + rounding {self.rounding:.3e}"
        return f"{text}; {self.mismatch}" if self.mismatch else text

    def check(self) -> Accuracy:
        """Returns itself if the result passes.

        Raises:
            AssertionError: the result does not pass; the message holds the figures.
        """
        if not self.passed:
            raise AssertionError(str(self))
        return self


def accuracy(
    out: torch.Tensor,
    ref: torch.Tensor,
    pt: torch.Tensor,
    *,
    factor: float = OUTPUT_FACTOR,
    name: str = "out",
    rounding: float = 0.0,
) -> Accuracy:
    """Measures a result against the accuracy rule, without raising.

    NaN and infinities must stand at the same positions as in ``ref``; the rule judges the other positions.

    Args:
        out: the result, of any floating dtype and device.
        ref: the reference in fp64, of the same shape.
        pt: PyTorch's math path in the precision of the inputs, of the same shape.
        factor: 2 for outputs and the LSE, 3 for gradients.
        name: what to call the result in messages.
        rounding: slack for small problems, from :attr:`Results.rounding` of the reference.

    Returns:
        The figures and the verdict. This copies to the host, hence waits for the device.
    """
    if out.shape != ref.shape or pt.shape != ref.shape:
        mismatch = f"shapes differ: out {list(out.shape)}, ref {list(ref.shape)}, pt {list(pt.shape)}"
        return Accuracy(name, math.inf, 0.0, 0.0, rounding, factor, (), mismatch)
    if ref.numel() == 0:
        return Accuracy(name, 0.0, 0.0, 0.0, rounding, factor)
    dtype = out.dtype
    # Moved before they are widened: on a GPU the fp64 copies of a large problem would not fit three times over.
    out, ref, pt = out.detach(), ref.detach().to(out.device, torch.float64), pt.detach().to(out.device)
    # A value beyond the range of the result's dtype is an infinity there, and must be one.
    low = ref.to(dtype)
    expected, wide, pt_wide = low.double(), out.double(), pt.double()
    mismatch = ""
    if math.isfinite(float(expected.sum() + wide.sum() + pt_wide.sum())):
        # As usual: the other way gives the same figures, by three times as many passes over the tensors.
        difference, pt_difference = (wide - ref).abs_(), (pt_wide - ref).abs_()
    else:
        finite = torch.isfinite(ref) & torch.isfinite(expected)
        same = torch.where(
            torch.isfinite(expected), torch.isfinite(wide), (wide == expected) | (wide.isnan() & expected.isnan())
        )
        difference = torch.where(finite & torch.isfinite(wide), wide - ref, 0.0).abs()
        pt_difference = torch.where(finite & torch.isfinite(pt_wide), pt_wide - ref, 0.0).abs()
        low = torch.where(finite, ref, 0.0).to(dtype)
        if not bool(same.all()):
            bad = ~same
            first = _unravel(int(bad.flatten().to(torch.uint8).argmax()), bad.shape)
            mismatch = (
                f"NaN or infinity differs from the reference at {int(bad.sum())} of {bad.numel()} positions, first at "
                f"{list(first)}: out {wide[first].item()}, ref {ref[first].item()}"
            )
    worst, pt_error = _unravel(int(difference.argmax()), difference.shape), pt_difference.amax()
    floor = 2 * ((low + 0.3) - 0.3 - low).double().abs().amax()
    return Accuracy(
        name, float(difference.amax()), float(pt_error), float(floor), float(rounding), factor, worst, mismatch
    )


def check_accuracy(
    out: torch.Tensor,
    ref: torch.Tensor,
    pt: torch.Tensor,
    *,
    factor: float = OUTPUT_FACTOR,
    name: str = "out",
    rounding: float = 0.0,
) -> Accuracy:
    """Like :func:`accuracy`, but raises if the result does not pass.

    Raises:
        AssertionError: the result does not pass; the message holds the figures.
    """
    return accuracy(out, ref, pt, factor=factor, name=name, rounding=rounding).check()


def _unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    position = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        position.append(rest)
    return tuple(reversed(position))


@dataclass
class Results:
    """What one attention call gives: outputs, and the gradients that were asked for.

    Attributes:
        out: the output, ``[..., Sq, Dv]``.
        lse: natural-log log-sum-exp of the scores before dropout, ``[..., Sq]``; ``-inf`` where no key is visible.
        dq, dk, dv: gradients of query, key and value, in their shapes.
        dmask: gradient of an additive mask, in its shape.
        dsink: gradient of the sink, in its shape.
        rounding: slack by result name, filled by :func:`oracle` for small problems.
    """

    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    dmask: torch.Tensor | None = None
    dsink: torch.Tensor | None = None
    rounding: dict[str, float] = field(default_factory=dict)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the names and tensors of the results that are present."""
        for name in _RESULT_NAMES:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor


def judge(results: Results, reference: Results, pt: Results) -> list[Accuracy]:
    """Applies the accuracy rule to every result that is present, with factor 2 for out and LSE and 3 for gradients.

    Args:
        results: what the code under test gave.
        reference: what :func:`oracle` gave for the same call.
        pt: what :func:`pt_reference` gave for the same call.

    Returns:
        One :class:`Accuracy` a result, none of them checked; use ``.check()`` or ``.passed``.

    Raises:
        ValueError: a result is present that the references lack.
    """
    verdicts = []
    for name, tensor in results.items():
        ref, low = getattr(reference, name), getattr(pt, name)
        if ref is None or low is None:
            raise ValueError(f"results: expected only what both references hold, but {name} is missing there")
        factor = OUTPUT_FACTOR if name in ("out", "lse") else GRADIENT_FACTOR
        rounding = reference.rounding.get(name, 0.0)
        verdicts.append(accuracy(tensor, ref, low, factor=factor, name=name, rounding=rounding))
    return verdicts


def oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: str = "top_left",
    window_size: Sequence[int] | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    keep_mask: torch.Tensor | None = None,
    grad_out: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
    needs_mask_grad: bool = False,
    needs_sink_grad: bool = False,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Results:
    """Attention by PyTorch's math path in fp64, with gradients, for any shapes that broadcast.

    Large problems are computed in chunks of batch, heads and query rows, so that no more than about ``chunk_bytes``
    are held besides the inputs and results.

    Args:
        query: ``[..., Hq, Sq, D]`` of 2 or more dimensions, any floating dtype.
        key: ``[..., Hkv, Skv, D]``.
        value: ``[..., Hkv, Skv, Dv]``.
        attn_mask: bool (True keeps) or additive, broadcastable to ``[..., Hq, Sq, Skv]``.
        dropout_p: dropout probability; needs ``keep_mask`` unless it is 0 or 1.
        is_causal: hide the keys behind the diagonal.
        scale: None means ``1 / sqrt(D)``.
        enable_gqa: key and value heads serve ``Hq / Hkv`` query heads each.
        causal_alignment: ``"top_left"`` (key j is visible to query i when ``j <= i``) or ``"bottom_right"``
            (``j <= i + Skv - Sq``).
        window_size: ``(left, right)``, -1 for no limit: key j is visible to query i when
            ``i + offset - left <= j <= i + offset + right``, offset 0 or ``Skv - Sq`` by ``causal_alignment``.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask.
        sink: ``[Hq]``, one more score for each row of a head, without a value.
        keep_mask: bool ``[..., Hq, Sq, Skv]``, the probabilities that dropout keeps.
        grad_out: gradient of the output. Gradients are computed if this or ``grad_lse`` is given.
        grad_lse: gradient of the LSE.
        needs_mask_grad: compute the gradient of an additive ``attn_mask`` too.
        needs_sink_grad: compute the gradient of ``sink`` too.
        chunk_bytes: how much memory a chunk may take.

    Returns:
        fp64 results in the shapes of the call.
    """
    call = _Call(
        dropout_p, is_causal, scale, enable_gqa, causal_alignment, torch.float64, torch.float64,
        None if window_size is None else (window_size[0], window_size[1]), softcap,
    )  # fmt: skip
    tensors = [tensor.detach().double() for tensor in (query, key, value)]
    mask = None if attn_mask is None else attn_mask.detach()
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    wide_sink = None if sink is None else sink.detach().double()
    needs = needs_mask_grad, needs_sink_grad
    results = _chunked(call, tensors, mask, wide_sink, keep_mask, grad_out, grad_lse, needs, chunk_bytes)
    plane = query.shape[-2] * key.shape[-2]
    if 0 < plane <= _ROUNDING_MAX_SCORES:
        results.rounding = _rounding(
            call, query.dtype, tensors, mask, wide_sink, keep_mask, grad_out, grad_lse, results
        )
        if sink is not None and results.dsink is not None and results.dsink.numel():
            results.rounding["dsink"] += float(torch.finfo(sink.dtype).eps / 2 * results.dsink.abs().amax())
    if query.dtype.itemsize < _LSE_ITEMSIZE:
        # An error of the LSE is a relative error of P, which is held in the inputs' precision itself.
        slack = torch.finfo(query.dtype).eps / 8
        results.rounding["lse"] = max(results.rounding.get("lse", 0.0), slack)
    return results


def pt_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: str = "top_left",
    window_size: Sequence[int] | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    keep_mask: torch.Tensor | None = None,
    grad_out: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
    needs_mask_grad: bool = False,
    needs_sink_grad: bool = False,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Results:
    """PyTorch's math path in the precision of the inputs: the ``pt`` of the accuracy rule.

    PyTorch's own setting decides what "math in bf16" means: unless
    ``torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)`` was called, the math path computes fp16 and bf16
    inputs in fp32 and rounds at the end. The LSE is computed in fp32 (fp64 for fp64 inputs).

    Takes the arguments of :func:`oracle`.

    Returns:
        Results in the dtypes and shapes of the inputs.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    call = _Call(
        dropout_p, is_causal, scale, enable_gqa, causal_alignment, query.dtype, wide,
        None if window_size is None else (window_size[0], window_size[1]), softcap,
    )  # fmt: skip
    tensors = [tensor.detach() for tensor in (query, key, value)]
    mask = None if attn_mask is None else attn_mask.detach()
    own_sink = None if sink is None else sink.detach()
    needs = needs_mask_grad, needs_sink_grad
    return _chunked(call, tensors, mask, own_sink, keep_mask, grad_out, grad_lse, needs, chunk_bytes)


@dataclass(frozen=True)
class _Call:
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    causal_alignment: str
    dtype: torch.dtype
    lse_dtype: torch.dtype
    window: tuple[int, int] | None = None
    softcap: float | None = None

    @property
    def bounded(self) -> bool:
        """Whether positions alone hide keys."""
        return self.is_causal or self.window is not None

    def true_scale(self, width: int) -> float:
        if self.scale is not None:
            return float(self.scale)
        return 1.0 / math.sqrt(width) if width else math.inf


def _batch_shape(call: _Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    """The leading dimensions of the output."""
    shapes = [tuple(tensor.shape[:-2]) for tensor in (query, key, value)]
    if call.enable_gqa:
        shapes = [shapes[0], *(shape[:-1] + shapes[0][-1:] for shape in shapes[1:])]
    return tuple(torch.broadcast_shapes(*shapes))


def _visible(call: _Call, rows: slice, rows_total: int, columns: int, device: torch.device) -> torch.Tensor:
    """The causal rule and the window as a bool mask for some of the query rows."""
    offset = columns - rows_total if call.causal_alignment == "bottom_right" else 0
    row = torch.arange(rows.start, rows.stop, device=device).unsqueeze(-1) + offset
    column = torch.arange(columns, device=device)
    visible = torch.ones_like(row == column)
    if call.is_causal:
        visible &= column <= row
    left, right = call.window or (-1, -1)
    if left >= 0:
        visible &= column >= row - left
    if right >= 0:
        visible &= column <= row + right
    return visible


def _shown(
    call: _Call, mask: torch.Tensor | None, rows: slice, rows_total: int, columns: int, device: torch.device
) -> torch.Tensor | None:
    """The mask, for some of the query rows, with what positions hide: bool or additive, None where all is visible."""
    if not call.bounded:
        return mask
    visible = _visible(call, rows, rows_total, columns, device)
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)


def _math(
    call: _Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    keep: torch.Tensor | None,
) -> torch.Tensor:
    if call.softcap is not None or sink is not None:
        return _written_out(call, query, key, value, mask, sink, keep)
    # The function behind sdpa_kernel(SDPBackend.MATH), called itself: the context manager sets flags of the whole
    # process, F.scaled_dot_product_attention may be patched, and only this takes a given dropout mask.
    # test_testing.py checks that the two agree bitwise.
    if call.dropout_p >= 1.0:
        keep = torch.zeros((), dtype=torch.bool, device=query.device)
    if mask is not None and mask.dtype == torch.bool:  # F does this before it calls the math path
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -math.inf)
    p = call.dropout_p if call.dropout_p < 1.0 else 0.5  # 1 / (1 - p) is infinite, and nothing is kept anyway
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, mask, p if keep is not None else 0.0, False, keep, scale=call.scale,
        enable_gqa=call.enable_gqa,
    )  # fmt: skip
    return out


def _written_out(
    call: _Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    keep: torch.Tensor | None,
) -> torch.Tensor:
    """The formula itself, in the precision of the LSE, rounded once at the end: for what PyTorch's math path lacks."""
    p, _ = _softmax(_scores(call, query, key, mask), sink)
    if call.dropout_p >= 1.0:
        p = p * 0.0
    elif keep is not None and call.dropout_p > 0.0:
        p = p * keep / (1.0 - call.dropout_p)
    (value,) = _repeat_heads(call, query, value)
    return (p @ value.to(p.dtype)).to(call.dtype)


def _repeat_heads(call: _Call, query: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    if not call.enable_gqa:
        return list(tensors)
    heads = query.shape[-3]
    return [
        tensor.repeat_interleave(heads // tensor.shape[-3], dim=-3) if tensor.shape[-3] != heads else tensor
        for tensor in tensors
    ]


def _scores(call: _Call, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Scores in the precision of the LSE; the scale is applied to the query, so that D = 0 gives 0, as in PyTorch."""
    (key,) = _repeat_heads(call, query, key)
    scores = (query.to(call.lse_dtype) * call.true_scale(query.shape[-1])) @ key.to(call.lse_dtype).mT
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask.to(call.lse_dtype)


def _softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of each row, 0 where it sees nothing, and its log-sum-exp; the sink is in the denominators alone.

    torch.logsumexp has ``exp(scores - lse)`` for its gradient: NaN where no key is visible, and 1 instead of 1/n in a
    row of finfo.min, whose LSE is too large to hold the log of n.
    """
    columns = scores.shape[-1]
    if sink is not None:
        # [H] beside [..., H, rows, keys], or [1] beside [rows, keys].
        sink = sink.to(scores.dtype).unsqueeze(-1)
        rows = torch.broadcast_shapes(scores.shape[:-1], sink.shape[scores.dim() == 2 :])
        sink = (sink if scores.dim() > 2 else sink.squeeze(0)).expand(rows)
        scores = torch.cat((scores.expand(*rows, columns), sink.unsqueeze(-1)), -1)
    if scores.shape[-1] == 0:
        return scores, scores.sum(-1) - math.inf
    highest = scores.detach().amax(-1, keepdim=True)
    dead = highest == -math.inf
    exponentials = torch.exp(scores - highest.masked_fill(dead, 0.0))
    total = exponentials.masked_fill(dead, 1.0).sum(-1, keepdim=True)
    return (exponentials / total)[..., :columns], (highest + torch.log(total)).squeeze(-1)


def _chunked(
    call: _Call,
    tensors: list[torch.Tensor],
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    keep: torch.Tensor | None,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    needs: tuple[bool, bool],
    chunk_bytes: int,
) -> Results:
    if 0.0 < call.dropout_p < 1.0 and keep is None:
        raise ValueError(f"keep_mask: expected a bool mask with dropout_p {call.dropout_p}, but got None")
    query, key, value = tensors
    batch = _batch_shape(call, query, key, value)
    rows, columns = query.shape[-2], key.shape[-2]
    with_grad = grad_out is not None or grad_lse is not None
    inputs = dict(zip(("dq", "dk", "dv"), tensors, strict=True))
    if mask is not None and mask.dtype != torch.bool and needs[0]:
        inputs["dmask"] = mask
    if sink is not None and needs[1]:
        inputs["dsink"] = sink
    out = query.new_zeros(*batch, rows, value.shape[-1])
    lse = query.new_zeros(*batch, rows, dtype=call.lse_dtype)
    # About eight score-sized matrices live at once in a forward and backward of the math path.
    limit = max(1, chunk_bytes // (8 * call.lse_dtype.itemsize))
    group = query.shape[-3] // key.shape[-3] if call.enable_gqa and key.shape[-3] else 1
    chunks = list(_chunks(batch, rows, columns, limit, group))
    # Chunks are summed in the wide precision and rounded once, as one large product would be.
    wide = call.lse_dtype if len(chunks) > 1 else None
    sums = {n: torch.zeros(t.shape, dtype=wide or t.dtype, device=t.device) for n, t in inputs.items() if with_grad}
    for index in chunks:
        lead, row = index[:-1], index[-1]
        kv_lead = _kv_heads(lead, key, group) if call.enable_gqa else lead
        whole = slice(0, max(columns, query.shape[-1], value.shape[-1]))
        regions = {"dq": _region(query, (*lead, row, whole))}
        regions |= {name: _region(t, (*kv_lead, whole, whole)) for name, t in (("dk", key), ("dv", value))}
        if mask is not None:
            regions["dmask"] = _region(mask, (*lead, row, whole))
        regions["dsink"] = _heads(lead)
        leaves = {name: t[regions[name]].detach().requires_grad_(with_grad) for name, t in inputs.items()}
        masked = leaves.get("dmask", None if mask is None else mask[regions.get("dmask", ())])
        sunk = leaves.get("dsink", None if sink is None else sink[regions["dsink"]])
        kept = None if keep is None else keep[_region(keep, (*lead, row, whole))]
        q, k, v = leaves["dq"], leaves["dk"], leaves["dv"]
        with torch.enable_grad():
            shown = _shown(call, masked, row, rows, columns, query.device)
            part = _math(call, q, k, v, shown, sunk, kept).expand(*out[index].shape)
            # Where the value alone has a batch, the LSE is the same for all of it.
            part_lse = _softmax(_scores(call, q, k, shown), sunk)[1].expand(part.shape[:-1])
        out[index] = part.detach()
        lse[index] = part_lse.detach()
        pairs = [
            (result, grad[index].to(result.dtype))
            for result, grad in ((part, grad_out), (part_lse, grad_lse))
            if grad is not None and result.numel()
        ]
        if pairs:
            results, cotangents = zip(*pairs, strict=True)
            grads = torch.autograd.grad(results, list(leaves.values()), cotangents, allow_unused=True)
            for name, grad in zip(leaves, grads, strict=True):
                if grad is not None:
                    sums[name][regions[name]] += grad
    found = Results(out, lse)
    for name, total in sums.items():
        setattr(found, name, total.to(inputs[name].dtype))
    return found


def _heads(lead: tuple[slice, ...]) -> tuple[slice, ...]:
    """The part of a sink that belongs to a chunk: its heads, or all where the call has no head dimension."""
    return lead[-1:] or (slice(None),)


def _chunks(batch: tuple[int, ...], rows: int, columns: int, limit: int, group: int) -> Iterator[tuple[slice, ...]]:
    """Cuts the score matrix into pieces of about ``limit`` elements: slices of each batch dimension and of the rows."""
    extents = (*batch, rows)

    def cut(dim: int) -> Iterator[tuple[slice, ...]]:
        if dim == len(extents):
            yield ()
            return
        each = math.prod(extents[dim + 1 :]) * columns
        step = max(1, limit // each if each else extents[dim])
        if group > 1 and dim == len(batch) - 1 and step < extents[dim]:
            step = step // group * group or 1  # whole groups of query heads, or single heads
        for start in range(0, extents[dim], step):
            here = slice(start, min(start + step, extents[dim]))
            if step > 1 or each <= limit:
                yield (here, *(slice(0, size) for size in extents[dim + 1 :]))
            else:
                yield from ((here, *rest) for rest in cut(dim + 1))

    if math.prod(extents) == 0:
        yield tuple(slice(0, size) for size in extents)
    else:
        yield from cut(0)


def _kv_heads(lead: tuple[slice, ...], key: torch.Tensor, group: int) -> tuple[slice, ...]:
    head = lead[-1]
    return (*lead[:-1], slice(head.start // group, min(-(-head.stop // group), key.shape[-3])))


def _region(tensor: torch.Tensor, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """The part of a tensor that broadcasts to ``index``: aligned at the right, dimensions of size 1 kept whole."""
    own = index[len(index) - tensor.dim() :] if tensor.dim() else ()
    return tuple(
        slice(0, 1) if size == 1 else part for size, part in zip(tensor.shape, own, strict=True)
    )  # fmt: skip


def _rounding(
    call: _Call,
    dtype: torch.dtype,
    tensors: list[torch.Tensor],
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    keep: torch.Tensor | None,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    results: Results,
) -> dict[str, float]:
    """First-order size of the roundings of a fused attention, by result.

    The model has two unit roundoffs: ``u`` of the input dtype, for P and dS cast before their matrix products and for
    O as stored (for what is less than the dtype's smallest normal number, of that number: a large sink leaves P and O
    that fp16 has in few digits), and ``a`` of the accumulator, with ``a(n) = a * (1 + sqrt(n) / 2)`` for a sum of n
    terms (where the terms are all equal, so are their roundings, and ``n / 2`` stands for ``sqrt(n) / 2``). Independent
    roundings add in squares, those shared by a row and those of equal terms as they are:

        score       e_s    = 2 * a * |s| + a(D) * scale * ||q o k||
        LSE         e_l    = a * (1 + 2 * |lse|) + ||P o e_s||
        P           rho    = u + e_s + 4 * a              (4 units: a vectorised exp), and e_l for the whole row
        O           e_o    = ||P o rho o V|| + a(Skv) * (||P o V|| + |O|) + (u + e_l) * |O|
        delta       e_d    = ||e_o o dO|| + a * (|delta| + |dlse|), for the whole row
        dS          e_ds   = |dS| * (u + rho) + a(Dv) * P * ||dO o V||, and P * e_d + |dS| * e_l for the whole row

    and a soft cap, with y the score before it, t = tanh(y / cap) and c' = 1 - t^2 its slope (the derivative of c' for y
    is -2 * t * c' / cap),

        score       e_y    = 2 * a * |y| + a(D) * scale * ||q o k||,    e_s = 6 * a * |s| + c' * e_y
        dQ, dK      from dS * c', with e_ds * c' + |dS| * e_c,          e_c = 8 * a * t^2 + 2 * |t| * c' * e_y / cap
        dsink       2 * ||p_sink o (e_d + |delta| * (e_l + 8 * a))|| over batch and rows; twice, because a sink in fp32
                    leaves neither the floor nor the error of pt to the rest of the bound

    and the gradients collect e_ds, through K for dQ and through Q for dK, and rho through dO for dV. Each result is
    rounded once more when it is stored. Over 10,000 drawn problems, PyTorch's fused CPU attention and an emulated bf16
    tensor-core kernel came to at most 0.8 of the bound this gives; tests/test_testing.py shows what still fails.
    """
    eps = torch.finfo(dtype).eps / 2
    # In fp64 the reference rounds as much as the result.
    acc = torch.finfo(dtype).eps if dtype == torch.float64 else torch.finfo(torch.float32).eps / 2
    query, key, value = tensors
    batch, rows, columns = _batch_shape(call, *tensors), query.shape[-2], key.shape[-2]
    group = query.shape[-3] // key.shape[-3] if call.enable_gqa and key.shape[-3] else 1
    whole = slice(0, max(columns, query.shape[-1], value.shape[-1]))
    targets = {name: tensor for name, tensor in results.items() if tensor.numel()}
    squares = {name: torch.zeros_like(tensor) for name, tensor in targets.items()}
    for index in _chunks(batch, rows, columns, _ROUNDING_MAX_SCORES, group):
        lead, row = index[:-1], index[-1]
        q_region = _region(query, (*lead, row, whole))
        kv_lead = _kv_heads(lead, key, group) if call.enable_gqa else lead
        regions = {name: _region(tensor, (*lead, row, whole)) for name, tensor in targets.items()}
        regions["lse"] = index
        regions["dsink"] = _heads(lead)
        for name, tensor in (("dk", key), ("dv", value)):
            regions[name] = _region(tensor, (*kv_lead, whole, whole))
        masked = None if mask is None else mask[_region(mask, (*lead, row, whole))]
        shown = _shown(call, masked, row, rows, columns, query.device)
        figures = _roundings(
            call,
            (eps, torch.finfo(dtype).smallest_normal, acc),
            [query[q_region], key[regions["dk"]], value[regions["dv"]]],
            shown,
            None if sink is None else sink[regions["dsink"]],
            None if keep is None else keep[_region(keep, (*lead, row, whole))],
            *(None if grad is None else grad[index] for grad in (grad_out, grad_lse)),
            with_gradients=results.dq is not None,
            sums_keys="dmask" in targets and targets["dmask"].shape[-1:] in ((1,), ()),
        )
        for name, square in squares.items():
            part = square[regions[name]]
            figure = figures[name].nan_to_num(0.0, 0.0, 0.0).square()
            if name in ("dk", "dv") and call.enable_gqa:
                figure = figure.unflatten(-3, (part.shape[-3], -1)).sum(-3)
            # What was broadcast is summed, so its squares are.
            figure = figure.expand(torch.broadcast_shapes(figure.shape, part.shape)).sum_to_size(part.shape)
            square[regions[name]] += figure
    rounding = {}
    for name, target in targets.items():
        unit = {"lse": acc, "dsink": 0.0}.get(name, eps)  # a sink's dtype is its own: the caller adds that
        stored = unit * target.nan_to_num(0.0, 0.0, 0.0).abs()
        rounding[name] = float((squares[name].sqrt() + stored).amax())
    return rounding


def _roundings(
    call: _Call,
    units: tuple[float, float, float],
    tensors: list[torch.Tensor],
    shown: torch.Tensor | None,
    sink: torch.Tensor | None,
    keep: torch.Tensor | None,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    *,
    with_gradients: bool,
    sums_keys: bool,
) -> dict[str, torch.Tensor]:
    """The figures of :func:`_rounding` for one chunk, by result, before they are summed over what was broadcast.

    With ``sums_keys`` (the mask is the same for every key) that of the mask's gradient is summed over keys already.
    """
    eps, normal, acc = units
    query, key, value = tensors
    scale = abs(call.true_scale(query.shape[-1])) if query.shape[-1] else 0.0
    scores = _scores(call, query, key, shown)
    lse = _softmax(scores, sink)[1].unsqueeze(-1)
    dead = lse == -math.inf
    p = torch.exp(scores - lse.masked_fill(dead, 0.0)).nan_to_num(0.0)
    wide_k, wide_v = _repeat_heads(call, query, key, value)

    def bounded(size: torch.Tensor) -> torch.Tensor:
        # A mask of finfo.min makes scores that swamp everything else alike in every precision: no rounding there.
        return torch.where(size.abs() < _SWAMPED, size, 0.0).abs()

    def norm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left.square() @ right.square()).sqrt()

    def alike(total: torch.Tensor, spread: torch.Tensor, count: int) -> torch.Tensor:
        """Whether all terms of a sum are equal, by Cauchy-Schwarz: then it is as large as its terms' norm allows."""
        return total > spread * (math.sqrt(count) * (1 - 1e-6))

    def sums(left: torch.Tensor, right: torch.Tensor, of_totals: float = 0.0) -> torch.Tensor:
        """The roundings of a matrix product's own sums, in proportion to their terms and ``of_totals`` of the sums."""
        count, spread, total = left.shape[-1], norm(left, right), (left @ right).abs()
        varied = (1 + math.sqrt(count) / 2) * (spread + of_totals * total)
        return acc * (varied + torch.where(alike(total, spread, count), count / 2 * total, 0.0))

    def collected(errors: torch.Tensor, through: torch.Tensor) -> torch.Tensor:
        """The size of what a matrix product makes of errors, as :func:`along` has it."""
        spread, total = norm(errors, through), (errors @ through).abs()
        return torch.where(alike(total, spread, errors.shape[-1]), total, spread)

    def along(errors: torch.Tensor, dim: int) -> torch.Tensor:
        """The size of a sum of errors: in squares, or where all terms are equal, and so round alike, as it is."""
        spread, total = errors.norm(dim=dim, keepdim=True), errors.sum(dim, keepdim=True).abs()
        return torch.where(alike(total, spread, errors.shape[dim]), total, spread)

    e_s = 2 * acc * bounded(scores) + scale * sums(query, wide_k.mT)
    slope, e_c = torch.ones_like(e_s), torch.zeros_like(e_s)
    if call.softcap is not None:
        raw = (query * call.true_scale(query.shape[-1])) @ wide_k.mT
        tanh = torch.tanh(raw / call.softcap)
        slope = 1.0 - tanh * tanh
        e_y = 2 * acc * raw.abs() + scale * sums(query, wide_k.mT)
        e_s = 6 * acc * call.softcap * tanh.abs() + slope * e_y
        e_c = 8 * acc * tanh * tanh + 2 * tanh.abs() * slope * e_y / call.softcap
    e_l = acc * (1 + 2 * bounded(lse)) + (p * e_s).norm(dim=-1, keepdim=True)
    positive = p.clamp_min(torch.finfo(torch.float64).tiny)
    rho = eps * (normal / positive).clamp_min(1.0) + e_s + 4 * acc
    dropped = p
    if call.dropout_p >= 1.0:
        dropped = p * 0.0
    elif keep is not None and call.dropout_p:
        dropped = p * keep / (1 - call.dropout_p)
    out = dropped @ wide_v
    e_o = collected(dropped * rho, wide_v) + sums(dropped, wide_v, 1.0) + e_l * out.abs()
    e_o += eps * torch.where(out == 0, 0.0, out.abs().clamp_min(normal))
    figures = {"out": e_o, "lse": e_l.masked_fill(dead, 0.0).squeeze(-1)}
    if not with_gradients:
        return figures
    do = torch.zeros_like(out) if grad_out is None else grad_out.double()
    dlse = torch.zeros_like(lse) if grad_lse is None else grad_lse.double().unsqueeze(-1)
    delta = (out * do).sum(-1, keepdim=True) - dlse
    ratio = torch.where(p > 0, dropped / positive, 0.0)
    ds = p * (ratio * (do @ wide_v.mT) - delta)
    e_d = along(e_o * do, -1) + acc * (delta.abs() + dlse.abs())
    own = ds.abs() * (eps + rho) + p * ratio * sums(do, wide_v.mT)
    shared = p * e_d + ds.abs() * e_l
    by_row = e_d * ((p * slope) @ wide_k).abs() + e_l * ((ds * slope) @ wide_k).abs()
    figures["dmask"] = own + shared
    if sums_keys:
        by_mask = e_d * p.sum(-1, keepdim=True) + e_l * ds.sum(-1, keepdim=True).abs()
        figures["dmask"] = own.norm(dim=-1, keepdim=True) + by_mask
    own, shared, ds = own * slope + ds.abs() * e_c, shared * slope, ds * slope
    figures["dq"] = scale * (collected(own, wide_k) + sums(ds, wide_k, 1.0) + by_row)
    figures["dk"] = scale * (collected((own + shared).mT, query) + sums(ds.mT, query, 1.0))
    figures["dv"] = collected((dropped * (rho + e_l)).mT, do) + sums(dropped.mT, do, 1.0)
    if sink is not None:
        p_sink = (1.0 - p.sum(-1, keepdim=True)).masked_fill(dead, 0.0)
        figures["dsink"] = 2 * along(p_sink * (e_d + delta.abs() * (e_l + 8 * acc)), -2).squeeze(-1).squeeze(-1)
    return figures

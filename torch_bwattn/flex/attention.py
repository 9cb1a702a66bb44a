"""``flex_attention``: PyTorch's function of that name, as one operator, forward and backward, on every device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

from ..api import explain
from ..layout import lse_dtype
from ..mods.program import Program, Ref, hoisted, run
from ..mods.recognize import Features, recognized
from ..mods.trace import Traced, traced
from ..ops.composite import autocast
from ..ops.flex import inputs, route, way
from ..problem import DTYPES

_NO_BLOCKS = torch_flex._LARGE_SPARSE_BLOCK_SIZE  # PyTorch's block mask that stands for none has such blocks

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with modified scores, ``softmax(score_mod(scale * query @ key^T)) @ value``, and with a block mask.

    The signature and the values of ``torch.nn.attention.flex_attention.flex_attention``. In eager mode and inside
    ``torch.compile`` it is one operator, which never holds all scores, on the CPU too, and in both directions.

    Args:
        query: ``[B, Hq, L, D]``, bfloat16, float16, float32 or float64.
        key: ``[B, Hkv, S, D]``, of the query's dtype; beside a block mask its batch may be 1.
        value: ``[B, Hkv, S, Dv]``; likewise.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, all tensors without dimensions: the score (float32,
            float64 for float64 operands) that takes its place. Positions are int32, as in PyTorch's compiled kernels.
            It may read other tensors; those of floating point get gradients.
        block_mask: Which scores count, as ``create_block_mask`` makes it, for these lengths. Its lists of blocks are
            kept to; its ``mask_mod`` decides in the blocks that are listed as partial.
        scale: Multiplies the scores before the mod; None means ``1 / sqrt(D)``.
        enable_gqa: ``Hq`` may be a multiple of ``Hkv``.
        return_lse: Return ``(out, lse)``.
        kernel_options: Options of PyTorch's kernels, of which this function reads none.
        return_aux: Return ``(out, AuxOutput)`` with what it asks for.

    Returns:
        ``out [B, Hq, L, Dv]`` in the query's dtype; ``lse`` and ``max_scores`` are ``[B, Hq, L]``, float32 (float64 for
        float64), natural logarithms; a row that sees nothing is 0, and -inf in both. Gradients flow through ``out`` and
        ``lse``.

    Raises:
        TypeError: An argument of another kind or dtype.
        ValueError: Shapes or devices that do not fit, a mod that is none (:class:`torch_bwattn.mods.trace.ModError`),
            or a block mask for other lengths or heads.
    """
    _check(query, key, value, enable_gqa, kernel_options, return_lse, return_aux)
    blocks = _blocks(query, key, block_mask)
    scale = 1.0 / math.sqrt(max(query.shape[3], 1)) if scale is None else _number(scale)
    with_max_scores = return_aux is not None and return_aux.max_scores
    if torch.compiler.is_dynamo_compiling():
        from .hop import flex_hop

        score = torch_flex._identity if score_mod is None else score_mod
        options = {"with_max_scores": with_max_scores}
        out, lse, most = flex_hop(query, key, value, score, (*blocks.fields, blocks.mask_mod), scale, options)
    else:
        score_traced = None if score_mod is None else traced(score_mod, "score_mod", lse_dtype(query.dtype))
        mask_traced = None if blocks.mask_mod is noop_mask else traced(blocks.mask_mod, "mask_mod")
        out, lse, most = call(query, key, value, score_traced, mask_traced, blocks.fields, scale, with_max_scores)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=most if with_max_scores else None)
    return (out, lse) if return_lse else out


def explain_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """Print what the mods of a call are recognised as, and which kernels it would run; runs and compiles no kernel.

    Takes the arguments of :func:`flex_attention` and raises what it raises. It looks at the lists of a block mask.

    Returns:
        The text that was printed.
    """
    _check(query, key, value, enable_gqa, None, return_lse=False, return_aux=None)
    blocks = _blocks(query, key, block_mask)
    scale = 1.0 / math.sqrt(max(query.shape[3], 1)) if scale is None else _number(scale)
    score = None if score_mod is None else traced(score_mod, "score_mod", lse_dtype(query.dtype))
    mask = None if blocks.mask_mod is noop_mask else traced(blocks.mask_mod, "mask_mod")
    mods = [_arguments(what, mod, query.device) for what, mod in (("score_mod", score), ("mask_mod", mask))]
    x = inputs(query, key, value, scale, (*mods[0], *mods[1], *_lists(blocks.fields)))
    programs = tuple(None if mod is None else mod.program for mod in (score, mask))
    found = route(programs[0], programs[1], x.blocks, query.shape[2], key.shape[2])
    if isinstance(found, str):
        wanted = [tensor.requires_grad for tensor in mods[0][1]]
        ways = [(direction, way(direction, x, wanted)) for direction in ("forward", "backward")]
        text = "\n".join([f"{found}:", *(f"  {direction}: {one}" for direction, one in ways)])
    else:
        text = f"recognised as {recognized(programs[0], programs[1])}"
    print(f"bwattn.flex_attention: mods {text}")
    if isinstance(found, str):
        return text
    return f"{text}\n{explain(query, *x.of_batch(), scale=scale, enable_gqa=enable_gqa, **found)}"


class Blocks(NamedTuple):
    """A block mask's parts: what is data, and its mod."""

    fields: tuple[Any, ...]
    """() for no lists, else queries and keys of a block, four lists of rows, and none or four of columns, or None."""
    mask_mod: Callable[..., Any]


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Traced | None,
    mask_mod: Traced | None,
    blocks: Sequence[Any],
    scale: float,
    with_max_scores: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator's call for traced mods, its operands cast as autocast says."""
    query, key, value = autocast(query, key, value)  # type: ignore[assignment]
    arguments: list[Any] = []
    for what, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        arguments += _arguments(what, mod, query.device)
    lists, sizes = _lists(blocks)
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.bwattn.flex_forward(
        query, key, value, scale, *arguments, lists, sizes, with_max_scores
    )
    return result


def _lists(fields: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
    """The operators' lists, and their sizes: of a block, and how many lists are of rows."""
    if not fields:
        return [], []
    of_rows, of_columns = ([one for one in some if one is not None] for some in (fields[2:6], fields[6:]))
    return [*of_rows, *of_columns], [*fields[:2], len(of_rows)]


def _arguments(what: str, mod: Traced | None, device: torch.device) -> list[Any]:
    """Text, captured tensors and integers of one mod."""
    if mod is None or _changes_nothing(mod.program):
        return [None, [], []]
    for place, tensor in enumerate(mod.captured):
        if tensor.device != device and (tensor.dim() or tensor.device.type != "cpu"):
            given = f"captured tensor {place}, {list(tensor.shape)} {tensor.dtype}, on {tensor.device}"
            raise ValueError(_expected(what, f"captured tensors on {device}", given))
    first, wanted, rest = hoisted(mod.program)
    captured = [tensor if tensor.dim() else tensor.to(device) for tensor in run(first, wanted, mod.captured)]
    return [rest.text, captured, list(mod.numbers)]


def _changes_nothing(program: Program) -> bool:
    return program.result == Ref("score") or recognized(None, program) == Features()


def _expected(argument: str, wanted: str, given: object) -> str:
    return f"flex_attention: {argument}: expected {wanted}, got {given}"


def _number(scale: object) -> float:
    if isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(scale, bool):
        return scale * 1.0  # type: ignore[operator, return-value]
    raise TypeError(_expected("scale", "a number or None", type(scale).__name__))


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    enable_gqa: bool,
    kernel_options: object,
    return_lse: bool,
    return_aux: AuxRequest | None,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(_expected(name, "a Tensor", type(tensor).__name__))
        if tensor.dim() != 4:
            raise ValueError(_expected(name, "4 dimensions", list(tensor.shape)))
        if tensor.dtype not in DTYPES or tensor.dtype != query.dtype:
            wanted = "bfloat16, float16, float32 or float64, the same for query, key and value"
            raise TypeError(_expected(name, wanted, tensor.dtype))
        if tensor.device != query.device:
            raise ValueError(_expected(name, f"a tensor on {query.device}, the query's", tensor.device))
    if query.shape[3] != key.shape[3]:
        raise ValueError(_expected("key", f"width {query.shape[3]}, the query's", key.shape[3]))
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(_expected("value", f"{list(key.shape[:3])}, the key's, before its width", list(value.shape)))
    heads, kv_heads = query.shape[1], key.shape[1]
    if not enable_gqa and heads != kv_heads:
        raise ValueError(_expected("key", f"{heads} heads, the query's (or enable_gqa=True)", kv_heads))
    if enable_gqa and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(_expected("key", f"heads that divide the query's {heads}", kv_heads))
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(_expected("kernel_options", "a dict or None", type(kernel_options).__name__))
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise TypeError(_expected("return_aux", "an AuxRequest or None", type(return_aux).__name__))
    if return_lse and return_aux is not None:
        raise ValueError(_expected("return_lse", "False beside return_aux (AuxRequest(lse=True) asks for it)", True))


def _blocks(query: Tensor, key: Tensor, block_mask: BlockMask | None) -> Blocks:
    """A block mask's parts, checked against the operands."""
    if block_mask is None:
        if query.shape[0] != key.shape[0]:
            wanted = f"batch {query.shape[0]}, the query's (1 for all beside a block mask)"
            raise ValueError(_expected("key", wanted, key.shape[0]))
        return Blocks((), noop_mask)
    if not isinstance(block_mask, BlockMask):
        raise TypeError(_expected("block_mask", "a BlockMask or None", type(block_mask).__name__))
    mask_mod = block_mask.mask_mod
    if mask_mod is torch_flex._sliced_mask_mod_error:
        raise RuntimeError(_expected("block_mask", "one with a mask_mod", "a slice of another, which has none"))
    mask_mod = noop_mask if mask_mod is None else mask_mod
    if key.shape[0] not in (query.shape[0], 1):
        raise ValueError(_expected("key", f"batch {query.shape[0]}, the query's, or 1", key.shape[0]))
    if block_mask.BLOCK_SIZE[0] == block_mask.BLOCK_SIZE[1] == _NO_BLOCKS:
        return Blocks((), mask_mod)
    lengths, wanted_lengths = tuple(block_mask.shape[-2:]), (query.shape[2], key.shape[2])
    if lengths != wanted_lengths:
        raise ValueError(
            _expected("block_mask", f"one for lengths {wanted_lengths}, the query's and key's", f"one for {lengths}")
        )
    counts, index = block_mask.kv_num_blocks, block_mask.kv_indices
    for one in (counts, index, block_mask.full_kv_num_blocks, block_mask.full_kv_indices):
        if one is not None and one.device != query.device:
            raise ValueError(_expected("block_mask", f"lists on {query.device}, the query's device", one.device))
    sizes = block_mask.BLOCK_SIZE
    rows = -(-query.shape[2] // sizes[0])
    if counts.shape[-1] < rows or index.shape[-2] < rows:
        given_rows = min(counts.shape[-1], index.shape[-2])
        raise ValueError(_expected("block_mask", f"lists of {rows} rows of blocks or more", given_rows))
    given = (1, 1, *counts.shape)[-3:-1]
    for name, size, most in zip(("batch", "heads"), given, query.shape[:2], strict=True):
        if size not in (1, most):
            raise ValueError(_expected("block_mask", f"{name} 1 or {most}, the query's", size))
    lists = _with_all_dims(counts, index, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return Blocks((*sizes, *lists, *_columns(block_mask, rows, -(-key.shape[2] // sizes[1]))), mask_mod)


def _columns(block_mask: BlockMask, rows: int, columns: int) -> list[Tensor | None]:
    """What the mask lists of its columns, if it does, of all of these and of no more rows than there are."""
    counts, index = block_mask.q_num_blocks, block_mask.q_indices
    full_counts, full_index = block_mask.full_q_num_blocks, block_mask.full_q_indices
    if counts is None or index is None or (block_mask.full_kv_num_blocks is None) != (full_counts is None):
        return []
    tensors = [one for one in (counts, index, full_counts, full_index) if one is not None]
    if any(one.device != block_mask.kv_indices.device for one in tensors):
        return []
    if counts.shape[-1] < columns or index.shape[-1] != rows:
        return []
    return _with_all_dims(counts, index, full_counts, full_index)


def _with_all_dims(*lists: Tensor | None) -> list[Tensor | None]:
    """Counts [B, H, R] and indices [B, H, R, C], in turns, of lists that may lack their first dimensions."""
    return [
        one if one is None or one.dim() == dims else one.view((1,) * (dims - one.dim()) + tuple(one.shape))
        for dims, one in zip((3, 4, 3, 4), lists, strict=True)
    ]

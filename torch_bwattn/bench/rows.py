"""The measured problems: which shapes, how many floating-point operations each takes, and random inputs for it.

A row is named like the tables of the README, ``B4H32/8S4096D128``: batch, query heads / key-value heads, length, head
width, and ``W1023`` at the end where a query sees only itself and so many keys before it. Tensors lie in memory as
batch, length, heads, width and are passed as ``[B, H, S, D]`` views, which is what the projection of a transformer
layer gives.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

FORWARD = "forward"
BACKWARD = "backward"
DIRECTIONS = (FORWARD, BACKWARD)

#: The backward runs five matrix products where the forward runs two.
BACKWARD_OVER_FORWARD = 2.5

_NAME = re.compile(r"B(\d+)H(\d+)(?:/(\d+))?S(\d+)D(\d+)(?:W(\d+))?")


@dataclasses.dataclass(frozen=True)
class Row:
    """One attention problem that is timed forward, backward or both.

    Attributes:
        batch: Number of sequences.
        heads: Number of query heads.
        kv_heads: Number of key and value heads; divides ``heads``.
        length: Tokens of queries and of keys.
        head_dim: Width of queries, keys and values.
        causal: Whether query i sees only keys j <= i.
        dtype: Name of the element type, as in ``getattr(torch, dtype)``.
        window: Of causal rows: query i sees only keys j >= i - window. None is no limit.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool
    dtype: str = "bfloat16"
    window: int | None = None

    def __post_init__(self) -> None:
        for field in ("batch", "heads", "kv_heads", "length", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: expected a positive number, got {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads={self.heads}, got {self.kv_heads}")
        if self.window is not None and not self.causal:
            raise ValueError(f"window: expected None on a row that is not causal, got {self.window}")

    @property
    def shape(self) -> str:
        """The name of the shape, without the mask: ``B4H32/8S4096D128``."""
        window = "" if self.window is None else f"W{self.window}"
        return f"B{self.batch}H{self.heads}/{self.kv_heads}S{self.length}D{self.head_dim}{window}"

    @property
    def name(self) -> str:
        """The name of the row: the shape, and ``causal`` if it is."""
        return f"{self.shape} causal" if self.causal else self.shape

    @property
    def gqa(self) -> bool:
        """Whether several query heads share one key-value head."""
        return self.heads != self.kv_heads

    @property
    def arguments(self) -> dict[str, Any]:
        """What a call of this package's op needs beside the tensors."""
        arguments: dict[str, Any] = {}
        if self.causal:
            arguments["is_causal"] = True
        if self.gqa:
            arguments["enable_gqa"] = True
        if self.window is not None:
            arguments["window_size"] = (self.window, 0)
        return arguments

    def flops(self, direction: str) -> float:
        """Floating-point operations of one call: 4 B H Sq Skv D forward, 2.5 times that backward.

        Half of it when causal, and of a window the pairs that it has.
        """
        pairs = self.length * self.length / (2 if self.causal else 1)
        if self.window is not None:
            seen = min(self.window + 1, self.length)
            pairs = seen * self.length - seen * (seen - 1) / 2
        forward = 4.0 * self.batch * self.heads * pairs * self.head_dim
        return forward * BACKWARD_OVER_FORWARD if direction == BACKWARD else forward

    def tflops(self, direction: str, ms: float) -> float:
        """TFLOP/s of a call that took ``ms`` milliseconds."""
        return self.flops(direction) / ms * 1e-9


def parse_shape(text: str) -> Row:
    """Reads a shape name such as ``B4H32/8S4096D128`` (``B4H32S4096D128`` when all heads have keys of their own).

    A name with a window gives a causal row, one without gives a row that is not.

    Raises:
        ValueError: ``text`` is no such name.
    """
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"shape: expected a name like B4H32/8S4096D128, got {text!r}")
    batch, heads, kv_heads, length, head_dim, window = match.groups()
    sizes = (int(batch), int(heads), int(kv_heads or heads), int(length), int(head_dim))
    return Row(*sizes, causal=window is not None, window=None if window is None else int(window))


#: The rows that every release is measured on, in the order of the tables.
SHAPES = (
    "B4H32/32S8192D64",
    "B4H32/32S8192D128",
    "B1H16/16S16384D128",
    "B2H16/16S8192D256",
    "B4H32/8S4096D128",
    "B32H16/16S512D128",
)


def select_rows(
    patterns: Iterable[str] | None = None,
    *,
    causal: Sequence[bool] = (False, True),
    dtype: str = "bfloat16",
) -> list[Row]:
    """The rows of the table, or those that ``patterns`` name.

    Args:
        patterns: Shape names (any shape, of the table or not) and shell patterns over the table's names (``*D64``).
            None takes the whole table.
        causal: Which masks each shape is measured with.
        dtype: Name of the element type.

    Raises:
        ValueError: A pattern is neither a shape's name nor matches one.
    """
    names: list[str] = []
    for pattern in SHAPES if patterns is None else patterns:
        matched = fnmatch.filter(SHAPES, pattern) or [parse_shape(pattern).shape]
        names += [name for name in matched if name not in names]
    rows = [dataclasses.replace(parse_shape(name), dtype=dtype) for name in names]
    return [
        row if row.window is not None else dataclasses.replace(row, causal=mask)
        for row in rows
        for mask in causal
        if row.window is None or mask
    ]


@dataclasses.dataclass
class Inputs:
    """Random inputs of one row; all four are ``[B, H, S, D]`` views of B, S, H, D memory."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three operands of a call."""
        return self.query, self.key, self.value

    def with_grad(self) -> Inputs:
        """The same storage as leaves that require grad."""
        query, key, value = (tensor.detach().requires_grad_() for tensor in self.qkv)
        return Inputs(query, key, value, self.grad_out)


def make_inputs(row: Row, device: torch.device | str, seed: int = 0) -> Inputs:
    """Standard normal inputs of ``row`` on ``device``; the same ``seed`` gives the same values."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, row.dtype)

    def draw(heads: int) -> torch.Tensor:
        size = (row.batch, row.length, heads, row.head_dim)
        return torch.randn(size, device=device, dtype=dtype, generator=generator).transpose(1, 2)

    return Inputs(draw(row.heads), draw(row.kv_heads), draw(row.kv_heads), draw(row.heads))

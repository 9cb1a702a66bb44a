"""Small helpers of the tests that call attention by hand."""

from __future__ import annotations

from typing import Any

import torch

import torch_bwattn
from torch_bwattn.testing import Results, judge, oracle, pt_reference


def count() -> int:
    """How many calls reached the package since its counts were reset."""
    return sum(torch_bwattn.call_counts().values())


def tensors(
    rows: int = 9, columns: int = 11, heads: tuple[int, int] = (4, 4), dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """A query, a key and a value."""
    shapes = ((heads[0], rows), (heads[1], columns), (heads[1], columns))
    return [torch.randn(2, *shape, 8).to(dtype) for shape in shapes]


def judged(results: Results | torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Judges an output, or several results, against the oracle of the call."""
    if isinstance(results, torch.Tensor):
        results = Results(results)
    for verdict in judge(results, oracle(*args, **kwargs), pt_reference(*args, **kwargs)):
        verdict.check()

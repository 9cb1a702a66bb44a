"""Memory that was never written shows as NaN."""

from __future__ import annotations

import math

import pytest
import torch


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every torch function that returns unwritten memory fill it with NaN (integers: their largest value)."""

    def filled(original):
        def call(*args, **kwargs):
            result = original(*args, **kwargs)
            if result.device.type == "meta" or type(result) is not torch.Tensor:
                return result
            if result.is_floating_point() or result.is_complex():
                return result.fill_(math.nan)
            return result.fill_(True if result.dtype == torch.bool else torch.iinfo(result.dtype).max)

        return call

    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, filled(getattr(owner, name)))

"""What Helion lowers to CuTe-DSL instead of Triton, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...target import capability

TCGEN05 = ((10, 0), (10, 3))
"""Compute capabilities with tcgen05, whose products accumulate in tensor memory."""


def has_tcgen05(target: str) -> bool:
    """Whether a target has the instructions."""
    return capability(target) in TCGEN05


PREFIX = "tcgen05 through CuTe-DSL, "
"""How the names of their configs begin."""

WIDEST = 128
"""The largest width of which the forms take any lengths forward."""

WHOLE_KEYS = 256
"""Some of the kernels take multiples of so many keys alone, where nothing hides what would be padded."""


@dataclass(frozen=True)
class CuteForm:
    """That a kernel function is of a form which Helion lowers to CuTe-DSL (:mod:`.cute_lowering`), and which.

    Attributes:
        flag: What of Helion's config space says that the form was recognised.
        kind: What Helion calls the body.
        triton: The config in its stead where there is no tcgen05.
    """

    flag: str
    kind: str
    triton: Mapping[str, Any]

"""Where the values of a matrix product's accumulator lie: for a thread and the number of a value, (row, column).

Plain integer arithmetic, for Python's numbers and for a kernel's. A tile has ``rows`` x ``columns`` values, spread over
``threads`` threads; ``split`` says whether the second of two warp groups has other rows or other columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WARP, WARP_GROUP = 32, 128


@dataclass(frozen=True)
class Accumulator:
    """The accumulator of one product.

    Attributes:
        arch: 80 (mma.sync m16n8k16, warps one below the other), 90 (wgmma m64nNk16) or 100 (tensor memory, read by
            tcgen05.ld 32x32b: a thread has a row).
        rows: Of the tile.
        columns: Of the tile.
        threads: 128 or 256.
        split: ``"rows"`` or ``"columns"``: what tells the two groups of 128 threads apart. Of 80 all warps have rows.
    """

    arch: int
    rows: int
    columns: int
    threads: int = WARP_GROUP
    split: str = "rows"

    @property
    def values(self) -> int:
        """Of a thread."""
        return self.rows * self.columns // self.threads

    def why_not(self) -> str:
        """Why there is no such accumulator, or nothing."""
        if self.arch not in (80, 90, 100):
            return f"arch: expected 80, 90 or 100, got {self.arch}"
        if self.threads not in (WARP_GROUP, 2 * WARP_GROUP):
            return f"threads: expected 128 or 256, got {self.threads}"
        if self.split not in ("rows", "columns"):
            return f"split: expected 'rows' or 'columns', got {self.split!r}"
        groups = self.threads // WARP_GROUP
        by_rows = groups if self.arch == 80 or self.split == "rows" else 1
        by_columns = groups // by_rows
        of_rows, of_columns = {80: (64, 8), 90: (64, 8), 100: (128, 4)}[self.arch]
        if self.rows % (of_rows * by_rows):
            return f"rows: expected a multiple of {of_rows * by_rows}, got {self.rows}"
        if self.columns % (of_columns * by_columns):
            return f"columns: expected a multiple of {of_columns * by_columns}, got {self.columns}"
        if self.arch != 80 and self.rows != of_rows * by_rows:
            return f"rows: expected {of_rows * by_rows}, got {self.rows}"
        return ""

    def coordinates(self, thread: Any, value: int) -> tuple[Any, Any]:
        """(row, column) of a thread's value."""
        if self.arch == 80:
            warps = self.threads // WARP
            lane, block = thread % WARP, value // 4
            down = self.rows // (16 * warps)
            row = 16 * (thread // WARP + warps * (block % down)) + lane // 4 + 8 * (value % 4 // 2)
            return row, 8 * (block // down) + 2 * (lane % 4) + value % 2
        group, inside = thread // WARP_GROUP, thread % WARP_GROUP
        if self.arch == 90:
            lane = inside % WARP
            row = 16 * (inside // WARP) + lane // 4 + 8 * (value // 2 % 2)
            column = 8 * (value // 4) + 2 * (lane % 4) + value % 2
        else:
            row, column = inside, value
        if self.split == "rows":
            return row + group * (64 if self.arch == 90 else 128), column
        return row, column + group * (self.columns * WARP_GROUP // self.threads)

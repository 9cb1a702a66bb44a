"""Print how long attention takes on paper: by the clocks of the tensor cores, shared memory, exp2 and arithmetic.

Needs no GPU and measures nothing. For sm_90a the rows that were measured on an H200 stand beside their times on paper;
for sm_100a what is printed is a prediction, beside the best that is published for a B200.

for example:
  paper                                         the measured rows of Hopper
  paper --target sm_100a                        B200 at B4 H32 S8192, widths 64 and 128
  paper --target sm_100a --shapes B1H16S16384D128 --causal yes
"""

from __future__ import annotations

import argparse

from . import UsageError
from .bench import CAUSAL_WORDS, words_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--target", default="sm_90a", metavar="NAME", help="sm_90a (the default) or sm_100a")
    parser.add_argument(
        "--shapes", metavar="LIST", help="of sm_100a: names like B4H32/8S4096D128, or patterns like '*D64'"
    )
    parser.add_argument("--causal", choices=tuple(CAUSAL_WORDS), help="of sm_100a (default: no)")


def main(namespace: argparse.Namespace) -> int:
    """Prints the table.

    Returns:
        0.

    Raises:
        UsageError: An option's value is wrong.
    """
    from ..bench import paper
    from ..bench.rows import select_rows

    if namespace.target not in paper.TARGETS:
        raise UsageError(f"--target: expected one of {', '.join(paper.TARGETS)}, got {namespace.target!r}")
    rows = paper.newest_measured()
    if namespace.target == "sm_90a":
        for name in ("shapes", "causal"):
            if (given := getattr(namespace, name)) is not None:
                raise UsageError(f"--{name}: expected none for sm_90a, whose rows are the measured ones, got {given!r}")
        print(paper.render_measured(rows))
        return 0
    patterns = paper.SEED_SHAPES if namespace.shapes is None else words_of(namespace.shapes)
    try:
        chosen = select_rows(patterns, causal=CAUSAL_WORDS[namespace.causal or "no"])
        print(paper.render_predicted(chosen, rows))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return 0

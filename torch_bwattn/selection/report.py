"""A plan in words: what would run, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence

from ..problem import Problem
from .choose import Candidate, Plan


def text(plans: Sequence[Plan]) -> str:
    """A report of plans for one call, forward and backward or one of them."""
    lines = [_described(plans[0].problem)]
    for made in plans:
        chosen = made.chosen
        name = "backward" if made.problem.backward else "forward"
        lines.append(f"{name}: {chosen.backend if chosen else 'refused'}" + (" (pinned)" if made.pinned else ""))
        if made.source:
            lines.append(f"  order by {made.source}")
        lines += [_candidate(candidate) for candidate in made.candidates]
    return "\n".join(lines)


def _described(problem: Problem) -> str:
    mask = "none" if problem.mask_dtype is None else f"{problem.mask_dtype} {list(problem.mask_sizes or ())}"
    return (
        f"bwattn.sdpa on {problem.target}: {problem.dtype}, B={problem.batch} Hq={problem.heads} "
        f"Hkv={problem.kv_heads} Sq={problem.q_len} Skv={problem.kv_len} D={problem.head_dim} "
        f"Dv={problem.value_dim}, mask {mask}, "
        + _visibility(problem)
        + f", scale {problem.scale:.6g}, dropout {problem.dropout_p}"
        + ("" if problem.softcap is None else f", softcap {problem.softcap:.6g}")
        + ("" if problem.sink_dtype is None else f", sink {problem.sink_dtype}")
    )


def _candidate(candidate: Candidate) -> str:
    verdict = candidate.verdict
    if not verdict:
        config = f", config {verdict.config}" if verdict.config else ""
        return f"  - {candidate.backend}: refuses{config}: {verdict.reason}"
    line = f"  + {candidate.backend}: supports it, config {verdict.config}"
    if verdict.note:
        line += f" ({verdict.note})"
    if candidate.figure:
        line += f", {candidate.figure}"
    return line + (f", last resort: {verdict.last_resort}" if verdict.last_resort else "")


def _visibility(problem: Problem) -> str:
    if problem.low_diagonal is not None:
        end = "" if problem.diagonal is None else f" <= i + {problem.diagonal}"
        return f"window (i + {problem.low_diagonal} <= j{end})"
    return "not causal" if problem.diagonal is None else f"causal (j <= i + {problem.diagonal})"

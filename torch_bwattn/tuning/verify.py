"""How good the choice is where no table names the problem: beside all its candidates, and beside plain PyTorch.

Problems are drawn by a seed over the features that models have. For each, every candidate is timed in turns with the
operator as users call it, which chooses, and with ``F.scaled_dot_product_attention`` where that can say the problem.
Problems whose key a table has are not drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import environment
from ..problem import Problem
from ..selection import tables
from ..selection.choose import plan
from ..selection.key import Key, key_of
from ..selection.on_demand import to_json
from . import calls, tuner

_MOST_SCORES = 2**34  # some milliseconds a call
_MOST_ELEMENTS = 2**29


def draw(target: str, count: int, seed: int = 0) -> list[Problem]:
    """Problems whose keys no table has, each of another key."""
    source = random.Random(seed)  # noqa: S311 (no secret)
    found: dict[Key, Problem] = {}
    while len(found) < count:
        problem = _draw(target, source)
        key = key_of(problem)
        if key not in found and tables.exact(target, key) is None:
            found[key] = problem
    return list(found.values())


def _draw(target: str, source: random.Random) -> Problem:
    few = source.random() < 0.3
    while True:
        q_len = source.choice((1, 2, 5, 16, 33, 100)) if few else source.randint(65, 12000)
        kv_len = source.randint(100, 30000) if few else q_len if source.random() < 0.8 else source.randint(65, 12000)
        kv_heads, group = source.choice((1, 2, 4, 8, 16)), source.choice((1, 1, 1, 4, 8))
        batch = source.choice((1, 2, 3, 8, 24))
        width = source.choice((32, 64, 64, 80, 96, 128, 128, 128, 192, 256))
        heads = kv_heads * group
        scores = batch * heads * q_len * kv_len
        elements = batch * width * max(heads * q_len, kv_heads * kv_len)
        if heads >= 4 and scores <= _MOST_SCORES and elements <= _MOST_ELEMENTS:
            break
    offset = kv_len - q_len
    plain = Problem(
        target, source.choice((torch.bfloat16, torch.bfloat16, torch.float16)), batch, heads, kv_heads, q_len, kv_len,
        width, width, width**-0.5, backward=not few and source.random() < 0.5,
    )  # fmt: skip
    mask = (source.choice((1, batch)), 1, source.choice((1, q_len)), kv_len)
    features: tuple[dict[str, Any], ...] = (
        {},
        {"diagonal": offset},
        {"diagonal": offset},
        {"diagonal": offset, "low_diagonal": offset - source.randint(50, 2000)},
        {"mask_dtype": torch.bool, "mask_sizes": mask},
        {"mask_dtype": plain.dtype, "mask_sizes": mask},
        {"dropout_p": 0.1},
        {"diagonal": offset, "softcap": 30.0},
        {"diagonal": offset, "sink_dtype": plain.dtype},
    )
    chosen = source.choice(features)
    if offset < 0:
        chosen = {name: value for name, value in chosen.items() if "diagonal" not in name}
    return dataclasses.replace(plain, **chosen)


@dataclasses.dataclass(frozen=True)
class Verified:
    """One problem's times in milliseconds: of the candidates, of what was chosen, of the operator, of PyTorch.

    ``chosen`` is the candidate's own time, to be compared with ``best``; ``auto`` and ``plain`` are whole calls.
    """

    key: Key
    chosen_name: str
    best_name: str
    chosen: float
    best: float
    auto: float | None
    plain: float | None
    failures: dict[str, str]

    @property
    def over_best(self) -> float:
        """The chosen candidate's time over the best one's."""
        return self.chosen / self.best

    @property
    def over_plain(self) -> float | None:
        """The operator's time over plain PyTorch's, where there is one."""
        return None if self.auto is None or self.plain is None else self.auto / self.plain

    def __str__(self) -> str:
        over = "" if self.over_plain is None else f", {self.over_plain:.3f} of plain PyTorch"
        better = "" if self.chosen_name == self.best_name else f" ({self.best_name})"
        return f"{self.key}: {self.chosen_name} {self.chosen:.4f} ms, {self.over_best:.3f} of the best{better}{over}"


def verify(
    problems: Sequence[Problem], options: tuner.Options, *, log: Callable[[str], None] = lambda _: None
) -> list[Verified]:
    """Times each problem's candidates beside the operator and PyTorch."""
    found, worker = [], tuner.Worker(options.command)
    rivals = {problem: tuner.competitors(problem) for problem in problems}
    try:
        with contextlib.closing(tuner.checked(rivals, options)) as ready:
            for problem, wrong in ready:
                one = _verify(problem, wrong, worker, options)
                if one is None:
                    log(f"{key_of(problem)}: no times")
                else:
                    log(str(one))
                    found.append(one)
    finally:
        worker.end()
    return found


def _verify(
    problem: Problem, wrong: dict[tables.Tunable, str], worker: tuner.Worker, options: tuner.Options
) -> Verified | None:
    first = plan(problem, None).chosen
    if first is None:
        return None
    names = [list(tunable) for tunable, failure in wrong.items() if not failure]
    others = [[calls.AUTO, ""], *([[calls.PLAIN, ""]] if calls.has_plain(problem) else [])]
    request = {
        "do": "time", "problem": to_json(problem), "tunables": names + others, "budget": options.budget,
    }  # fmt: skip
    try:
        reply = worker.ask(request, options.limit_s, tuner.times_of(len(names + others)))
    except tuner.NoAnswer:
        return None
    times = {tuple(name): ms for name, ms in zip(names + others, reply["ms"], strict=True)}
    reasons = zip(names + others, reply["failures"], strict=True)
    failures = {str(tunable): failure for tunable, failure in wrong.items() if failure}
    failures |= {": ".join(name): reason for name, reason in reasons if reason}
    timed = {name: ms for name, ms in times.items() if ms is not None and name[0] not in (calls.AUTO, calls.PLAIN)}
    if tuple(first.tunable) not in timed:
        return None
    best = min(timed, key=lambda name: timed[name])
    return Verified(
        key_of(problem), str(first.tunable), ": ".join(best), timed[tuple(first.tunable)], timed[best],
        times.get((calls.AUTO, "")), times.get((calls.PLAIN, "")), failures,
    )  # fmt: skip


def document(found: Sequence[Verified]) -> dict[str, Any]:
    """The figures and the environment, as JSON."""
    problems = [
        {**dataclasses.asdict(one), "key": str(one.key), "over_best": one.over_best, "over_plain": one.over_plain}
        for one in found
    ]
    return {"environment": environment.describe(0 if torch.cuda.is_available() else None), "problems": problems}


def summary(found: Sequence[Verified], asked: int) -> str:
    """How many choices are within 5 % and 15 % of the best candidate, and how many are slower than plain PyTorch."""
    close = sum(one.over_best <= 1.05 for one in found)
    near = sum(one.over_best <= 1.15 for one in found)
    ratios = [one.over_plain for one in found if one.over_plain is not None]
    slower = sum(ratio > 1.03 for ratio in ratios)
    return (
        f"{asked} problems, {len(found)} with times: {close} within 5 % of the best candidate, {near} within 15 %; "
        f"{slower} of {len(ratios)} more than 3 % slower than plain PyTorch"
    )

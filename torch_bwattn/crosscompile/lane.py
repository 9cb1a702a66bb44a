"""Compiles what the package would use on a target, on a machine without that GPU, and says what became of it.

For each kind of problem and both directions, the config that each backend chooses itself is compiled to the target's
machine code, and all that Helion lowers to CuTe-DSL: by Triton and CuTe-DSL for Helion's kernels, for a GPU that
:mod:`..backends.helion.pretend` pretends, and by CuTe-DSL for the hand-written ones, which name their architecture and
of which every config is compiled. Nothing runs. A kernel has a *fault* where the target's matrix instruction is
missing, where a hand-written one has more or fewer products than it was written with, where it spills more than is
known, or where it asks for more shared memory than there is.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from ..backends.flex_inputs import BlockLists, FlexInputs, Mod
from ..backends.helion.forms import PREFIX
from ..mods.trace import traced
from ..problem import Problem
from ..selection import drawn
from ..selection.choose import get_backend
from ..selection.key import kind_of
from ..target import capability

if TYPE_CHECKING:
    from ..backends.cute.compile import KernelKey
    from ..backends.cute.report import KernelReport
    from ..backends.helion.runtime import KernelFamily

TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
_PRODUCTS = {(9, 0): "wgmma", (10, 0): "tcgen05", (10, 3): "tcgen05"}
_KINDS_OF_PRODUCTS = ("tcgen05", "wgmma", "mma_sync")
_WITHOUT_PRODUCTS = ("attention_delta", "backward_preprocess", "backward_postprocess")
_SHARED_BYTES = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448, (12, 0): 101376}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel on the target.

    Attributes:
        backend: Whose it is.
        kernel: Its name.
        problem: The kind of problem that it was compiled for.
        config: Its config.
        product: The matrix instruction that it has, or none.
        products: How many.
        bulk_copies: Tensor copies by TMA.
        setmaxnreg: Instructions that move registers between warps.
        f32x2: Packed float32 instructions.
        registers: Per thread at launch.
        spilled_bytes: Local memory per thread.
        shared_bytes: Shared memory per block.
        seconds: To compile.
        faults: What must not be, a sentence each.
    """

    backend: str
    kernel: str
    problem: str
    config: str
    product: str
    products: int
    bulk_copies: int
    setmaxnreg: int
    f32x2: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    seconds: float
    faults: tuple[str, ...] = ()


def product_of(target: str) -> str:
    """The matrix instruction of a target: tcgen05 from 10.0 on, wgmma at 9.0, mma.sync elsewhere (12.0 among them)."""
    return _PRODUCTS.get(capability(target) or (0, 0), "mma_sync")


_MANY = 2048
"""Queries and keys at which other configs are chosen than at few."""


def problems(target: str) -> list[Problem]:
    """One problem of each kind that has kernels of its own: all features at width 128, the widths without.

    Forward also at many queries and keys, where configs depend on that.
    """

    def plain(width: int, value_dim: int = 0, dtype: torch.dtype = torch.bfloat16) -> Problem:
        return Problem(target, dtype, 1, 4, 2, 512, 512, width, value_dim or width, width**-0.5)

    mask: dict[str, Any] = {"q_len": 300, "kv_len": 300, "mask_sizes": (1, 1, 300, 300)}
    features: tuple[dict[str, Any], ...] = (
        {}, {"diagonal": 0}, {"diagonal": 0, "low_diagonal": -100}, {"softcap": 30.0}, {"sink_dtype": torch.float32},
        {"mask_dtype": torch.bool, **mask}, {"mask_dtype": torch.bfloat16, **mask},
        {"dropout_p": 0.1},
    )  # fmt: skip
    found = [dataclasses.replace(plain(128), **fields) for fields in features]
    for width in (plain(64), plain(96), plain(192, 128), plain(256)):
        found += [width, dataclasses.replace(width, diagonal=0)]
    found.append(plain(64, dtype=torch.float32))
    if product_of(target) == "tcgen05":  # what is there of a mask shapes the code, and a soft cap beside it
        keys_only = dataclasses.replace(plain(128), **{**mask, "mask_sizes": (1, 1, 1, 300)})
        found.append(dataclasses.replace(keys_only, mask_dtype=torch.bool, softcap=30.0))
        whole = {**mask, "mask_sizes": (2, 1, 300, 300), "mask_dtype": torch.float16, "batch": 2}
        found += [dataclasses.replace(plain(width, dtype=torch.float16), **whole) for width in (64, 128)]
    many = [
        dataclasses.replace(problem, q_len=_MANY, kv_len=_MANY)
        for problem in found
        if problem.dtype != torch.float32 and problem.mask_dtype is None and not problem.dropout_p
    ]
    return [dataclasses.replace(problem, backward=backward) for problem in found for backward in (False, True)] + many


def problems_of_cute() -> list[Problem]:
    """Problems besides, for the hand-written kernels: what takes most registers, and configs that no other has."""

    def plain(width: int, value_dim: int, lengths: tuple[int, int] = (_MANY, _MANY), **fields: Any) -> Problem:
        sizes = (2, 8, 2, *lengths, width, value_dim, width**-0.5)
        return Problem("sm_90a", torch.bfloat16, *sizes, **fields)

    few = (7, _MANY)
    window: dict[str, Any] = {"diagonal": 0, "low_diagonal": -127}
    sink = {**window, "sink_dtype": torch.float32}
    cap = {**sink, "softcap": 30.0}
    forward = [
        plain(192, 192), plain(8, 8, diagonal=0), plain(64, 64, few, diagonal=0), plain(192, 128, few, diagonal=0),
        plain(64, 64, **sink), plain(128, 128, **sink), plain(192, 192, **sink), plain(72, 40, **cap),
        plain(128, 64, **cap), plain(192, 128, **cap), plain(256, 256, few, **cap),
    ]  # fmt: skip
    repeatable = {**window, "softcap": 30.0, "deterministic": True}
    backward = [
        plain(64, 64, **window, deterministic=True), plain(40, 72, **window, softcap=30.0),
        plain(128, 128, **repeatable), plain(192, 128, low_diagonal=-127), plain(256, 256, **repeatable),
    ]  # fmt: skip
    masked: dict[str, Any] = {"mask_dtype": torch.bool, "mask_sizes": (1, 1, _MANY, _MANY)}
    added = {**masked, "mask_dtype": torch.bfloat16}
    of_keys = {**masked, "mask_sizes": (1, 1, 1, _MANY)}
    forward += [plain(64, 64, **added), plain(192, 192, **masked), plain(256, 256, **added), plain(128, 128, **of_keys)]
    backward += [plain(64, 64, **masked), plain(192, 192, **added), plain(256, 256, **of_keys)]
    return forward + [dataclasses.replace(problem, backward=True) for problem in backward]


def _codes(problem: Problem, backend: str) -> Iterator[tuple[Hashable, str]]:
    """What of a backend to compile for a problem, each after what its code depends on; none where it refuses.

    Of `cute` the kernels of the first choice, by name; of Helion's configs those that it lowers to CuTe-DSL and the
    first among those that go to Triton.
    """
    chosen = get_backend(backend)
    offers = [] if chosen.missing() else [offer.config for offer in chosen.offers(problem) if offer]
    if backend == "cute":
        yield from ((key, key.name) for key in _cute_keys(problem) if offers)
        return
    from ..backends.helion.backend import tcgen05_code

    for config in offers:
        if config.startswith(PREFIX):
            yield tcgen05_code(problem, config), config
        else:
            yield (_words(problem), config), config
            break


_FLEX = "flex"
"""What tasks call kernels for mods and lists of blocks, of the backends that are their parts."""
_FLEX_WIDTHS = (64, 128, 256)


def _flex_inputs(width: int, curve: Callable[[Tensor], Tensor]) -> FlexInputs:
    """A call of everything: a learned table and a curve in the score mod, a mask mod, blocks in part and whole."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return curve(score) + slopes[h] * (kv_idx - q_idx)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    slopes = torch.ones(8)
    lists = BlockLists.of(create_block_mask(mask_mod, None, None, 512, 512, device="cpu"))
    score, mask = traced(score_mod, "score_mod"), traced(mask_mod, "mask_mod")
    q, k, v = (torch.zeros(2, heads, 512, width, dtype=torch.bfloat16) for heads in (8, 2, 2))
    return FlexInputs(q, k, v, width**-0.5, Mod(score.program, score.captured), Mod(mask.program), lists)


def _flex_on_hopper(problem: Problem) -> Iterator[Compiled]:
    from ..backends.cute import calls, configs, flex, report

    x = _flex_inputs(problem.head_dim, torch.sigmoid)  # a tanh takes the compiler three times as long
    features = flex.backward_features_of(x)
    config = configs.flex_forward(problem.head_dim)
    of_backward = configs.flex_backward(problem.head_dim)
    keys = (
        (calls.forward_key(flex.features_of(x), config), config),
        (calls.backward_key(features, of_backward), of_backward),
    )
    for key, chosen in keys:
        for found in report.compile_report(key, calls.build_of(key)):
            yield _judged(problem, _of_cute(key.name, f"{_words(problem)} mods", str(chosen), found))


def _flex(problem: Problem) -> Iterator[Compiled]:
    from ..backends.helion import configs, flex, report

    x = _flex_inputs(problem.head_dim, lambda score: 20.0 * torch.tanh(score / 20.0))
    chosen = configs.flex(problem.head_dim, problem.value_dim, problem.dtype, problem.target)
    with report.collected() as prepared:
        out, lse, _ = flex.forward(x, chosen=chosen)
        flex.backward(x, out, None, out, lse, [True], chosen=chosen)
    for one in prepared:
        if one[0].name not in _WITHOUT_PRODUCTS:
            yield _judged(problem, dataclasses.replace(_triton(problem, *one), problem=f"{_words(problem)} mods"))


def compile_problem(problem: Problem, backend: str, parts: Sequence[str] | None = None) -> list[Compiled]:
    """Some of what :func:`_codes` names for a problem, by default all; empty where the backend refuses it."""
    if parts is None:
        parts = [part for _, part in _codes(problem, backend)]
    return list({"helion": _helion, "cute": _cute}[backend](problem, parts))


def _helion(problem: Problem, configs: Sequence[str]) -> Iterator[Compiled]:
    from ..backends.helion import report

    backend, x = get_backend("helion"), drawn.inputs(problem, "cpu")
    for chosen in configs:
        with report.collected() as prepared:
            if problem.backward:
                made_up = drawn.made_up(problem, x, drawn.gradient_of(problem, x))
                backend.backward(problem, chosen)(made_up, drawn.wanted(problem))
            else:
                backend.forward(problem, chosen)(x)
        for one in prepared:
            yield _judged(problem, _triton(problem, *one) if one[0].cute is None else _tcgen05(problem, chosen, *one))


def _triton(problem: Problem, family: KernelFamily, arguments: Sequence[Any], config: Mapping[str, Any]) -> Compiled:
    from ..backends.helion import report

    found = report.compile_report(family, arguments, config, capability=capability(problem.target) or (0, 0))
    product = next((kind for kind in _KINDS_OF_PRODUCTS if found.counts[kind]), "")
    return Compiled(
        "helion", found.name, _words(problem), _line(config), product, found.counts.get(product, 0),
        found.counts["tma"], found.counts["setmaxnreg"], found.counts["f32x2"], found.registers,
        found.stack_bytes, found.shared_bytes, found.seconds,
    )  # fmt: skip


def _tcgen05(
    problem: Problem, chosen: str, family: KernelFamily, arguments: Sequence[Any], config: Mapping[str, Any]
) -> Compiled:
    from ..backends.helion import cute_lowering, report

    target = capability(problem.target) or (0, 0)
    found = cute_lowering.compile_report(family, arguments, config, target, problem.target)
    counts = report.counted(found.ptx)
    return Compiled(
        "helion", found.name, _words(problem), chosen, "tcgen05" if counts["tcgen05"] else "",
        counts["tcgen05"], counts["tma"], counts["setmaxnreg"], counts["f32x2"], found.registers, found.frame_bytes,
        found.shared_bytes, found.seconds,
    )  # fmt: skip


def _words(problem: Problem) -> str:
    """The kind of problem; backward a sink is in no kernel of its own."""
    return kind_of(problem) + (" sink" if problem.sink_dtype is not None and not problem.backward else "")


def _line(config: Mapping[str, Any]) -> str:
    sizes = "x".join(map(str, config["block_sizes"]))
    return f"{sizes}, {config['num_warps']} warps, {config['num_stages']} stages"


def _cute_keys(problem: Problem) -> list[KernelKey]:
    """What decides the code of the hand-written kernels for a problem."""
    from ..backends.cute import calls, configs

    if not problem.backward:
        return [calls.forward_key(configs.features(problem), configs.forward(problem))]
    features, chosen = configs.backward_features(problem), configs.backward(problem)
    main, finish = calls.backward_key(features, chosen), calls.postprocess_key(features, chosen)
    excess = [calls.excess_key(problem)] if features.mask == "added" else []
    return [calls.preprocess_key(features, wide=True, lse_grad=problem.lse_grad), *excess, main, finish]


def _cute(problem: Problem, names: Sequence[str]) -> Iterator[Compiled]:
    from ..backends.cute import calls, configs, report

    config = str(configs.backward(problem) if problem.backward else configs.forward(problem))
    for key in (key for key in _cute_keys(problem) if key.name in names):
        for found in report.compile_report(key, calls.build_of(key)):
            yield _judged(problem, _of_cute(key.name, _words(problem), config, found))


def _of_cute(kernel: str, problem: str, config: str, found: KernelReport) -> Compiled:
    copies = sum(found.counts[name] for name in ("UTMALDG", "UTMASTG", "UTMAREDG"))
    return Compiled(
        "cute", found.name, problem, config, "wgmma" if found.counts["HGMMA"] else "", found.counts["HGMMA"], copies,
        found.counts["setmaxnreg"], 0, found.registers, found.frame_bytes, found.shared_bytes, found.seconds,
        found.faults_beside(_KNOWN_SPILLS_OF_CUTE.get(kernel, 0)) + _miscounted(kernel, found.counts["ARRIVE"]),
    )  # fmt: skip


PRODUCTS_IN_CODE = {
    "forward_sm90": 6, "flex_forward_sm90": 6, "mask_forward_sm90": 6, "mask_excess_sm90": 6, "backward_sm90": 10,
    "flex_backward_sm90": 10, "mask_backward_sm90": 10,
}  # fmt: skip
"""Forward the first tile's scores, two in each of the two loops, the last tile's output; backward the first tile's S
and dP, five products of each tile but the last, which has three."""


def _miscounted(kernel: str, products: int) -> tuple[str, ...]:
    wanted = PRODUCTS_IN_CODE.get(kernel, products)
    return () if products == wanted else (f"its code has {products} matrix products in place of {wanted}",)


def _judged(problem: Problem, compiled: Compiled) -> Compiled:
    """With what is wrong for the target."""
    faults = list(compiled.faults)
    wanted = product_of(problem.target)
    half = problem.dtype in (torch.bfloat16, torch.float16)
    if half and compiled.kernel not in _WITHOUT_PRODUCTS and compiled.product != wanted:
        faults.append(f"expected {wanted}, got {compiled.product or 'no matrix instruction'}")
    if compiled.backend == "helion" and compiled.spilled_bytes > known_spills(problem, compiled.kernel):
        faults.append(f"it spills {compiled.spilled_bytes} bytes a thread")
    limit = _SHARED_BYTES.get(capability(problem.target) or (0, 0))
    if limit is not None and compiled.backend == "helion" and compiled.shared_bytes > limit:
        faults.append(f"it asks for {compiled.shared_bytes} bytes of shared memory, of which a block has {limit}")
    return dataclasses.replace(compiled, faults=tuple(faults))


_KNOWN_SPILLS = {
    (9, "attention_forward"): 16,
    (9, "attention_dkv"): 496,
    (9, "attention_dq"): 304,
    (9, "flex_dkv"): 664,
    (10, "attention_dkv"): 80,
    (10, "flex_dkv"): 80,
    (10, "attention_flash"): 88,
    (10, "attention_flash_backward"): 56,
    (10, "attention_flash_wide"): 120,
}
"""By major capability, bytes a thread of what is shipped. On Hopper Triton 3.7 spills where 3.6 does not, under which
these tiles were the fastest; `cute` is the first choice there. On Blackwell smaller tiles have no tcgen05, and Helion's
own tcgen05 bodies spill, forward 80 bytes at width 64 and 24 at 128 (88 and 32 with a soft cap), 120 at 192 and
128, backward at width 128 40 by pairs of programs (56 on sm_103a) and 8 without."""
_KNOWN_SPILLS_OF_CUTE = {"flex_backward_sm90": 32, "mask_backward_sm90": 80}
"""In the producer, which has 24 registers and reads lists; of bytes beside 128 queries: 64 spill nothing, but
take 1.009 ms where these take 0.955 (B2 H16 S4096 D64)."""
_KNOWN_SPILLS_BESIDE_MASKS = 160  # of the tcgen05 forward: 104 to 136, with a soft cap 160
_KNOWN_SPILLS_OF_FLOAT32 = 464  # of dK and dV: larger than with tiles that were slower on the H200


def known_spills(problem: Problem, kernel: str) -> int:
    """How much one of Helion's kernels is known to spill, in bytes a thread; more is a fault."""
    if problem.dtype == torch.float32:
        return _KNOWN_SPILLS_OF_FLOAT32 if kernel == "attention_dkv" else 0
    if kernel == "attention_flash" and problem.mask_dtype is not None:
        return _KNOWN_SPILLS_BESIDE_MASKS
    return _KNOWN_SPILLS.get(((capability(problem.target) or (0, 0))[0], kernel), 0)


_Task = tuple[Problem, str, tuple[str, ...]]


def _unit(task: _Task) -> list[Compiled]:
    torch.set_num_threads(1)
    problem, backend, parts = task
    try:
        if backend == _FLEX:
            return [one for part in parts for one in (_flex if part == "helion" else _flex_on_hopper)(problem)]
        return compile_problem(problem, backend, parts)
    except Exception as error:  # noqa: BLE001 (it is what is looked for)
        text = " ".join(str(error).split())[:300]
        failed = Compiled(backend, "?", _words(problem), "", "", 0, 0, 0, 0, 0, 0, 0, 0.0, (f"not compiled: {text}",))
        return [failed]


def _tasks(target: str, backends: Sequence[str]) -> list[_Task]:
    """What to compile, each code once."""
    seen: set[Hashable] = set()
    tasks = []
    wanted = [(problem, backend) for problem in problems(target) for backend in backends]
    if target == "sm_90a" and "cute" in backends:
        wanted += [(problem, "cute") for problem in problems_of_cute()]
    for problem, backend in wanted:
        new = [(code, part) for code, part in _codes(problem, backend) if code not in seen]
        seen.update(code for code, _ in new)
        if new:
            tasks.append((problem, backend, tuple(part for _, part in new)))
    for backend in backends:
        if not get_backend(backend).missing() and (backend == "helion" or target == "sm_90a"):
            for width in _FLEX_WIDTHS:
                problem = Problem(target, torch.bfloat16, 2, 8, 2, 512, 512, width, width, width**-0.5)
                tasks.append((problem, _FLEX, (backend,)))
    return tasks


def run(
    target: str,
    backends: Sequence[str] = ("cute", "helion"),
    *,
    jobs: int = 1,
    log: Callable[[Compiled], None] = lambda _: None,
) -> list[Compiled]:
    """Compiles everything for a target, in ``jobs`` processes.

    Args:
        target: One of :data:`TARGETS`.
        backends: Whose kernels.
        jobs: How many processes compile beside each other.
        log: Takes each kernel as it is done.

    Raises:
        ValueError: Another target.
    """
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")
    found: dict[tuple[str, str, str, str], Compiled] = {}
    for backend in backends:
        missing = get_backend(backend).missing()
        if missing and any(get_backend(backend).supports(problem) for problem in problems(target)):
            fault = f"not compiled: {missing}"
            found[backend, "", "", ""] = Compiled(backend, "?", "", "", "", 0, 0, 0, 0, 0, 0, 0, 0.0, (fault,))
    # Fresh processes: what is pretended in them is never true of this one.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for compiled in pool.map(_unit, _tasks(target, backends)):
            for one in compiled:
                key = one.backend, one.kernel, one.problem, one.config
                if key not in found:
                    found[key] = one
                    log(one)
    return list(found.values())


def table(found: Sequence[Compiled]) -> str:
    """The kernels side by side, a line each; faults below."""
    head = ("backend", "kernel", "problem", "config", "product", "copies", "maxnreg", "f32x2", "regs", "spilled",
            "shared", "s")  # fmt: skip
    rows: list[tuple[str, ...]] = [head]
    for one in found:
        product = f"{one.products} {one.product}" if one.product else "-"
        numbers = (one.bulk_copies, one.setmaxnreg, one.f32x2, one.registers, one.spilled_bytes, one.shared_bytes)
        rows.append((one.backend, one.kernel.removeprefix("attention_"), one.problem, one.config, product,
                     *map(str, numbers), f"{one.seconds:.0f}"))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = 5
    lines = [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(
        [*lines, *(f"{one.backend} {one.kernel}, {one.problem}: {x}" for one in found for x in one.faults)]
    )

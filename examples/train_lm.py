"""Trains a small language model twice, with torch_bwattn under its attention and without, and compares the two.

The model (lm_model.py) calls plain `F.scaled_dot_product_attention` and the text comes with Python, so there is
nothing to download. Run it as it is for about a minute and a half on two CPU cores, or larger on a GPU:

    python examples/train_lm.py
    python examples/train_lm.py --layers 12 --heads 16 --kv-heads 4 --head-dim 64 --seq-len 1024 --steps 1000 --lr 6e-4

With `--control` it trains a third time, with another of PyTorch's kernels, to measure what a large model makes of
rounding: that may be more than the usual tolerance. The patched run then has to agree with the nearer of the two.

It prints a progress bar for each run, a text that the model wrote, which backend computed the attention calls and
whether the two loss curves agree; it plots both curves to a PNG file. The exit status is 1 when the curves disagree or
when the patch reached no call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean
from typing import NamedTuple

import torch
from lm_model import LanguageModel, ModelConfig
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import torch_bwattn

EARLY_STEPS = 20


class Tolerance(NamedTuple):
    """How far apart the two losses may be, in nats: at most within EARLY_STEPS, and on average over the run."""

    early: float
    mean: float


# Correct attention kernels differ by rounding, which training amplifies from step to step: the first steps are held to
# the dtype's rounding, the whole run to a mean. Measured between a fused and a blockwise kernel: 5e-7 and 2e-3 in
# float32, 3e-4 and 2e-2 in bfloat16. In float32, query heads that read the wrong key heads give 2e-2 and 3e-2, a scale
# that is 2% off 2e-5 and 2e-2.
# A larger model amplifies more. There `--control` measures it: a third run, with another of PyTorch's own kernels.
TOLERANCES = {torch.float32: Tolerance(1e-4, 1e-2), torch.bfloat16: Tolerance(1e-2, 5e-2)}


def read_prose() -> str:
    """Returns the prose of Python's own reference, one paragraph a line, without code, tables and repetitions."""
    paragraphs = (" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n"))
    # Topics overlap: without dict.fromkeys, text that is held out would also be trained on.
    prose = (p for p in paragraphs if len(p) > 80 and sum(c.isalpha() or c == " " for c in p) > 0.85 * len(p))
    return "\n".join(dict.fromkeys(prose))


class Vocabulary:
    """The characters of a text, and its commonest words, as tokens.

    Whole words let a model this small write English after a minute; characters spell the rest, so nothing is unknown.

    Args:
        text: the text to describe.
        size: number of tokens, at least the number of distinct characters.
    """

    def __init__(self, text: str, size: int) -> None:
        characters = sorted(set(text))
        if size < len(characters):
            msg = f"size must be at least the text's {len(characters)} distinct characters, got {size}"
            raise ValueError(msg)
        words = Counter(piece for piece in self._pieces(text) if len(piece) > 1)
        self.tokens = characters + [word for word, _ in words.most_common(size - len(characters))]
        self._ids = {token: i for i, token in enumerate(self.tokens)}

    @staticmethod
    def _pieces(text: str) -> list[str]:
        return re.findall(r" ?[A-Za-z]+|\n|.", text)

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> torch.Tensor:
        """Returns the text as a 1-D int64 tensor."""
        ids: list[int] = []
        for piece in self._pieces(text):
            if piece in self._ids:
                ids.append(self._ids[piece])
            else:
                ids.extend(self._ids[character] for character in piece)
        return torch.tensor(ids)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of token ids."""
        return "".join(self.tokens[i] for i in ids)


@dataclass
class Run:
    """What one training run left behind."""

    model: LanguageModel
    losses: list[float]
    tokens_per_second: float
    first_step_seconds: float
    attention_calls: dict[str, int]


def draw_batch(data: torch.Tensor, args: argparse.Namespace, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Draws random windows of the text; returns tokens and targets, each [batch, seq_len]."""
    starts = torch.randint(len(data) - args.seq_len, (args.batch_size, 1), generator=generator)
    windows = data[starts + torch.arange(args.seq_len + 1)].to(args.device)
    return windows[:, :-1], windows[:, 1:]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first tenth, then linear decay to a tenth."""
    warm_up = max(1, args.steps // 10)
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    return args.lr * (1 - 0.9 * (step - warm_up) / max(1, args.steps - warm_up))


def train(name: str, config: ModelConfig, data: torch.Tensor, args: argparse.Namespace) -> Run:
    """Trains a fresh model; the same arguments give the same first weights and the same batches."""
    torch.manual_seed(args.seed)
    torch.compiler.reset()
    torch_bwattn.reset_call_counts()
    batches = torch.Generator().manual_seed(args.seed)
    model = LanguageModel(config).to(args.device)
    loss_of = model.loss if args.no_compile else torch.compile(model.loss, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    losses: list[torch.Tensor] = []
    begin = first_step = time.perf_counter()
    with tqdm(total=args.steps, desc=f"{name:>7}", unit="step", mininterval=0.5) as bar:
        for step in range(args.steps):
            tokens, targets = draw_batch(data, args, batches)
            with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.dtype == torch.bfloat16):
                loss = loss_of(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            # Reading the loss waits for the device, so it is read only when it is shown.
            if step == 0:
                loss.item()
                first_step = time.perf_counter()
                bar.set_postfix_str("compiled" if not args.no_compile else "")
            elif step % 10 == 9 or step == args.steps - 1:
                value = loss.item()
                rate = step * tokens.numel() / (time.perf_counter() - first_step)
                bar.set_postfix_str(f"loss {value:.3f}, {rate:,.0f} tokens/s")
            bar.update()
    seconds = time.perf_counter() - first_step
    return Run(
        model=model,
        losses=torch.stack(losses).tolist(),
        tokens_per_second=(args.steps - 1) * args.batch_size * args.seq_len / seconds,
        first_step_seconds=first_step - begin,
        attention_calls=torch_bwattn.call_counts(),
    )


@torch.no_grad()
def held_out_loss(model: LanguageModel, data: torch.Tensor, args: argparse.Namespace) -> float:
    """Mean loss over a few batches of text that was not trained on, in nats a token."""
    batches = torch.Generator().manual_seed(args.seed)
    with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.dtype == torch.bfloat16):
        return sum(model.loss(*draw_batch(data, args, batches)).item() for _ in range(8)) / 8


@torch.no_grad()
def write_text(model: LanguageModel, vocabulary: Vocabulary, prompt: str, args: argparse.Namespace) -> str:
    """Continues the prompt by sampling, each token given the last `seq_len`."""
    generator = torch.Generator().manual_seed(args.seed)
    ids = vocabulary.encode(prompt).tolist()
    for _ in range(args.sample_tokens):
        window = torch.tensor([ids[-args.seq_len :]], device=args.device)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.dtype == torch.bfloat16):
            logits = model(window)[0, -1].float().cpu()
        # A temperature below 1 keeps a short-trained model near the words that it has learned.
        ids.append(int(torch.multinomial(torch.softmax(logits / 0.7, dim=-1), 1, generator=generator)))
    return vocabulary.decode(ids)


def distances(patched: Run, plain: Run) -> list[float]:
    """Returns how far apart the two runs' losses are at each step; infinitely far where one is NaN."""
    gaps = (abs(a - b) for a, b in zip(patched.losses, plain.losses, strict=True))
    return [math.inf if math.isnan(gap) else gap for gap in gaps]


def nearer(patched: Run, plain: Run, control: Run | None) -> Run:
    """Returns the one of PyTorch's runs, which nothing puts before each other, that the patched run is nearer to."""
    runs = [plain] if control is None else [plain, control]
    return min(runs, key=lambda run: mean(distances(patched, run)))


def tolerance_of(dtype: torch.dtype, plain: Run, control: Run | None) -> Tolerance:
    """Returns the dtype's tolerance, or twice what two of PyTorch's own kernels differ by where that is more."""
    usual = TOLERANCES[dtype]
    if control is None:
        return usual
    gaps = distances(control, plain)
    return Tolerance(max(usual.early, 2 * max(gaps[:EARLY_STEPS])), max(usual.mean, 2 * mean(gaps)))


def failures(patched: Run, plain: Run, tolerance: Tolerance) -> list[str]:
    """Returns what is wrong with the two runs, one sentence each; empty when all is well."""
    found = []
    gaps = distances(patched, plain)
    if max(gaps[:EARLY_STEPS]) > tolerance.early or mean(gaps) > tolerance.mean:
        found.append("the two loss curves disagree")
    if sum(patched.attention_calls.values()) == 0:
        found.append("the patch reached no attention call")
    if sum(plain.attention_calls.values()) != 0:
        found.append("the run without the patch called torch_bwattn")
    return found


def plot(patched: Run, plain: Run, tolerance: Tolerance, path: Path) -> None:
    """Draws both loss curves, and their distance beside the tolerance, into a PNG file."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("Agg")  # files only, no window
    figure, (curves, distance) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    curves.plot(plain.losses, color="0.75", linewidth=5, label="F.scaled_dot_product_attention")
    curves.plot(patched.losses, color="tab:blue", linewidth=1.2, label="torch_bwattn")
    curves.set_ylabel("loss (nats a token)")
    curves.set_title("The same seed with and without torch_bwattn")
    curves.legend()
    # A logarithmic axis cannot show the steps at which both losses are equal to the bit.
    distance.semilogy([max(gap, 1e-8) for gap in distances(patched, plain)], color="tab:blue", linewidth=1)
    distance.hlines(tolerance.early, 0, EARLY_STEPS, color="tab:red", label=f"bound of the first {EARLY_STEPS} steps")
    distance.axhline(tolerance.mean, color="tab:red", linestyle="--", label="bound of the mean")
    distance.set_xlabel("step")
    distance.set_ylabel("distance")
    distance.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def positive(text: str) -> int:
    """Parses a number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        msg = f"expected at least 1, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line; adds `dtype`, which follows from the device."""
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layers", type=positive, default=2, help="transformer blocks")
    parser.add_argument("--heads", type=positive, default=4, help="query heads")
    parser.add_argument("--kv-heads", type=positive, default=2, help="key and value heads; must divide --heads")
    parser.add_argument(
        "--head-dim", type=positive, default=32, help="width of one head; the model is heads times this wide"
    )
    parser.add_argument("--seq-len", type=positive, default=128, help="tokens in a training window")
    parser.add_argument("--batch-size", type=positive, default=8, help="windows a step")
    parser.add_argument("--steps", type=positive, default=400, help="training steps of each run")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--vocabulary", type=positive, default=1024, help="tokens: characters, then common words")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the batches and the sample")
    parser.add_argument("--sample-tokens", type=positive, default=150, help="tokens of text to write at the end")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device, help="bf16 on cuda, fp32 on cpu")
    parser.add_argument(
        "--control", action="store_true", help="train a third time, with another of PyTorch's kernels, as a measure"
    )
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    parser.add_argument("--losses", type=Path, help="where the losses of all steps go, as JSON")
    parser.add_argument("--plot", type=Path, default=Path("train_lm.png"), help="where the plot goes")
    parser.add_argument("--no-plot", action="store_true", help="do without the plot, and without matplotlib")
    args = parser.parse_args(argv)
    if not args.no_plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("matplotlib is not installed: pip install -c constraints.txt -e '.[examples]', or --no-plot")
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    args = parse_arguments(argv)
    text = read_prose()
    vocabulary = Vocabulary(text, args.vocabulary)
    # The tail of the text is not trained on.
    train_text, held_out_text = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    train_data, held_out_data = vocabulary.encode(train_text), vocabulary.encode(held_out_text)
    config = ModelConfig(
        vocabulary=len(vocabulary),
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        seq_len=args.seq_len,
    )
    parameters = sum(p.numel() for p in LanguageModel(config).parameters())
    print(f"{len(text):,} characters of Python's documentation as {len(train_data) + len(held_out_data):,} tokens;")
    print(f"{parameters:,} parameters, {args.dtype} on {args.device}, {'eager' if args.no_compile else 'compiled'}\n")

    with torch_bwattn.patch_sdpa():
        patched = train("patched", config, train_data, args)
        sample = write_text(patched.model, vocabulary, "The ", args)
        held_out = held_out_loss(patched.model, held_out_data, args)
    plain = train("plain", config, train_data, args)
    control = None
    if args.control:
        other = SDPBackend.FLASH_ATTENTION if args.device == "cuda" else SDPBackend.MATH
        # What the plain run compiled would be found again, with its kernels: the cache does not ask which are allowed.
        with sdpa_kernel(other), torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
            control = train("control", config, train_data, args)
    tolerance = tolerance_of(args.dtype, plain, control)
    compared = nearer(patched, plain, control)
    if not args.no_plot:
        plot(patched, compared, tolerance, args.plot)
    runs = {"patched": patched, "plain": plain, **({"control": control} if control else {})}
    if args.losses:
        args.losses.write_text(json.dumps({name: run.losses for name, run in runs.items()}) + "\n")

    print(f"\nWritten by the patched model (held-out loss {held_out:.3f} nats a token):\n")
    print("\n".join("    " + line for line in sample.splitlines()))
    print(f"\n{'run':<10}{'first step':>12}{'tokens/s':>12}{'last loss':>12}  attention calls")
    for name, run in runs.items():
        calls = ", ".join(f"{backend} {count:,}" for backend, count in run.attention_calls.items()) or "none counted"
        speed = f"{run.first_step_seconds:>10.1f} s{run.tokens_per_second:>12,.0f}"
        print(f"{name:<10}{speed}{run.losses[-1]:>12.4f}  {calls}")

    gaps = distances(patched, compared)
    others = "control" if compared is control else "plain"
    print(
        f"\nDistance of the patched and the {others} run's losses, tolerances for {args.dtype} in brackets: at most "
        f"{max(gaps[:EARLY_STEPS]):.1e}"
    )
    print(
        f"in the first {EARLY_STEPS} steps [{tolerance.early:.0e}], {mean(gaps):.1e} on average [{tolerance.mean:.0e}]."
    )
    if not args.no_plot:
        print(f"Both curves: {args.plot}")
    found = failures(patched, compared, tolerance)
    for failure in found:
        print(f"FAILED: {failure}.", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

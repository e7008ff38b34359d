# SPDX-License-Identifier: BSD-3-Clause
# Does a model learn the same with fa's attention as with eager attention, and at what cost?
"""Fine-tunes one model twice on the same batches: eager attention, then fa's. Loss, time, memory.

    python3 tools/train.py                      # SmolLM2-135M, 200 steps (pip install '.[demo]')
    python3 tools/train.py --model FOLDER       # a folder or GGUF file instead: no download
    python3 tools/train.py --random             # SmolLM2's shape, random weights: no download
    python3 tools/train.py --tiny --steps 20    # few weights: seconds on a CPU

The text is English prose that is already here: this project's Markdown files and the topics of
Python's own help (pydoc_data), or files given with --text. Weights and optimizer are fp32; products
run in bfloat16 on a GPU (autocast) and in fp32 on a CPU. Writes train.jsonl and train.png to --out.

Exit status 0: the loss curves agree; 1: they do not, or a model or kernel is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "tools") not in sys.path:
    sys.path.insert(0, str(ROOT / "tools"))
importlib.import_module("clone_package")

import torch  # noqa: E402  (the path comes first)

import machine  # noqa: E402
from fa._cli import compare, fetch, measure  # noqa: E402

# Shapes of SmolLM2-135M, and of a model of its kind that a CPU trains in seconds.
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
TINY = SMOLLM2 | {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
BYTES = 256  # the vocabulary without a tokenizer
# Largest mean difference of two loss curves, in nats, that the rounding of products explains.
ALLOWED = {torch.float32: 2e-3, torch.bfloat16: 2e-2}


@dataclasses.dataclass
class Run:
    """Of one implementation."""

    name: str
    losses: list[float]
    seconds: float  # median of a step
    peak_bytes: int | None  # of a step, beyond weights and optimizer on a GPU; None: unknown


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="a folder, a GGUF file, or a name on the hub")
    source.add_argument("--random", action="store_true", help="SmolLM2's shape, random weights")
    source.add_argument("--tiny", action="store_true", help="two narrow layers, random weights")
    add("--steps", type=int, default=200)
    add("--batch", type=int, help="sequences of a step (default: 8, tiny 2)")
    add("--length", type=int, help="tokens of a sequence (default: 1024, tiny 64)")
    add("--rate", type=float, help="learning rate (default: 5e-5, random weights 1e-3)")
    add("--impl", nargs="+", default=["eager", "fa"], help="eager first, then eager, sdpa or fa")
    add("--device", help="default: a GPU if torch sees one")
    add("--text", type=Path, nargs="+", help="files to learn from")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("build/train"))
    options = parser.parse_args(arguments)
    options.batch = options.batch or (2 if options.tiny else 8)
    options.length = options.length or (64 if options.tiny else 1024)
    options.rate = options.rate or (1e-3 if options.tiny or options.random else 5e-5)
    for name in ("steps", "batch", "length"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: {getattr(options, name)}; at least 1 is needed.")
    if options.impl[0] != "eager" or set(options.impl) - {"eager", "sdpa", "fa"}:
        parser.error(f"--impl: {options.impl}; eager comes first, then eager, sdpa or fa.")
    options.device = torch.device(
        options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    if options.device.type == "cuda":
        machine.require_gpu("train.py --device cuda", "`--device cpu` trains here", torch_too=True)
    options.dtype = torch.bfloat16 if options.device.type == "cuda" else torch.float32
    return options


def read_text(files: list[Path] | None) -> str:
    """What is learned. Raises FileNotFoundError for a file that is not there."""
    if files:
        return "\n\n".join(path.read_text(errors="replace") for path in files)
    parts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    parts += [path.read_text() for path in sorted(ROOT.glob("*.md"))]
    with contextlib.suppress(ImportError):  # some systems package Python without its help
        from pydoc_data.topics import topics

        parts += [topics[name] for name in sorted(topics)]
    return "\n\n".join(parts)


def load(options: argparse.Namespace) -> tuple[Any, Any, str]:
    """(model in fp32, its tokenizer or None for bytes, what to call it). Raises as compare.load."""
    if options.tiny or options.random:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(options.seed)
        shape = TINY if options.tiny else SMOLLM2
        config = LlamaConfig(vocab_size=BYTES, attn_implementation="eager", **shape)
        name = "tiny" if options.tiny else "SmolLM2-135M's shape, random"
        return LlamaForCausalLM(config).to(options.device), None, name
    source = options.model or str(fetch.default_model())
    loaded = compare.load(source, options.device, torch.float32)
    return loaded.model, loaded.tokenizer, loaded.name


def token_ids(text: str, tokenizer: Any) -> torch.Tensor:
    """int64 [tokens]."""
    if tokenizer is None:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    pieces = [text[i : i + 100_000] for i in range(0, len(text), 100_000)]
    ids = tokenizer(pieces, add_special_tokens=False).input_ids
    return torch.tensor([token for piece in ids for token in piece])


def batches(ids: torch.Tensor, options: argparse.Namespace) -> list[torch.Tensor]:
    """One int64 [batch, length] of drawn excerpts for each step."""
    if len(ids) <= options.length:
        raise SystemExit(f"--length: {options.length}, and the text has {len(ids)} tokens.")
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.steps, options.batch)
    begins = torch.randint(len(ids) - options.length, shape, generator=generator)
    return [torch.stack([ids[b : b + options.length] for b in row]) for row in begins.tolist()]


def train(model: Any, name: str, steps: list[torch.Tensor], options: argparse.Namespace) -> Run:
    """Trains the model in place with one implementation of attention."""
    device = options.device
    model.set_attn_implementation(name)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.01)
    warm = max(1, options.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / warm))
    losses, seconds, peaks = [], [], []
    for batch in steps:
        ids = batch.to(device)
        wait(device)
        held = torch.cuda.memory_allocated(device) if on_gpu(device) else measure.reset_peak()
        if on_gpu(device):
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu(device)):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(float(loss.detach()))  # waits for the device
        wait(device)
        seconds.append(time.perf_counter() - began)
        top = torch.cuda.max_memory_allocated(device) - held if on_gpu(device) else None
        peaks.append(top if on_gpu(device) else measure.peak_since(held))
        if len(losses) % max(1, options.steps // 10) == 0:
            took = f"{seconds[-1]:.3f} s"
            print(f"  {name}: step {len(losses)}, loss {losses[-1]:.4f}, {took}", flush=True)
    # The first step makes the optimizer's moments; it counts only where it is the only one.
    known = [p for p in peaks[1:] or peaks if p is not None]
    middle = sorted(seconds[1:] or seconds)[len(seconds[1:] or seconds) // 2]
    return Run(name, losses, middle, max(known) if known else None)


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def wait(device: torch.device) -> None:
    if on_gpu(device):
        torch.cuda.synchronize(device)


def difference(run: Run, first: Run) -> float:
    """Mean over the steps of |loss - loss of the first run|, in nats; NaN if a loss is none."""
    pairs = zip(run.losses, first.losses, strict=True)
    return sum(abs(a - b) for a, b in pairs) / len(run.losses)


def report(runs: list[Run], allowed: float) -> tuple[str, bool]:
    """The table, and whether every run learned what the first one did, and anything at all."""
    lines = ["  attention  first loss  last loss  difference  s/step  peak MiB"]
    good, long_enough = True, len(runs[0].losses) >= 10
    tail = max(1, len(runs[0].losses) // 20)
    for run in runs:
        apart = difference(run, runs[0])
        last = sum(run.losses[-tail:]) / tail
        good = good and apart <= allowed  # a NaN is not <=
        good = good and (not long_enough or last < run.losses[0])
        peak = "?" if run.peak_bytes is None else f"{run.peak_bytes / 2**20:.0f}"
        lines.append(
            f"  {run.name:<9}  {run.losses[0]:10.4f}  {last:9.4f}  {apart:10.2e}  "
            f"{run.seconds:6.3f}  {peak:>8}"
        )
    word = "agree" if good else "DO NOT agree"
    falls = ", and the loss falls" if long_enough else ""
    lines.append(f"The curves {word}: mean difference at most {allowed:.0e} nats{falls}.")
    return "\n".join(lines), good


def plot(runs: list[Run], title: str, path: Path) -> None:
    """Loss over the steps, and the differences from the first run. ImportError: no matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    for run in runs:
        cost = "" if run.peak_bytes is None else f", {run.peak_bytes / 2**30:.2f} GiB"
        left.plot(run.losses, label=f"{run.name}: {run.seconds * 1e3:.0f} ms a step{cost}")
    for run in runs[1:]:
        apart = [a - b for a, b in zip(run.losses, runs[0].losses, strict=True)]
        right.plot(apart, label=f"{run.name} - {runs[0].name}")
    for axes, label in (
        (left, "loss [nats per token]"),
        (right, "difference of the losses [nats]"),
    ):
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(True, alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        from fa.integrations.transformers import register

        register()
        model, tokenizer, name = load(options)
    except (ImportError, fetch.FetchError, compare.ModelError) as error:
        print(f"No model: {error} Or pass --random or --tiny, which download nothing.")
        return 1
    steps = batches(token_ids(read_text(options.text), tokenizer), options)
    where = torch.cuda.get_device_name(options.device) if on_gpu(options.device) else "CPU"
    title = (
        f"{name}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters: "
        f"{options.steps} steps of {options.batch} x {options.length} tokens, "
        f"{str(options.dtype).removeprefix('torch.')}, {where}"
    )
    print(title, flush=True)
    first = {n: t.detach().cpu().clone() for n, t in model.state_dict().items()}
    runs = []
    for implementation in options.impl:
        model.load_state_dict(first)
        try:
            runs.append(train(model, implementation, steps, options))
        except NotImplementedError as error:
            print(f"{implementation}: {error}")
            return 1
    text, good = report(runs, ALLOWED[options.dtype])
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "train.jsonl", "w") as lines:
        for run in runs:
            lines.write(json.dumps({"title": title, **dataclasses.asdict(run)}) + "\n")
    try:
        plot(runs, title, options.out / "train.png")
        print(f"{(options.out / 'train.png').resolve()}")
    except ImportError as error:
        print(f"No picture: {error}. Install what the demo needs: pip install '.[demo]'")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

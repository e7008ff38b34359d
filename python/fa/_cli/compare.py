# SPDX-License-Identifier: BSD-3-Clause
# Does a real model say the same with fa's attention as with eager attention, and at what cost?
"""A causal language model run twice with the same weights: eager attention, then fa's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fa._cli import measure
from fa._cli.lengths import gib, seconds
from fa._cli.progress import Progress

OURS = "fa"
NAMES = ("eager", OURS)
REFERENCE_UP_TO = 10**9  # parameters of a model that is copied to fp32 for the error of 16 bits

GENERATION_LIMIT_S = 20.0  # then it stops; what both have is compared

PROMPT = "Explain in two sentences why the sky is blue."

# For the prefill: a text of ordinary words. Nothing is asked about it.
PASSAGE = """\
A lighthouse keeper on a small island wrote down every evening what had passed on the water that
day. On the first page there are fishing boats, the mail steamer and a whale. Later pages tell of
storms: how the lamp was cleaned of salt at two in the morning, how the rope of the landing stage
broke, and how a crew of five spent three nights in the kitchen and repaired the stove in thanks.
He counted birds in spring and in autumn and compared the numbers with those of his father, who
had kept the lamp before him. When the light became electric he had more time, and he began to
measure the water: its height at noon, its warmth, its colour against a painted board. Nobody had
asked for it. Eighty years afterwards a student found the books in the attic of the harbour office
and typed them into a computer, line by line. The warmth of the water had gone up by a little more
than one degree; the birds came eleven days earlier. She wrote to the keeper's granddaughter, who
answered that the painted board still stood in the garden, and that its colours had never faded,
because he had painted it anew each year with the same paint.
"""


class ModelError(Exception):
    """The model could not be loaded or run; the text says why and what to do."""


@dataclasses.dataclass
class Loaded:
    """A model, its tokenizer, and what to call them."""

    model: Any
    tokenizer: Any
    name: str
    parameters: int


@dataclasses.dataclass
class Sizes:
    """How much is run."""

    prefill: int
    check: int  # tokens over which every logit is compared
    new_tokens: int


def load(source: str, device: torch.device, dtype: torch.dtype) -> Loaded:
    """From a folder, a GGUF file or a hub name, by transformers. Raises ModelError."""
    try:
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ModelError(
            f"transformers could not be imported ({error}). "
            "Install what the demo needs: pip install '.[demo]'"
        ) from error
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    place, options = source, {}
    path = Path(source).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelError(
                f"--model: {path} has no config.json and {len(files)} GGUF files; "
                "give a folder with one of the two, or the file itself."
            )
        path = files[0]
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"--model: there is no file {path}.")
        place, options = str(path.parent), {"gguf_file": path.name}
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise ModelError(
                f"Reading {path.name} needs the package gguf. Install it with: pip install gguf"
            ) from error
    elif path.exists():
        place = str(path)
    elif source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelError(
            f"--model: there is no folder {path}. Allowed are a folder with config.json and "
            "weights, a GGUF file, or the name of a causal language model on the hub."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, attn_implementation="eager", **options
        )
    except Exception as error:  # transformers raises what it likes; the user needs one sentence
        first = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise ModelError(
            f"--model: transformers could not load {source!r}: {type(error).__name__}: {first} "
            "Allowed are a folder with config.json and weights, a GGUF file, or the name of a "
            "causal language model on the hub."
        ) from error
    name = path.stem if path.exists() else source
    model = model.to(device).eval()
    return Loaded(model, tokenizer, name, sum(p.numel() for p in model.parameters()))


def sizes(loaded: Loaded, device: torch.device, quick: bool, new_tokens: int | None) -> Sizes:
    """Lengths for this device that the model's positions allow."""
    on_gpu = device.type == "cuda"
    prefill = (4096 if on_gpu else 512) // (4 if quick else 1)
    limit = getattr(loaded.model.config, "max_position_embeddings", None) or prefill
    if new_tokens is None:
        new_tokens = (128 if on_gpu else 32) // (4 if quick else 1)
    return Sizes(min(prefill, limit), min(prefill, limit, 1024 if on_gpu else 256), new_tokens)


@contextlib.contextmanager
def attention(loaded: Loaded, name: str) -> Iterator[Any]:
    """The model with one of the two implementations."""
    loaded.model.set_attn_implementation(name)
    try:
        with torch.inference_mode():
            yield loaded.model
    finally:
        loaded.model.set_attn_implementation("eager")


class _Ticks:
    """A streamer of transformers that only counts."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.prompt_seen = progress, False

    def put(self, value: Any) -> None:
        if self.prompt_seen:
            self.progress.update(1)
        self.prompt_seen = True

    def end(self) -> None:
        pass


@dataclasses.dataclass
class Result:
    """Of one implementation."""

    prefill: measure.Cost
    logits: torch.Tensor  # [check, vocabulary], on the CPU
    tokens: list[int]  # new ones
    step_logits: list[torch.Tensor]  # [vocabulary] each, on the CPU
    seconds: float  # of the generation
    peak_bytes: int | None  # of the generation


def run(loaded: Loaded, name: str, prompt: str, size: Sizes, device: torch.device) -> Result:
    """Prefill of the passage and greedy generation after the prompt, with one implementation."""
    passage = _passage_ids(loaded, size.prefill).to(device)
    ids = _prompt_ids(loaded, prompt).to(device)
    with attention(loaded, name) as model:
        keep = {"logits_to_keep": 1}
        try:
            model(ids[:, :8], use_cache=False, **keep)  # loads kernels, starts threads
        except TypeError:
            keep = {}
            model(ids[:, :8], use_cache=False)
        budget = 1.0 if device.type == "cuda" else 2.5
        prefill = measure.cost(lambda: model(passage, use_cache=False, **keep), device, budget)
        logits = model(passage[:, : size.check], use_cache=False).logits[0].float().cpu()
        options = {
            "attention_mask": torch.ones_like(ids),
            "do_sample": False,
            "return_dict_in_generate": True,
            "output_logits": True,
            "max_time": GENERATION_LIMIT_S,
        }
        model.generate(ids, max_new_tokens=2, **options)
        made: list[Any] = []
        with Progress(f"generation, {name}", size.new_tokens, "tokens") as progress:
            options.update(max_new_tokens=size.new_tokens, streamer=_Ticks(progress))
            began = time.perf_counter()
            cost = _once(lambda: made.append(model.generate(ids, **options)), device)
            took = time.perf_counter() - began
    output = made[0]
    return Result(
        prefill,
        logits,
        output.sequences[0, ids.shape[1] :].tolist(),
        [step[0].float().cpu() for step in output.logits],
        took,
        cost,
    )


def _once(call: Any, device: torch.device) -> int | None:
    """Runs `call` once. Returns its peak memory beyond what was held before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    held = measure.reset_peak()
    call()
    return measure.peak_since(held)


def _passage_ids(loaded: Loaded, length: int) -> torch.Tensor:
    """[1, length]: the passage, repeated as often as it takes."""
    ids = loaded.tokenizer(PASSAGE, return_tensors="pt").input_ids
    return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]


def _prompt_ids(loaded: Loaded, prompt: str) -> torch.Tensor:
    """[1, n]: the prompt as a turn of a chat, where the tokenizer knows chats."""
    tokenizer = loaded.tokenizer
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    return tokenizer(prompt, return_tensors="pt").input_ids


def reference_logits(loaded: Loaded, size: Sizes, device: torch.device) -> torch.Tensor | None:
    """[check, vocabulary] of the same weights in fp32 with eager attention; None if too large."""
    if loaded.parameters > REFERENCE_UP_TO:
        return None
    passage = _passage_ids(loaded, size.check).to(device)
    # A copy, because a cast back to 16 bits would also round buffers that were fp32.
    # The method of nn.Module: transformers refuses its own on a model that came from a GGUF file,
    # although its weights were expanded when it was loaded.
    exact = dataclasses.replace(loaded, model=torch.nn.Module.float(copy.deepcopy(loaded.model)))
    with attention(exact, "eager") as model:
        return model(passage, use_cache=False).logits[0].float().cpu()


@dataclasses.dataclass
class Verdict:
    """The comparison as text, and whether fa's results stand."""

    text: str
    good: bool


def judge(
    results: dict[str, Result], reference: torch.Tensor | None, dtype: torch.dtype
) -> Verdict:
    """Same tokens, or a tie within rounding; logits within rounding of each other.

    fp32: within 1e-3 of the largest logit. 16 bits: fa's error against fp32 at most twice that of
    eager attention in the same 16 bits; without an fp32 reference, within 5 % of the largest logit.
    """
    eager, ours = results["eager"], results[OURS]
    scale = eager.logits.abs().max().item()
    apart = (eager.logits - ours.logits).abs().max().item()
    lines = [f"  largest logit difference, fa to eager: {apart:.2e} (logits up to {scale:.1f})"]
    if dtype == torch.float32:
        good = apart <= 1e-3 * scale
    elif reference is None:
        good = apart <= 5e-2 * scale
    else:
        errors = {n: (r.logits - reference).abs().max().item() for n, r in results.items()}
        lines.append(
            f"  largest logit error against fp32: eager {errors['eager']:.2e}, "
            f"fa {errors[OURS]:.2e}"
        )
        good = errors[OURS] <= 2 * errors["eager"] + 1e-3 * scale
    if not good:
        lines.append("  This is more than rounding explains: please report it (python -m fa info).")
    text, same = _judge_tokens(eager, ours)
    return Verdict("\n".join([text, *lines]), good and same)


def _judge_tokens(eager: Result, ours: Result) -> tuple[str, bool]:
    steps = min(len(eager.tokens), len(ours.tokens))
    at = next((i for i in range(steps) if eager.tokens[i] != ours.tokens[i]), None)
    if at is None:
        return f"  the same {steps} tokens: yes", True
    e, o = eager.step_logits[at], ours.step_logits[at]
    apart = (e - o).abs().max().item()
    margin = (e[eager.tokens[at]] - e[ours.tokens[at]]).item()
    text = f"  the same tokens: the first {at} of {steps}; then eager's two best candidates are "
    text += f"{margin:.2e} apart, and the implementations differ by up to {apart:.2e}"
    if margin <= 2 * apart:
        return f"{text}: a tie that rounding decides", True
    return f"{text}. Please report it (python -m fa info).", False


def table(results: dict[str, Result], size: Sizes) -> str:
    """Times and peak memory of both, as text."""
    rows: list[tuple[str, ...]] = [("", *NAMES)]
    each = [results[n] for n in NAMES]

    def memory(values: list[int | None]) -> list[str]:
        return [gib(v) if v is not None else "-" for v in values]

    rows.append((f"prefill of {size.prefill} tokens", *(seconds(r.prefill.seconds) for r in each)))
    rows.append(("  peak memory", *memory([r.prefill.peak_bytes for r in each])))
    made = [
        f"{len(r.tokens)} in {seconds(r.seconds)}"
        + (" (time limit)" if r.seconds >= GENERATION_LIMIT_S else "")
        for r in each
    ]
    rows.append(("greedy generation, tokens", *made))
    rows.append(("  peak memory", *memory([r.peak_bytes for r in each])))
    widths = [max(len(r[i]) for r in rows) for i in range(3)]
    return "\n".join(
        f"  {r[0].ljust(widths[0])}  {r[1].rjust(widths[1])}  {r[2].rjust(widths[2])}" for r in rows
    )

# SPDX-License-Identifier: BSD-3-Clause
# What does fa do for a real model, and why?
"""`python -m fa demo`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import fa
from fa._cli import compare, fetch, info, lengths

DESCRIPTION = """\
1. What GPU, what build, what would run.
2. A real model (SmolLM2-135M-Instruct; downloaded once, 98 MB) with eager attention and with fa's:
   the same tokens, the largest logit difference, time and peak memory.
3. Why: standard attention against fa as the sequence grows, as a table and a PNG picture.
"""
EPILOG = """\
exit code: 0; 1 when fa's results are not those of eager attention, or when a model that was asked
for (--model, --prompt, --max-new-tokens) could not be run; 2 for a wrong command line. When only
the download of the default model fails, the reason is printed and the rest runs: exit code 0.

The model is kept in FA_CACHE, else XDG_CACHE_HOME/fa, else ~/.cache/fa.
"""


def parse(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """The command line. Exits with 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        prog=f"python -m fa {prog}",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer tokens and shorter sequences")
    add("--model", help="a folder, a GGUF file, or a name on the hub, instead of SmolLM2")
    add("--prompt", help=f'what to continue (default: "{compare.PROMPT}")')
    add("--max-new-tokens", type=int, help="length of the generation (default: by device)")
    add("--device", default="auto", help="cuda, cuda:1, cpu; default: a GPU that has kernels")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16 on a GPU")
    add("--no-model", action="store_true", help="the table only")
    add("--out", type=Path, default=Path(), help="folder of the picture (default: here)")
    options = parser.parse_args(arguments)
    if options.no_model and (options.model or options.prompt or options.max_new_tokens):
        parser.error("--no-model goes with none of --model, --prompt, --max-new-tokens.")
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens: {options.max_new_tokens}; at least 1 is needed.")
    try:
        options.device, options.note = choose_device(options.device)
    except (ValueError, RuntimeError) as error:
        parser.error(f"--device: {error}")
    on_gpu = options.device.type == "cuda"
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    if on_gpu and options.dtype == torch.float32:
        parser.error(
            "--dtype: float32 has no kernel on a GPU; allowed are bfloat16 and float16 there, "
            "or add --device cpu."
        )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if not os.access(options.out, os.W_OK):
            raise PermissionError("no permission to write there")
    except OSError as error:
        parser.error(f"--out: {options.out} cannot be used ({error}). Give a writable folder.")
    return options


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device, and a sentence where it is not what one may expect. Raises ValueError."""
    if name != "auto":
        try:
            device = torch.device(name)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f'"{name}" is not available; allowed are auto, cpu, cuda, cuda:N.')
        if device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if (device.index or 0) >= count:
                raise ValueError(
                    f'"{name}": torch {torch.__version__} sees {count} GPUs here. '
                    "Use --device cpu, or install a CUDA build of torch on a machine with a GPU."
                )
            reason = _no_kernel(device)
            if reason:
                raise ValueError(f'"{name}": {reason}')
        return device, ""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "No GPU is visible to torch: the CPU path of fa runs."
    device = torch.device("cuda", torch.cuda.current_device())
    reason = _no_kernel(device)
    if reason:
        return torch.device("cpu"), f"The GPU is not used, the CPU path of fa runs: {reason}"
    return device, ""


def _no_kernel(device: torch.device) -> str:
    """Why the table's call cannot run on this GPU; empty if it can."""
    answer = fa.supports(*_sample(lengths.plan(device, torch.bfloat16, True), 512), causal=True)
    return "" if answer is True else str(answer)


def _sample(plan: lengths.Plan, length: int) -> list[torch.Tensor]:
    shape = (1, length, plan.heads, plan.dim)
    return [torch.empty(shape, device=plan.device, dtype=plan.dtype) for _ in range(3)]


def run(arguments: Sequence[str], prog: str = "demo") -> int:
    """The command. Returns its exit code."""
    options = parse(arguments, prog)
    began = time.monotonic()
    plan = lengths.plan(options.device, options.dtype, options.quick)
    print(info.summary())
    if options.note:
        print(options.note)
    print(f"\n== What would run: causal, 1 x 4096 x {plan.heads} heads of {plan.dim}\n")
    print(fa.explain(*_sample(plan, 4096), causal=True).rstrip())
    if options.device.type != "cuda" and info.has_rows():
        call = ((1, 4096, 16, 128), torch.bfloat16, "cpu")
        print("\nOn an H200, for 16 heads of 128 in bfloat16, from this build:")
        print(fa.explain(call, call, call, device="h200", causal=True).rstrip())
    good = True
    if not options.no_model:
        good = run_model(options)
    good = run_table(options, plan) and good
    print(f"\nDone in {time.monotonic() - began:.0f} s.")
    return 0 if good else 1


def run_model(options: argparse.Namespace) -> bool:
    """The model part. Returns False when it was asked for and failed, or its results differ."""
    print("\n== A real model, with eager attention and with fa's\n", flush=True)
    asked = bool(options.model or options.prompt or options.max_new_tokens)
    try:
        if not options.model and importlib.util.find_spec("transformers") is None:
            raise compare.ModelError(
                "transformers is not installed. Install what the demo needs: pip install '.[demo]'"
            )
        source = options.model or str(fetch.default_model())
        began = time.monotonic()
        print(f"loading {source} ...", flush=True)
        loaded = compare.load(source, options.device, options.dtype)
        print(
            f"{loaded.name}: {loaded.parameters / 1e6:.0f} M parameters, "
            f"{str(options.dtype).removeprefix('torch.')} on {options.device}, "
            f"loaded in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        return _compare(options, loaded)
    except (fetch.FetchError, compare.ModelError) as error:
        print(f"\nThe model part was not run. {error}")
        return not asked


def _compare(options: argparse.Namespace, loaded: compare.Loaded) -> bool:
    from fa.integrations.transformers import register

    register(compare.OURS)
    device = options.device
    size = compare.sizes(loaded, device, options.quick, options.max_new_tokens)
    prompt = options.prompt or compare.PROMPT
    results = {
        name: compare.run(loaded, name, prompt, size, device) for name in reversed(compare.NAMES)
    }
    reference = None
    if options.dtype != torch.float32:
        reference = compare.reference_logits(loaded, size, device)
    verdict = compare.judge(results, reference, options.dtype)
    print(f"\n  > {prompt}")
    print("  " + loaded.tokenizer.decode(results[compare.OURS].tokens).replace("\n", "\n  "))
    print(f"\n{compare.table(results, size)}\n{verdict.text}")
    return verdict.good


def run_table(options: argparse.Namespace, plan: lengths.Plan) -> bool:
    """The table and its picture. Returns False when fa's numbers are not those of the standard."""
    dtype = str(plan.dtype).removeprefix("torch.")
    print(
        f"\n== Why: attention over N tokens, causal, batch 1, {plan.heads} heads of {plan.dim}, "
        f"{dtype}\n",
        flush=True,
    )
    lines = lengths.measure_lengths(plan)
    print(lengths.table(lines))
    print(
        "\n  Standard attention holds the N x N scores; fa holds one tile of them at a time.\n"
        "  Ratio: standard to fa; above 1, fa is faster or smaller. Memory: beyond q, k and v."
    )
    try:
        from fa._cli.plot import write_plot

        path = options.out / "fa-demo.png"
        write_plot(lines, plan, info.device_name(options.device), path)
        print(f"  Picture: {path.resolve()}")
    except ImportError as error:
        print(f"  No picture: {error}. Install what the demo needs: pip install '.[demo]'")
    ours = [line.ours for line in lines if line.ours is not None]
    differences = [c.difference for c in ours if c.difference is not None]
    allowed = 1e-4 if plan.dtype == torch.float32 else 0.05
    if not all(d <= allowed for d in differences):  # a NaN is not <=
        print(
            f"  Largest differences {differences} are more than rounding explains "
            f"({allowed:.0e}): please report it (python -m fa info)."
        )
        return False
    return True

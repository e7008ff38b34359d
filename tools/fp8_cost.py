#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""What does attention in e4m3 cost with the quantisation of its inputs, and with finer factors?

    python3 tools/fp8_cost.py --length 4096 --dim 128 [--causal]
    python3 tools/fp8_cost.py --device cpu --length 128 --tokens 256   # a smoke run

16 384 tokens, hidden size 2048. Median milliseconds of the quantisation of 16-bit q, k and v, of
attention over what it made, and of both; "gain" is the time of bf16 attention over that of both.
All calls alternate within one process (bench_timers.py).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
importlib.import_module("clone_package")

import torch  # noqa: E402  (after the paths)

import bench_timers as timers  # noqa: E402
import fa  # noqa: E402
import machine  # noqa: E402
from fa.quantize import GRANULARITIES  # noqa: E402

HIDDEN = 2048
PARTS = ("quantise", "attention", "both")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    if options.length < 1 or options.tokens % options.length:
        parser.error(f"--length: {options.length} must divide --tokens, {options.tokens}.")
    if options.dim not in (64, 128, 256):
        parser.error(f"--dim: {options.dim} must be 64, 128 or 256.")
    if options.device.startswith("cuda"):
        machine.require_gpu("fp8_cost.py", "`--device cpu` makes a smoke run", torch_too=True)
    return options


def calls_of(o: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """bf16 attention, and the three parts of every granularity with and without rotation."""
    generator = torch.Generator(o.device).manual_seed(0)
    shape = (o.tokens // o.length, o.length, HIDDEN // o.dim, o.dim)
    tensors = [
        torch.randn(shape, generator=generator, device=o.device, dtype=torch.bfloat16)
        for _ in range(3)
    ]
    calls: dict[str, Callable[[], Any]] = {
        "bf16": lambda: fa.attention(*tensors, causal=o.causal),
    }
    for granularity in GRANULARITIES:
        for hadamard in (False, True):
            name = f"{granularity}{' rotated' if hadamard else ''}"

            def quantise(how: tuple[Any, ...] = (granularity, hadamard)) -> Any:
                return fa.quantize_qkv(*tensors, *how)

            def attend(x: Any) -> torch.Tensor:
                return fa.attention(x.q, x.k, x.v, causal=o.causal, **x.options)

            made = quantise()
            calls[f"{name}: quantise"] = quantise
            calls[f"{name}: attention"] = lambda x=made: attend(x)
            calls[f"{name}: both"] = lambda quantise=quantise: attend(quantise())
    return calls


def main(arguments: list[str] | None = None) -> None:
    o = parse(arguments)
    impls = [timers.Impl(name, call) for name, call in calls_of(o).items()]
    cuda = o.device.startswith("cuda")
    timer = timers.Timer(o.device)
    failed = timers.time_interleaved(impls, timer, o.repeats, sample_ms=2.0 if cuda else 0.0)
    times = {impl.name: impl.quantile(0.5) for impl in impls if impl.name not in failed}
    for name, why in failed.items():
        print(f"{name} is not timed: {why}")
    whole = times["bf16"]
    shape = f"{o.tokens} tokens, D {o.dim}, S {o.length}, {'causal' if o.causal else 'full'}"
    print(f"bf16 attention: {whole:.3f} ms; {shape}; timer {timer.name}\n")
    print("| factors | " + " | ".join(PARTS) + " | gain |\n|---|" + "---|" * (len(PARTS) + 1))
    for name in dict.fromkeys(n.split(":")[0] for n in times if ":" in n):
        row = [times[f"{name}: {part}"] for part in PARTS]
        print(f"| {name} | " + " | ".join(f"{t:.3f}" for t in row) + f" | {whole / row[-1]:.2f} |")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: BSD-3-Clause
# How fast are the calls here, and where does their time go?
"""`python -m fa bench` and `python -m fa profile`.

`bench` hands its arguments to tools/bench.py of the source tree. `profile ROW …` hands them to
tools/ncu/profile.sh there (Nsight Compute, one kernel row); without a row it runs a few calls under
torch's profiler, which needs neither. An installed package has no tools folder, and says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import fa
from fa._cli import demo, lengths


def run(arguments: Sequence[str], prog: str) -> int:
    """Either command. Returns its exit code."""
    return bench(arguments) if prog == "bench" else profile(arguments)


def source_tool(name: str) -> Path | None:
    """tools/<name> of the source tree this package lies in, or that is the current folder."""
    package = Path(fa.__file__).resolve().parents[2]
    for root in (package, Path.cwd()):
        if (root / "tools" / "variants.csv").is_file() and (root / "tools" / name).is_file():
            return root / "tools" / name
    return None


def _hand_over(name: str, program: str, arguments: Sequence[str]) -> int:
    """Runs tools/<name> with this package on its path; 2 where there is no such file."""
    tool = source_tool(name)
    if tool is None:
        print(
            f"tools/{name} is part of the source tree of fa and not of an installed package: run "
            "this in a clone, or from the folder of one.",
            file=sys.stderr,
        )
        return 2
    folder = str(Path(fa.__file__).resolve().parents[1])
    path = os.pathsep.join(p for p in (folder, os.environ.get("PYTHONPATH")) if p)
    environment = {"PYTHON": sys.executable, **os.environ, "PYTHONPATH": path}
    return subprocess.run([program, str(tool), *arguments], env=environment).returncode


def bench(arguments: Sequence[str]) -> int:
    """Runs tools/bench.py."""
    return _hand_over("bench.py", sys.executable, arguments)


def profile(arguments: Sequence[str]) -> int:
    """Nsight Compute over one kernel row where a row is named, else torch's profiler."""
    if arguments and not arguments[0].startswith("-"):
        return _hand_over("ncu/profile.sh", "bash", arguments)
    return _torch_profile(arguments)


def _torch_profile(arguments: Sequence[str]) -> int:
    """A few calls under torch's profiler."""
    parser = argparse.ArgumentParser(
        prog="python -m fa profile",
        description="Runs one causal call of fa.attention a few times under torch's profiler.",
        epilog="python -m fa profile ROW [SHAPE] [options]: the counters of one kernel row by "
        "Nsight Compute; needs a GPU, ncu and a clone of the source (tools/ncu/profile.sh).",
    )
    parser.add_argument("--device", default="auto", help="cuda, cuda:1, cpu")
    parser.add_argument("--length", type=int, default=2048, help="tokens (default 2048)")
    parser.add_argument("--calls", type=int, default=5, help="default 5")
    parser.add_argument("--trace", type=Path, help="also write a Chrome trace to this file")
    options = parser.parse_args(arguments)
    for name in ("length", "calls"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: {getattr(options, name)}; at least 1 is needed.")
    try:
        device, note = demo.choose_device(options.device)
    except ValueError as error:
        parser.error(f"--device: {error}")
    if note:
        print(note)
    on_gpu = device.type == "cuda"
    plan = lengths.plan(device, torch.bfloat16 if on_gpu else torch.float32, quick=True)
    q, k, v = lengths.inputs(plan, options.length)
    print(fa.explain(q, k, v, causal=True).rstrip() + "\n")
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.no_grad():
        lengths.fa_attention(q, k, v)
        with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
            for _ in range(options.calls):
                lengths.fa_attention(q, k, v)
            if on_gpu:
                torch.cuda.synchronize(device)
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=40))
    if options.trace is not None:
        profiler.export_chrome_trace(str(options.trace))
        print(f"Trace: {options.trace.resolve()}")
    return 0

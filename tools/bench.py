# SPDX-License-Identifier: BSD-3-Clause
# How fast is each kernel row, beside the peers, in one run on this machine?
"""The benchmark: attention cells of ours and of the peers, host time, GEMM ceiling and copy.

    python3 tools/bench.py                                   # the whole table, about a minute
    python3 tools/bench.py --quick --dims 128 --ops forward
    python3 tools/bench.py --json docs/results/h200.jsonl --compare old.jsonl
    python3 tools/bench.py --device cpu                      # smoke run without a GPU

Implementations of a cell alternate within one process, because clocks and temperature move every
figure by several percent: only ratios within one run mean something. Inputs are standard normal.
TFLOP/s counts 4·B·H·S²·D, half of it under a causal mask, the backward 2.5 times that. One JSON
line per measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import clone_package  # noqa: F401  isort: skip  (before everything that imports fa)
import bench_cells as cells
import bench_impls as impls
import fa
import libfa

OPS = ("forward", "shapes", "backward", "step", "host", "gemm", "copy")
LOSS = 0.03  # --compare fails on more


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu, a smoke run")
    parser.add_argument("--ops", default=",".join(OPS), help=f"of {','.join(OPS)}")
    parser.add_argument("--dtypes", default="bfloat16", help="comma-separated, torch's names")
    parser.add_argument("--dims", default="64,128,256", help="head dims, comma-separated")
    parser.add_argument("--lengths", help="sequence lengths (default 1024,4096,16384)")
    parser.add_argument("--backends", default="sm90,sm80", help="ours: sm90, sm80")
    parser.add_argument("--no-peers", action="store_true", help="time ours alone")
    parser.add_argument("--quick", action="store_true", help="a third of the repeats")
    parser.add_argument("--repeats", type=int, help="samples per implementation (default 21)")
    parser.add_argument("--l2", choices=("hot", "cold"), default="hot")
    parser.add_argument("--json", type=Path, help="write the lines to this file (replaced)")
    parser.add_argument("--compare", type=Path, help="an older file: gain per row, fails on losses")
    parser.add_argument("--commit", help="commit id to record where there is no git")
    options = parser.parse_args(arguments)
    options.ops = options.ops.split(",")
    unknown = set(options.ops) - set(OPS)
    if unknown:
        parser.error(f"--ops {sorted(unknown)} unknown; allowed are {', '.join(OPS)}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible to torch here; `--device cpu` makes a smoke run.")
    options.repeats = options.repeats or (7 if options.quick else 21)
    return options


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _commit() -> str:
    """Of the clone; without git (a copy on a GPU machine) what the library was built from."""
    folder = str(Path(__file__).resolve().parent)
    known = _first_line("git", "-C", folder, "rev-parse", "HEAD")
    if known is None:
        with contextlib.suppress(Exception):
            known = libfa.Library().version().split("+g")[1].split()[0]
    return known or "unknown"


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """What every line of this run has in common."""
    cuda = options.device == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": options.commit or _commit(),
        "gpu": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "driver": _first_line(*query) if cuda else None,
        "torch": torch.__version__,
        "run_id": uuid.uuid4().hex[:12],
    }


class Bench:
    """One run: its options, its lines, its sentences about what could not be measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.common = environment(options)
        self.lines: list[cells.Record] = []
        self.notes: list[str] = []
        self.spread: dict[tuple[Any, ...], tuple[float, float]] = {}  # p20, p80 in ms
        self.cuda = options.device == "cuda"

    def add(self, impl: impls.Impl, timer: impls.Timer, known: dict[str, Any]) -> None:
        """One line from an implementation that has been timed."""
        line = cells.record(
            **self.common,
            **known,
            impl=impl.name,
            row=impl.row,
            median_ms=impl.quantile(0.5),
            repeats=len(impl.samples_ms),
            timer=timer.name,
            l2=timer.l2,
        )
        self.lines.append(line)
        self.spread[cells.cell_key(line) + (cells.column(line),)] = (
            impl.quantile(0.2),
            impl.quantile(0.8),
        )

    def _table(self) -> tuple[Any, ...]:
        """Dtypes, head dims, lengths, tokens and hidden size of the forward and backward tables."""
        o = self.options
        small = () if self.cuda else (256, 256)
        lengths = o.lengths or ("1024,4096,16384" if self.cuda else "64,128")
        dims, sizes = ([int(n) for n in text.split(",")] for text in (o.dims, lengths))
        return (o.dtypes.split(","), dims, sizes, *small)

    def forward(self) -> None:
        """Every cell of the forward table."""
        self._cells(cells.forward_cells(*self._table()))

    def backward(self) -> None:
        """Gradients through autograd; ours also deterministic."""
        self._cells(cells.backward_cells(*self._table()))

    def step(self) -> None:
        """Forward and backward of a training step with grouped heads."""
        self._cells(cells.step_cells() if self.cuda else [])

    def shapes(self) -> None:
        """The second set: groups, windows, packed and unequal lengths, few heads, fp16."""
        table = cells.shape_cells()
        if not self.cuda:  # whatever is small enough to see that it runs
            table = [c for c in table if c.flops < 2e9]
        self._cells(table)

    def _cells(self, table: list[cells.Cell]) -> None:
        o = self.options
        modules = impls.peer_modules() if self.cuda and not o.no_peers else {}
        timer = impls.Timer(o.device, o.l2)
        backends = o.backends.split(",") if self.cuda else ["cpu"]
        refused: dict[tuple[str, int, str, str], list[cells.Cell]] = {}
        for cell in table:
            tensors = impls.cell_tensors(cell, o.device)
            candidates = [] if o.no_peers else impls.peers(cell, tensors, modules)
            modes = (False,) if cell.work != "backward" else (False, True)
            for backend, deterministic in itertools.product(backends, modes):
                one = impls.ours(cell, tensors, backend, deterministic)
                if isinstance(one, str):
                    refused.setdefault((cell.dtype, cell.head_dim, backend, one), []).append(cell)
                else:
                    candidates.append(impls.trained(cell, tensors, one))
            chosen, notes = impls.usable(cell, candidates)
            self.notes += notes
            sample_ms = (2.0 if self.cuda else 0.1) * (0.5 if o.quick else 1.0)
            impls.time_interleaved(chosen, timer, o.repeats, sample_ms)
            for impl in chosen:
                seconds = impl.quantile(0.5) / 1e3
                figures = {"tflops": cell.flops / seconds / 1e12, "gbs": cell.bytes / seconds / 1e9}
                figures["deterministic"] = impl.deterministic
                self.add(impl, timer, cell.fields() | figures)
            self._print_cell(cell, chosen)
        for (dtype, dim, backend, reason), without in refused.items():
            where = f"{dtype} d{dim}, {len(without)} cells: no {backend} figure"
            self.notes.append(f"{where}: {reason.splitlines()[0]}")

    def _print_cell(self, cell: cells.Cell, chosen: list[impls.Impl]) -> None:
        parts = []
        for impl in chosen:
            rates = [cell.flops / impl.quantile(s) / 1e9 for s in (0.5, 0.8, 0.2)]
            label = (impl.row or impl.name) + " det" * impl.deterministic
            parts.append(f"{label} {rates[0]:.3g} ({rates[1]:.3g}–{rates[2]:.3g})")
        print(f"{cell.name}: " + "; ".join(parts), flush=True)

    def host(self) -> None:
        """Host time per call, B 1 S 128 H 8 D 128."""
        dtype = getattr(torch, self.options.dtypes.split(",")[0])
        entries = impls.host_impls(self.options.device, dtype)
        calls = 200 if self.cuda else 2
        impls.time_host(entries, self.cuda, max(3, self.options.repeats), calls)
        shape = {"op": "host", "dtype": str(dtype).removeprefix("torch."), "layout": "bshd"}
        shape |= {"batch": 1, "seqlen_q": 128, "seqlen_k": 128, "heads_q": 8, "heads_k": 8}
        shape |= {"head_dim": 128, "head_dim_v": 128, "causal": False, "window": [-1, -1]}
        timer = impls.Timer("cpu")
        for impl in entries:
            self.add(impl, timer, shape)

    def _one(self, op: str, call: Callable[[], Any], flops: float, size: float, n: int) -> None:
        timer = impls.Timer(self.options.device, "hot")
        impl = impls.Impl("torch", call)
        impls.time_interleaved([impl], timer, self.options.repeats, 5.0 if self.cuda else 0.1)
        seconds = impl.quantile(0.5) / 1e3
        known = {"op": op, "dtype": "bfloat16", "seqlen_q": n}
        if flops:
            known |= {"seqlen_k": n, "head_dim": n, "tflops": flops / seconds / 1e12}
        known["gbs"] = size / seconds / 1e9
        self.add(impl, timer, known)

    def gemm(self) -> None:
        """The ceiling of matrix work: bf16 n × n × n, n = 8192."""
        n = 8192 if self.cuda else 128
        a, b = (torch.randn(n, n, device=self.options.device, dtype=torch.bfloat16) for _ in "ab")
        self._one("gemm", lambda: a @ b, 2.0 * n**3, 3 * 2.0 * n * n, n)

    def copy(self) -> None:
        """The ceiling of memory: bytes read plus bytes written per second."""
        n = 1 << (31 if self.cuda else 16)
        source = torch.randint(-128, 127, (n,), device=self.options.device, dtype=torch.int8)
        target = torch.empty_like(source)
        self._one("copy", lambda: target.copy_(source), 0.0, 2.0 * n, n)


def losses(bench: Bench, changes: list[cells.Change]) -> list[str]:
    """Sentences about rows that lost more than LOSS, beyond the spread of this run."""
    found = []
    slack: dict[str, float] = {}
    for line in bench.lines:
        p20, _ = bench.spread[cells.cell_key(line) + (cells.column(line),)]
        slack[_place(line)] = line["median_ms"] / p20
    for change in changes:
        best_case = (1 + change.gain) * slack.get(f"{change.cell} {change.name}", 1.0) - 1
        if change.gain < -LOSS and best_case < 0:
            found.append(f"{change.cell} {change.row or change.name}: {change.gain * 100:+.1f} %.")
    return found


def _place(line: cells.Record) -> str:
    return f"{line['op']} {cells.cell_label(line)} {cells.column(line)}"


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: measured; 1: a wrong result or a loss; 2: bad arguments."""
    options = parse(arguments)
    old = cells.read_lines(options.compare) if options.compare else None
    start = time.perf_counter()
    bench = Bench(options)
    print(f"fa {fa.__version__}, {bench.common['gpu']}, torch {torch.__version__}, L2 {options.l2}")
    for op in options.ops:
        getattr(bench, op)()
        if options.json:  # after each, for a run that is cut short
            cells.write_lines(options.json, bench.lines)
    report = cells.forward_table(bench.lines) + [""]
    for op in ("shapes", "backward", "step"):
        report += cells.forward_table(bench.lines, op) + [""]
    report += cells.other_table(bench.lines)
    print("\n".join(["", *report, "", *bench.notes]))
    print(f"{len(bench.lines)} measurements in {time.perf_counter() - start:.0f} s.")
    wrong = [note for note in bench.notes if "WRONG" in note]
    if old is not None:
        changes = cells.compare(old, bench.lines)
        print("\n".join(cells.change_table(changes)))
        wrong += losses(bench, changes)
    for note in wrong:
        print(f"FAILED: {note}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

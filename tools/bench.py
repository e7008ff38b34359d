# SPDX-License-Identifier: BSD-3-Clause
# How fast is each kernel row, beside the peers, in one run on this machine?
"""The benchmark: attention cells of ours and of the peers, host time, GEMM ceiling and copy.

    python3 tools/bench.py                                   # the whole table
    python3 tools/bench.py --quick --dims 128 --ops forward
    python3 tools/bench.py --ops models --only 'Llama*' --timer graph --report models.html
    python3 tools/bench.py --json new.jsonl --compare docs/results/h200.jsonl
    python3 tools/bench.py --list                            # names of the cells; no GPU needed
    python3 tools/bench.py --device cpu                      # smoke run without a GPU

Implementations of a cell alternate within one process, because clocks and temperature move every
figure by several percent: only ratios within one run mean something. Inputs are standard normal.
TFLOP/s counts 2 (D + D_v) operations per visible pair of a row and a key, the backward 2.5 times
that; GB/s counts every tensor once. Clocks and temperature are read, never set. One JSON line per
measurement. bench_timers.py says what the timers mean.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import importlib.util
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
import bench_models
import bench_report
import bench_tables as tables
import bench_timers as timers
import fa
import libfa
import machine
import overhead
import progress

TABLES = ("forward", "shapes", "backward", "step", "models")
OPS = (*TABLES, "host", "gemm", "copy")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu, a smoke run")
    parser.add_argument("--ops", default=",".join(OPS), help=f"of {','.join(OPS)}")
    parser.add_argument("--dtypes", default="bfloat16", help="comma-separated, torch's names")
    parser.add_argument("--dims", default="64,128,256", help="head dims, comma-separated")
    parser.add_argument("--lengths", help="sequence lengths (default 1024,4096,16384)")
    parser.add_argument("--backends", default="sm90,sm80", help="ours: sm90, sm80")
    parser.add_argument("--no-peers", action="store_true", help="time ours alone")
    parser.add_argument("--quick", action="store_true", help="a third of the repeats")
    parser.add_argument("--repeats", type=int, help="samples per implementation (default 21)")
    parser.add_argument(
        "--only", action="append", metavar="GLOB", help="cells whose name matches; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="print the cells' names and stop")
    parser.add_argument("--timer", choices=timers.KINDS, default="events")
    parser.add_argument("--l2", choices=("hot", "cold"), default="hot")
    parser.add_argument("--json", type=Path, help="write the lines to this file (replaced)")
    parser.add_argument("--report", type=Path, help="write a page .html or a plot .png")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="OLD",
        help="an older file: gain per row; status 1 where a row lost more than 3 %% and the p20 to "
        "p80 of both runs do not explain it",
    )
    parser.add_argument("--commit", help="commit id to record where there is no git")
    options = parser.parse_args(arguments)
    options.ops = options.ops.split(",")
    unknown = set(options.ops) - set(OPS)
    if unknown:
        parser.error(f"--ops {sorted(unknown)} unknown; allowed are {', '.join(OPS)}.")
    if options.report is not None:
        if options.report.suffix not in bench_report.SUFFIXES:
            allowed = " or ".join(bench_report.SUFFIXES)
            parser.error(f"--report: {options.report} must end in {allowed}.")
        if options.report.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
            parser.error(
                f"--report: {options.report} needs matplotlib, which is not installed; a page "
                ".html needs nothing."
            )
    if options.compare is not None and not options.compare.is_file():
        parser.error(f"--compare: there is no file {options.compare}.")
    if options.device != "cuda":
        if options.timer != "events":
            parser.error(f"--timer: {options.timer} needs a GPU; leave it away with --device cpu.")
    elif not options.list:
        instead = "`--device cpu` makes a smoke run and `--list` names the cells"
        machine.require_gpu("bench.py", instead, torch_too=True)
    options.repeats = options.repeats or (7 if options.quick else 21)
    return options


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _commit() -> str:
    """What was timed: the commit the library was built from; else that of the clone."""
    with contextlib.suppress(Exception):
        return libfa.Library().version().split("+g")[1].split()[0]
    folder = str(Path(__file__).resolve().parent)
    return _first_line("git", "-C", folder, "rev-parse", "HEAD") or "unknown"


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


def _table(o: argparse.Namespace, cuda: bool) -> tuple[Any, ...]:
    """Dtypes, head dims, lengths, tokens and hidden size of the forward and backward tables."""
    small = () if cuda else (256, 256)
    lengths = o.lengths or ("1024,4096,16384" if cuda else "64,128")
    dims, sizes = ([int(n) for n in text.split(",")] for text in (o.dims, lengths))
    return (o.dtypes.split(","), dims, sizes, *small)


def cells_of(o: argparse.Namespace, op: str) -> list[cells.Cell]:
    """The cells of one table that a run measures; without a GPU, those small enough."""
    cuda = o.device == "cuda"
    table: list[cells.Cell] = []
    if op == "forward":
        table = cells.forward_cells(*_table(o, cuda))
    elif op == "backward":  # through autograd; ours also deterministic
        table = [c for c in cells.backward_cells(*_table(o, cuda)) if c.dtype != impls.FP8]
    elif op == "step" and cuda:
        table = cells.step_cells()
    elif op == "shapes":
        table = [cell for cell in cells.shape_cells() if cuda or cell.flops < 2e9]
    elif op == "models":
        table = bench_models.model_cells()
        table = table if cuda else [bench_models.small(cell) for cell in table]
    wanted = o.only or ["*"]
    return [c for c in table if any(fnmatch.fnmatchcase(c.name, glob) for glob in wanted)]


# What one of our backends does not take: {(dtype, head dim, backend, reason): cells}.
Refused = dict[tuple[str, int, str, str], list[cells.Cell]]


class Bench:
    """One run: its options, its lines, its sentences about what could not be measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.common = environment(options)
        self.lines: list[cells.Record] = []
        self.notes: list[str] = []
        self.refused: set[tuple[tuple[Any, ...], str]] = set()  # (cells.cell_key, backend)
        self.cuda = options.device == "cuda"
        uuid = str(torch.cuda.get_device_properties(0).uuid) if self.cuda else None
        self.watch = machine.Watch(uuid) if self.cuda else None
        peers = self.cuda and not options.no_peers
        self.modules = impls.peer_modules() if peers else {}
        self.timer = timers.Timer(options.device, options.l2, options.timer)

    def state(self) -> machine.State:
        """Clocks and temperature now; unknown on a CPU."""
        return self.watch.read() if self.watch is not None else machine.State()

    def add(
        self,
        impl: timers.Impl,
        timer: timers.Timer,
        known: dict[str, Any],
        before: machine.State,
    ) -> None:
        """One line from an implementation that has been timed."""
        after = self.state()
        for name in ("sm_mhz", "celsius", "watts"):
            pair = [getattr(before, name), getattr(after, name)]
            known = known | {name: pair if pair != [None, None] else None}
        line = cells.record(
            **self.common,
            **known,
            impl=impl.name,
            row=impl.row,
            median_ms=impl.quantile(0.5),
            repeats=len(impl.samples_ms),
            timer=timer.name,
            l2=timer.l2,
            p20_ms=impl.quantile(0.2),
            p80_ms=impl.quantile(0.8),
        )
        self.lines.append(line)

    def run(self, op: str) -> None:
        """Measures one op of OPS."""
        if op not in TABLES:
            getattr(self, op)()
            return
        with self.timer.around():
            self._cells(cells_of(self.options, op))

    def _candidates(self, cell: cells.Cell, refused: Refused) -> list[timers.Impl]:
        o = self.options
        tensors = impls.cell_tensors(cell, o.device)
        candidates = [] if o.no_peers else impls.peers(cell, tensors, self.modules)
        modes = (False,) if cell.work != "backward" else (False, True)
        backends = o.backends.split(",") if self.cuda else ["cpu"]
        for backend, deterministic in itertools.product(backends, modes):
            one = impls.ours(cell, tensors, backend, deterministic)
            if isinstance(one, str):
                refused.setdefault((cell.dtype, cell.head_dim, backend, one), []).append(cell)
            else:
                candidates.append(impls.trained(cell, tensors, one))
        return candidates

    def _cells(self, table: list[cells.Cell]) -> None:
        refused: Refused = {}
        sample_ms = (2.0 if self.cuda else 0.1) * (0.5 if self.options.quick else 1.0)
        for cell in progress.shown(table, "bench", "cells"):
            chosen, notes = impls.usable(cell, self._candidates(cell, refused))
            self.notes += notes
            before = self.state()
            failed = timers.time_interleaved(chosen, self.timer, self.options.repeats, sample_ms)
            for name, reason in failed.items():
                self.notes.append(
                    f"{cell.name}: {name} is not timed by {self.timer.name}: {reason}"
                )
            chosen = [impl for impl in chosen if impl.samples_ms]
            for impl in chosen:
                seconds = impl.quantile(0.5) / 1e3
                figures = {"tflops": cell.flops / seconds / 1e12, "gbs": cell.bytes / seconds / 1e9}
                figures["deterministic"] = impl.deterministic
                self.add(impl, self.timer, cell.fields() | figures, before)
            self._print_cell(cell, chosen)
            self.save()
        for (dtype, dim, backend, reason), without in refused.items():
            where = f"{dtype} d{dim}, {len(without)} cells: no {backend} figure"
            self.notes.append(f"{where}: {reason.splitlines()[0]}")
            lines = (cells.record(**cell.fields(), l2=self.timer.l2) for cell in without)
            self.refused |= {(cells.cell_key(line), backend) for line in lines}

    def save(self) -> None:
        """After each cell, for a run that is cut short."""
        if self.options.json:
            cells.write_lines(self.options.json, self.lines)

    def _print_cell(self, cell: cells.Cell, chosen: list[timers.Impl]) -> None:
        parts = []
        for impl in chosen:
            rates = [cell.flops / impl.quantile(s) / 1e9 for s in (0.5, 0.8, 0.2)]
            label = (impl.row or impl.name) + " det" * impl.deterministic
            parts.append(f"{label} {rates[0]:.3g} ({rates[1]:.3g}–{rates[2]:.3g})")
        print(f"{cell.name}: " + "; ".join(parts), flush=True)

    def host(self) -> None:
        """Host time per call, B 1 S 128 H 8 D 128."""
        dtype = getattr(torch, self.options.dtypes.split(",")[0])
        entries, notes = overhead.host_impls(self.options.device, dtype)
        self.notes += notes
        calls, before = 200 if self.cuda else 2, self.state()
        overhead.time_host(entries, self.cuda, max(3, self.options.repeats), calls)
        shape = {"op": "host", "dtype": str(dtype).removeprefix("torch."), "layout": "bshd"}
        shape |= {"batch": 1, "seqlen_q": 128, "seqlen_k": 128, "heads_q": 8, "heads_k": 8}
        shape |= {"head_dim": 128, "head_dim_v": 128, "causal": False, "window": [-1, -1]}
        timer = timers.Timer("cpu")
        for impl in entries:
            self.add(impl, timer, shape, before)

    def _one(self, op: str, call: Callable[[], Any], flops: float, size: float, n: int) -> None:
        timer, before = timers.Timer(self.options.device, "hot"), self.state()
        impl = timers.Impl("torch", call)
        timers.time_interleaved([impl], timer, self.options.repeats, 5.0 if self.cuda else 0.1)
        seconds = impl.quantile(0.5) / 1e3
        known = {"op": op, "dtype": "bfloat16", "seqlen_q": n}
        if flops:
            known |= {"seqlen_k": n, "head_dim": n, "tflops": flops / seconds / 1e12}
        known["gbs"] = size / seconds / 1e9
        self.add(impl, timer, known, before)

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


def print_cells(options: argparse.Namespace) -> None:
    """The names of every cell, with the operations and bytes that are counted."""
    for op in options.ops:
        for cell in cells_of(options, op) if op in TABLES else []:
            print(
                f"{cell.op:12}{cell.name}: {cell.flops / 1e9:.4g} GFLOP, {cell.bytes / 1e6:.4g} MB"
            )


def measure(bench: Bench) -> None:
    """Every op of the options."""
    o = bench.options
    print(f"fa {fa.__version__}, {bench.common['gpu']}, torch {torch.__version__}, L2 {o.l2}")
    if not o.no_peers:
        print("\n".join(impls.peer_report(bench.modules, bench.cuda)))
    print(f"before: {bench.state()}", flush=True)
    for op in o.ops:
        bench.run(op)
        bench.save()
    print(f"after: {bench.state()}")


SHOWN_MISSING = 8


def compared(bench: Bench, old: list[cells.Record]) -> list[str]:
    """Prints what changed since `old`; returns a sentence per row that lost.

    On another GPU a row's ratio to its peers is another one, whatever the code: nothing is lost.
    """
    changes = cells.compare(old, bench.lines)
    print("\n".join(tables.change_table(changes)))
    missing = cells.not_measured(old, bench.lines) if not bench.options.only else []
    print("\n".join(f"in the older file alone: {name}." for name in missing[:SHOWN_MISSING]))
    if len(missing) > SHOWN_MISSING:
        print(f"and {len(missing) - SHOWN_MISSING} more cells in the older file alone.")
    if not changes:
        return ["the older file has no cell in common with this run."]
    gains = cells.geometric_mean(1 + change.gain for change in changes)
    lost = [f"{c.cell} {c.row or c.name}: {100 * c.gain:+.1f} %." for c in changes if c.lost]
    gone = cells.not_measured(old, bench.lines, bench.refused)
    lost += [f"{name}: refused now, measured in the older file." for name in gone]
    print(
        f"compared: {len(changes)} rows, {100 * (gains - 1):+.1f} % in the mean, {len(lost)} lost."
    )
    gpus = {line["gpu"] for line in old}
    if gpus != {bench.common["gpu"]}:
        names = ", ".join(sorted(str(gpu) for gpu in gpus))
        print(
            f"compared: the older file is of {names}, this is {bench.common['gpu']}; none counts."
        )
        return []
    return lost


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: measured; 1: a wrong result or a loss; 2: bad arguments, or no GPU."""
    options = parse(arguments)
    if options.list:
        print_cells(options)
        return 0
    old = cells.read_lines(options.compare) if options.compare else None
    start = time.perf_counter()
    bench = Bench(options)
    measure(bench)
    print("\n".join(["", *tables.report(bench.lines), "", *bench.notes]))
    print(f"{len(bench.lines)} measurements in {time.perf_counter() - start:.0f} s.")
    if options.report:
        bench_report.write(options.report, bench.lines, bench.notes)
        print(f"Report: {options.report}")
    wrong = [note for note in bench.notes if "WRONG" in note]
    if old is not None:
        wrong += compared(bench, old)
    for note in wrong:
        print(f"FAILED: {note}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: BSD-3-Clause
# What did each generation of attention gain, in time, memory and bytes, on this GPU?
"""From standard attention to FlashAttention 3, measured: time, memory, bytes, errors, ablations.

    python3 tools/evolution.py --quick                     # head dim 128, about a minute
    python3 tools/evolution.py --json docs/results/evolution.jsonl
    python3 tools/evolution.py --parts bytes --lengths 4096
    python3 tools/evolution.py --ablations build/ablations # *.so, each with one forward row
    python3 tools/evolution.py --device cpu                # a smoke run: the models, small

Then `python3 tools/evolution_page.py` writes docs/evolution.md and docs/evolution.zh.md. All
generations of a cell alternate in one process on the same tensors. Bytes are counted by Nsight
Compute in a process of its own, every kernel from cold caches.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import clone_package  # noqa: F401  isort: skip  (before everything that imports fa)
import bench
import bench_impls as impls
import bench_timers as timers
import evolution_count as counting
import evolution_fa1 as fa1
import evolution_impls as generations
import evolution_lines
import libfa
import machine
import ncu_reader
import progress
import toolchain
from bench_cells import Cell
from evolution_lines import Line

PARTS = ("time", "error", "ablation", "bytes")
SHORT = (128, 256, 512, 1024)  # of a single sequence
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu, a smoke run")
    parser.add_argument("--quick", action="store_true", help="head dim 128, a third of the repeats")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--dims", help="of 64 and 128 (default both; quick: 128)")
    parser.add_argument("--lengths", help="sequence lengths, comma-separated")
    parser.add_argument("--counted", help="of these, those whose bytes are counted")
    parser.add_argument("--repeats", type=int, help="samples per generation (default 15, quick 5)")
    parser.add_argument("--ablations", type=Path, help="folder of libraries with one row each")
    parser.add_argument("--json", type=Path, help="write the lines to this file (replaced)")
    parser.add_argument("--commit", help="commit id to record where there is no git")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    cpu = not options.device.startswith("cuda")
    options.parts = options.parts.split(",")
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts {sorted(unknown)} unknown; allowed are {', '.join(PARTS)}.")
    dims = options.dims or ("64" if cpu else "128" if options.quick else "128,64")
    lengths = options.lengths or ("128,200" if cpu else ",".join(map(str, LENGTHS)))
    try:
        options.dims = [int(n) for n in dims.split(",")]
        options.lengths = [int(n) for n in lengths.split(",")]
        counted = options.counted
        options.counted = (
            [int(n) for n in counted.split(",")] if counted else list(counting.COUNTED)
        )
    except ValueError:
        parser.error("--dims, --lengths and --counted are whole numbers joined by commas.")
    if min(options.lengths + options.counted) < 1 or set(options.dims) - set(fa1.DIMS):
        parser.error("--lengths are positive, --dims of 64 and 128.")
    options.repeats = options.repeats or (5 if options.quick else 15)
    return options


def table(options: argparse.Namespace) -> list[Cell]:
    """Every cell that is timed: both masks, both directions; e4m3 forward; single short ones."""
    cells = []
    for dim in options.dims:
        for work, dtype in (
            ("forward", "bfloat16"),
            ("backward", "bfloat16"),
            ("forward", impls.FP8),
        ):
            for causal in (False, True):
                cells += [generations.cell(n, dim, causal, work, dtype) for n in options.lengths]
    dim = options.dims[0]
    short = [n for n in SHORT if n <= max(options.lengths)]
    cells += [dataclasses.replace(generations.cell(n, dim, False), tokens=n) for n in short]
    if options.device == "cpu":
        small = [c for c in cells if c.dtype != impls.FP8]
        return [generations.small(c) for c in small]
    return cells


class Evolution:
    """One run: its options, its lines, its sentences about what could not be measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cuda = options.device.startswith("cuda")
        self.common = bench.environment(options)
        self.lines: list[Line] = []
        self.notes: list[str] = []
        self.kernel: fa1.Kernel | None = None
        if self.cuda:
            try:
                self.kernel = fa1.Kernel()
            except (toolchain.ToolchainError, OSError) as error:
                self.notes.append(f"FlashAttention 1's order has no figures: {error}")

    def add(self, kind: str, one: Cell, impl: str, **known: Any) -> None:
        """One line."""
        cell = {"op": one.work, "dtype": one.dtype, "head_dim": one.head_dim}
        cell |= {"causal": one.causal, "batch": one.batch, "heads": one.heads}
        cell["seqlen"] = one.seqlen
        fields = self.common | cell | known
        self.lines.append(evolution_lines.line(**fields, kind=kind, impl=impl))

    def save(self) -> None:
        """Writes the lines so far, if a file was named."""
        if self.options.json:
            evolution_lines.write(self.options.json, self.lines)

    # --- time and memory ------------------------------------------------------------------------

    def time(self) -> None:
        """Every cell; one that does not fit into memory is named and passed over."""
        for one in progress.shown(table(self.options), "time", "cells"):
            start = time.perf_counter()
            try:
                texts = self._time_cell(one)
            except torch.OutOfMemoryError as error:
                self.notes.append(f"{one.name}: {str(error).splitlines()[0]}")
                texts = ["out of memory"]
            if self.cuda:
                torch.cuda.empty_cache()
            self.save()  # a run that is cut short has its cells
            spent = time.perf_counter() - start
            print(f"{generations.name_of(one)}: {'; '.join(texts)} ({spent:.1f} s)", flush=True)

    def _time_cell(self, one: Cell) -> list[str]:
        """All generations in alternation, then the memory of each."""
        tensors = generations.tensors_of(one, self.options.device)
        candidates, refused = generations.all_of(one, tensors, self.kernel)
        for name, reason in refused.items():
            self.add("absent", one, name, note=reason.splitlines()[0])
        usable, notes = impls.usable(one, candidates)
        self.notes += notes
        sample_ms = 2.0 if self.cuda else 0.1
        timer = timers.Timer(self.options.device)
        failed = timers.time_interleaved(usable, timer, self.options.repeats, sample_ms)
        failures = [f"{one.name}: {name} was not timed: {why}" for name, why in failed.items()]
        self.notes += failures
        for impl in candidates:  # what was tried and failed, most of all for want of memory
            note = next((text for text in notes + failures if f": {impl.name} " in text), None)
            if note:
                self.add("absent", one, impl.name, row=impl.row, note=note)
        timed = {
            impl.name: (impl.row, [impl.quantile(share) for share in (0.5, 0.2, 0.8)])
            for impl in usable
            if impl.samples_ms
        }
        del candidates, usable  # and with them what a backward keeps of its forward
        peaks = self._peaks(one, tensors, set(timed))
        for name, (row, (median, p20, p80)) in timed.items():
            known = {"median_ms": median, "p20_ms": p20, "p80_ms": p80}
            known |= {"tflops": one.flops / median / 1e9, "peak_bytes": peaks.get(name)}
            known |= generations.formulas(one, name, row)
            self.add("time", one, name, row=row, **known)
        return [f"{name} {times[0]:.3g} ms" for name, (_, times) in timed.items()]

    def _peaks(
        self, one: Cell, tensors: tuple[torch.Tensor, ...], names: set[str]
    ) -> dict[str, int | None]:
        """Most memory of one call; of a backward: of the forward and the backward together."""
        if not self.cuda:
            return {}
        whole = one if one.work == "forward" else dataclasses.replace(one, work="step")
        peaks: dict[str, int | None] = {}
        for impl in generations.all_of(whole, tensors, self.kernel)[0]:
            if impl.name in names:
                with impl.context():
                    peaks[impl.name] = generations.peak_bytes(impl.call, self.options.device)
        return peaks

    # --- exactness ------------------------------------------------------------------------------

    def error(self) -> None:
        """Differences from fp64, one small call each."""
        length = 2048 if self.cuda else 200
        for dim in self.options.dims:
            for dtype in ("bfloat16", impls.FP8) if self.cuda else ("bfloat16",):
                one = generations.small(generations.cell(length, dim, False, dtype=dtype), length)
                tensors = generations.tensors_of(one, self.options.device)
                exact = generations.exact_answer(one, tensors)
                for impl in generations.all_of(one, tensors, self.kernel)[0]:
                    with impl.context():
                        largest, rms = generations.errors(impl.call(), exact)
                    known = {"row": impl.row, "max_error": largest, "rms_error": rms}
                    self.add("error", one, impl.name, **known)

    # --- ablations ------------------------------------------------------------------------------

    def ablation(self) -> None:
        """Rows of other builds beside the shipped one, bf16, head dim 128, full."""
        folder = self.options.ablations
        if folder is None or not self.cuda:
            return
        libraries = generations.ablation_libraries(folder)
        if not libraries:
            self.notes.append(f"--ablations {folder}: the folder holds no *.so.")
        timer = timers.Timer(self.options.device)
        for length in (n for n in self.options.lengths if n in counting.COUNTED):
            one = generations.cell(length, 128, False)
            tensors = generations.tensors_of(one, self.options.device)
            candidates = []
            for library, name in [(libfa.Library(), "fa3"), *((it, "") for it in libraries)]:
                try:
                    candidates.append(generations.ablation(library, one, tensors, name))
                except libfa.Refused as error:
                    self.notes.append(f"{library.path.name}: {error}")
            usable, notes = impls.usable(one, candidates)
            self.notes += notes
            timers.time_interleaved(usable, timer, max(7, self.options.repeats), 4.0)
            for impl in usable:
                median = impl.quantile(0.5)
                known = {"median_ms": median, "tflops": one.flops / median / 1e9}
                self.add("ablation", one, impl.name, row=impl.row, **known)
                print(f"{one.name}: {impl.row} {known['tflops']:.0f} TFLOP/s", flush=True)

    # --- bytes ----------------------------------------------------------------------------------

    def bytes(self) -> None:
        """What Nsight Compute counts, every generation in one profiled process."""
        if not self.cuda:
            return
        o = self.options
        try:
            ncu_reader.need_ncu()
            self._count(counting.jobs_of(o.dims[0], o.lengths, o.counted))
        except ncu_reader.ReportError as error:
            self.notes.append(f"No bytes were counted: {error}")

    def _count(self, jobs: list[dict[str, Any]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            launches, said = counting.profile(jobs, Path(folder), Path(__file__))
        groups = counting.grouped(launches)
        if len(groups) != len(jobs):
            self.notes.append(
                f"No bytes were counted: ncu's report holds {len(groups)} groups of kernels for "
                f"{len(jobs)} calls."
            )
            return
        for job, group in zip(jobs, groups, strict=True):
            one = counting.cell_of_job(job)
            row = said.get(str(job["number"]), {})
            if not group:
                self.notes.append(f"{one.name}: {job['impl']}: {row.get('note', 'not launched')}")
                continue
            known = counting.counted(group)
            known |= generations.formulas(one, job["impl"], row.get("row"))
            self.add("bytes", one, job["impl"], row=row.get("row"), **known)
            sizes = {n: known[n] for n in ("dram_read", "dram_written", "l2_read", "model_dram")}
            sizes["model_l2_read"] = known["model_l2_read"]
            text = ", ".join(f"{n} {v / 1e6:.0f} MB" for n, v in sizes.items() if v is not None)
            print(f"{generations.name_of(one)}: {job['impl']}: {text}, {len(group)} kernels")


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: measured; 1: a wrong result; 2: bad arguments or no GPU."""
    options = parse(arguments)
    if options.device.startswith("cuda"):
        instead = "`--device cpu` makes a smoke run of the models"
        machine.require_gpu("evolution.py", instead, torch_too=True)
    if options.child:
        return counting.child(options.child)
    start = time.perf_counter()
    run = Evolution(options)
    print(f"{run.common['gpu']}, torch {torch.__version__}, commit {run.common['commit'][:12]}")
    for part in options.parts:
        begun = time.perf_counter()
        getattr(run, part)()
        run.save()
        print(f"{part}: {time.perf_counter() - begun:.0f} s", flush=True)
    print("\n".join(["", *run.notes]))
    print(f"{len(run.lines)} lines in {time.perf_counter() - start:.0f} s.")
    return 1 if any("WRONG" in note for note in run.notes) else 0


if __name__ == "__main__":
    sys.exit(main())

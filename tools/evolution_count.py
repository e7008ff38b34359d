# SPDX-License-Identifier: BSD-3-Clause
# How many bytes does one call of each generation move, by Nsight Compute's counters?
"""The profiled child of tools/evolution.py: its jobs, its kernels, and their sums per call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import evolution_fa1 as fa1
import evolution_impls as generations
import ncu_reader
import toolchain
from bench_cells import Cell
from bench_impls import FP8

COUNTED = (1024, 4096, 16384)  # lengths whose bytes are counted
SEPARATOR = "erfinv"  # part of the name of a torch kernel that nothing else here launches
DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
L2 = ("lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_srcunit_tex_op_write.sum")
TMA = "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum"
METRICS = (*DRAM, *L2, TMA, "l1tex__m_xbar2l1tex_read_bytes.sum", "gpu__time_duration.sum")


def jobs_of(dim: int, timed: Sequence[int], counted: Sequence[int]) -> list[dict[str, Any]]:
    """Calls whose bytes are counted: the forward at every `counted` length up to the longest timed
    one; causal, and the backward, at the middle one."""
    jobs: list[dict[str, Any]] = []

    def add(names: Iterable[str], length: int, causal: bool, work: str, dtype: str) -> None:
        for name in names:
            job = {"impl": name, "length": length, "causal": causal, "work": work}
            jobs.append(job | {"dtype": dtype, "dim": dim, "number": len(jobs)})

    lengths = sorted(n for n in counted if n <= max(timed)) or [max(timed)]
    for length in lengths:
        add(generations.NAMES, length, False, "forward", "bfloat16")
        add(("fa3",), length, False, "forward", FP8)
    middle = lengths[len(lengths) // 2]
    add(generations.NAMES, middle, True, "forward", "bfloat16")
    add(("standard", "fa2", "fa3"), middle, False, "backward", "bfloat16")
    return jobs


def cell_of_job(job: dict[str, Any]) -> Cell:
    """The cell that a job calls."""
    return generations.cell(job["length"], job["dim"], job["causal"], job["work"], job["dtype"])


def profile(
    jobs: list[dict[str, Any]], folder: Path, tool: Path
) -> tuple[list[ncu_reader.Launch], dict[str, Any]]:
    """Runs the jobs in `tool --child` under ncu: every kernel, and what was said about each job.

    Raises ncu_reader.ReportError where nothing was counted.
    """
    metrics, unknown = ncu_reader.known_metrics(METRICS)
    if unknown:
        print(f"this ncu does not count {', '.join(unknown)} on this GPU.", file=sys.stderr)
    report, plan, said = folder / "evolution.ncu-rep", folder / "jobs.json", folder / "said.json"
    plan.write_text(json.dumps({"jobs": jobs, "said": str(said)}))
    command = [ncu_reader.need_ncu(), "--profile-from-start", "off", "--clock-control", "none"]
    command += ["--metrics", ",".join(metrics), "-f", "-o", str(report)]
    command += [sys.executable, str(tool.resolve()), "--child", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True)
    if not report.is_file():
        output = done.stdout + done.stderr
        reason = ncu_reader.complaint(output) or output.strip()[-1500:]
        raise ncu_reader.ReportError(reason or f"ncu ended with status {done.returncode}.")
    words = json.loads(said.read_text()) if said.is_file() else {}
    return ncu_reader.read_report(report), words


def grouped(launches: Iterable[ncu_reader.Launch]) -> list[list[ncu_reader.Launch]]:
    """The kernels of each job: what lies between two launches of the separator."""
    groups: list[list[ncu_reader.Launch]] = []
    current: list[ncu_reader.Launch] = []
    for launch in launches:
        if SEPARATOR in launch.name:
            groups.append(current)
            current = []
        else:
            current.append(launch)
    return groups


def read_from_l2(launch: ncu_reader.Launch) -> tuple[float | None, str]:
    """Bytes that a kernel's multiprocessors read from the L2, and the metric that says so.

    What TMA brought in a kernel that uses it (K, V and Q of our Hopper rows come that way), else
    the sectors that the L1 asked for.
    """
    by_tma = launch.metrics.get(TMA)
    if by_tma:
        return by_tma, TMA
    found = launch.metrics.get(L2[0])
    return (None if found is None else found * ncu_reader.SECTOR_BYTES), L2[0]


def counted(group: list[ncu_reader.Launch]) -> dict[str, Any]:
    """Sums over a call's kernels; None where a kernel lacks the metric."""

    def total(values: Iterable[float | None]) -> float | None:
        known = list(values)
        return None if None in known else sum(v for v in known if v is not None)

    def of(name: str) -> float | None:
        return total(launch.metrics.get(name) for launch in group)

    reads = [read_from_l2(launch) for launch in group]
    written = of(L2[1])
    return {
        "dram_read": of(DRAM[0]),
        "dram_written": of(DRAM[1]),
        "l2_read": total(size for size, _ in reads),
        "l2_read_by": " + ".join(sorted({name for _, name in reads})),
        "l2_written": None if written is None else written * ncu_reader.SECTOR_BYTES,
        "kernels": [
            {"name": launch.label, **{m: launch.metrics.get(m) for m in METRICS}}
            for launch in group
        ],
    }


def child(plan: Path) -> int:
    """Runs under ncu: each job once before the profiled part, once in it, then the separator."""
    words = json.loads(plan.read_text())
    said: dict[str, Any] = {}
    separator = torch.zeros(32, device="cuda")
    try:
        kernel = fa1.Kernel()
    except (toolchain.ToolchainError, OSError):
        kernel = None
    for job in words["jobs"]:
        one, impl, note = cell_of_job(job), None, "it cannot do this cell"
        try:
            tensors = generations.tensors_of(one, "cuda")
            found, refused = generations.all_of(one, tensors, kernel)
            impl = next((i for i in found if i.name == job["impl"]), None)
            note = refused.get(job["impl"], note)
            if impl is not None:
                with impl.context():
                    impl.call()
        except Exception as error:  # out of memory: the other jobs go on
            impl, note = None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        if impl is not None:
            with impl.context():
                impl.call()
        separator.erfinv_()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        said[str(job["number"])] = {"row": impl.row} if impl is not None else {"note": note}
        Path(words["said"]).write_text(json.dumps(said))
        impl = found = tensors = None
        torch.cuda.empty_cache()
    return 0

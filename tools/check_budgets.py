#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Is the build within its budgets? Reads what compile_probe.py recorded and measures the library.

Also prints how many blocks of an Ampere row a multiprocessor of 8.0, 8.6, 8.9 and 9.0 holds.
Fails on: a row above 120 s on one core, a stack frame, a spill, a C7508–C7519 note, a row without
a record, a library above 40 MB, more than 10 MB of preprocessed text in a unit of the dev profile.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROW_SECONDS = 120
LIBRARY_MB = 40
PREPROCESSED_MB = 10


def row_problems(record: dict) -> list[str]:
    """Broken limits of one row's record."""
    unit = record["unit"]
    found = []
    if record["seconds"] is not None and record["seconds"] > ROW_SECONDS:
        took = f"compiled in {record['seconds']} core-seconds"
        found.append(f"{unit}: {took}; the limit is {ROW_SECONDS}.")
    if not record["kernels"]:
        found.append(f"{unit}: ptxas named no kernel; was -Xptxas -v dropped?")
    for kernel in record["kernels"]:
        for key, word in (("stack", "stack frame"), ("spill_stores", "spill stores")):
            if kernel.get(key, 0) > 0:
                found.append(f"{unit}: {kernel[key]} bytes of {word} on {kernel['target']}.")
        if "registers" not in kernel:
            found.append(f"{unit}: no register count for {kernel['target']}.")
    found += [f"{unit}: {text}" for text in record["advisories"]]
    return found


# Per multiprocessor: bytes of shared memory (of which the system takes 1 KB a block), threads.
MULTIPROCESSORS = {
    "8.0": ("sm_80", 167936, 2048),
    "8.6/8.9": ("sm_80", 102400, 1536),
    "9.0": ("sm_90", 233472, 2048),
}
REGISTERS = 65536


def blocks_per_multiprocessor(
    registers: int, threads: int, smem: int, smem_of_all: int, threads_of_all: int
) -> int:
    """Thread blocks that fit; 0 where a block gets no more than 1 KB less than there is."""
    per_warp = -(-registers // 8) * 8 * 32
    by_registers = REGISTERS // per_warp // (threads // 32)
    return min(by_registers, threads_of_all // threads, smem_of_all // (smem + 1024))


def occupancy_line(record: dict, threads: int, smem: int) -> str:
    """ "8.0: 2 x 4 warps; ..." of an Ampere row, by the registers of the code that GPU runs."""
    registers: dict[str, int] = {}
    for k in record["kernels"]:
        registers[k["target"]] = max(k.get("registers", 0), registers.get(k["target"], 0))
    words = []
    for name, (target, smem_of_all, threads_of_all) in MULTIPROCESSORS.items():
        if target in registers:
            blocks = blocks_per_multiprocessor(
                registers[target], threads, smem, smem_of_all, threads_of_all
            )
            words.append(f"{name}: {blocks} x {threads // 32} warps" if blocks else f"{name}: none")
    return f"{record['unit']:40} {smem:>7} bytes of shared memory; {'; '.join(words)}"


def occupancy(library: Path, records: list[dict]) -> None:
    """Prints what one multiprocessor holds of each Ampere row."""
    import libfa  # needs numpy, which nothing else here does

    held = {row.id: row for row in libfa.Library(library).rows()}
    for record in records:
        row = held.get(record["unit"])
        if row is not None and row.arch == 80:
            print(occupancy_line(record, row.threads, row.smem_bytes))


def table_line(record: dict) -> str:
    per_target = " ".join(
        f"{k['target'].removeprefix('sm_')}:{k.get('registers', '?')}r/{k.get('stack', '?')}B"
        for k in record["kernels"]
    )
    seconds = "cached" if record["seconds"] is None else f"{record['seconds']:.1f}"
    memory = "-" if record["peak_mb"] is None else str(record["peak_mb"])
    size = record["object_bytes"] / 1e3
    return f"{record['unit']:40} {seconds:>7} {memory:>7} {size:>7.0f}  {per_target}"


def preprocessed_bytes(build: Path, unit: str) -> int:
    """Size of one unit after the device pass's preprocessor, by its own command of the build."""
    commands = json.loads((build / "compile_commands.json").read_text())
    entry = next(c for c in commands if Path(c["file"]).name == f"{unit}.cu")
    words = shlex.split(entry["command"])
    compiler = next(i for i, w in enumerate(words) if Path(w).name == "nvcc")
    words = words[compiler:]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "unit.ii"
        words[words.index("-o") + 1] = str(target)
        words[words.index("-c")] = "-E"
        subprocess.run(words, cwd=entry["directory"], check=True)
        return target.stat().st_size


def check(build: Path) -> list[str]:
    """Prints the tables; returns the broken limits as sentences."""
    rows = json.loads((build / "generated" / "rows.json").read_text())
    found, records = [], []
    for unit in [row["id"] for row in rows] + ["combine"] * bool(rows):
        path = build / "probe" / f"{unit}.json"
        if path.exists():
            records.append(json.loads(path.read_text()))
        else:
            found.append(f"{unit}: no record in {path.parent}; build it first.")
    print(f"{'row':40} {'seconds':>7} {'MB peak':>7} {'kB obj':>7}  registers/stack by target")
    for record in sorted(records, key=lambda r: -(r["seconds"] or 0)):
        print(table_line(record))
        found += row_problems(record)
    library = build / "lib" / "libfa.so"
    occupancy(library, records)
    known = [r["seconds"] for r in records if r["seconds"] is not None]
    print(f"{len(records)} rows, {sum(known):.0f} core-seconds in {len(known)} compiled afresh")
    megabytes = library.stat().st_size / 1e6
    print(f"libfa.so {megabytes:.2f} MB (limit {LIBRARY_MB})")
    if megabytes > LIBRARY_MB:
        found.append(f"libfa.so is {megabytes:.1f} MB; the limit is {LIBRARY_MB} MB.")
    for arch in sorted({r["arch"] for r in rows if r["profile"] == "dev"}):
        unit = next(r["id"] for r in rows if r["profile"] == "dev" and r["arch"] == arch)
        size = preprocessed_bytes(build, unit) / 1e6
        print(f"{unit}: {size:.2f} MB preprocessed (limit {PREPROCESSED_MB})")
        if size > PREPROCESSED_MB:
            found.append(
                f"{unit}: {size:.1f} MB after the preprocessor; the limit is {PREPROCESSED_MB} MB. "
                "Include single CuTe headers."
            )
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("build", type=Path, help="the build folder (holds generated/ and probe/)")
    build = parser.parse_args(argv).build
    if not (build / "generated" / "rows.json").exists():
        print(f"check_budgets: {build} is not a build folder of fa.", file=sys.stderr)
        return 2
    found = check(build)
    for text in found:
        print(f"check_budgets: {text}", file=sys.stderr)
    print(f"check_budgets: {'FAILED' if found else 'ok'}{os.linesep}", end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""What did one translation unit cost? A compiler launcher that leaves one JSON line per unit.

`compile_probe.py --records DIR -- [ccache] nvcc …` runs the command unchanged (same output, same
exit status) and writes DIR/<unit>.json: seconds on one core, peak memory, and what ptxas said of
every kernel (registers, stack frame, spills, advisories). ccache replays the compiler's words on a
hit, so these stay known; seconds and memory of a hit are those of the last real compilation, if
there was one. Seconds are those the processor worked: what else a machine does does not count.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

# ptxas' own codes for "this wgmma was serialised" and its siblings.
ADVISORY = re.compile(r"\bC75(?:0[89]|1[0-9])\b")


def output_of(command: list[str]) -> str | None:
    """The object that the command writes; None when it does not compile one unit."""
    if "-c" not in command and "-dc" not in command:
        return None
    for flag, value in zip(command, command[1:], strict=False):
        if flag == "-o":
            return value
    return None


def parse_ptxas(text: str) -> tuple[list[dict[str, object]], list[str]]:
    """Per kernel and architecture what `-Xptxas -v` printed, and the advisory lines."""
    kernels: list[dict[str, object]] = []
    entry: dict[str, object] = {}
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)' for '([^']+)'", line):
            entry = {"function": match[1], "target": match[2]}
            kernels.append(entry)
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            # A device function that is not inlined has no entry of its own: keep the worst.
            for key, value in zip(
                ("stack", "spill_stores", "spill_loads"), match.groups(), strict=True
            ):
                entry[key] = max(int(value), int(str(entry.get(key, 0))))
        elif match := re.search(r"Used (\d+) registers", line):
            entry["registers"] = int(match[1])
    advisories = [line.strip() for line in text.splitlines() if ADVISORY.search(line)]
    return kernels, advisories


def run(command: list[str]) -> tuple[int, str, float, float, bool]:
    """Runs the command; returns status, stderr, core-seconds, peak MB, whether ccache answered."""
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        environment = dict(os.environ, CCACHE_STATSLOG=log.name)
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, check=False)
        hit = re.search(r"^(direct|preprocessed)_cache_hit$", log.read(), re.M) is not None
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = done.stderr.decode(errors="replace")
    return done.returncode, said, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, hit


def quiet(text: str) -> str:
    """The compiler's words without ptxas' statistics, which the record holds."""
    noise = re.compile(
        r"^ptxas info|^\s+\d+ bytes stack frame|^\s*Function properties|bytes gmem|^ptxas \(|"
        r"Used \d+ registers|Compile time ="
    )
    return "".join(
        line for line in text.splitlines(True) if ADVISORY.search(line) or not noise.search(line)
    )


def main(argv: list[str]) -> int:
    if len(argv) < 4 or argv[0] != "--records" or argv[2] != "--":
        print("usage: compile_probe.py --records DIR -- command…", file=sys.stderr)
        return 2
    records, command = Path(argv[1]), argv[3:]
    status, said, seconds, peak, hit = run(command)
    sys.stderr.write(quiet(said) if status == 0 else said)
    output = output_of(command)
    if status != 0 or output is None:
        return status
    kernels, advisories = parse_ptxas(said)
    unit = Path(output).name.removesuffix(".o").removesuffix(".cu")
    path = records / f"{unit}.json"
    record: dict[str, object] = {"unit": unit, "cached": hit}
    record["seconds"], record["peak_mb"] = round(seconds, 2), round(peak)
    if hit:
        last = json.loads(path.read_text()) if path.exists() else {}
        record["seconds"], record["peak_mb"] = last.get("seconds"), last.get("peak_mb")
    record |= {"object_bytes": Path(output).stat().st_size}
    record |= {"kernels": kernels, "advisories": advisories}
    records.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
# What does the hardware allow? Builds the small programs of this folder and runs them.
"""python3 tools/microbench/run.py [beside] [memory] [wgmma]: all of them by default.

Needs a Hopper GPU and nvcc; beside and wgmma also CUTLASS' headers. Programs are built into
build/microbench and built again when their source is newer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import machine  # noqa: E402  (the path comes first)
import toolchain  # noqa: E402

PROGRAMS = tuple(sorted(path.stem for path in FOLDER.glob("*.cu")))
BUILD = ROOT / "build" / "microbench"


def built(name: str, nvcc: str) -> Path:
    """The program, compiled where its sources are newer. Raises CalledProcessError."""
    source, program = FOLDER / f"{name}.cu", BUILD / name
    newest = max(path.stat().st_mtime for path in (source, *FOLDER.glob("*.h")))
    if program.exists() and program.stat().st_mtime >= newest:
        return program
    BUILD.mkdir(parents=True, exist_ok=True)
    command = [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr"]
    command += ["-gencode", "arch=compute_90a,code=sm_90a"]
    command += [f"-L{toolchain.cuda_library_folder(nvcc)}"]
    if "#include <cute/" in source.read_text():
        include = toolchain.find_cutlass()
        if include is None:
            raise toolchain.ToolchainError(
                f"{name}: CUTLASS' headers were not found; `pip install --no-deps "
                f"{toolchain.CUTLASS_PACKAGE}`, or set FA_CUTLASS_DIR."
            )
        command.append(f"-I{include}")
    subprocess.run([*command, "-o", str(program), str(source)], check=True)
    return program


def main(arguments: list[str] | None = None) -> int:
    """Exit status 2 without a GPU or a compiler, 1 where a program fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--build", action="store_true", help="build only; needs no GPU")
    options = parser.parse_args(arguments)
    unknown = set(options.programs) - set(PROGRAMS)
    if unknown:
        parser.error(f"{sorted(unknown)} unknown; allowed are {', '.join(PROGRAMS)}.")
    if not options.build:
        machine.require_gpu("microbench/run.py", "`--build` compiles the programs")
    try:
        nvcc = toolchain.find_nvcc()
        if nvcc is None:
            raise toolchain.ToolchainError("no nvcc 12.8 or newer was found; install CUDA.")
        for name in options.programs or PROGRAMS:
            program = built(name, nvcc)
            if options.build:
                continue
            print(f"== {name}", flush=True)
            if subprocess.run([str(program)]).returncode != 0:
                return 1
    except toolchain.ToolchainError as error:
        print(f"microbench/run.py: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"microbench/run.py: {error.cmd[-1]} does not compile.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

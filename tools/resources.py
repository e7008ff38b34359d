#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
# What does each kernel take: registers, shared memory, local memory, code, instructions?
"""Reads the machine code of a library, an object, or every object of a build folder.

    python3 tools/resources.py build/release                      # every kernel of every row
    python3 tools/resources.py python/fa/lib/libfa.so --rows 'sm90_fwd_bf16_*' --instructions
    python3 tools/resources.py build/release --markdown resources.md --json resources.json

Registers and stack come from the cubins' own records, static shared memory and code size from
their sections; dynamic shared memory and threads from the library's list of rows. `blocks` is how
many blocks a multiprocessor of that target holds. `--instructions` disassembles, some seconds a
row. Status 1 where a kernel uses local memory (a stack frame, or with --instructions STL or LDL).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import check_budgets
import check_sass
import same_code
import toolchain

# Columns of --instructions: what each group of opcodes is for.
GROUPS = {
    "products": ("HGMMA", "QGMMA", "HMMA"),
    "MUFU": ("MUFU",),
    "fp32": ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2"),
    "max": ("FMNMX", "FMNMX3"),
    "shuffle": ("SHFL",),
    "copies": ("UTMALDG", "UTMASTG", "UTMAREDG", "LDGSTS", "LDG", "STG", "RED", "REDG", "ATOMG"),
    "shared": ("LDS", "STS", "LDSM", "STSM"),
    "barriers": ("BAR", "SYNCS", "WARPGROUP", "WARPSYNC", "DEPBAR"),
    "local": check_sass.FORBIDDEN,
}
# Of check_budgets.MULTIPROCESSORS: the GPU that stands for a target.
GPU_OF = {"sm_80": "8.0", "sm_90": "9.0", "sm_90a": "9.0"}
INSTRUCTION_BYTES = 16
RESERVED = {"sm_90": 1024, "sm_90a": 1024}  # of static shared memory: the system's, in every block

# What makes a call's products: a row's block size and shared memory are those of this kernel.
MAIN_KERNELS = ("fa_fwd", "fa_fwd_packed", "fa_bwd", "fa_bwd_pair")


@dataclass
class Kernel:
    """One kernel of one target."""

    row: str  # id of the row, or "combine" and the like
    name: str  # of the kernel function
    target: str
    function: str  # mangled
    registers: int = 0
    stack: int = 0
    static_shared: int = 0
    code: int = 0  # bytes
    threads: int | None = None  # and dynamic shared memory: of a row's main kernel
    dynamic_shared: int | None = None
    opcodes: Counter[str] = field(default_factory=Counter)

    @property
    def blocks(self) -> int | None:
        """How many blocks a multiprocessor holds; None where that is not known."""
        gpu = GPU_OF.get(self.target)
        if gpu is None or self.threads is None or self.dynamic_shared is None:
            return None
        _, smem, threads = check_budgets.MULTIPROCESSORS[gpu]
        taken = self.dynamic_shared + self.static_shared - RESERVED.get(self.target, 0)
        return check_budgets.blocks_per_multiprocessor(
            self.registers, self.threads, taken, smem, threads
        )

    @property
    def local(self) -> int:
        """Instructions that touch local memory, if disassembled."""
        return sum(self.opcodes[name] for name in check_sass.FORBIDDEN)


def mangled_words(function: str) -> Iterator[str]:
    """The names in a mangled name, each of which its length precedes: 2fa4sm906fa_fwd…"""
    at = 0
    while number := re.compile(r"\d+").search(function, at):
        at = number.end()
        word = function[at : at + int(number[0])]
        literal = function[: number.start()].endswith(("Li", "Lj", "Lb", "Lm"))
        if not literal and len(word) == int(number[0]) and word.isidentifier():
            yield word
            at += len(word)


def kernel_name(function: str) -> tuple[str, str]:
    """(row, kernel) of a mangled name; the row is empty where the kernel belongs to none."""
    words = list(mangled_words(function))
    row = next((w for w in words if re.match(r"sm(80|90)_(fwd|bwd)_", w)), "")
    name = next((w for w in words if w.startswith("fa_")), words[-1] if words else function)
    return row, name


def kernels_of_cubin(target: str, data: bytes) -> list[Kernel]:
    """Every kernel of one cubin, without what needs a disassembly."""
    found: dict[str, Kernel] = {}
    sections = same_code.elf_sections(data)
    for section, (_, size) in sections.items():
        if section.startswith(".text."):
            function = section.removeprefix(".text.")
            row, name = kernel_name(function)
            found[function] = Kernel(row or name, name, target, function, code=size)
            shared = sections.get(f".nv.shared.{function}")
            found[function].static_shared = shared[1] if shared else 0
    tables = [sections.get(name, (b"", 0))[0] for name in (".nv.info", ".symtab", ".strtab")]
    for what, value in same_code.per_function(*tables):
        word, _, function = what.partition(" of ")
        if function in found and word == "registers":
            found[function].registers = value
        elif function in found and word == "frame size":
            found[function].stack = value
    return list(found.values())


def disassemble(cubin: Path, kernels: list[Kernel]) -> None:
    """Fills the opcode counts of the kernels of one cubin."""
    done = subprocess.run(
        [*check_sass.disassembler(), "-sass", str(cubin)],
        capture_output=True,
        text=True,
        env=check_sass.environment(),
    )
    if done.returncode != 0:
        raise same_code.ToolError(f"cuobjdump cannot disassemble {cubin}: {done.stderr.strip()}")
    parts = re.split(r"^\s*Function : (\S+)\s*$", done.stdout, flags=re.M)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    for kernel in kernels:
        if kernel.function not in texts:  # no instructions would read as no local memory
            raise same_code.ToolError(f"cuobjdump shows no code of {kernel.function} in {cubin}.")
        kernel.opcodes = check_sass.count(texts[kernel.function])


def kernels_of(path: Path, pattern: str, instructions: bool) -> Iterator[Kernel]:
    """Every kernel of an object or library whose row matches."""
    tool = toolchain.find_cuda_tool("cuobjdump")
    if tool is None:
        raise same_code.ToolError("cuobjdump is needed; `pip install nvidia-cuda-cuobjdump`.")
    with tempfile.TemporaryDirectory() as folder:
        command = [tool, "-xelf", "all", str(path.resolve())]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        cubins = sorted(Path(folder).glob("*.cubin"))
        if not cubins:
            said = (done.stderr or done.stdout).strip() or "no word from cuobjdump"
            raise same_code.ToolError(f"{path}: no machine code of a GPU found ({said}).")
        for cubin in cubins:  # <object>.<number>.<target>.cubin
            target = cubin.suffixes[-2].removeprefix(".")
            found = kernels_of_cubin(target, cubin.read_bytes())
            found = [kernel for kernel in found if fnmatch.fnmatchcase(kernel.row, pattern)]
            if found and instructions:
                disassemble(cubin, found)
            yield from found


def sources(path: Path) -> tuple[list[Path], Path | None]:
    """Files with machine code, and the library that lists the rows, if there is one."""
    if path.is_file():
        return [path], path if path.suffix == ".so" else None
    library = path / "lib" / "libfa.so"
    objects = sorted(path.rglob("*.cu.o"))
    if not objects:
        raise same_code.ToolError(
            f"{path} is no file and holds no *.cu.o: name a library, an object or a build folder."
        )
    return objects, library if library.is_file() else None


def add_launches(kernels: list[Kernel], library: Path | None) -> None:
    """Threads and dynamic shared memory of the rows' main kernels."""
    if library is None:
        return
    import libfa  # needs numpy, which nothing else here does

    held = {row.id: row for row in libfa.Library(library).rows()}
    for kernel in kernels:
        row = held.get(kernel.row)
        if row is not None and kernel.name in MAIN_KERNELS:
            kernel.threads, kernel.dynamic_shared = row.threads, row.smem_bytes


def table(kernels: list[Kernel], instructions: bool) -> list[str]:
    """Markdown, a line per kernel and target."""
    columns = ["row", "kernel", "target", "registers", "threads", "shared", "static", "blocks"]
    columns += ["stack", "code", "instructions", *(GROUPS if instructions else ())]
    rows = ["| " + " | ".join(columns) + " |", "|---|---|---|" + "---:|" * (len(columns) - 3)]
    for k in kernels:
        known = (k.threads, k.dynamic_shared, k.static_shared, k.blocks, k.stack, k.code)
        threads, shared, static, blocks, stack, code = ("–" if n is None else n for n in known)
        cells = [k.row, k.name, k.target, k.registers, threads, shared, static, blocks, stack, code]
        cells.append(k.code // INSTRUCTION_BYTES)
        if instructions:
            cells += [sum(k.opcodes[name] for name in names) for names in GROUPS.values()]
        rows.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return rows


def heading(library: Path | None) -> list[str]:
    """The begin of the Markdown file: which build this is, and what the columns mean."""
    build = "an object"
    if library is not None:
        import libfa

        build = f"libfa.so {libfa.Library(library).version()}"
    return [
        "# Resources of every kernel",
        "",
        f"Written by `tools/resources.py`, from {build}. Shared memory, stack, code in bytes; "
        "`blocks`: how many fit a multiprocessor (sm_80: that of 8.0). Instructions: of the code.",
        "",
    ]


def problems(kernels: list[Kernel]) -> list[str]:
    """Sentences about local memory."""
    found = []
    for k in kernels:
        if k.stack:
            found.append(f"{k.row} {k.name} on {k.target}: a stack frame of {k.stack} bytes.")
        if k.local:
            found.append(f"{k.row} {k.name} on {k.target}: {k.local} accesses of local memory.")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1: local memory is used; 2: nothing to read, or a program is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="libfa.so, an object, or a build folder")
    parser.add_argument("--rows", default="*", metavar="GLOB", help="rows whose id matches")
    parser.add_argument("--instructions", action="store_true", help="disassemble and count")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--json", type=Path, help="write every figure and opcode to this file")
    options = parser.parse_args(arguments)
    try:
        files, library = sources(options.path)
        kernels = [
            k for file in files for k in kernels_of(file, options.rows, options.instructions)
        ]
        add_launches(kernels, library)
    except (same_code.ToolError, toolchain.ToolchainError, OSError) as error:
        print(f"resources.py: {error}", file=sys.stderr)
        return 2
    if not kernels:
        print(f"resources.py: {options.path} has no row that matches {options.rows!r}.")
        return 2
    kernels.sort(key=lambda k: (k.row, k.name, k.target))
    lines = table(kernels, options.instructions)
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join([*heading(library), *lines]) + "\n")
    if options.json:
        records: list[dict[str, Any]] = [{**vars(k), "blocks": k.blocks} for k in kernels]
        options.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = problems(kernels)
    for text in found:
        print(f"resources.py: {text}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

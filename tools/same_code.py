#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Did a change of the sources leave the machine code as it was? Compares kernels byte by byte.

`same_code.py OLD NEW` takes two objects, libraries or build folders. Of folders, the objects that
both hold are compared, so that a few rows can be rebuilt and compared with a full build. For every
GPU target and kernel: instructions, constants, shared memory, launch attributes, registers and
stack. PTX is not compared: it may differ where the machine code made from it does not. Exit status:
0 the same, 1 changed, 2 not comparable.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import toolchain

# Sections that hold what runs; others hold names, debugging notes and hashes of the compilation.
CODE = (".text.", ".nv.constant", ".nv.info.", ".nv.shared.", ".nv.global", ".nv.local.")
# Records of the section .nv.info that give a number per function.
PER_FUNCTION = {0x2F: "registers", 0x11: "frame size", 0x12: "least stack", 0x23: "largest stack"}
_NOBITS = 8  # type of a section that has a size and no bytes

# (target, name) -> what must be equal: the bytes of a section and its size, or one number.
Code = dict[tuple[str, str], tuple[bytes, int]]


class ToolError(Exception):
    """A sentence: what is missing or wrong, and what to do."""


def elf_sections(data: bytes) -> dict[str, tuple[bytes, int]]:
    """Bytes and size of every section of a 64-bit little-endian ELF file, by name."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ToolError("cuobjdump wrote no 64-bit ELF file; use the one of CUDA 12.8 or newer.")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    # name, type, flags, address, offset, size, …
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    found = {}
    for name, kind, _, _, offset, length in headers:
        text = data[names + name : data.index(b"\0", names + name)].decode()
        found[text] = (b"" if kind == _NOBITS else data[offset : offset + length], length)
    return found


def per_function(info: bytes, symbols: bytes, strings: bytes) -> Iterator[tuple[str, int]]:
    """("registers of KERNEL", 168) and the like: the records of .nv.info that are known."""
    at = 0
    while at + 4 <= len(info):
        kind, attribute, length = struct.unpack_from("<BBH", info, at)
        if kind == 4 and length == 8 and attribute in PER_FUNCTION:
            symbol, value = struct.unpack_from("<II", info, at + 4)
            (name,) = struct.unpack_from("<I", symbols, symbol * 24)
            function = strings[name : strings.index(b"\0", name)].decode()
            yield f"{PER_FUNCTION[attribute]} of {function}", value
        at += 4 + (length if kind == 4 else 0)  # the other kinds hold their value in `length`


def code_of_cubin(target: str, data: bytes) -> Code:
    """The machine code of one cubin."""
    sections = elf_sections(data)
    found = {(target, name): held for name, held in sections.items() if name.startswith(CODE)}
    tables = [sections.get(name, (b"", 0))[0] for name in (".nv.info", ".symtab", ".strtab")]
    for name, value in per_function(*tables):
        found[target, name] = (b"", value)
    return found


def code_of(path: Path, cuobjdump: str) -> Code:
    """The machine code of an object or library, for every target."""
    found: Code = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [cuobjdump, "-xelf", "all", str(path.resolve())]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        for cubin in sorted(Path(folder).glob("*.cubin")):  # <object>.<number>.<target>.cubin
            found |= code_of_cubin(cubin.suffixes[-2].removeprefix("."), cubin.read_bytes())
    if not found:
        said = (done.stderr or done.stdout).strip() or "no word from cuobjdump"
        raise ToolError(f"{path}: no machine code of a GPU found ({said}).")
    return found


def differences(old: Code, new: Code) -> list[str]:
    """What is not the same, as sentences."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        place = " ".join(key)
        if key not in old or key not in new:
            found.append(f"{place}: only in the {'new' if key in new else 'old'} code.")
        elif old[key][1] != new[key][1]:
            found.append(f"{place}: {old[key][1]} became {new[key][1]}.")
        elif old[key] != new[key]:
            found.append(f"{place}: other bytes, as many.")
    return found


def pairs(old: Path, new: Path) -> list[tuple[Path, Path]]:
    """What to compare with what: two files, or the objects of one name in two folders."""
    for path in (old, new):
        if not path.exists():
            raise ToolError(f"{path} does not exist; name two objects, libraries or build folders.")
    if old.is_file() != new.is_file():
        raise ToolError(f"{old} and {new}: one is a file, the other a folder; name two of a kind.")
    if old.is_file():
        return [(old, new)]
    before, after = ({p.name: p for p in sorted(d.rglob("*.cu.o"))} for d in (old, new))
    both = [(before[name], after[name]) for name in before if name in after]
    if not both:
        raise ToolError(f"{old} and {new} hold no *.cu.o of one name; build the same rows in both.")
    return both


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", type=Path, help="object, library or build folder before the change")
    parser.add_argument("new", type=Path, help="the same after it")
    args = parser.parse_args(argv)
    changed = 0
    try:
        cuobjdump = toolchain.find_cuda_tool("cuobjdump")
        if cuobjdump is None:
            raise ToolError("cuobjdump is needed; `pip install nvidia-cuda-cuobjdump`.")
        compared = pairs(args.old, args.new)
        for before, after in compared:
            old, new = code_of(before, cuobjdump), code_of(after, cuobjdump)
            found = differences(old, new)
            targets = ", ".join(sorted({target for target, _ in new}))
            print(f"{after.name}: {'CHANGED' if found else 'same'} ({targets})")
            for text in found:
                print(f"  {text}")
            changed += bool(found)
    except (ToolError, toolchain.ToolchainError) as error:
        print(f"same_code: {error}", file=sys.stderr)
        return 2
    print(f"same_code: {changed} of {len(compared)} objects changed")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())

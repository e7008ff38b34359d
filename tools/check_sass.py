#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Is the machine code what the rows promise? Disassembles every row's object with cuobjdump.

Hopper rows must hold HGMMA (e4m3: QGMMA) and UTMALDG in sm_90a code, Ampere rows HMMA and LDGSTS in
sm_80 code (and in every other target), and none may touch local memory (STL, LDL).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import toolchain

REQUIRED = {90: ("HGMMA", "UTMALDG"), 80: ("HMMA", "LDGSTS")}
TARGET = {90: "sm_90a", 80: "sm_80"}
FORBIDDEN = ("STL", "LDL")
SHOWN = ("HGMMA", "QGMMA", "UTMALDG", "HMMA", "LDGSTS", "STL", "LDL")
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.M)


def count(sass: str) -> Counter[str]:
    """How often each opcode stands in a disassembly."""
    return Counter(_OPCODE.findall(sass))


def disassembler() -> list[str]:
    """The begin of a cuobjdump command; ToolchainError where that or nvdisasm is missing."""
    tools = [toolchain.find_cuda_tool(name) for name in ("cuobjdump", "nvdisasm")]
    if None in tools:
        raise toolchain.ToolchainError(
            "cuobjdump and nvdisasm are both needed; "
            "`pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`."
        )
    return [str(tools[0])]


def environment() -> dict[str, str]:
    """For cuobjdump, which looks for nvdisasm on PATH."""
    tools = [toolchain.find_cuda_tool(name) for name in ("cuobjdump", "nvdisasm")]
    folders = [str(Path(str(tool)).parent) for tool in tools]
    return dict(os.environ, PATH=os.pathsep.join([*folders, os.environ.get("PATH", "")]))


def opcodes(sass: str) -> dict[str, Counter[str]]:
    """Opcode counts per target of one `cuobjdump -sass` text."""
    counts: dict[str, Counter[str]] = {}
    parts = re.split(r"^\s*arch = (sm_\w+)\s*$", sass, flags=re.M)
    for target, text in zip(parts[1::2], parts[2::2], strict=True):
        found = count(text)
        if found:
            counts.setdefault(target, Counter()).update(found)
    return counts


def problems(
    row_id: str, arch: int, counts: dict[str, Counter[str]], dtype: str = "bf16"
) -> list[str]:
    """What is wrong with the machine code of one row, as sentences. dtype: of its products."""
    found = []
    required = ["QGMMA" if (name, dtype) == ("HGMMA", "e4m3") else name for name in REQUIRED[arch]]
    if TARGET[arch] not in counts:
        found.append(f"{row_id}: no {TARGET[arch]} code, only {', '.join(counts) or 'none'}.")
    for target, opcode in counts.items():
        for name in required:
            if not opcode[name]:
                found.append(f"{row_id}: no {name} in its {target} code.")
        for name in FORBIDDEN:
            if opcode[name]:
                found.append(f"{row_id}: {opcode[name]} {name} in its {target} code: local memory.")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("build", type=Path, help="the build folder")
    build = parser.parse_args(argv).build
    try:
        cuobjdump = disassembler()
    except toolchain.ToolchainError as error:
        print(f"check_sass: {error}", file=sys.stderr)
        return 2
    rows = json.loads((build / "generated" / "rows.json").read_text())
    found = []
    print(f"{'row':40} {'target':8}" + "".join(f"{name:>9}" for name in SHOWN))
    for row in rows:
        objects = list(build.glob(f"CMakeFiles/fa.dir/**/{row['id']}.cu.o"))
        if len(objects) != 1:
            found.append(f"{row['id']}: {len(objects)} objects in {build}; build the row first.")
            continue
        command = [*cuobjdump, "-sass", str(objects[0])]
        done = subprocess.run(command, capture_output=True, text=True, env=environment())
        if done.returncode != 0:
            found.append(f"{row['id']}: cuobjdump failed: {done.stderr.strip()}")
            continue
        counts = opcodes(done.stdout)
        for target, opcode in counts.items():
            print(f"{row['id']:40} {target:8}" + "".join(f"{opcode[n]:>9}" for n in SHOWN))
        found += problems(row["id"], row["arch"], counts, row["dtype"])
    for text in found:
        print(f"check_sass: {text}", file=sys.stderr)
    print(f"check_sass: {'FAILED' if found else 'ok'}, {len(rows)} rows")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

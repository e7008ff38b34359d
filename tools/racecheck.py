# SPDX-License-Identifier: BSD-3-Clause
# Is a race that racecheck reports one? It does not follow all barriers: which instructions are it?
"""Judges the log of `compute-sanitizer --tool racecheck --racecheck-report analysis`.

    python3 tools/racecheck.py LOG [LIBRARY]

racecheck sees an mbarrier's arrival, but not that one lane arrives for its warp, nor whether a bulk
copy was waited for: pairs of accesses of which one is a bulk copy are counted and no finding. Pairs
of KNOWN were read in the source and the machine code; the reason stands with them. Every other pair
is a finding. tests/gpu/test_determinism.py repeats each small shape 1000 times, whatever is said
here. Exit status 0: no finding; 1: findings; 2: the machine code cannot be read.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import check_sass
import libfa
import resources
import toolchain
from same_code import ToolError

BULK = ("UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG")
ACCESS = re.compile(
    r"(Read|Write) access at .*?::(fa_\w+)<.*?\b(sm(?:80|90)_(?:fwd|bwd)_\w+).*\+(0x[0-9a-f]+)"
)
LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)")
BLOCK = "BAR.SYNC 0x0 of the whole block lies between, lost beside barriers of pairs of warps"
SAME = "warpgroups that share keys write the same limits of a key twice, each before it reads them"
# (row, opcodes of the two accesses) -> what orders them, or why they need no order.
KNOWN: dict[tuple[str, str, str], str] = {
    # The main loop's slots of Q, dO and dS: written in one step, read in the next, or the reverse.
    ("sm80_bwd_*", "LDGSTS", "LDSM"): BLOCK,
    ("sm80_bwd_*", "STS", "LDSM"): BLOCK,
    # BwdCompute::write_visible_rows() of the rows with 64 keys a tile.
    ("sm90_bwd_*_d256_band", "STS", "LDS"): SAME,
    ("sm90_bwd_*_d192*_band", "STS", "LDS"): SAME,
    ("sm90_bwd_*_any", "STS", "LDS"): SAME,
}


@dataclass(frozen=True)
class Access:
    """One side of a reported race."""

    kernel: str
    row: str
    offset: int


def pairs(log: str) -> Iterator[tuple[Access, Access]]:
    """The accesses that a log holds against each other."""
    first: Access | None = None
    for line in log.splitlines():
        found = ACCESS.search(line)
        if found is None:
            continue
        access = Access(found[2], found[3], int(found[4], 16))
        if "Race reported between" in line:
            first = access
        elif first is not None:
            yield first, access


def opcodes(sass: str) -> dict[int, str]:
    """{offset: opcode without its suffixes} of one function's listing."""
    found = (LINE.match(line) for line in sass.splitlines())
    return {int(m[1], 16): m[2].split(".")[0] for m in found if m}


class Code:
    """The machine code of a library, function by function as it is asked for."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.known: dict[tuple[str, str], list[dict[int, str]]] = {}

    def of(self, row: str, kernel: str) -> list[dict[int, str]]:
        """The opcodes of a row's kernel, for each target that the library holds."""
        if (row, kernel) not in self.known:
            names = {k.function for k in resources.kernels_of(self.library, row, False)}
            names = {n for n in names if resources.kernel_name(n)[1] == kernel}
            texts = [self._listing(name) for name in sorted(names)]
            parts = [part for text in texts for part in re.split(r"^arch = ", text, flags=re.M)[1:]]
            self.known[row, kernel] = [code for part in parts if (code := opcodes(part))]
        return self.known[row, kernel]

    def _listing(self, function: str) -> str:
        command = [*check_sass.disassembler(), "-sass", "-fun", function, str(self.library)]
        done = subprocess.run(command, capture_output=True, text=True, env=check_sass.environment())
        return done.stdout


def verdict(pair: tuple[Access, Access], code: Code) -> tuple[str, str]:
    """("bulk" | "known" | "finding", the pair in words)."""
    first, second = pair
    shown: list[str] = []
    for target in code.of(first.row, first.kernel):
        names = target.get(first.offset), target.get(second.offset)
        if None in names:
            continue
        a, b = (str(name) for name in names)
        shown.append(f"{a} +{first.offset:#x} and {b} +{second.offset:#x}")
        if a in BULK or b in BULK:
            return "bulk", ""
        for (row, one, other), reason in KNOWN.items():
            if fnmatch.fnmatchcase(first.row, row) and {a, b} == {one, other}:
                return "known", f"{first.row} {first.kernel}: {one} and {other}: {reason}"
    where = " or ".join(shown) or f"+{first.offset:#x} and +{second.offset:#x}, no such code"
    return "finding", f"{first.row} {first.kernel}: {where}"


def main(arguments: list[str] | None = None) -> int:
    """Prints the findings, and in the last line how many pairs were what."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log", type=Path, help="what compute-sanitizer printed")
    parser.add_argument("library", type=Path, nargs="?", help="libfa.so (default: the package's)")
    options = parser.parse_args(arguments)
    library = options.library or libfa.library_path()
    try:
        if library is None:
            raise ToolError("no libfa.so was found; name it behind the log.")
        code = Code(library)
        found = [verdict(pair, code) for pair in dict.fromkeys(pairs(options.log.read_text()))]
    except (ToolError, toolchain.ToolchainError) as error:
        print(f"racecheck.py: {error}", file=sys.stderr)
        return 2
    for kind in ("finding", "known"):
        for text in dict.fromkeys(text for what, text in found if what == kind):
            print(f"{kind}: {text}")
    number = {what: sum(w == what for w, _ in found) for what in ("bulk", "known", "finding")}
    print(
        f"{number['bulk']} pairs with a bulk copy, {number['known']} known, "
        f"{number['finding']} findings"
    )
    return int(number["finding"] > 0 or not found)


if __name__ == "__main__":
    sys.exit(main())

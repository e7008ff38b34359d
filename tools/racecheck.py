# SPDX-License-Identifier: BSD-3-Clause
# Is a race that racecheck reports one? It does not follow all barriers: which instructions are it?
"""Judges the log of `compute-sanitizer --tool racecheck --racecheck-report analysis`.

    python3 tools/racecheck.py LOG [LIBRARY]

racecheck sees an mbarrier's arrival, but not that one lane arrives for its warp, nor whether a bulk
copy was waited for; and it loses barriers of the whole block beside those of pairs of warps. Pairs
of KNOWN were read in the source, where the reason stands that the machine code cannot show; its
`proof` is looked for in the machine code of the library that ran, wherever the instructions lie
there. Every other pair is a finding. tests/gpu/test_determinism.py repeats each small shape 1000
times, whatever is said here. Exit status 0: no finding; 1: findings; 2: the machine code cannot be
read.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import check_sass
import flow
import libfa
import resources
import toolchain
from same_code import ToolError

WRITES = ("STS", "STSM", "LDGSTS", "ATOMS", "UBLKCP", "UTMALDG")  # to shared memory
READS = ("LDS", "LDSM", "ATOMS", "UBLKCP", "UBLKRED", "UTMASTG", "UTMAREDG", "HGMMA", "QGMMA")
ACCESS = re.compile(
    r"(Read|Write) access at .*?::(fa_\w+)<.*?\b(sm(?:80|90)_(?:fwd|bwd)_\w+).*\+(0x[0-9a-f]+)"
)
BLOCK_BARRIER = r"BAR\.SYNC(\.DEFER_BLOCKING)? 0x0"
COPIES_THERE = r"DEPBAR\.LE SB0, 0x0"
MBARRIER_WAIT = r"SYNCS\.PHASECHK\.\S*TRYWAIT .*"


def block_barrier_between(code: flow.Flow, one: int, other: int) -> bool:
    """One of the two never follows the other without a barrier of the whole block.

    So each cycle of the loop that both are in has one. Where the copies of one are asynchronous,
    it waits for them too before the other comes behind a barrier.
    """
    barriers, waits = code.where(BLOCK_BARRIER), code.where(COPIES_THERE)
    if other in code.behind([one], barriers) and one in code.behind([other], barriers):
        return False
    for copy, use in ((one, other), (other, one)):
        if flow.opcode(code.code[copy]) == "LDGSTS":
            met = barriers & code.behind([copy], waits)
            if use in code.behind(met, waits) - waits:
                return False
    return bool(barriers)


def mbarriers_waited(code: flow.Flow, one: int, other: int) -> bool:
    """No way from the begin to either access, nor round to the read again, lacks a wait."""
    waits = code.where(MBARRIER_WAIT)
    early = code.from_begin(waits)
    read = other if flow.opcode(code.code[one]) == "UBLKCP" else one
    return one not in early and other not in early and read not in code.behind([read], waits)


def anything(code: flow.Flow, one: int, other: int) -> bool:
    """The reason needs no order."""
    return True


@dataclass(frozen=True)
class Known:
    """Pairs that are no race: rows, opcodes of the two accesses, why, what the code must show."""

    rows: str
    opcodes: frozenset[str]
    reason: str
    proof: Callable[[flow.Flow, int, int], bool]


STEP = (
    "the other slot within a step; from step to step a BAR.SYNC 0x0 of the whole block lies "
    "between, lost beside barriers of pairs of warps"
)
STATISTICS = (
    "LSE and delta of a block: a reader waits for the copy's mbarrier, and the copy for that "
    "which each compute warp's first lane arrives at behind a __syncwarp"
)
SAME = "warpgroups that share keys write the same limits of a key twice, each before it reads them"
KNOWN = (
    # The main loop's slots of Q, dO, their statistics, and dS.
    Known("sm80_bwd_*", frozenset({"LDGSTS", "LDSM"}), STEP, block_barrier_between),
    Known("sm80_bwd_*", frozenset({"LDGSTS", "LDS"}), STEP, block_barrier_between),
    Known("sm80_bwd_*", frozenset({"STS", "LDSM"}), STEP, block_barrier_between),
    # BwdLoader::load_stats() and BwdCompute::release().
    Known("sm90_bwd_*", frozenset({"UBLKCP", "LDS"}), STATISTICS, mbarriers_waited),
    # BwdCompute::write_visible_rows() of the rows with 64 keys a tile.
    Known("sm90_bwd_*_d256_band", frozenset({"STS", "LDS"}), SAME, anything),
    Known("sm90_bwd_*_d192*_band", frozenset({"STS", "LDS"}), SAME, anything),
    Known("sm90_bwd_*_any", frozenset({"STS", "LDS"}), SAME, anything),
)


@dataclass(frozen=True)
class Access:
    """One side of a reported race."""

    kernel: str
    row: str
    offset: int
    writes: bool

    def fits(self, code: flow.Flow) -> bool:
        """Is there an instruction that can be it?"""
        kinds = WRITES if self.writes else READS
        return self.offset in code.code and flow.opcode(code.code[self.offset]) in kinds


def pairs(log: str) -> Iterator[tuple[Access, Access]]:
    """The accesses that a log holds against each other."""
    first: Access | None = None
    for line in log.splitlines():
        found = ACCESS.search(line)
        if found is None:
            continue
        access = Access(found[2], found[3], int(found[4], 16), found[1] == "Write")
        if "Race reported between" in line:
            first = access
        elif first is not None:
            yield first, access


class Code:
    """The machine code of a library, function by function as it is asked for."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.known: dict[tuple[str, str], list[flow.Flow]] = {}

    def of(self, row: str, kernel: str) -> list[flow.Flow]:
        """A row's kernel, for each target that the library holds."""
        if (row, kernel) not in self.known:
            names = {k.function for k in resources.kernels_of(self.library, row, False)}
            names = {n for n in names if resources.kernel_name(n)[1] == kernel}
            texts = [self._listing(name) for name in sorted(names)]
            parts = [part for text in texts for part in re.split(r"^arch = ", text, flags=re.M)[1:]]
            codes = [code for part in parts if (code := flow.instructions(part))]
            self.known[row, kernel] = [flow.Flow(code) for code in codes]
        return self.known[row, kernel]

    def _listing(self, function: str) -> str:
        command = [*check_sass.disassembler(), "-sass", "-fun", function, str(self.library)]
        done = subprocess.run(command, capture_output=True, text=True, env=check_sass.environment())
        return done.stdout


def reason(pair: tuple[Access, Access], code: flow.Flow) -> str | None:
    """Why a pair is no race in one target's code, if it is known and that code shows it."""
    places = [access.offset for access in pair]
    names = {flow.opcode(code.code[at]) for at in places}
    for known in KNOWN:
        fits = fnmatch.fnmatchcase(pair[0].row, known.rows) and names == known.opcodes
        if fits and known.proof(code, *places):
            return known.reason
    return None


def ran(found: list[tuple[Access, Access]], code: Code) -> dict[tuple[str, str], list[flow.Flow]]:
    """The targets of each row's kernel that can have run: the log does not name them, but in that
    one there is an instruction for every access."""
    of: dict[tuple[str, str], set[Access]] = {}
    for pair in found:
        for access in pair:
            of.setdefault((access.row, access.kernel), set()).add(access)
    return {
        key: [target for target in code.of(*key) if all(one.fits(target) for one in accesses)]
        for key, accesses in of.items()
    }


def verdict(pair: tuple[Access, Access], targets: list[flow.Flow]) -> tuple[str, str]:
    """("known" | "finding", the pair in words): known if it is in each of the targets."""
    first, second = pair
    known: list[str | None] = []
    shown: list[str] = []
    for target in targets:
        a, b = (flow.opcode(target.code[access.offset]) for access in pair)
        why = reason(pair, target)
        known.append(why and f"{a} and {b}: {why}")
        shown.append(f"{a} +{first.offset:#x} and {b} +{second.offset:#x}")
    name = f"{first.row} {first.kernel}"
    if targets and None not in known:
        return "known", f"{name}: {' or '.join(sorted({str(text) for text in known}))}"
    where = " or ".join(shown) or f"+{first.offset:#x} and +{second.offset:#x}, no such code"
    return "finding", f"{name}: {where}"


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
        reported = list(dict.fromkeys(pairs(options.log.read_text())))
        targets = ran(reported, Code(library))
        found = [verdict(p, targets[p[0].row, p[0].kernel]) for p in reported]
    except (ToolError, toolchain.ToolchainError) as error:
        print(f"racecheck.py: {error}", file=sys.stderr)
        return 2
    for kind in ("finding", "known"):
        for text in dict.fromkeys(text for what, text in found if what == kind):
            print(f"{kind}: {text}")
    number = {what: sum(w == what for w, _ in found) for what in ("known", "finding")}
    print(f"{number['known']} pairs known, {number['finding']} findings")
    return int(number["finding"] > 0 or not found)


if __name__ == "__main__":
    sys.exit(main())

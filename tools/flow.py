# SPDX-License-Identifier: BSD-3-Clause
# Which barriers lie on every way from one instruction of a kernel to another?
"""The control flow of one function's listing, as far as a proof of order needs it.

Where a jump's target is not known, every place it may have is taken: a way too many can lose a
proof, and never make one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
PREDICATE = re.compile(r"^@!?U?P[0-9T]+\s+")
TARGET = re.compile(r"\b0x[0-9a-f]+$")
ALWAYS = re.compile(r"BRA(\.\w+)* 0x[0-9a-f]+$")  # no predicate among its operands
JUMPS = ("BRA", "CALL", "WARPSYNC", "JMP")


def instructions(sass: str) -> dict[int, str]:
    """{offset: instruction with its predicate} of one function's listing."""
    found = (LINE.match(line) for line in sass.splitlines())
    return {int(m[1], 16): m[2] for m in found if m}


def opcode(instruction: str) -> str:
    """`LDS` of `@!P0 LDS.64 R12, [R10]`."""
    return PREDICATE.sub("", instruction).split()[0].split(".")[0]


class Flow:
    """What can run behind what, in one function."""

    def __init__(self, code: dict[int, str]) -> None:
        self.code = code
        places = sorted(code)
        behind = dict(zip(places, places[1:], strict=False))
        returns = {behind[at] for at in places if opcode(code[at]) == "CALL" and at in behind}
        self.next = {at: self._successors(at, behind, returns) for at in places}

    def _successors(self, at: int, behind: dict[int, int], returns: set[int]) -> set[int]:
        text = self.code[at]
        name, target = opcode(text), TARGET.search(text)
        if name in ("BRX", "JMX"):
            return set(self.code)
        to = set(returns) if name == "RET" else set()
        if name in JUMPS and target and int(target[0], 16) in self.code:
            to.add(int(target[0], 16))
        leaves = text == "EXIT" or text.startswith("RET") or ALWAYS.fullmatch(text)
        if not leaves and at in behind:
            to.add(behind[at])
        return to

    def where(self, pattern: str) -> set[int]:
        """Instructions that fit a regular expression, predicate included."""
        return {at for at, text in self.code.items() if re.fullmatch(pattern, text)}

    def behind(self, starts: Iterable[int], stops: set[int]) -> set[int]:
        """What can run behind `starts` before a stop, and the stops that come first."""
        seen: set[int] = set()
        left = [to for at in starts for to in self.next[at]]
        while left:
            at = left.pop()
            if at in seen:
                continue
            seen.add(at)
            if at not in stops:
                left.extend(self.next[at])
        return seen

    def from_begin(self, stops: set[int]) -> set[int]:
        """The same from the function's first instruction, which is none of them."""
        return self.behind([min(self.code)], stops)

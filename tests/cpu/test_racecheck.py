# SPDX-License-Identifier: BSD-3-Clause
# Are races that racecheck reports told apart by their instructions and by what orders these?

from __future__ import annotations

from pathlib import Path

import pytest

import flow
import racecheck

SM90, SM80, SHARED = (
    "sm90_bwd_bf16_d128_band",
    "sm80_bwd_bf16_d128_band",
    "sm90_bwd_bf16_d256_band",
)
# A loop whose steps begin with a barrier: statistics and rows of the slot that came are read,
# copies to the other one begin. Behind it STS and LDSM without a barrier both ways.
AMPERE = """
        DEPBAR.LE SB0, 0x0
        BAR.SYNC.DEFER_BLOCKING 0x0
        LDS.64 R12, [R10+0x18000]
    @P1 LDGSTS.E.BYPASS.128 [R13], desc[UR8][R14.64]
        LDSM.16.MT88.4 R180, [R178]
        BAR.SYNC.DEFER_BLOCKING R4, 0x40
    @P0 BRA 0x0
        STS [R204+0x20000], R208
        LDSM.16.MT88.4 R180, [R178]
    @P2 BRA 0x70
        EXIT
"""
# One role copies behind a wait, the other one reads behind its own; the last two lack theirs.
HOPPER = """
    @P3 BRA 0x50
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8+0x2c518], R2
   @!P0 BRA 0x10
        UBLKCP.S.G [UR16], [UR24], UR7
    @P1 BRA 0x10
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R5+URZ+0x2c500], R4
   @!P0 BRA 0x50
        LDS.128 R4, [R9]
    @P1 BRA 0x50
        LDS.128 R4, [R9]
    @P2 BRA 0x90
        STS.64 [R9], R4
        EXIT
"""


def listing(text: str) -> str:
    lines = (line.strip() for line in text.strip().splitlines())
    return "\n".join(
        f"        /*{16 * i:04x}*/    {line} ;  /* 0x0 */\n      /* 0x0 */"
        for i, line in enumerate(lines)
    )


def code(text: str) -> flow.Flow:
    return flow.Flow(flow.instructions(listing(text)))


def access(row: str, offset: int, way: str) -> str:
    params = "fa::sm90::BwdParams<T1>" if row[:4] == "sm90" else "fa::BwdArgs"
    return f"{way} access at void fa::{row[:4]}::fa_bwd<fa::rows::{row}>({params})+{offset:#x}"


def log(row: str, write: int, *reads: int) -> str:
    first = f"========= Error: Race reported between {access(row, write, 'Write')}"
    return "\n".join(
        [first, *(f"=========     and {access(row, at, 'Read')} [96 hazards]" for at in reads)]
    )


def judged(text: str, *targets: flow.Flow) -> list[tuple[str, str]]:
    made = racecheck.Code(Path("libfa.so"))
    found = list(racecheck.pairs(text))
    made.known = {(pair[0].row, pair[0].kernel): list(targets) for pair in found}
    can = racecheck.ran(found, made)
    return [racecheck.verdict(pair, can[pair[0].row, pair[0].kernel]) for pair in found]


def test_a_listing_gives_the_instruction_of_an_offset() -> None:
    found = flow.instructions(listing(AMPERE))
    assert len(found) == 11
    assert found[0x30].startswith("@P1 LDGSTS")
    assert [flow.opcode(found[at]) for at in (0, 0x30, 0x60, 0xA0)] == [
        "DEPBAR",
        "LDGSTS",
        "BRA",
        "EXIT",
    ]


def test_ways_end_at_stops() -> None:
    ways = code(AMPERE)
    barriers = ways.where(racecheck.BLOCK_BARRIER)
    assert barriers == {0x10}
    assert ways.behind([0x50], barriers) == {0x60, 0, 0x10, 0x70, 0x80, 0x90, 0xA0}
    assert ways.from_begin(barriers) == {0x10}
    always = code("BRA 0x20\nNOP\nEXIT")
    assert always.from_begin(set()) == {0x20}


def test_every_pair_of_a_report_is_found() -> None:
    found = list(racecheck.pairs(log(SM90, 0x19CA0, 0x40, 0x60) + "\n" + log(SM80, 0x50, 0x60)))
    offsets = [(one.row, one.offset, other.offset) for one, other in found]
    assert offsets == [(SM90, 0x19CA0, 0x40), (SM90, 0x19CA0, 0x60), (SM80, 0x50, 0x60)]
    assert {one.kernel for one, _ in found} == {"fa_bwd"}
    assert {(one.writes, other.writes) for one, other in found} == {(True, False)}


@pytest.mark.parametrize(
    ("text", "row", "write", "read", "kind"),
    [
        (AMPERE, SM80, 0x30, 0x20, "known"),
        (AMPERE, SM80, 0x30, 0x40, "known"),
        (AMPERE, SM80, 0x70, 0x80, "finding"),  # each follows the other without a barrier
        (AMPERE, SM90, 0x30, 0x40, "finding"),  # the same instructions of another row
        (AMPERE, SM80, 0x30, 0x990, "finding"),  # no such code
        (AMPERE, SM80, 0x40, 0x20, "finding"),  # a load that writes
        (AMPERE.replace("DEPBAR.LE SB0, 0x0", "NOP"), SM80, 0x30, 0x40, "finding"),  # not waited
        (AMPERE.replace("BLOCKING 0x0", "BLOCKING R4, 0x40"), SM80, 0x30, 0x40, "finding"),
        (HOPPER, SM90, 0x30, 0x70, "known"),
        (HOPPER, SM90, 0x30, 0x90, "finding"),  # read again without a wait
        (HOPPER, SM80, 0x30, 0x70, "finding"),
        (HOPPER.replace("@P3 BRA 0x50", "@P3 BRA 0x30"), SM90, 0x30, 0x70, "finding"),
        (HOPPER.replace("@P3 BRA 0x50", "@P3 BRA 0x70"), SM90, 0x30, 0x70, "finding"),
        (HOPPER, SM90, 0xB0, 0x70, "finding"),
        (HOPPER, SHARED, 0xB0, 0x70, "known"),  # rows with 64 keys a tile
    ],
)
def test_a_pair_is_judged_by_its_instructions(
    text: str, row: str, write: int, read: int, kind: str
) -> None:
    ((what, words),) = judged(log(row, write, read), code(text))
    assert what == kind
    assert row in words


def test_a_target_in_which_an_access_is_no_access_did_not_run() -> None:
    moved = code("NOP\n" * 3 + "STS [R1], R2\nLDS R1, [R2]\n" + "NOP\n" * 8)
    one, two = log(SM80, 0x30, 0x40), log(SM80, 0x30, 0x20, 0x40)
    assert [what for what, _ in judged(one, code(AMPERE), moved)] == ["finding"]
    assert [what for what, _ in judged(two, code(AMPERE), moved)] == ["known", "known"]


def test_findings_set_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(racecheck.Code, "of", lambda self, row, kernel: [code(HOPPER)])
    path = tmp_path / "log"
    for text, status, words in (
        (log(SM90, 0x30, 0x70), 0, "1 pairs known, 0 findings"),
        (log(SM90, 0xB0, 0x70), 1, "finding: sm90_bwd_bf16_d128_band fa_bwd: STS +0xb0 and LDS"),
        ("========= nothing that is understood", 1, "0 findings"),
    ):
        path.write_text(text)
        assert racecheck.main([str(path), "libfa.so"]) == status
        assert words in capsys.readouterr().out

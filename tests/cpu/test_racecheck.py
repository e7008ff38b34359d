# SPDX-License-Identifier: BSD-3-Clause
# Are races that racecheck reports told apart by what their instructions are?

from __future__ import annotations

from pathlib import Path

import pytest

import racecheck

SM90, SM80 = "sm90_bwd_bf16_d128_band", "sm80_bwd_bf16_d128_band"
SASS = """
arch = sm_90
\t\tFunction : made_up
        /*0040*/                   LDS.64 R12, [R10+0x30000] ;      /* 0x030000000a0c7984 */
                                                                    /* 0x000fe20000000a00 */
        /*0050*/              @!P0 STS [R204+0x20000], R208 ;       /* 0x020000d0cc007388 */
        /*0060*/                   LDSM.16.MT88.4 R180, [R178] ;    /* 0x02000000b2b4783b */
        /*19ca0*/                  UBLKCP.S.G [UR10], [UR8], UR6 ;  /* 0x0000000a080073ba */
"""


def access(row: str, offset: int, way: str) -> str:
    params = "fa::sm90::BwdParams<T1>" if row == SM90 else "fa::BwdArgs"
    return f"{way} access at void fa::{row[:4]}::fa_bwd<fa::rows::{row}>({params})+{offset:#x}"


def log(row: str, write: int, *reads: int) -> str:
    first = f"========= Error: Race reported between {access(row, write, 'Write')}"
    return "\n".join(
        [first, *(f"=========     and {access(row, at, 'Read')} [96 hazards]" for at in reads)]
    )


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> racecheck.Code:
    made = racecheck.Code(Path("libfa.so"))
    monkeypatch.setattr(made, "of", lambda row, kernel: [racecheck.opcodes(SASS)])
    return made


def test_a_listing_gives_the_instruction_of_an_offset() -> None:
    assert racecheck.opcodes(SASS) == {0x40: "LDS", 0x50: "STS", 0x60: "LDSM", 0x19CA0: "UBLKCP"}


def test_every_pair_of_a_report_is_found() -> None:
    found = list(racecheck.pairs(log(SM90, 0x19CA0, 0x40, 0x60) + "\n" + log(SM80, 0x50, 0x60)))
    offsets = [(one.row, one.offset, other.offset) for one, other in found]
    assert offsets == [(SM90, 0x19CA0, 0x40), (SM90, 0x19CA0, 0x60), (SM80, 0x50, 0x60)]
    assert {one.kernel for one, _ in found} == {"fa_bwd"}


@pytest.mark.parametrize(
    ("row", "write", "read", "kind"),
    [
        (SM90, 0x19CA0, 0x40, "bulk"),
        (SM80, 0x50, 0x60, "known"),
        (SM80, 0x50, 0x40, "finding"),  # other instructions of that row
        (SM90, 0x50, 0x60, "finding"),  # the same instructions of another row
        (SM90, 0x50, 0x99, "finding"),  # no such code
    ],
)
def test_a_pair_is_judged_by_its_instructions(
    code: racecheck.Code, row: str, write: int, read: int, kind: str
) -> None:
    (pair,) = racecheck.pairs(log(row, write, read))
    what, words = racecheck.verdict(pair, code)
    assert what == kind
    assert kind == "bulk" or row in words


def test_findings_set_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = [racecheck.opcodes(SASS)]
    monkeypatch.setattr(racecheck.Code, "of", lambda self, row, kernel: code)
    path = tmp_path / "log"
    for text, status, words in (
        (log(SM90, 0x19CA0, 0x40), 0, "1 pairs with a bulk copy, 0 known, 0 findings"),
        (log(SM90, 0x50, 0x60), 1, "finding: sm90_bwd_bf16_d128_band fa_bwd: STS +0x50 and LDSM"),
        ("========= nothing that is understood", 1, "0 findings"),
    ):
        path.write_text(text)
        assert racecheck.main([str(path), "libfa.so"]) == status
        assert words in capsys.readouterr().out

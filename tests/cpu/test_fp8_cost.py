# SPDX-License-Identifier: BSD-3-Clause
# Does fp8_cost.py time every granularity, and refuse what it cannot lay out?
import pytest

import fp8_cost


def test_every_granularity_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--length", "16", "--tokens", "32", "--dim", "256", "--repeats", "1"]
    fp8_cost.main(["--device", "cpu", *size])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("bf16 attention: ") and "32 tokens, D 256, S 16, full" in lines[0]
    rows = {row[1].strip(): row[2:6] for row in (line.split("|") for line in lines[4:])}
    names = ("tensor", "head", "block")
    assert set(rows) == {f"{n}{rotated}" for n in names for rotated in ("", " rotated")}
    assert all(float(x) > 0 for row in rows.values() for x in row[:3])


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--length", "100"], "--length: 100 must divide --tokens, 16384."),
        (["--dim", "96"], "--dim: 96 must be 64, 128 or 256."),
    ):
        with pytest.raises(SystemExit):
            fp8_cost.main(["--device", "cpu", *arguments])
        assert words in capsys.readouterr().err

# SPDX-License-Identifier: BSD-3-Clause
# Does the host time tool measure every layer, and name what it cannot?

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import overhead
from bench_timers import Impl


def test_every_entry_of_a_cpu_and_its_profile(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--repeats", "3", "--calls", "3", "--profile", "fa.train"]
    assert overhead.main(arguments) == 0
    out = capsys.readouterr().out
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")]
    assert rows == [
        *("entry", "sdpa", "fa.raw_op", "fa.attention", "fa.ops.forward"),
        *("sdpa.record", "sdpa.backward", "sdpa.train"),
        *("fa.record", "fa.backward", "fa.train", "fa.backward_op"),
    ]
    assert "function calls" in out and "Ordered by: internal time" in out


def layer_of_a_call() -> None:
    """A function whose name a profile must show."""


def test_a_profile_counts_the_functions_behind_an_entry() -> None:
    text = overhead.profiled(Impl("one", layer_of_a_call), calls=3)
    (line,) = (x for x in text.splitlines() if "layer_of_a_call" in x)
    assert line.split()[0] == "3" and "test_overhead.py" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--profile", "fa.c_call"], "fa.c_call is no entry here; allowed are sdpa, fa.raw_op"),
        (["--dtype", "float17"], "float17 is not a dtype of torch"),
    ],
)
def test_bad_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        overhead.main(["--device", "cpu", *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_entries_are_held_against_sdpa_doing_the_same() -> None:
    times = {"sdpa": 0.02, "fa.attention": 0.01, "sdpa.train": 0.1, "fa.train": 0.15}
    times |= {"sdpa.backward": 0.05, "fa.backward_op": 0.04, "fa.backward": 0.06}
    impls = [Impl(name, lambda: None, samples_ms=[ms]) for name, ms in times.items()]
    table = overhead.table(impls)
    assert "| fa.attention | 10.0 | 10.0 – 10.0 | 0.50 |" in table
    assert "| fa.train | 150.0 | 150.0 – 150.0 | 1.50 |" in table
    assert "| fa.backward_op | 40.0 | 40.0 – 40.0 | 0.80 |" in table
    assert "| fa.backward | 60.0 | 60.0 – 60.0 | 1.20 |" in table

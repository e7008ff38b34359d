# SPDX-License-Identifier: BSD-3-Clause
# Does gpu_check.sh run its stages, compare with the committed results, and end in one summary?
"""The script with a Python that plays a GPU machine: what the tools print is given here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = "fa sm90: geometric mean 1.086 × best peer, worst cell 0.97, 18 cells."


def run(
    tmp_path: Path,
    *arguments: str,
    bench_status: int = 0,
    pytest_says: str = "echo '12 passed, 1 skipped in 3.21s'",
    **environment: str,
) -> tuple[int, str, str]:
    """Status, what was printed, and the command lines of the tools."""
    calls = tmp_path / "calls"
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >>{shlex.quote(str(calls))}\n'
        "case $* in\n"
        "  *machine.py*processes) echo 2 ;;\n"
        "  *machine.py*) exit 0 ;;\n"
        "  *tools/driver.py*) echo '3 rows, 0 failures.' ;;\n"
        f"  *'-m pytest'*) {pytest_says} ;;\n"
        "  *fuzz.py*) echo 'fuzz seed 5: 300 problems, 0 failures, 9 s.' ;;\n"
        f"  *bench.py*) echo '{BENCH}'; echo 'FAILED: a row: -9.0 %.'; exit {bench_status} ;;\n"
        "  *library_path*) echo /lib/libfa.so ;;\n"
        "  *'import torch'*) echo NVIDIA H200 torch 2.11 ;;\n"
        "  *cuda.bindings*) exit 1 ;;\n"
        "esac\n"
    )
    python.chmod(0o755)
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text("#!/bin/sh\n")
    sanitizer.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    known = {"PYTHON": str(python), "FA_CHECK_OUT": str(tmp_path / "out"), "PATH": path}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FA_")}
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh"), *arguments],
        env={**inherited, **known, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = calls.read_text() if calls.exists() else ""
    return done.returncode, done.stdout + done.stderr, said


def test_full_compares_with_the_committed_results_and_fails_on_a_loss(tmp_path: Path) -> None:
    status, out, calls = run(tmp_path, "full", bench_status=1)
    assert status == 1
    (bench,) = (line for line in calls.splitlines() if "bench.py" in line)
    assert bench.endswith("--compare docs/results/h200.jsonl")
    assert "--dtypes bfloat16,float8_e4m3fn" in bench
    summary = out[out.index("=== summary (full): NVIDIA H200 torch 2.11") :]
    assert summary == (tmp_path / "out" / "summary.txt").read_text()
    lines = [line.strip() for line in summary.splitlines()]
    for text in (BENCH, "FAILED: a row: -9.0 %."):
        assert text in lines
    # two parts, then the tests that run alone
    said = "tests: 36 passed, 0 failed, 0 error, 3 skipped; 2 processes, then one."
    assert said in lines
    stages = {line.split()[0]: line.split("  ")[-1] for line in lines if " s  " in line}
    assert stages["tests"] == stages["fuzz"] == stages["build"] == "ok"
    assert stages["sanitize"].startswith("NOT RUN: ")
    assert stages["bench"] == "FAILED (status 1)"
    assert lines[-1] == "1 stages FAILED"
    assert any(line.startswith("fuzz: 600 problems, 0 failures, seeds ") for line in lines)
    fuzz = [line for line in calls.splitlines() if "tools/fuzz.py" in line]
    assert [line.split()[2] for line in fuzz] == ["500", "500"]
    assert len({line.split()[4] for line in fuzz}) == 2, "each process draws from its own seed"


def test_quick_compares_only_when_told(tmp_path: Path) -> None:
    status, out, calls = run(tmp_path, "quick", bench_status=0)
    assert status == 0, out
    assert "--compare" not in calls
    assert out.splitlines()[-1] == "good, as far as it ran; NOT RUN: sanitize"
    status, _, calls = run(tmp_path, "quick", bench_status=0, FA_COMPARE="old.jsonl")
    assert "--compare old.jsonl" in calls


@pytest.mark.parametrize("names", ["test", "tests,fuz", "", ","])
def test_a_stage_that_does_not_exist_is_no_success(tmp_path: Path, names: str) -> None:
    status, out, calls = run(tmp_path, "stage", names)
    assert status == 2, out
    assert "allowed are build, tests, sanitize, fuzz and bench" in out
    assert not calls, "nothing was started"


def test_chosen_stages_alone(tmp_path: Path) -> None:
    status, out, calls = run(tmp_path, "stage", "tests,fuzz")
    assert status == 0, out
    assert out.splitlines()[-1] == "good"
    assert "-m pytest" in calls and "fuzz.py" in calls and "bench.py" not in calls


def test_tests_that_were_all_skipped_are_no_success(tmp_path: Path) -> None:
    status, out, _ = run(tmp_path, "stage", "tests", pytest_says="echo '140 skipped in 3.21s'")
    assert status == 1
    assert "FAILED: no test passed" in out
    assert out.splitlines()[-1] == "1 stages FAILED"


def test_files_behind_a_hanging_one_run_in_another_process(tmp_path: Path) -> None:
    """Whatever its name: the files in order, each of which stops the process once."""
    files = sorted(f"tests/gpu/{p.name}" for p in (ROOT / "tests" / "gpu").glob("test_*.py"))
    assert any(re.search(r"[0-9]", name) for name in files)
    # The process stops in the first file that it is given.
    says = (
        "for word in $*; do case $word in tests/gpu/*) echo 3 passed in 1s; "
        "echo FA-TESTS-STOPPED-IN $word; exit 86 ;; esac; done"
    )
    status, out, calls = run(tmp_path, "stage", "tests", pytest_says=says)
    assert status == 1, out
    started = [
        line.split(" tests/gpu/")[1].split()[0] for line in calls.splitlines() if " -q " in line
    ]
    assert sorted(f"tests/gpu/{name}" for name in started) == sorted(3 * files)


def test_parts_of_the_tests_are_all_of_them() -> None:
    """Whatever files are collected with them, so that a process may go on behind a lost context."""

    def names(part: str, *files: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--co", "-p", "no:cacheprovider", *files],
            env={**os.environ, "FA_TEST_DEVICE": "cpu", "FA_TEST_PART": part},
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
        )
        return [line for line in done.stdout.splitlines() if "::" in line]

    order, varlen = "tests/gpu/test_fa1_order.py", "tests/gpu/test_varlen.py"
    whole = names("0/1", order, varlen)
    halves = [names("0/2", order, varlen), names("1/2", order, varlen)]
    assert sorted(halves[0] + halves[1]) == sorted(whole)
    assert all(halves), "each has something to do"
    assert sum(any(order in name for name in half) for half in halves) == 1, "it compiles a kernel"
    alone = names("1/2", varlen)
    assert alone == [name for name in halves[1] if varlen in name]

# SPDX-License-Identifier: BSD-3-Clause
# Does sanitize.sh tell a clean row from one that nobody looked at?
"""The script with a Python that plays a GPU machine, and a compute-sanitizer that runs it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OK = "echo 'a row dense: ok (error / bound: out 0.100)'"
NO_ROW = "echo \"libfa.so (1.0) holds no row that matches 'sm80_*'.\"; exit 2"
NO_GPU = "echo 'driver.py needs a CUDA GPU, and none can be used here: cuInit answers 999.'; exit 2"


def run(tmp_path: Path, driver: str, probe: str = OK) -> tuple[int, str]:
    """Status and output, where tools/driver.py does `driver` for a glob and `probe` for a row."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        "case $* in\n"
        f"  *--rows*'*'*) {driver} ;;\n"
        f"  *--rows*) {probe} ;;\n"
        "  *rows*) echo sm80_fwd_row ;;\n"
        "esac\n"
    )
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(
        '#!/bin/sh\nwhile [ "$1" != ' + shlex.quote(str(python)) + ' ]; do shift; done\nexec "$@"\n'
    )
    for program in (python, sanitizer):
        program.chmod(0o755)
    known = {"PYTHON": str(python), "FA_CHECK_OUT": str(tmp_path / "out")}
    known["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "sanitize.sh"), "quick", "memcheck"],
        env={**os.environ, **known},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_rows_that_ran_clean(tmp_path: Path) -> None:
    status, out = run(tmp_path, OK)
    assert status == 0, out
    assert out.count("1 problems  clean") == 2


def test_a_build_of_one_architecture(tmp_path: Path) -> None:
    status, out = run(tmp_path, f"case $* in *sm80*) {NO_ROW} ;; *) {OK} ;; esac")
    assert status == 0, out
    assert "no such row in this build" in out and "clean" in out


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (NO_ROW, "so nothing was looked at"),
        (NO_GPU, "FAILED (status 2)"),
        ("echo usage: driver.py >&2; exit 2", "FAILED (status 2)"),
        ("echo another row is better on this GPU", "FAILED: nothing ran"),
        ("echo '========= Invalid __global__ read'; exit 9", "FAILED (status 9)"),
    ],
)
def test_what_looked_at_nothing_or_found_something_fails(
    tmp_path: Path, driver: str, words: str
) -> None:
    status, out = run(tmp_path, driver)
    assert status == 1, out
    assert words in out


def test_a_sanitizer_that_hides_the_gpu_is_not_run(tmp_path: Path) -> None:
    status, out = run(tmp_path, NO_GPU, probe=NO_GPU)
    assert status == 77, out
    assert "not run: compute-sanitizer cannot attach" in out
    assert "cuInit answers 999" in out

# SPDX-License-Identifier: BSD-3-Clause
# Can a program without torch drive the library: ctypes, and arrays and streams of cuda-python?

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest

import libfa

pytestmark = pytest.mark.usefixtures("cuda_only")
DRIVER = Path(__file__).resolve().parents[2] / "tools" / "driver.py"


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DRIVER), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )


def drive(*arguments: str, **environment: str) -> str:
    done = start(*arguments, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _cuda_python(name: str) -> None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed (pip install cuda-core cuda-bindings)")


def test_every_row_with_cuda_bindings() -> None:
    _cuda_python("cuda.bindings")
    output = drive(*_runnable())
    for row in harness.rows():
        if row.backend in harness.backends():
            good = (f"{row.id} dense: {word}" in output for word in ("ok", "another row is better"))
            assert any(good), output


def test_every_row_with_cuda_core() -> None:
    _cuda_python("cuda.core")
    assert "0 failures" in drive(*_runnable(), "--memory", "core")


def test_plans_without_launching() -> None:
    """Every row is the one its small case selects, on the nominal device, with no GPU in sight."""
    assert "0 failures" in drive("--plan", CUDA_VISIBLE_DEVICES="")


def test_ptx_of_ampere_rows() -> None:
    """What a GPU newer than this build runs: every kernel made from PTX when it is loaded."""
    _cuda_python("cuda.bindings")
    rows = [row.id for row in harness.rows() if row.backend == "sm80" and row.op == libfa.FORWARD]
    if not rows:
        pytest.skip("this build holds no Ampere row")
    ptx = {"CUDA_FORCE_PTX_JIT": "1", "CUDA_CACHE_DISABLE": "1"}
    small = next((name for name in rows if "_d64_band" in name), rows[0])
    assert f"{small} dense: ok" in drive("--rows", small, **ptx)
    # Hopper rows have no PTX. Were the variables without effect, this would run.
    hopper = [row.id for row in harness.rows() if row.backend == "sm90"]
    if hopper and "sm90" in harness.backends():
        assert start("--rows", hopper[0], **ptx).returncode != 0


def _runnable() -> list[str]:
    return [] if "sm90" in harness.backends() else ["--rows", "sm80_*"]

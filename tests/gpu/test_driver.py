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

pytestmark = pytest.mark.usefixtures("cuda_only")
DRIVER = Path(__file__).resolve().parents[2] / "tools" / "driver.py"


def drive(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(DRIVER), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
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


def _runnable() -> list[str]:
    return [] if "sm90" in harness.backends() else ["--rows", "sm80_*"]

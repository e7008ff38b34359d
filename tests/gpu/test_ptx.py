# SPDX-License-Identifier: BSD-3-Clause
# Does the PTX in the Ampere rows, which newer GPUs will run, compile and give the answer?

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest

pytestmark = pytest.mark.usefixtures("cuda_only")
DRIVER = Path(__file__).resolve().parents[2] / "tools" / "driver.py"


def test_ampere_row_from_ptx(tmp_path: Path) -> None:
    """CUDA_FORCE_PTX_JIT hides the machine code; the cache shows that PTX was compiled."""
    ids = [row.id for row in harness.rows() if row.arch == 80]
    assert ids, "this build holds no Ampere row"
    environment = os.environ | {
        "CUDA_FORCE_PTX_JIT": "1",
        "CUDA_CACHE_PATH": str(tmp_path / "jit"),
        "CUDA_MODULE_LOADING": "LAZY",  # only the module of this row
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, str(DRIVER), "--rows", ids[0]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ids[0]} dense: ok" in done.stdout
    assert any((tmp_path / "jit").rglob("*")), "nothing was compiled from PTX"

#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
# What is around fa on this machine? The same as `python -m fa env`, also where fa does not load.
"""python3 tools/collect_env.py: prints compilers, GPUs, packages and variables for a bug report."""

from __future__ import annotations

import runpy
from pathlib import Path

REPORT = Path(__file__).resolve().parents[1] / "python" / "fa" / "_cli" / "env.py"

if __name__ == "__main__":
    runpy.run_path(str(REPORT), run_name="__main__")

# SPDX-License-Identifier: BSD-3-Clause
# Which package `fa` do the tools use? What Python finds; where it is not installed, this clone's.
"""Import this before `fa`. The clone's package finds its library through FA_LIBRARY."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("fa") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

# SPDX-License-Identifier: BSD-3-Clause
# Do drawn problems hold? A small part of tools/fuzz.py; tools/gpu_check.sh runs a thousand.

from __future__ import annotations

import random

import harness
import pytest

import fuzz


@harness.each_backend()
def test_drawn_problems(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    seed = random.SystemRandom().randrange(2**31)
    count = 5 if harness.ON_CPU else 60
    seen, failures = fuzz.run(seed, count, harness.DEVICE, (backend,))
    assert not failures, f"fuzz seed {seed}: {capsys.readouterr().out}"
    assert sum(n for name, n in seen.items() if not name.startswith("with ")) == count

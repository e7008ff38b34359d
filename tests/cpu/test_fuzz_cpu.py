# SPDX-License-Identifier: BSD-3-Clause
# Does the fuzzer draw the same problems again, find faults, and pass on the CPU backend?

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fuzz
from cases import Case

ROOT = Path(__file__).resolve().parents[2]


def run_fuzz(*arguments: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """The fuzzer in its own process, which may test on another device than this one."""
    script = f"import sys\nsys.path.insert(0, {str(ROOT / 'tools')!r})\nimport fuzz\n{prelude}\n"
    script += f"sys.exit(fuzz.main({list(arguments)!r}))"
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_drawn_problems_on_the_cpu_backend() -> None:
    done = run_fuzz("--device", "cpu", "--count", "40", "--seed", "11")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fuzz seed 11: 40 problems, 0 failures" in done.stdout
    assert "cpu e4m3 ran 5" in done.stdout


def test_a_wrong_result_is_found_and_can_be_reproduced() -> None:
    prelude = (
        "sys.path[:0] = [str(fuzz.ROOT / 'tests'), str(fuzz.ROOT / 'tests/gpu')]\n"
        "import os; os.environ['FA_TEST_DEVICE'] = 'cpu'\n"
        "import harness\n"
        "right = harness.call_guarded\n"
        "def wrong(inputs, backend, **more):\n"
        "    result = right(inputs, backend, **more)\n"
        "    result.out.mul_(1.05)\n"
        "    return result\n"
        "harness.call_guarded = wrong"
    )
    done = run_fuzz("--device", "cpu", "--count", "6", "--seed", "11", prelude=prelude)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert failed
    source = failed[0].split(": ", 1)[1]
    case = eval(source, {"Case": Case})  # the printed line is Python
    assert case in [fuzz.draw(11, n, True) for n in range(6)]


def test_a_wrong_e4m3_result_is_found() -> None:
    prelude = (
        "sys.path[:0] = [str(fuzz.ROOT / 'tests'), str(fuzz.ROOT / 'tests/gpu')]\n"
        "import os; os.environ['FA_TEST_DEVICE'] = 'cpu'\n"
        "import fp8_problems\n"
        "right = fp8_problems.run\n"
        "def wrong(*tensors, **options):\n"
        "    out, lse = right(*tensors, **options)\n"
        "    return out * 1.2 + 0.02, lse\n"
        "fp8_problems.run = wrong"
    )
    done = run_fuzz("--device", "cpu", "--count", "7", "--seed", "11", prelude=prelude)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED on cpu in e4m3: Case(" in done.stdout


def test_draws_depend_on_seed_and_number_only() -> None:
    assert fuzz.draw(3, 7, False) == fuzz.draw(3, 7, False)
    assert fuzz.draw(3, 7, False) != fuzz.draw(3, 8, False)
    assert fuzz.draw(4, 7, False) != fuzz.draw(3, 7, False)


def test_draws_cover_the_options() -> None:
    seen: set[str] = set()
    for number in range(300):
        seen |= fuzz.draw(1, number, False).features
    assert seen >= {
        *("causal", "window_left", "window_right", "chunk", "softcap", "alibi", "sinks", "gqa"),
        *("dim_v", "packed_q", "packed_k", "seqused_q", "seqused_k", "leftpad_k"),
        *("kv_batch_idx", "strided", "out_fp32"),
    }

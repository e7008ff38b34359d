# SPDX-License-Identifier: BSD-3-Clause
# Is there a combination of options on which a backend is wrong, or refuses without a sentence?
"""Draws problems over all options of `fa::forward`, runs each on a backend, compares with fp64.

Every second problem is a backward, where the library holds rows for that; every eighth is a forward
of e4m3 tensors, on backends that may read them.

    python3 tools/fuzz.py --count 1000                  # on a GPU; the seed is printed
    python3 tools/fuzz.py --seed 123 --count 1000       # the same problems again
    python3 tools/fuzz.py --device cpu --count 20       # the CPU backend

Draws that no kernel row covers must be refused with NotImplementedError and a sentence, inputs
untouched. A failing problem is printed as a `Case(...)` for tests/cases.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).resolve().parents[1]
for _folder in (ROOT / "tools", ROOT / "tests", ROOT / "tests" / "gpu"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
importlib.import_module("clone_package")

# (share of the draws, longest sequence, most multiplications)
SIZES = ((0.90, 150, 3e8), (0.08, 500, 3e9), (0.02, 2100, 2e10))
CPU_SIZES = ((1.0, 150, 3e7),)
AHEAD = 16  # problems whose tensors are made in advance


def draw(seed: int, number: int, on_cpu: bool, backward: bool = False) -> Any:
    """Problem `number` of a seed, the same on every machine."""
    from cases import sweep

    rng = random.Random(f"{seed}:{number}")
    sizes = CPU_SIZES if on_cpu else SIZES
    longest, most = rng.choices([s[1:] for s in sizes], [s[0] for s in sizes])[0]
    while True:
        (case,) = sweep(rng.randrange(2**31), 1, int(longest))
        if case.cost * (2.5 if backward else 1) <= most:
            dlse = case.dlse and backward
            tag = f"fuzz{seed}_{number}"
            return dataclasses.replace(case, backward=backward, dlse=dlse, tag=tag)


def execution(seed: int, number: int, backend: str, backward: bool) -> dict[str, Any]:
    """Options beside the case, where the backend takes them: dropout and the number of splits."""
    rng = random.Random(f"{seed}:{number}:options")
    if backward or backend == "sm90":
        return {}
    options: dict[str, Any] = {"num_splits": rng.choice((0, 0, 1, 2, 5, 40))}
    if rng.random() < 0.2:
        options["dropout_p"] = rng.choice((0.05, 0.1, 0.5, 0.97))
        options["seed"] = (rng.randrange(-(2**63), 2**63), rng.randrange(2**40))
    return options


def in_e4m3(number: int, backends: tuple[str, ...]) -> bool:
    """Whether problem `number` is one of e4m3 tensors; Ampere has no such products."""
    return number // len(backends) % 8 == 6 and backends[number % len(backends)] != "sm80"


def as_source(case: Any) -> str:
    """A `Case(...)` that draws nothing: only what differs from the defaults."""
    given = [
        f"{f.name}={getattr(case, f.name)!r}"
        for f in dataclasses.fields(case)
        if getattr(case, f.name) != f.default
    ]
    return f"Case({', '.join(given)})"


def prepared(
    seed: int, count: int, on_cpu: bool, device: str, kind_of: Callable[[int], str]
) -> Iterator[tuple[Any, Any]]:
    """(case, inputs) in order; tensors of the next ones are made in other threads meanwhile."""

    def make(number: int) -> tuple[Any, Any]:
        from fp8_problems import e4m3_case

        kind = kind_of(number)
        case = draw(seed, number, on_cpu, kind == "backward")
        if kind == "e4m3":
            case = e4m3_case(case)
        return case, case.make(device)

    import progress

    with ThreadPoolExecutor(1 if on_cpu else 6) as pool:
        waiting: list[Future[tuple[Any, Any]]] = []
        for number in progress.shown(range(count), "fuzz", "problems", prints=False):
            waiting.append(pool.submit(make, number))
            if len(waiting) > AHEAD:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def solve(
    case: Any, inputs: Any, kind: str, seed: int, number: int, backend: str, seen: Counter[str]
) -> str:
    """Runs one problem and compares; "ran" or the sentence of a lawful refusal."""
    import fp8_problems
    import gradients
    import harness
    import torch

    if kind == "backward":
        return gradients.check_inputs(inputs, backend, deterministic=number % 3 == 0)
    if kind == "e4m3":
        return fp8_problems.check_drawn(case, inputs, random.Random(f"{seed}:{number}"), backend)
    more = execution(seed, number, backend, False)
    if "seed" in more:
        drawn = torch.tensor(more.pop("seed"), dtype=torch.int64, device=harness.DEVICE)
        inputs.options["philox_seed_offset"] = drawn
    splits = {"num_splits": more.pop("num_splits")} if "num_splits" in more else {}
    inputs.options.update(more)
    outcome = harness.check_inputs(inputs, backend, **splits)
    seen["with dropout"] += "dropout_p" in more and outcome == "ran"
    seen["with num_splits"] += splits.get("num_splits", 0) > 1 and outcome == "ran"
    return outcome


def run(seed: int, count: int, device: str, backends: tuple[str, ...]) -> tuple[Counter[str], int]:
    """How often each outcome was seen, and how many problems failed (each is printed)."""
    import gradients
    import harness
    import torch

    seen: Counter[str] = Counter()
    failures = 0
    trained = ("cpu",) if harness.ON_CPU else tuple(row.backend for row in gradients.rows())

    def kind_of(number: int) -> str:
        """Each backend in turn runs a forward, then each of them a backward; some in e4m3."""
        if number // len(backends) % 2 == 1 and backends[number % len(backends)] in trained:
            return "backward"
        return "e4m3" if in_e4m3(number, backends) else "forward"

    problems = prepared(seed, count, harness.ON_CPU, device, kind_of)
    for number, (case, inputs) in enumerate(problems):
        backend, kind = backends[number % len(backends)], kind_of(number)
        try:
            outcome = solve(case, inputs, kind, seed, number, backend, seen)
        except Exception as error:
            failures += 1
            more = execution(seed, number, backend, kind == "backward") if kind != "e4m3" else {}
            word = " in e4m3" if kind == "e4m3" else ""
            print(f"FAILED on {backend}{word}: {as_source(case)}", flush=True)
            if more:
                print(f"with {more}", flush=True)
            print("".join(traceback.format_exception_only(error)).strip()[:600], flush=True)
            if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
                print("The CUDA context is lost: no further problem can run in this process.")
                break
            continue
        word = "" if kind == "forward" else f"{kind} "
        seen[f"{backend} {word}{'ran' if outcome == 'ran' else 'refused'}"] += 1
        for feature in case.features:
            seen[f"with {feature}"] += outcome == "ran"
    return seen, failures


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: every problem right or lawfully refused; 1: some failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="problems to draw (default 1000)")
    parser.add_argument("--seed", type=int, help="default: drawn, and printed")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", help="one of sm90, sm80, cpu, auto; default: all in turn")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        machine.require_gpu("fuzz.py", "`--device cpu` tests the CPU backend", torch_too=True)
    os.environ["FA_TEST_DEVICE"] = options.device

    import harness

    if options.device != harness.DEVICE:
        parser.error(f"this process already tests on {harness.DEVICE}: start another for it.")
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    backends = (options.backend,) if options.backend else harness.backends()
    if not backends:
        parser.error("the library holds no kernel row for this GPU: nothing to fuzz.")
    print(f"fuzz seed {seed}: {options.count} problems on {', '.join(backends)}", flush=True)
    start = time.perf_counter()
    seen, failures = run(seed, options.count, options.device, backends)
    print("; ".join(f"{name} {number}" for name, number in sorted(seen.items())))
    done = sum(n for name, n in seen.items() if not name.startswith("with ")) + failures
    seconds = time.perf_counter() - start
    print(f"fuzz seed {seed}: {done} problems, {failures} failures, {seconds:.0f} s.")
    if failures:
        print(f"Again: python3 tools/fuzz.py --seed {seed} --count {options.count}")
    return 1 if failures or done < options.count else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: BSD-3-Clause
# Which tests of this folder run here? All need a GPU, unless FA_TEST_DEVICE=cpu rehearses them.
from __future__ import annotations

import os
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
for path in (FOLDER, FOLDER.parents[1] / "tools"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

from harness import ON_CPU  # noqa: E402  (after the paths)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test here is a GPU test; tests/conftest.py says why one is skipped.

    FA_TEST_PART=2/8 leaves the third of eight parts, for processes side by side.
    """
    for item in items:
        if not ON_CPU and FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    wanted, _, count = os.environ.get("FA_TEST_PART", "0/1").partition("/")
    parts = part_of_each(items, int(count))
    left_out = [item for item, part in zip(items, parts, strict=True) if part != int(wanted)]
    items[:] = [item for item, part in zip(items, parts, strict=True) if part == int(wanted)]
    config.hook.pytest_deselected(items=left_out)


def part_of_each(items: list[pytest.Item], count: int) -> list[int]:
    """Which of `count` parts each test belongs to, whatever other files were collected.

    The tests of a file in turn, beginning somewhere; a file with ONE_PROCESS stays whole.
    """
    seen: Counter[Path] = Counter()
    parts = []
    for item in items:
        begin = zlib.crc32(item.path.name.encode())
        parts.append((begin + seen[item.path]) % count)
        seen[item.path] += not getattr(getattr(item, "module", None), "ONE_PROCESS", False)
    return parts


# tools/gpu_check.sh starts another process for the files behind the one this names.
STOPPED = "FA-TESTS-STOPPED-IN"
HANG_SECONDS = float(os.environ.get("FA_TEST_HANG_SECONDS", "150"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """After an illegal access every later CUDA call of the process fails: say so once and stop."""
    report = yield
    if report.failed and call.excinfo is not None and FOLDER in item.path.parents:
        text = str(call.excinfo.value)
        lost = ("illegal memory access", "misaligned address", "unspecified launch failure")
        if any(words in text for words in (*lost, "illegal instruction", "device-side assert")):
            item.session.shouldstop = f"the CUDA context is lost: {STOPPED} {_relative(item)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):  # type: ignore[no-untyped-def]
    """A kernel that never ends blocks its process for good: name the test and leave.

    pytest asks this hook about the tests of every folder; those of the CPU may take their time.
    """
    if ON_CPU or FOLDER not in item.path.parents:
        return (yield)

    def leave() -> None:
        text = f"\n{item.nodeid} did not end in {HANG_SECONDS:.0f} s. {STOPPED} {_relative(item)}\n"
        os.write(_terminal, text.encode())
        os._exit(86)

    watchdog = threading.Timer(HANG_SECONDS, leave)
    watchdog.daemon = True
    watchdog.start()
    try:
        return (yield)
    finally:
        watchdog.cancel()


_terminal = 2


def pytest_configure(config: pytest.Config) -> None:
    """Keeps a way to the terminal; while options are read, pytest captures nothing yet."""
    global _terminal
    _terminal = os.dup(2)


def _relative(item: pytest.Item) -> str:
    return item.path.relative_to(FOLDER.parents[1]).as_posix()


@pytest.fixture
def cuda_only() -> None:
    """For tests of streams, graphs, processes and devices, which the rehearsal leaves out."""
    if ON_CPU:
        pytest.skip("needs CUDA itself; FA_TEST_DEVICE is cpu")


@pytest.fixture(autouse=True)
def release_memory() -> Iterator[None]:
    """A test with tensors of many gigabytes must not starve the next one."""
    yield
    import torch

    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 8e9:
        torch.cuda.empty_cache()

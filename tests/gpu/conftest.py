# SPDX-License-Identifier: BSD-3-Clause
# Which tests of this folder run here? All need a GPU, unless FA_TEST_DEVICE=cpu rehearses them.
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
for path in (FOLDER, FOLDER.parents[1] / "tools"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

from harness import ON_CPU  # noqa: E402  (after the paths)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here is a GPU test; tests/conftest.py says why one is skipped."""
    for item in items:
        if not ON_CPU and FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)


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

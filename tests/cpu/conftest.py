# SPDX-License-Identifier: BSD-3-Clause
# Which library do tests ask about the rows that ship?
"""Fixtures of several files of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import host_build
from fa import _lib


@pytest.fixture(scope="session")
def shipped_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libfa.so with the shipped rows, which plans and cannot launch."""
    if host_build.compiler() is None:
        pytest.skip("no g++ to compile with")
    folder = tmp_path_factory.mktemp("shipped")
    rows = host_build.shipped_rows()
    return host_build.build(folder, "rows::kShipped", shim=False, declarations=rows)


@pytest.fixture(scope="module")
def shipped(shipped_library: Path) -> Iterator[None]:
    """The tests of a module plan with `shipped_library`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA_LIBRARY", str(shipped_library))
        patch.setattr(_lib, "_loaded", None)
        yield
        patch.setattr(_lib, "_loaded", None)

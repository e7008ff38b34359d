# SPDX-License-Identifier: BSD-3-Clause
# Which device do the tests run on, and why is a test skipped?
"""Import paths, device discovery and reporting for both tiers."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))
if importlib.util.find_spec("fa") is None:  # run from a clone that is not installed
    sys.path.insert(0, str(TESTS.parent / "python"))

MARKERS = {
    "gpu": "needs a GPU that a row of this build runs on",
    "slow": "takes more than ten seconds",
    "small": "at most eight tiles, for the sanitizers",
    "alone": "reads or fills the memory of the whole GPU, so nothing else may run there",
}


def gpu_missing() -> str | None:
    """Why no test can use a GPU here; None if one can."""
    if torch.version.cuda is None:
        return f"no GPU: torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "no GPU: torch finds no CUDA device (driver missing or CUDA_VISIBLE_DEVICES empty)"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"GPU of compute capability {major}.{minor}: the kernels need 8.0 or newer"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if "s" not in config.option.reportchars and "a" not in config.option.reportchars:
        config.option.reportchars += "s"  # skips are printed with their reasons


def pytest_report_header() -> str:
    missing = gpu_missing()
    device = missing or f"GPU: {torch.cuda.get_device_name()}"
    return f"torch {torch.__version__}, {platform.machine()}; {device}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = gpu_missing()
    for item in items:
        if missing and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=missing))
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: pass --slow to run it"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """A test leaves the plan of its call (fa.explain) with record_property("plan", text)."""
    report = yield
    if report.failed:
        for name, value in item.user_properties:
            if name == "plan":
                report.sections.append(("plan of the call", str(value)))
    return report


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the GPU tier runs; a test that asks for it is skipped where there is no GPU."""
    missing = gpu_missing()
    if missing:
        pytest.skip(missing)
    return torch.device("cuda", torch.cuda.current_device())

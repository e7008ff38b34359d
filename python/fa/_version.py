# SPDX-License-Identifier: BSD-3-Clause
# Which version is this? pyproject.toml says so; an installed package has that in its metadata.
"""`__version__`, from the checkout that this file lies in or else from the installed package."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "fa-kernels"


def _read() -> str:
    project = Path(__file__).parents[2] / "pyproject.toml"
    if project.is_file():
        text = project.read_text(encoding="utf-8")
        found = re.search(r'(?m)^version = "([^"]+)"', text)
        if found and f'name = "{DISTRIBUTION}"' in text:
            return found.group(1)
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+unknown"


__version__ = _read()

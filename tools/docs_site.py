# SPDX-License-Identifier: BSD-3-Clause
# How does the documentation become a site, and does every link on it lead somewhere?
"""Builds the site of README.md, docs/ and the API pages with mkdocs, in strict mode, and checks it.

    pip install '.[docs]'
    python3 tools/docs_site.py                 # to build/site; open build/site/index.html
    python3 tools/docs_site.py --serve         # and shows it at a local address

The pages stay plain Markdown for a repository's own pages; what the site needs besides is made
here: links to files of the repository lead to pages with their text, nested lists get the
indentation that mkdocs' Markdown wants.
"""

from __future__ import annotations

import argparse
import html.parser
import logging
import os
import re
import shutil
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import docs_api
import docs_links
from docs_links import LINK, OUTSIDE, ROOT, lines_with_code, target_of

# Section -> pages, in the repository's names; api/ is made from the docstrings.
NAVIGATION: dict[str, tuple[str, ...]] = {
    "Interface": (
        *(f"api/{name}.md" for name in ("index", "attention", "operators", "introspection")),
        *(f"api/{name}.md" for name in ("quantize", "reference", "flash_attn")),
        *("api/flash_attn_interface.md", "api/integrations.md", "docs/abi.md"),
        "docs/environment.md",
    ),
    "How it works": ("docs/architecture.md", "docs/numerics.md"),
    "Schedules": (
        *("docs/schedules/hopper_forward.md", "docs/schedules/hopper_forward_e4m3.md"),
        *("docs/schedules/hopper_backward.md", "docs/schedules/ampere_forward.md"),
        "docs/schedules/ampere_backward.md",
    ),
    "Measured": (
        *("docs/performance.md", "docs/evolution.md", "docs/evolution.zh.md"),
        *("docs/profiles.md", "docs/results/resources.md", "docs/measuring.md"),
    ),
    "Changing it": ("CONTRIBUTING.md", "docs/adding.md", "CHANGELOG.md", "THIRD_PARTY.md"),
}
LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".cu": "cpp", ".sh": "bash", ".c": "c"}
LANGUAGES |= {".toml": "toml", ".txt": "cmake", ".csv": "text"}
LIST_ITEM = re.compile(r"^( *)([*+-]|\d+\.)( +)")


def repository_pages() -> list[str]:
    """README.md and every page of docs/, those of the navigation first."""
    named = [page for pages in NAVIGATION.values() for page in pages if "api/" not in page]
    rest = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))
    return ["README.md", *dict.fromkeys([*named, *rest])]


def site_name(path: str) -> str:
    """Where a page of the repository lies on the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if "/" in path else path.lower()


class Stage:
    """The folder that mkdocs reads: pages with their links rewritten, assets, pages of code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = {ROOT / path: site_name(path) for path in repository_pages()}
        self.code: dict[Path, str] = {}
        self.interface = docs_api.places()  # public name -> page and heading
        self.problems: list[str] = []
        shutil.rmtree(folder, ignore_errors=True)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def page(self, source: Path, name: str, text: str) -> None:
        """`source`: the file that relative links of the text start from."""
        text = "\n".join(
            line if code else self._linked(line, source, name)
            for _, line, code in lines_with_code(text)
        )
        self.write(name, with_list_indents(text) + "\n")

    def _linked(self, line: str, source: Path, name: str) -> str:
        """Links where they lead on the site; public names in backticks become links as well."""
        if line.startswith("#"):
            return line
        parts = re.split(r"(`[^`]*`)(?![^\[]*\]\()", line)
        for i, part in enumerate(parts):
            page = self.interface.get(part.strip("`").partition("(")[0]) if i % 2 else None
            if page is not None and not page.startswith(f"{name}#"):
                parts[i] = f"[{part}]({os.path.relpath(page, os.path.dirname(name) or '.')})"
            elif i % 2 == 0:
                parts[i] = LINK.sub(lambda m: self._link(m, source, name), part)
        return "".join(parts)

    def _link(self, match: re.Match[str], source: Path, name: str) -> str:
        before, target, after = match.groups()
        if OUTSIDE.match(target) or target.startswith("#"):
            return match[0]
        if name.startswith("api/") and not target.startswith("/"):
            return match[0]  # between pages that exist on the site only
        path, anchor = target_of(source, target)
        if not path.is_file():
            self.problems.append(f"{name}: {target} is no file of the repository.")
            return match[0]
        to = self._place(path)
        here = os.path.dirname(name) or "."
        return before + os.path.relpath(to, here) + (f"#{anchor}" if anchor else "") + after

    def _place(self, path: Path) -> str:
        if path in self.pages:
            return self.pages[path]
        relative = path.relative_to(ROOT).as_posix()
        if path.suffix in (".png", ".svg"):
            to = self.folder / "assets" / relative
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
            return f"assets/{relative}"
        return self.code.setdefault(path, f"code/{relative}.md")

    def code_pages(self) -> None:
        """The files that pages link to, each on a page of its own."""
        for path, name in self.code.items():
            language = LANGUAGES.get(path.suffix, "text")
            fence = "~" * 8
            text = path.read_text(encoding="utf-8")
            title = path.relative_to(ROOT).as_posix()
            self.write(name, f"# {title}\n\n{fence} {{ .{language} }}\n{text}\n{fence}\n")


def with_list_indents(text: str) -> str:
    """Nested lists in steps of four columns, and an empty line ahead of a list."""
    out: list[str] = []
    stack: list[int] = []  # columns of the text of the items around
    for _, line, code in lines_with_code(text):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            out.append("")
            continue
        while stack and indent < stack[-1]:
            stack.pop()
        item = None if code else LIST_ITEM.match(line)
        if item and not stack and out and out[-1].strip() and not LIST_ITEM.match(out[-1]):
            continues = out[-1].startswith(" ")
            if not continues:
                out.append("")
        base = stack[-1] if stack else 0
        out.append(" " * (4 * len(stack)) + line[min(base, indent) :] if stack else line)
        if item:
            stack.append(item.end())
    return "\n".join(out)


def navigation(stage: Stage) -> list[dict[str, Any]]:
    """Pages that no section names come last, so that none is forgotten."""
    named = {page for pages in NAVIGATION.values() for page in pages}
    rest = [p for p in repository_pages() if p not in named and p != "README.md"]
    sections = NAVIGATION | ({"More": tuple(rest)} if rest else {})
    result: list[dict[str, Any]] = [{"fa": "index.md"}]
    for section, pages in sections.items():
        names = [page if page.startswith("api/") else site_name(page) for page in pages]
        result.append({section: names})
    return result


def stage_pages(folder: Path) -> Stage:
    stage = Stage(folder)
    for source, name in stage.pages.items():
        if not source.is_file():
            stage.problems.append(f"{source.relative_to(ROOT)}: the navigation names it.")
            continue
        stage.page(source, name, source.read_text(encoding="utf-8"))
    for name, text in docs_api.pages().items():
        stage.page(ROOT / "README.md", f"api/{name}", text)
    stage.code_pages()
    from pygments.formatters import HtmlFormatter

    css = HtmlFormatter(style="default").get_style_defs(".codehilite")
    stage.write("style.css", css + "\n.wy-nav-content { max-width: 1100px }\n")
    return stage


def configuration(stage: Stage, out: Path) -> Any:
    from mkdocs.config import load_config

    # mkdocs wants a file of configuration beside the pages; ours is here.
    config_file = stage.folder.parent / "mkdocs.yml"
    config_file.write_text("site_name: fa\n", encoding="utf-8")
    return load_config(
        str(config_file),
        site_name="fa",
        docs_dir=str(stage.folder),
        site_dir=str(out),
        strict=True,
        use_directory_urls=False,  # so that the pages also work as files
        theme={"name": "readthedocs", "highlightjs": False, "navigation_depth": 3},
        extra_css=["style.css"],
        nav=navigation(stage),
        markdown_extensions=[
            *("tables", "fenced_code", "attr_list"),
            {"codehilite": {"guess_lang": False}},
            {"toc": {"slugify": lambda text, separator: docs_links.slug(text)}},
        ],
        validation={
            "omitted_files": "ignore",
            "not_found": "warn",
            "absolute_links": "warn",
            "unrecognized_links": "warn",
            "anchors": "warn",
        },
    )


# ---- the built site -----------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """What one page links to, what can be linked to on it, and paragraphs that ate a list."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.targets.append(values["href"])
        if "src" in values:
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") != "canonical":
            self.loaded.append(values["href"])


SWALLOWED = re.compile(r"<p>[^<]*(?:<(?!/p>)[^<]*)*\n(?:[*+-] |\d+\. |\|[ -])")


def site_problems(out: Path) -> list[str]:
    """Links of the built site that lead nowhere, things that it would load from elsewhere."""
    texts = {p: p.read_text(encoding="utf-8") for p in sorted(out.rglob("*.html"))}
    pages = {path: Page(text) for path, text in texts.items()}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(out).as_posix()
        if name == "404.html":
            continue
        for target in [*page.targets, *page.loaded]:
            split = urllib.parse.urlsplit(target)
            if split.scheme or split.netloc:
                if target in page.loaded and split.scheme != "data":
                    wrong.append(f"{name}: loads {target}; the site must be complete.")
                continue
            to = (path.parent / urllib.parse.unquote(split.path)).resolve() if split.path else path
            if to.is_dir():
                to /= "index.html"
            if not to.is_file():
                wrong.append(f"{name}: {target} is not on the site.")
            elif split.fragment and to in pages and split.fragment not in pages[to].anchors:
                wrong.append(f"{name}: {target} has no such heading.")
        if "code/" not in name:
            wrong += [
                f"{name}: a list or table inside a paragraph: {match[0][-60:]!r}"
                for match in SWALLOWED.finditer(texts[path])
            ]
    return wrong


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="build/site")
    parser.add_argument("--serve", action="store_true", help="show the site at a local address")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    out = options.out.resolve()
    try:
        from mkdocs.commands.build import build
        from mkdocs.exceptions import Abort
    except ImportError as error:
        print(f"mkdocs is missing ({error}). Install it: pip install '.[docs]'", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    stage = stage_pages(out.parent / "site_pages")
    problems = stage.problems
    try:
        build(configuration(stage, out))
    except Abort as error:
        problems.append(f"mkdocs: {error}")
    else:
        problems += site_problems(out)
    print("\n".join(problems) or f"{len(list(out.rglob('*.html')))} pages in {out}")
    if problems:
        return 1
    if options.serve:
        import functools
        import http.server

        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(out))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 8000), handler) as server:
            print("http://127.0.0.1:8000")
            server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: BSD-3-Clause
# Does the documentation say what is so? Links, names, docstrings, drawn schedules.

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import docs_api
import docs_links
import docs_site
import fa
import gen_variants
import schedules
from fa._cli import COMMANDS

ROOT = docs_links.ROOT
PUBLIC = {name.dotted: name for name in docs_api.public()}
TABLE = gen_variants.TABLE.read_text()
try:
    PAGES = [p for p in docs_links.markdown_files() if p.name != "CHANGELOG.md"]
except (OSError, subprocess.CalledProcessError) as error:
    pytest.skip(f"not a git checkout: {error}", allow_module_level=True)


# ---- the pages -----------------------------------------------------------------------------------


def test_every_link_leads_somewhere() -> None:
    assert not [
        wrong for page in docs_links.markdown_files() for wrong in docs_links.dead_links(page)
    ]


def test_a_dead_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_links, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# One `two`: three\n\n# Twice\n# Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#one-two-three) [b](other.md#twice-1) [c](#here) [d](https://no.invalid)\n"
        "# Here\n```\n[code](gone.md)\n```\n`[code](gone.md)` ![x](gone.png) [y](other.md#no)\n"
    )
    wrong = docs_links.dead_links(page)
    assert len(wrong) == 2
    assert wrong[0].startswith("page.md:6: gone.png: there is no file")
    assert wrong[1].endswith("other.md has no heading #no.")


def test_schedules_are_those_of_the_table_and_the_script() -> None:
    old = [p.name for p, text in schedules.wanted().items() if p.read_text("utf-8") != text]
    assert not old, f"python3 tools/schedules.py renews {old}"


def test_every_page_is_on_the_site() -> None:
    named = {page for pages in docs_site.NAVIGATION.values() for page in pages}
    missing = [p for p in named if not p.startswith("api/") and not (ROOT / p).is_file()]
    assert not missing
    made = {f"api/{name}" for name in docs_api.pages()}
    assert made == {p for p in named if p.startswith("api/")}
    assert {f"docs/schedules/{name}.md" for name in schedules.FAMILIES} <= named


def test_every_table_has_a_header() -> None:
    """An empty line inside of a table makes text of the rows behind it."""
    wrong = []
    for page in PAGES:
        lines = [
            "" if code else line
            for _, line, code in docs_links.lines_with_code(page.read_text("utf-8"))
        ]
        for number, line in enumerate(lines[:-1], 1):
            first = line.startswith("|") and not (number > 1 and lines[number - 2].startswith("|"))
            if first and not re.fullmatch(r"\|[-:| ]+\|", lines[number]):
                wrong.append(f"{page.relative_to(ROOT)}:{number}")
    assert not wrong


def test_lists_get_the_indents_that_the_site_needs() -> None:
    text = "Text:\n* one\n  more\n  - inner\n    tail\n* two\n\n1. a\n   * b\n\n```\n* code\n```\n"
    assert docs_site.with_list_indents(text) == (
        "Text:\n\n* one\n    more\n    - inner\n        tail\n* two\n\n1. a\n    * b\n\n```\n"
        "* code\n```"
    )


# ---- names --------------------------------------------------------------------------------------


def code_spans(page: Path) -> list[tuple[int, str]]:
    """(line, text) of everything in backticks, and the lines of shell blocks."""
    found = []
    for number, line, code in docs_links.lines_with_code(page.read_text("utf-8")):
        spans = [line] if code else re.findall(r"`([^`]+)`", line)
        found += [(number, span) for span in spans]
    return found


def spoken(pattern: str) -> list[tuple[str, str]]:
    """(place, match) of a pattern with one group in the code of all pages."""
    return [
        (f"{page.relative_to(ROOT)}:{number}", match[1])
        for page in PAGES
        for number, span in code_spans(page)
        for match in re.finditer(pattern, span)
    ]


FOLDERS = "kernels_common|kernels_sm80|kernels_sm90|python|tests|tools|docs"


def test_files_that_pages_name_exist() -> None:
    names = spoken(rf"(?<![\w/.<])((?:{FOLDERS})/[\w./-]*\w/?)")
    assert len(names) > 60
    made = ("docs/results/", "kernels_common/api/fa")
    gone = [f"{at}: {n}" for at, n in names if not (ROOT / n).exists() and not n.startswith(made)]
    assert not gone


def test_names_of_fa_that_pages_speak_of_exist() -> None:
    names = spoken(r"(?<![\w.:/-])((?:fa|torch\.ops\.fa)\.(?!h\b|so\b)\w+(?:\.\w+)*)")
    assert len(names) > 25
    labels = all_text("tools")  # of what bench.py times, as "fa.c_call"
    gone = [f"{at}: {n}" for at, n in names if not exists(n) and f'"{n}"' not in labels]
    assert not gone


def exists(dotted: str) -> bool:
    if dotted.startswith("torch.ops.fa."):
        return hasattr(torch.ops.fa, dotted.split(".")[3])
    value: Any = fa
    for part in dotted.split(".")[1:]:
        if not hasattr(value, part):
            try:
                importlib.import_module(f"{value.__name__}.{part}")
            except ImportError:
                return False
        value = getattr(value, part)
    return True


def test_functions_of_the_c_interface_that_pages_speak_of_exist() -> None:
    header = (ROOT / "kernels_common/api/fa.h").read_text()
    sources = "\n".join(p.read_text() for p in ROOT.glob("kernels_*/**/*.h"))
    names = spoken(r"(?<![\w.])((?:fa|FA)_[a-zA-Z0-9_]+\b)(?!\.so)")
    assert len(names) > 30
    known = header + sources + all_text("python", "tests", "tools", "CMakeLists.txt")
    gone = [f"{at}: {n}" for at, n in names if not re.search(rf"\b{n}\b", known)]
    assert not gone


def all_text(*places: str) -> str:
    files = [p for place in places for p in [ROOT / place, *(ROOT / place).rglob("*")]]
    kinds = {".py", ".sh", ".txt", ".json", ".cpp", ".h", ".cmake"}
    return "\n".join(p.read_text("utf-8") for p in files if p.is_file() and p.suffix in kinds)


def test_every_function_of_the_c_interface_is_explained() -> None:
    header = (ROOT / "kernels_common/api/fa.h").read_text()
    page = (ROOT / "docs" / "abi.md").read_text("utf-8")
    functions = re.findall(r"^FA_API [\w *]*?\b(fa_\w+)\(", header, re.M)
    assert len(functions) > 12
    assert [name for name in functions if f"`{name}`" not in page] == []


def test_names_in_docstrings_and_messages_exist() -> None:
    """fa.attention, `python -m fa demo`, a tool; in C++ the functions and fields of fa.h."""
    wrong, checked = [], 0
    for path in docs_links.committed("python/fa/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if not isinstance(text, str):
                continue
            names = re.findall(
                r"(?<![\w./\"-])((?:torch\.ops\.)?fa\.(?!h\b)[A-Za-z]\w*(?:\.\w+)*)", text
            )
            gone = [name for name in names if not exists(name)]
            commands = re.findall(r"python3? -m fa ([a-z]+)", text)
            gone += [name for name in commands if name not in COMMANDS]
            files = re.findall(rf"\b((?:{FOLDERS})/[\w/]+\.\w+)", text)
            gone += [name for name in files if not (ROOT / name).exists()]
            checked += len(names) + len(commands) + len(files)
            wrong += [f"{path.name}:{node.lineno}: {name}" for name in gone]
    header = (ROOT / "kernels_common/api/fa.h").read_text()
    for path in docs_links.committed("kernels_common/host/*.cpp", "kernels_common/api/*.cpp"):
        for text in re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text("utf-8")):
            fields = r"\b(?:options|shape|mask|score|grad|pages|dropout|seq)\.([a-z_]*[a-z])\b"
            names = re.findall(r"\b(fa_[a-z_]+)\b", text) + re.findall(fields, text)
            checked += len(names)
            wrong += [f"{path.name}: {n}" for n in names if not re.search(rf"\b{n}\b", header)]
    assert checked > 100 and not wrong, wrong


def commands() -> list[tuple[str, str]]:
    """(place, line) of everything that looks like a command in the pages."""
    return [
        (f"{page.relative_to(ROOT)}:{number}", span)
        for page in PAGES
        for number, span in code_spans(page)
        if re.search(r"\b(?:python3? |tools/|cmake |-m fa )", span)
    ]


def with_imports(tool: Path) -> str:
    """The text of a tool and of the tools that it imports."""
    text = tool.read_text("utf-8")
    for name in re.findall(r"^(?:import|from) (\w+)", text, re.M):
        other = tool.parent / f"{name}.py"
        text += other.read_text("utf-8") if other.is_file() else ""
    return text


def test_options_of_commands_exist() -> None:
    """Every --flag behind a tool, a command of `python -m fa`, and every preset of cmake."""
    presets = (ROOT / "CMakePresets.json").read_text("utf-8")
    cli = all_text("python/fa/_cli", "tools")
    wrong, checked = [], 0
    for place, line in commands():
        for part in re.split(r"&&|\||;", line.partition("  #")[0]):
            tool = re.search(r"(tools/[\w/]+\.(?:py|sh))(.*)", part)
            ours = re.search(r"-m fa \w+(.*)", part)
            text = with_imports(ROOT / tool[1]) if tool else cli
            rest = tool[2] if tool else ours[1] if ours else ""
            for flag in re.findall(r"(?<=\s)--[a-z][\w-]*", rest):
                checked += 1
                if not re.search(rf"{flag}\b(?!-)", text):
                    wrong.append(f"{place}: {flag}")
            for preset in re.findall(r"cmake.*?--preset (\w+)", part):
                checked += 1
                if f'"name": "{preset}"' not in presets:
                    wrong.append(f"{place}: preset {preset}")
    assert checked > 15 and not wrong, wrong


def test_every_environment_variable_is_explained() -> None:
    page = (ROOT / "docs" / "environment.md").read_text("utf-8")
    explained = set(re.findall(r"`(FA_[A-Z0-9_]+)`", page))
    used: set[str] = set()
    for path in docs_links.committed("*.py", "*.sh", "*.cpp", "CMakeLists.txt"):
        text = path.read_text("utf-8")
        used |= set(re.findall(r"(?:environ(?:\.get)?[\[(]|getenv\()\"(FA_[A-Z0-9_]+)", text))
        if path.suffix == ".sh":
            used |= set(re.findall(r"\$\{(FA_[A-Z0-9_]+):", text))
        for names in re.findall(r"^foreach\(name ([A-Z_ ]+)\)\n.*ENV\{FA_\$", text, re.M):
            used |= {f"FA_{name}" for name in names.split()}
    assert used == explained, f"not explained or not used: {sorted(used ^ explained)}"
    first = set(re.findall(r"`(FA_[A-Z0-9_]+)`", page[: page.index("## Tests and tools")]))
    told = re.findall(r'"(FA_\w+)"', (ROOT / "python/fa/_cli/info.py").read_text("utf-8"))
    assert first <= set(told), "python -m fa info does not print these"


def test_rows_that_pages_name_are_in_the_table() -> None:
    ids = {row.id for row in gen_variants.parse(TABLE)}
    names = spoken(r"\b(sm\d0_(?:fwd|bwd)_\w+)\b(?!\*)")
    assert names
    gone = [f"{at}: {n}" for at, n in names if n not in ids and not n.endswith("_")]
    assert not gone


# Names of other libraries, and what was tried and is not in the tree.
ELSEWHERE = {"sm_scale", "logits_soft_cap", "qo_indptr", "kv_indptr", "EVICT_NORMAL"}
OPCODE = re.compile(r"[A-Z]{3,}[0-9]*")  # of a machine instruction


def test_identifiers_that_pages_name_are_in_the_code() -> None:
    """Arguments, options, knobs, types: a word that stands alone in backticks."""
    places = ("kernels_common", "kernels_sm80", "kernels_sm90", "python", "tests", "tools")
    files = [p for place in places for p in (ROOT / place).rglob("*") if p.is_file()]
    files += [ROOT / name for name in ("CMakeLists.txt", "CMakePresets.json", "pyproject.toml")]
    words: set[str] = set(ELSEWHERE)
    for path in files:
        if path != Path(__file__) and "__pycache__" not in path.parts and path.suffix != ".so":
            words.add(path.stem)
            words.update(re.findall(r"\w+", path.read_text("utf-8", errors="replace")))
    tags = {row.id.removeprefix(row.stem()) for row in gen_variants.parse(TABLE)}
    gone = []
    for page in PAGES:
        for _, line, code in docs_links.lines_with_code(page.read_text("utf-8")):
            for span in [] if code else re.findall(r"`([^`]+)`", line):
                alone = re.fullmatch(r"[\w.:]+(?:=[\w.]+)?(?:\([^)]*\))?", span)
                for word in re.findall(r"[A-Za-z_]\w{2,}", span) if alone else []:
                    known = word in words or word in tags or OPCODE.fullmatch(word)
                    if not known and not word.endswith("_"):
                        gone.append(f"{page.name}: `{span}`: {word}")
    assert not gone


def test_files_that_comments_name_exist() -> None:
    names = {path.name for path in ROOT.rglob("*.*") if "build" not in path.parts}
    foreign = re.compile(r"[<\"]|cuda\w*\.h|shim\.h|std\w+\.h")
    gone = []
    for path in docs_links.committed("*.h", "*.cpp", "*.cu", "*.py", "*.sh", "*.txt", "*.toml"):
        if path.name.startswith("test_docs"):
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            comment = re.search(r"(?:^|\s)(?://|#)\s(.*)", line)
            if comment is None or foreign.search(comment[1]):
                continue
            for name in re.findall(r"[\w/]*\b([a-z]\w*\.(?:md|h|cpp|py|sh|csv))\b", comment[1]):
                if name not in names:
                    gone.append(f"{path.relative_to(ROOT)}:{number}: {name}")
    assert not gone


# ---- docstrings ---------------------------------------------------------------------------------


def module_docstring(name: docs_api.Name) -> str:
    return ast.get_docstring(ast.parse(name.module.read_text("utf-8"))) or ""


@pytest.mark.parametrize("dotted", PUBLIC)
def test_a_docstring_says_all(dotted: str) -> None:
    """Every argument, what is returned, what is raised; or which function or module says so."""
    name = PUBLIC[dotted]
    own, above = name.docstring, module_docstring(name)
    assert own, f"{dotted} has no docstring"
    assert own.split("\n")[0].rstrip().endswith((".", ":", "`")), "the first line is a sentence"
    if isinstance(name.node, ast.ClassDef):
        return
    args = name.node.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    silent = [n for n in names if not re.search(rf"\b{n}\b|{wildcard(n)}", own + above)]
    assert not silent, f"{dotted} says nothing of {silent}"
    other = re.search(r"`(\w+)` of ", own)  # another function with the arguments packed
    if name.node.returns is not None and ast.unparse(name.node.returns) != "None":
        assert other or re.search(r"\b(Returns|returns|return value)\b", own), "what is returned?"
    assert re.search(r"\b[Rr]aise[sd]?\b", own) or "Errors are" in above, "what is raised?"


def wildcard(name: str) -> str:
    """cu_seqlens_q may be spoken of as cu_seqlens_*."""
    return re.escape(name.rpartition("_")[0] + "_*") if "_" in name else r"\b\B"


@pytest.mark.parametrize("dotted", PUBLIC)
def test_examples_of_docstrings_run(dotted: str) -> None:
    found = doctest.DocTestParser().get_examples(PUBLIC[dotted].docstring)
    torch.manual_seed(0)
    test = doctest.DocTest(found, {"torch": torch, "fa": fa}, dotted, None, 0, None)
    log: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.DocTestRunner(verbose=False, optionflags=flags).run(test, out=log.append)
    assert result.failed == 0, "".join(log)


def test_the_main_functions_have_examples() -> None:
    names = ("attention", "attention_varlen", "attention_kvcache", "append_kv", "combine")
    for name in (*names, "quantize_qkv", "supports", "explain", "kernels", "backend"):
        assert ">>> " in PUBLIC[f"fa.{name}"].docstring, name


def test_every_public_operator_has_its_meaning() -> None:
    from fa._schemas import MEANINGS, SCHEMAS

    assert set(MEANINGS) == {name for name in SCHEMAS if not name.startswith("_")}
    assert all(text.endswith(".") for text in MEANINGS.values())

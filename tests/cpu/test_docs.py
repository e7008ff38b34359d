# SPDX-License-Identifier: BSD-3-Clause
# Does the documentation say what is so? Links, names, docstrings, examples, drawn schedules.

from __future__ import annotations

import ast
import doctest
import importlib
import re
import sys
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

ROOT = docs_links.ROOT
PUBLIC = {name.dotted: name for name in docs_api.public()}
PAGES = [p for p in docs_links.markdown_files() if p.name != "CHANGELOG.md"]


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
    known = header + sources + all_text("python", "tools", "CMakeLists.txt", "CMakePresets.json")
    gone = [f"{at}: {n}" for at, n in names if not re.search(rf"\b{n}\b", known)]
    assert not gone


def all_text(*places: str) -> str:
    files = [p for place in places for p in [ROOT / place, *(ROOT / place).rglob("*")]]
    kinds = {".py", ".sh", ".txt", ".json", ".cpp", ".h", ".cmake"}
    return "\n".join(p.read_text("utf-8") for p in files if p.is_file() and p.suffix in kinds)


def test_rows_that_pages_name_are_in_the_table() -> None:
    ids = {row.id for row in gen_variants.parse(gen_variants.TABLE.read_text())}
    names = spoken(r"\b(sm\d0_(?:fwd|bwd)_\w+)\b(?!\*)")
    assert names
    gone = [f"{at}: {n}" for at, n in names if n not in ids and not n.endswith("_")]
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


# ---- README's code ------------------------------------------------------------------------------


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def small_inputs() -> dict[str, Any]:
    """What README.md takes for given, small enough for any machine."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 32, heads, 16, generator=g) for heads in (4, 2, 2))
    lengths = torch.tensor([0, 10, 32], dtype=torch.int32)
    pages = torch.arange(4, dtype=torch.int32).view(2, 2)
    return {
        "torch": torch,
        **{"q": q, "k": k, "v": v, "k_new": k[:, :1], "v_new": v[:, :1]},
        **{f"packed_{name}": t[0] for name, t in (("q", q), ("k", k), ("v", v))},
        **{"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "pages": pages},
        **{"k_cache": torch.zeros(4, 64, 2, 16), "v_cache": torch.zeros(4, 64, 2, 16)},
        "lengths": torch.tensor([5, 9], dtype=torch.int32),
    }


def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="README shows a model of transformers"
    )
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
        )
    )
    model.save_pretrained(tmp_path)
    scope = small_inputs() | {"path": str(tmp_path), "ids": torch.tensor([[1, 2, 3]])}
    found = blocks(ROOT / "README.md", "python")
    assert len(found) >= 3
    for block in found:
        exec(compile(block, "README.md", "exec"), scope)
    want, _ = fa.reference.attention(scope["q"], scope["k"], scope["v"], causal=True)
    assert (scope["out"] - want).abs().max() < 1e-5  # of its last line with this name
    assert sys.modules["flash_attn"] is fa.flash_attn

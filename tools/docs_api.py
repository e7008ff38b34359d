# SPDX-License-Identifier: BSD-3-Clause
# What do the API pages of the documentation say? Signatures and docstrings, read and not imported.
"""Markdown pages of the public names of `fa`, from the source text: without torch and a build.

`public()` finds the names (tests/cpu/test_docs.py holds their docstrings to the project's form),
`pages()` writes them down.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from pathlib import Path

import docs_links

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "fa"
OPERATORS = "_schemas"

# Page -> (title, what it holds, its names): "fa" for those of the package, else one module each.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "attention": (
        "Attention",
        "The functions that compute, dense, packed and over a cache.",
        ("fa.attention", "fa.attention_varlen", "fa.attention_kvcache", "fa.append_kv")
        + ("fa.combine",),
    ),
    "quantize": (
        "Quantisation",
        "From 16-bit tensors to e4m3 tensors and their factors.",
        ("fa.quantize_qkv", "fa.QuantizedQkv"),
    ),
    "introspection": (
        "Kernels and backends",
        "Which kernel would run, which exist, and who computes.",
        ("fa.explain", "fa.supports", "fa.kernels", "fa.backend"),
    ),
    "reference": ("The reference", "", ("fa.reference",)),
    "flash_attn": (
        "fa.flash_attn",
        "",
        ("fa.flash_attn", "fa.flash_attn.flash_attn_interface", "fa.flash_attn.bert_padding"),
    ),
    "flash_attn_interface": ("fa.flash_attn_interface", "", ("fa.flash_attn_interface",)),
    "integrations": (
        "transformers",
        "",
        ("fa.integrations.transformers", "fa.integrations.paged_cache"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Name:
    """One public function or class, where it is defined."""

    dotted: str  # as users write it: fa.attention
    module: Path
    node: ast.FunctionDef | ast.ClassDef

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def line(self) -> int:
        return self.node.lineno


def module_path(dotted: str) -> Path:
    """The file of module fa.x.y."""
    base = ROOT / "python" / Path(*dotted.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def exported(tree: ast.Module) -> list[str]:
    """`__all__`; else every function and class without an underscore."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]


def _origins(tree: ast.Module) -> dict[str, str]:
    """Name -> the module of ours that it is imported from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fa":
            found |= {alias.asname or alias.name: node.module or "" for alias in node.names}
    return found


def definitions(module: str) -> list[Name]:
    """The public functions and classes of a module, imported ones where they are defined."""
    path = module_path(module)
    tree = _tree(path)
    origins, found = _origins(tree), []
    for name in exported(tree):
        home = path
        if name in origins:
            if module_path(f"{origins[name]}.{name}").exists():
                continue  # a module; it has names of its own
            home = module_path(origins[name])
        nodes = [n for n in _tree(home).body if getattr(n, "name", "") == name]
        if nodes:
            found.append(Name(f"{module}.{name}", home, nodes[0]))
    return found


def public() -> list[Name]:
    """Every public function and class of the package, each once, in the order of the pages."""
    package = {n.dotted: n for n in definitions("fa")}
    found: dict[tuple[Path, str], Name] = {}
    for _, _, names in PAGES.values():
        for dotted in names:
            for name in [package[dotted]] if dotted in package else definitions(dotted):
                found.setdefault((name.module, name.node.name), name)
    return list(found.values())


# ---- Markdown -----------------------------------------------------------------------------------


def signature(name: str, node: ast.FunctionDef) -> str:
    """def name(…), one argument a line where it is long."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    parts = [_argument(a, d) for a, d in zip(plain, defaults, strict=True) if a.arg != "self"]
    if args.vararg:
        parts.append("*" + _argument(args.vararg, None))
    elif args.kwonlyargs:
        parts.append("*")
    parts += [_argument(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        parts.append("**" + _argument(args.kwarg, None))
    end = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= 88:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    text = arg.arg + (f": {ast.unparse(arg.annotation)}" if arg.annotation else "")
    return text if default is None else f"{text} = {ast.unparse(default)}"


SECTION = re.compile(r"^(Args|Returns|Raises|Example):(?: (.*))?$")
ENTRY = re.compile(r"^(\S(?:[^:\[]|\[[^\]]*\])*?):\s")


def docstring_markdown(text: str) -> str:
    """A docstring of ours as Markdown: sections become headings, their entries lists."""
    out: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        section = SECTION.match(lines[at])
        if section is None:
            out.append(lines[at])
            at += 1
            continue
        body = [section[2]] if section[2] else []
        at += 1
        while at < len(lines) and (not lines[at].strip() or lines[at].startswith("    ")):
            body.append(lines[at])
            at += 1
        if section[1] == "Example":
            code = textwrap.dedent("\n".join(body)).strip()
            out += ["", "**Example**", "", "```pycon", *code.splitlines(), "```", ""]
        else:
            out += ["", f"**{section[1]}**", "", *_entries(body), ""]
    return _safe("\n".join(out)).strip() + "\n"


def _entries(body: list[str]) -> list[str]:
    """`name: text` with its continuation lines becomes an item; other text stays."""
    dedented = textwrap.dedent("\n".join(body)).strip().splitlines()
    if not any(ENTRY.match(line) for line in dedented):
        return [line.strip() for line in dedented]
    out = []
    for line in dedented:
        entry = ENTRY.match(line)
        if entry:
            out.append(f"* `{entry[1]}`: {line[entry.end() :]}")
        elif line.strip():
            out.append("  " + line.strip() if out else line)
    return out


def _safe(text: str) -> str:
    """What Markdown would read as its own outside of code: HTML, emphasis around a word."""
    parts = re.split(r"(^```.*?^```$|`[^`\n]*`|^    .*$)", text, flags=re.M | re.S)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<![\w/\]])docs/\w+\.md", r"[\g<0>](/\g<0>)", parts[i])
        parts[i] = re.sub(r"<(?=[A-Za-z/!])", "&lt;", parts[i])
        if "**" not in parts[i]:
            parts[i] = re.sub(r"(?<![*\\])\*(?=\w)", r"\\*", parts[i])
    return "".join(parts)


def _source(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def entry_markdown(name: Name, level: int = 2) -> list[str]:
    """Heading, signature, docstring; methods of a class below it."""
    node = name.node
    hashes = "#" * level
    lines = [f"{hashes} {name.dotted}", ""]
    if isinstance(node, ast.FunctionDef):
        lines += ["```python", signature(name.dotted, node), "```", ""]
    else:
        init = next((n for n in node.body if getattr(n, "name", "") == "__init__"), None)
        shown = signature(name.dotted, init) if isinstance(init, ast.FunctionDef) else name.dotted
        lines += ["```python", f"class {shown.removesuffix(' -> None')}", "```", ""]
    lines += [docstring_markdown(name.docstring), f"[source](/{_source(name.module)})", ""]
    if isinstance(node, ast.ClassDef):
        lines += [*_members(name), ""]
    return lines


def _members(name: Name) -> list[str]:
    """Fields with their comments, and methods with the first line of their docstrings."""
    source, lines = name.module.read_text(encoding="utf-8").splitlines(), []
    for inner in name.node.body:
        if isinstance(inner, ast.AnnAssign):
            comment = source[inner.lineno - 1].partition("  # ")[2]
            field = f"{ast.unparse(inner.target)}: {ast.unparse(inner.annotation)}"
            lines.append(f"* `{field}`" + (f": {comment}" if comment else ""))
        elif isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
            text = (ast.get_docstring(inner) or "").split("\n")[0]
            call = " ".join(signature(inner.name, inner).split()).replace(", )", ")")
            lines.append(f"* `{call.replace('( ', '(')}`" + (f": {text}" if text else ""))
    return lines


def operators_markdown() -> str:
    """The schemas of torch.ops.fa, an argument a line, with what each operator does."""
    scope: dict[str, object] = {}
    exec(compile(_tree(PACKAGE / f"{OPERATORS}.py"), OPERATORS, "exec"), scope)
    schemas, meanings = scope["SCHEMAS"], scope["MEANINGS"]
    assert isinstance(schemas, dict) and isinstance(meanings, dict)
    lines = [
        "# Operators",
        "",
        "`torch.ops.fa.*`: what the functions call, with the same options under the same names.",
        "They are registered for CUDA, CPU and fake tensors, and can be compiled and exported.",
        "Names that begin with an underscore are internal. What the options mean:",
        "[fa.attention](attention.md#faattention) and [numerics](/docs/numerics.md).",
        "",
    ]
    for name, meaning in meanings.items():
        inside, _, result = schemas[name].rpartition(" -> ")
        parts = re.split(r", (?![^()]*\))", inside.strip()[1:-1])
        lines += [f"## fa::{name}", "", meaning, "", "```text", f"fa::{name}("]
        lines += [*(f"    {part}," for part in parts), f") -> {result}", "```", ""]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """File name -> Markdown. Links that begin with / are paths in the repository."""
    package = {n.dotted: n for n in definitions("fa")}
    found = {"operators.md": operators_markdown()}
    index = ["# Interface", "", _docline("fa"), ""]
    for page, (title, lead, names) in PAGES.items():
        lines = [f"# {title}", ""] + ([lead, ""] if lead else [])
        for dotted in names:
            if dotted in package:
                lines += entry_markdown(package[dotted])
                continue
            text = ast.get_docstring(_tree(module_path(dotted))) or ""
            if len(names) > 1:
                lines += [f"## {dotted}", ""]
            lines += [docstring_markdown(text), ""]
            seen = () if dotted == "fa.flash_attn" else definitions(dotted)
            for name in seen:
                lines += entry_markdown(name, 3 if len(names) > 1 else 2)
        found[f"{page}.md"] = "\n".join(lines)
        heads = [f"`{line[3:]}`" for line in lines if line.startswith("## fa.")]
        index.append(f"* [{title}]({page}.md)" + (": " if heads else "") + ", ".join(heads))
    index += ["* [Operators](operators.md): `torch.ops.fa.*`"]
    index += ["", "The C interface: [abi](/docs/abi.md)."]
    found["index.md"] = "\n".join(index) + "\n"
    return found


def places() -> dict[str, str]:
    """Public name -> page and heading: fa.attention -> api/attention.md#faattention."""
    found: dict[str, str] = {}
    for page, text in pages().items():
        for heading in re.findall(r"^#{2,3} ((?:fa\.|fa::)\w[\w.]*)$", text, re.M):
            place = f"api/{page}#{docs_links.slug(heading)}"
            found.setdefault(heading, place)
            if heading.startswith("fa::"):
                found[f"torch.ops.fa.{heading[4:]}"] = place
    return found


def _docline(module: str) -> str:
    return (ast.get_docstring(_tree(module_path(module))) or "").split("\n\n")[0]

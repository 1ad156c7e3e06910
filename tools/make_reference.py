"""Write docs/reference.md: every public name of `manyhands`, from its docstring.

Usage: python tools/make_reference.py [--check]

``--check`` writes nothing, and tells whether the page is as it would be written now. The page is complete or it is not written: a public
name, an argument or an attribute without a word is an error.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"
SOURCES = (ROOT / "core" / "src",)

INTRODUCTION = """\
# Reference

Every public name, with its arguments and its errors. This page is made from the docstrings by `tools/make_reference.py`, and a test
holds it current. `help(manyhands.Group.all_reduce)` shows the same in Python. What a plugin may import is in [plugins.md](plugins.md).
"""

# (module, heading, what it says)
MODULES = (("manyhands", "manyhands", "`import manyhands as mh`"),)
TITLES = {"returns": "Returns", "yields": "Yields", "raises": "Raises", "parameters": "Parameters", "attributes": "Attributes"}


class IncompleteError(Exception):
    """Something public has no words."""


@dataclass(slots=True)
class Page:
    """The lines of the page, and the names that it can link to."""

    names: set[str]
    lines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(self, *lines: str) -> None:
        """Add a paragraph: some lines, and an empty one behind them."""
        self.lines += [*lines, ""]

    def words(self, text: str, owner: str) -> str:
        """Return the words of a docstring as Markdown: code as code, names as links, examples fenced."""

        def name(match: re.Match[str]) -> str:
            given = match.group(1)
            full = f"{owner}.{given}" if f"{owner}.{given}" in self.names else given
            return f"[`{given}`](#{anchor(full)})" if full in self.names else f"`{given}`"

        text = re.sub(r"((?:^(?:>>>|\.\.\.).*\n?)+)", r"```python\n\1\n```\n", text, flags=re.MULTILINE).replace(
            "\n\n```\n", "\n```\n"
        )
        parts = re.split(r"(?<!`)``([^`]+?)``(?!`)", text)
        parts[::2] = [re.sub(r"(?<!`)`([A-Za-z_.]+)`(?!`)", name, part) for part in parts[::2]]
        parts[1::2] = [f"`{part}`" for part in parts[1::2]]
        return "".join(parts)

    def linked(self, types: str) -> str:
        """Return some types as code, those of this page as links."""
        if not all(part in self.names for part in types.split(", ")):
            return f"`{types}`"
        return ", ".join(f"[`{part}`](#{anchor(part)})" for part in types.split(", "))


def anchor(name: str) -> str:
    """Return the anchor that Markdown gives to the heading of a name."""
    return name.lower().replace(".", "")


def public(owner: Any) -> Iterator[Any]:
    """Yield the public members of a class, its own first, then those that it inherits, each in the order of the source.

    What core alone calls says so in its first sentence, and is left out.
    """
    for member in [*owner.members.values(), *owner.inherited_members.values()]:
        words = member.docstring.value.partition("\n")[0] if member.docstring else ""
        if not member.name.startswith("_") and not words.endswith("; for core."):
            yield member


def signature_of(function: Any, name: str) -> str:
    """Return how a function is called, on several lines where one would be long."""
    arguments: list[str] = []
    kinds = [parameter.kind for parameter in function.parameters]
    for index, parameter in enumerate(function.parameters):
        if parameter.name in {"self", "cls"}:
            continue
        kind = parameter.kind
        if (
            kind is griffe.ParameterKind.keyword_only
            and griffe.ParameterKind.var_positional not in kinds[:index]
            and "*" not in arguments
        ):
            arguments.append("*")
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        annotation = f": {parameter.annotation}" if parameter.annotation else ""
        default = f" = {parameter.default}" if parameter.default is not None and not stars else ""
        arguments.append(f"{stars}{parameter.name}{annotation}{default}")
        if kind is griffe.ParameterKind.positional_only and kinds[index + 1 : index + 2] != [kind]:
            arguments.append("/")
    returns = f" -> {function.returns}" if getattr(function, "returns", None) else ""
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"


def sections_of(thing: Any) -> list[Any]:
    """Return the sections of a docstring."""
    return list(thing.docstring.parsed) if thing.docstring else []


def write_words(page: Page, thing: Any, name: str, owner: str) -> None:
    """Write what the docstring of a function or a class says."""
    if not thing.docstring:
        page.missing.append(f"{name} has no docstring")
    for section in sections_of(thing):
        kind = section.kind.value
        if kind == "text":
            page.add(page.words(section.value, owner))
        elif kind == "examples":
            examples = [text if part.value == "text" else f"```python\n{text}\n```" for part, text in section.value]
            page.add("\n\n".join(examples))
        elif kind in TITLES:
            page.add(f"**{TITLES[kind]}**")
            for entry in section.value:
                if kind in {"returns", "yields", "raises"}:
                    label = page.linked(str(entry.annotation or "").strip("()"))
                else:
                    label = f"`{entry.name}`"
                words = " ".join(page.words(entry.description, owner).split())
                page.lines.append(f"- {label}: {words}")
            page.lines.append("")
        else:
            page.missing.append(f"{name} has a section {kind!r}, which this tool does not know")


def write_function(page: Page, function: Any, name: str, level: str) -> None:
    """Write a function or a method, all arguments included."""
    page.add(f"{level} {name}")
    page.add("```python", signature_of(function, name.rpartition(".")[2]), "```")
    write_words(page, function, name, name.rpartition(".")[0])
    told = {
        entry.name.strip("*")
        for section in sections_of(function)
        if section.kind.value == "parameters"
        for entry in section.value
    }
    wanted = {parameter.name for parameter in getattr(function, "parameters", ()) if parameter.name not in {"self", "cls"}}
    page.missing += [f"{name} says nothing of its argument {left}" for left in sorted(wanted - told)]


def write_background(page: Page, functions: list[Any], owner: Any) -> None:
    """Write the calls that do not wait: each takes the arguments of the one that does."""
    page.add(f"### {owner.name}, in the background")
    for function in functions:
        waits = function.name.removesuffix("_async")
        page.add(f"#### {owner.name}.{function.name}")
        page.add("```python", signature_of(function, function.name), "```")
        write_words(page, function, f"{owner.name}.{function.name}", owner.name)
        mine, other = ({entry.name for entry in each.parameters} for each in (function, owner.all_members[waits]))
        page.missing += [f"{function.name} takes {left}, and {waits} does not" for left in sorted(mine - other)]


def write_class(page: Page, owner: Any) -> None:
    """Write a class: how it is made, its attributes, its methods."""
    page.add(f"### {owner.name}")
    if owner.bases:
        page.add(f"`class {owner.name}({', '.join(str(base).rpartition('.')[2] for base in owner.bases)})`")
    write_words(page, owner, owner.name, owner.name)
    members = list(public(owner))
    methods = [member for member in members if member.is_function]
    background = [method for method in methods if method.name.endswith("_async")]
    for method in methods:
        if method not in background:
            write_function(page, method, f"{owner.name}.{method.name}", "####")
    if background:
        write_background(page, background, owner)
    told = {
        entry.name
        for section in sections_of(owner)
        if section.kind.value in {"attributes", "parameters"}
        for entry in section.value
    }
    for member in members:
        if member.is_attribute and not member.inherited and member.name not in told:
            page.missing.append(f"{owner.name}.{member.name} has no words")


def write_errors(page: Page, errors: list[Any]) -> None:
    """Write the errors: those with attributes of their own in full, and all of them in a table."""
    page.add("### Errors")
    page.lines += ["| error | is a | |", "|---|---|---|"]
    for error in errors:
        if not error.docstring:
            page.missing.append(f"{error.name} has no docstring")
            continue
        bases = [str(base).rpartition(".")[2] for base in error.bases]
        linked = ", ".join(page.linked(base) for base in bases)
        # Those with a heading of their own below are reached by it; the others by the anchor.
        name = (
            f"[`{error.name}`](#{anchor(error.name)})" if error.members else f'<a id="{anchor(error.name)}"></a>`{error.name}`'
        )
        page.lines.append(f"| {name} | {linked} | {' '.join(page.words(sections_of(error)[0].value, error.name).split())} |")
    page.lines.append("")
    for error in errors:
        if error.members:
            write_class(page, error)


def page_of() -> str:
    """Return the whole page.

    Raises
    ------
    IncompleteError
        Something public has no words.
    """
    loader = griffe.GriffeLoader(search_paths=SOURCES, docstring_parser="numpy", allow_inspection=False)
    modules = {module: loader.load(module) for module, _, _ in MODULES}
    loader.resolve_aliases()
    things: dict[str, list[Any]] = {}
    seen: set[str] = set()
    for module, loaded in modules.items():
        exports = [str(name).strip("'\"") for name in loaded.exports or ()]
        things[module] = [
            loaded[name] for name in exports if not name.startswith("__") and loaded[name].canonical_path not in seen
        ]
        seen |= {thing.canonical_path for thing in things[module]}
    names = {thing.name for each in things.values() for thing in each}
    classes = [thing for each in things.values() for thing in each if thing.is_class]
    names |= {f"{owner.name}.{member.name}" for owner in classes for member in public(owner) if member.is_function}
    page = Page(names)
    page.add(INTRODUCTION)
    for module, heading, words in MODULES:
        page.add(f"## {heading}")
        page.add(words)
        each = things[module]
        errors = [thing for thing in each if thing.is_class and thing.name.endswith(("Error", "Warning"))]
        others = [thing for thing in each if thing not in errors]
        page.add(" · ".join(f"[`{thing.name}`](#{anchor(thing.name)})" for thing in others) + " · [errors](#errors)")
        for thing in sorted(others, key=lambda thing: bool(thing.is_class)):
            if thing.is_function:
                write_function(page, thing, thing.name, "###")
            else:
                write_class(page, thing)
        write_errors(page, errors)
    if page.missing:
        raise IncompleteError("\n".join(page.missing))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(page.lines)).rstrip() + "\n"


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(str(__doc__)), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is not current")
    check = parser.parse_args().check
    try:
        page = page_of()
    except IncompleteError as error:
        print(error, file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    old = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    if old == page.splitlines():
        return 0
    print("docs/reference.md is not current: run `python tools/make_reference.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

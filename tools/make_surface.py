"""Write core/tests/api_surface.txt: every name of `oneaccord.api` with its signature, fields and abstract methods, and the hooks.

Usage: python tools/make_surface.py [--check]

``--check`` writes nothing, and shows what differs from the file.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "core" / "src"
FILE = ROOT / "core" / "tests" / "api_surface.txt"
LONGEST = 160
MADE_BY_CORE = frozenset({"Group", "Work"})
MUST_GROW = """\
Something that plugins may use is gone or has changed, or they must implement more. API_VERSION (in oneaccord/contract/backend.py) must grow,
unless all that was written for the old lines still works. A name that goes stays for one version: see _DEPRECATED in oneaccord/api.py.
Then write the file anew: python tools/make_surface.py"""
MAY_STAY = """\
Only what plugins need not use was added, so API_VERSION may stay. Write the file anew: python tools/make_surface.py"""


def public(owner: Any) -> Iterator[Any]:
    """Yield the public members of a class, its own first, then those that it inherits, each in the order of the source.

    What core alone calls says so in its first sentence, and is left out.
    """
    for member in [*owner.members.values(), *owner.inherited_members.values()]:
        words = member.docstring.value.partition("\n")[0] if member.docstring else ""
        if not member.name.startswith("_") and not words.endswith("; for core."):
            yield member


def signature_of(function: Any, name: str) -> str:
    """Return how a function is called, on one line."""
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
    return " ".join(f"{name}({', '.join(arguments)}){returns}".split())


def has_decorator(member: Any, decorator: str) -> bool:
    """Tell whether a method has a decorator."""
    member = member.final_target if member.is_alias else member
    return any(str(each.value).rpartition(".")[2] == decorator for each in getattr(member, "decorators", ()))


def value_of(thing: Any) -> str:
    """Return what follows the name of a constant, a field or an attribute: its type, and what it is by default."""
    given = re.sub(r",? *description='[^']*'", "", " ".join(str(thing.value).split()))
    annotation = f": {thing.annotation}" if thing.annotation else ""
    shown = thing.value is not None and len(given) <= LONGEST
    return f"{annotation} = {given}" if shown else annotation


def lines_of_class(name: str, owner: Any) -> Iterator[str]:
    """Yield the lines of a class: how it is made, and what it has; its attributes in their order, which may be that of its arguments."""
    bases = ", ".join(str(base).rpartition(".")[2] for base in owner.bases)
    yield f"class {name}({bases})" if bases else f"class {name}"
    for decorator in owner.decorators:
        yield f"    @{decorator.value}"
    is_error = name.endswith("Error")  # what all errors have stands once, with the first of them
    if name not in MADE_BY_CORE and "__init__" in (owner.members if is_error else owner.all_members):
        yield f"    {signature_of(owner.all_members['__init__'], '__init__')}"
    members = [member for member in public(owner) if not (is_error and member.inherited)]
    for member in members:
        if member.is_attribute:
            is_instances = "class-attribute" not in member.labels and "dataclass" not in owner.labels
            yield f"    {member.name}{f': {member.annotation}' if is_instances and member.annotation else value_of(member)}"
    for member in sorted((member for member in members if member.is_function), key=lambda member: str(member.name)):
        kinds = [kind for kind in ("classmethod", "staticmethod") if has_decorator(member, kind)]
        words = ["abstract"] * has_decorator(member, "abstractmethod") + kinds
        yield f"    {' '.join([*words, signature_of(member, member.name)])}"


def surface() -> str:
    """Return the whole surface, a paragraph for each name."""
    loader = griffe.GriffeLoader(search_paths=[SOURCE], docstring_parser="numpy", allow_inspection=False)
    package = loader.load("oneaccord")
    api, hooks = package["api"], package["contract.hookspecs"]
    loader.resolve_aliases()
    paragraphs = []
    for name in sorted(str(each).strip("'\"") for each in api.exports or ()):
        thing = api[name]
        if thing.is_class:
            paragraphs.append("\n".join(lines_of_class(name, thing)))
        elif thing.is_function:
            paragraphs.append(signature_of(thing, name))
        else:
            paragraphs.append(name + value_of(thing))
    paragraphs += [f"hook {signature_of(hooks[name], name)}" for name in hooks.members if name.startswith("oneaccord_")]
    return "\n\n".join(paragraphs) + "\n"


def changes(old: str, new: str) -> str:
    """Say what has changed from one surface to another, and what to do about it; empty where nothing has."""
    if old == new:
        return ""
    diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), "api_surface.txt", "oneaccord.api", n=2, lineterm=""))
    breaks = any(line.startswith("-") or line.lstrip("+ ").startswith("abstract ") for line in diff[2:] if line[0] in "+-")
    return "\n".join([*diff, "", MUST_GROW if breaks else MAY_STAY])


def main() -> int:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(str(__doc__)), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; show what differs, and exit with 1 where anything does"
    )
    if not parser.parse_args().check:
        FILE.write_text(surface(), encoding="utf-8")
        return 0
    told = changes(FILE.read_text(encoding="utf-8"), surface())
    print(told or "core/tests/api_surface.txt is current")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())

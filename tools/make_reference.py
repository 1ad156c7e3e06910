"""Write docs/reference/api.md, docs/reference/parallel.md and docs/reference/plugin-api.md: every public name of `oneaccord`, of `oneaccord_parallel` and
of `oneaccord.api`, from its docstring.

Usage: python tools/make_reference.py [--check]

``--check`` writes nothing, and tells whether the pages are as they would be written now. A page is complete or it is not written: a public
name, an argument or an attribute without a word is an error.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "core" / "src", ROOT / "parallel" / "src")


@dataclass(frozen=True, slots=True)
class Reference:
    """A page that is to be written: the package that it describes, its file, and the words above the names."""

    package: str
    file: Path
    introduction: str
    usage: str


CORE = Reference(
    "oneaccord",
    ROOT / "docs" / "reference" / "api.md",
    """\
# Reference

Every public name, with its arguments and its errors. `tools/make_reference.py` makes this page from the docstrings, and a test keeps it up to
date. `help(oneaccord.Group.all_reduce)` shows the same in Python. [plugins.md](plugins.md) says what a plugin may import. The training layers have
[their own page](reference-parallel.md).
""",
    "`import oneaccord as oa`",
)
PARALLEL = Reference(
    "oneaccord_parallel",
    ROOT / "docs" / "reference" / "parallel.md",
    """\
# Reference of the training layers

Every public name of `oneaccord_parallel`, with its arguments and its errors: functions, classes, errors, and then the names of the modules
`mp.compress`, `mp.jax` and `mp.torch`. [parallel.md](parallel.md) shows how to use them. Groups, meshes and their errors are in the
[reference of oneaccord](reference.md). Like that page, this one is made from the docstrings.
""",
    "`import oneaccord_parallel as mp`",
)
API = Reference(
    "oneaccord.api",
    ROOT / "docs" / "reference" / "plugin-api.md",
    """\
# Reference of the plugin API

Everything that a plugin may import: what a plugin must do, what core promises, and which errors are raised. [plugins.md](plugins.md) shows how
to write a plugin, and says which promises hold for how long. `tools/make_reference.py` makes this page from the docstrings.
""",
    "",
)
REFERENCES = (CORE, PARALLEL, API)

# The sections of the page of the API: what stands where in core. The last one takes the rest.
API_SECTIONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "A backend",
        (
            "contract.spec",
            "contract.config",
            "contract.backend",
            "contract.transport",
            "contract.deadline",
            "common.installing",
            "config",
        ),
        "",
    ),
    ("Cards", ("control.cards",), "What ranks tell each other before they begin. See `Bootstrap.exchange`."),
    (
        "Foreign libraries",
        ("kit",),
        "For a backend over a library that moves the bytes itself. See [plugins.md](plugins.md#over-a-foreign-library).",
    ),
    ("Memory of GPUs", ("contract.device",), "See `Backend.open_device`."),
    ("Hooks", ("contract.hookspecs", "contract.observe"), ""),
    ("Algorithms", ("schedule.steps", "schedule.algorithms"), "See `oneaccord_register_algorithms`."),
    ("Launchers", ("launch",), "For a backend whose ranks are not started by `oneaccord run`."),
    (
        "Worlds of threads, and simulated ones",
        ("",),
        "For a backend whose ranks are threads, or live in a world with a clock of its own. The plugin simulated uses it.",
    ),
)
LONGEST_VALUE = 250
TITLES = {"returns": "Returns", "yields": "Yields", "raises": "Raises", "parameters": "Parameters", "attributes": "Attributes"}


class IncompleteError(Exception):
    """Something public has no words."""


@dataclass(slots=True)
class Page:
    """The lines of the page, and where the names that it can link to are."""

    names: Mapping[str, str]
    lines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(self, *lines: str) -> None:
        """Add a paragraph: some lines, and an empty one behind them."""
        self.lines += [*lines, ""]

    def place_of(self, given: str, owner: str) -> str | None:
        """Return where a name is, as the words of a class or a module say it: their own names go first."""
        parts = owner.split(".")
        names = (".".join([*parts[:count], given]) for count in range(len(parts), -1, -1))
        return next((self.names[name] for name in names if name in self.names), None)

    def words(self, text: str, owner: str) -> str:
        """Return the words of a docstring as Markdown: code as code, names as links, examples fenced."""

        def name(match: re.Match[str]) -> str:
            given = match.group(1)
            return f"[`{given}`]({where})" if (where := self.place_of(given, owner)) else f"`{given}`"

        text = re.sub(r"(^>>>.*\n?(?:^\S.*\n?)*)", r"```python\n\1\n```\n", text, flags=re.MULTILINE).replace(
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
        return ", ".join(f"[`{part}`]({self.names[part]})" for part in types.split(", "))


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
            remarks = []
            for description, entries in groupby(section.value, lambda entry: entry.description):
                if kind == "raises" and not description:  # Griffe takes a paragraph below the list for an error's name
                    remarks += [page.words(str(entry.annotation), owner) for entry in entries]
                    continue
                if kind in {"returns", "yields", "raises"}:
                    labels = [page.linked(str(entry.annotation or "").strip("()")) for entry in entries]
                else:
                    labels = [f"`{entry.name}`" for entry in entries]
                words = " ".join(page.words(description, owner).split())
                page.lines.append(f"- {', '.join(labels)}: {words}")
            page.add()
            for remark in remarks:
                page.add(remark)
        elif kind == "admonition":  # Notes, See Also
            page.add(f"**{section.title}**")
            page.add(page.words(section.value.description, owner))
        else:
            page.missing.append(f"{name} has a section {kind!r}, which this tool does not know")


def write_function(page: Page, function: Any, name: str, level: str) -> None:
    """Write a function or a method, all arguments included."""
    page.add(f"{level} {name}")
    is_abstract = any(str(decorator.value) == "abstractmethod" for decorator in function.decorators)
    page.add("```python", *["@abstractmethod"] * is_abstract, signature_of(function, name.rpartition(".")[2]), "```")
    write_words(page, function, name, name.rpartition(".")[0])
    told = {
        entry.name.strip("*")
        for section in sections_of(function)
        if section.kind.value == "parameters"
        for entry in section.value
    }
    wanted = {parameter.name for parameter in getattr(function, "parameters", ()) if parameter.name not in {"self", "cls"}}
    page.missing += [f"{name} says nothing of its argument {left}" for left in sorted(wanted - told)]


def write_background(page: Page, functions: list[Any], owner: Any, owner_name: str) -> None:
    """Write the calls that do not wait: each takes the arguments of the one that does."""
    page.add(f"### {owner_name}, in the background")
    for function in functions:
        waits = function.name.removesuffix("_async")
        page.add(f"#### {owner_name}.{function.name}")
        page.add("```python", signature_of(function, function.name), "```")
        write_words(page, function, f"{owner_name}.{function.name}", owner_name)
        mine, other = ({entry.name for entry in each.parameters} for each in (function, owner.all_members[waits]))
        page.missing += [f"{function.name} takes {left}, and {waits} does not" for left in sorted(mine - other)]


def write_class(page: Page, owner: Any, owner_name: str) -> None:
    """Write a class: how it is made, its attributes, its methods."""
    page.add(f"### {owner_name}")
    if owner.bases:
        page.add(f"`class {owner_name}({', '.join(str(base).rpartition('.')[2] for base in owner.bases)})`")
    write_words(page, owner, owner_name, owner_name)
    members = list(public(owner))
    told = {
        name
        for section in sections_of(owner)
        if section.kind.value in {"attributes", "parameters"}
        for entry in section.value
        for name in entry.name.split(", ")
    }
    if any(str(base) == "enum.Enum" for base in owner.bases):
        page.add(" · ".join(f"`{member.name}`" for member in members if member.is_attribute))
        members = [member for member in members if not member.is_attribute]
    told.add("model_config")  # what pydantic is told
    properties = [member for member in members if member.is_attribute and not member.inherited and member.name not in told]
    if properties:
        page.add("**Properties**")
    for member in properties:
        if member.docstring:
            page.lines.append(f"- `{member.name}`: {' '.join(page.words(member.docstring.value, owner_name).split())}")
        else:
            page.missing.append(f"{owner_name}.{member.name} has no words")
    page.add()
    methods = [member for member in members if member.is_function]
    background = [method for method in methods if method.name.endswith("_async")]
    for method in methods:
        if method not in background:
            write_function(page, method, f"{owner_name}.{method.name}", "####")
    if background:
        write_background(page, background, owner, owner_name)


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
            write_class(page, error, error.name)


def write_constant(page: Page, constant: Any) -> None:
    """Write a constant or the name of a type."""
    page.add(f"### {constant.name}")
    value = str(constant.value)
    if len(value) < LONGEST_VALUE:
        page.add("```", f"{constant.name} = {value}", "```")  # not as Python, which a formatter would lay out anew
    write_words(page, constant, constant.name, "")


@dataclass(slots=True)
class Section:
    """What stands under one heading: the things of a module, and what comes before their names."""

    heading: str
    words: str
    things: list[Any]
    prefix: str = ""

    def names(self) -> Iterator[str]:
        """Yield the names of all that has a heading, the methods of classes included."""
        for thing in self.things:
            yield self.prefix + thing.name
            if thing.is_class:
                yield from (f"{self.prefix}{thing.name}.{member.name}" for member in public(thing) if member.is_function)


def sections_of_page(package: Any, usage: str) -> list[Section]:
    """Return what a page has: the names of a package, and those of the modules that it names as such in ``_MODULES``."""

    def things_of(module: Any) -> list[Any]:
        exports = [str(name).strip("'\"") for name in module.exports or ()]
        return [module[name] for name in exports if not name.startswith("__") and not module[name].is_module]

    sections = [Section(package.name, usage, things_of(package))]
    named = str(package["_MODULES"].value) if "_MODULES" in package.members else ""
    for name in sorted(re.findall(r"\w+(?=['\"])", named)):
        module = package[name]
        words = str(module.docstring.value) if module.docstring else ""
        sections.append(Section(f"{package.name}.{name}", words, things_of(module), f"{name}."))
        for inner in [str(each).strip("'\"") for each in module.exports or ()]:
            if module[inner].is_module:
                words = str(module[inner].docstring.value)
                sections.append(Section(f"{package.name}.{name}.{inner}", words, things_of(module[inner]), f"{name}.{inner}."))
    return sections


def api_sections(package: Any) -> list[Section]:
    """Return the sections of the page of the API; what is in `oneaccord` as well has its place on the page of that."""
    core = {str(name).strip("'\"") for name in package.exports}
    hooks = package["contract.hookspecs"]
    names = [str(name).strip("'\"") for name in package["api"].exports]
    things = [package["api"][name] for name in names if name not in core]
    things += [hooks[name] for name in hooks.members if name.startswith("oneaccord_")]
    sections = []
    for heading, homes, words in API_SECTIONS:
        taken = [thing for thing in things if thing.canonical_path.startswith(tuple(f"oneaccord.{home}" for home in homes))]
        things = [thing for thing in things if thing not in taken]
        sections.append(Section(heading, words, taken))
    both = " · ".join(f"`{name}`" for name in names if name in core)
    sections.append(Section("In oneaccord as well", f"These are on the [page of oneaccord](reference.md): {both}.", []))
    return sections


def names_of(sections: list[Section], file: str = "") -> dict[str, str]:
    """Return where each name is, from a page whose sections these are, or from another one."""
    return {name: f"{file}#{anchor(name)}" for section in sections for name in section.names()}


def write_section(page: Page, section: Section) -> None:
    """Write a section: a list of its names, functions, classes, errors."""
    page.add(f"## {section.heading}")
    page.add(page.words(section.words, section.prefix.removesuffix(".")))
    errors = [thing for thing in section.things if thing.is_class and thing.name.endswith(("Error", "Warning"))]
    others = sorted(
        (thing for thing in section.things if thing not in errors), key=lambda thing: (bool(thing.is_class), thing.name.lower())
    )
    links = [f"[`{section.prefix}{thing.name}`](#{anchor(section.prefix + thing.name)})" for thing in others]
    page.add(" · ".join(links + ["[errors](#errors)"] * bool(errors)))
    for thing in others:
        if thing.is_function:
            write_function(page, thing, section.prefix + thing.name, "###")
        elif thing.is_class:
            write_class(page, thing, section.prefix + thing.name)
        else:
            write_constant(page, thing)
    if errors:
        write_errors(page, errors)


@functools.cache
def read(sources: tuple[Path, ...], packages: tuple[str, ...]) -> list[Any]:
    """Return packages as Griffe reads them; which takes seconds, and so is done once."""
    loader = griffe.GriffeLoader(search_paths=sources, docstring_parser="numpy", allow_inspection=False)
    found = [loader.load(package) for package in packages]
    loader.resolve_aliases()
    return found


def page_of(reference: Reference) -> str:
    """Return a whole page.

    Raises
    ------
    IncompleteError
        Something public has no words.
    """
    more = PARALLEL.package if reference in REFERENCES else reference.package
    core, beside = read(SOURCES, (CORE.package, more))
    package = {CORE.package: core, API.package: core["api"] if reference is API else None, more: beside}[reference.package]
    sections = api_sections(core) if reference is API else sections_of_page(package, reference.usage)
    own = names_of(sections)
    full = {f"{package.name}.{name}": place for name, place in own.items()}
    page = Page(names_of(sections_of_page(core, ""), CORE.file.name) | own | full)
    page.add(reference.introduction)
    for section in sections:
        write_section(page, section)
    if page.missing:
        raise IncompleteError("\n".join(page.missing))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(page.lines)).rstrip() + "\n"


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(str(__doc__)), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is not current")
    check = parser.parse_args().check
    failed = False
    for reference in REFERENCES:
        try:
            page = page_of(reference)
        except IncompleteError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        file = reference.file
        if not check:
            file.write_text(page, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != page:
            print(f"docs/{file.name} is not current: run `python tools/make_reference.py`", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Every public name, each argument of it and each attribute is described: the site's reference is made of nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "core" / "src", ROOT / "parallel" / "src")


def read(package: str, sources: tuple[Path, ...] = SOURCES) -> Any:
    loader = griffe.GriffeLoader(search_paths=sources, docstring_parser="numpy", allow_inspection=False)
    top = loader.load(package.partition(".")[0])
    if package == "oneaccord_parallel":
        loader.load("oneaccord")
    loader.resolve_aliases()
    inner = package.partition(".")[2]
    return top[inner] if inner else top


def exported(module: Any) -> Iterator[Any]:
    """Yield what a module exports, and what the modules do that it exports."""
    for name in [str(name).strip("'\"") for name in module.exports or ()]:
        if name.startswith("__"):
            continue
        thing = module[name]
        if thing.is_module:
            yield from exported(thing)
        else:
            yield thing


def told(thing: Any, *kinds: str) -> set[str]:
    sections = thing.docstring.parsed if thing.docstring else []
    entries = [entry for section in sections if section.kind.value in kinds for entry in section.value]
    return {name.strip("*") for entry in entries for name in entry.name.split(", ")}


def members(owner: Any) -> Iterator[Any]:
    for member in [*owner.members.values(), *owner.inherited_members.values()]:
        words = member.docstring.value.partition("\n")[0] if member.docstring else ""
        if not member.name.startswith("_") and not words.endswith("; for core."):
            yield member


def missing_of_function(function: Any, name: str, owner: Any = None) -> Iterator[str]:
    if not function.docstring:
        yield f"{name} has no docstring"
    names = {parameter.name for parameter in function.parameters} - {"self", "cls"}
    if owner is not None and name.endswith("_async"):  # it takes the arguments of the call that waits, which describes them
        waits = owner.all_members[function.name.removesuffix("_async")]
        yield from (
            f"{name} takes {left}, and {waits.name} does not" for left in sorted(names - {p.name for p in waits.parameters})
        )
        return
    yield from (f"{name} says nothing of its argument {left}" for left in sorted(names - told(function, "parameters")))


def missing(module: Any) -> Iterator[str]:
    for thing in exported(module):
        if thing.is_function:
            yield from missing_of_function(thing, thing.name)
        elif not thing.docstring:
            yield f"{thing.name} has no docstring"
        elif thing.is_class:
            described = told(thing, "attributes", "parameters") | {"model_config"}  # what pydantic is told
            is_enum = any(str(base) == "enum.Enum" for base in thing.bases)
            for member in members(thing):
                name = f"{thing.name}.{member.name}"
                if member.is_function:
                    yield from missing_of_function(member, name, thing)
                elif not (is_enum or member.inherited or member.name in described or member.docstring):
                    yield f"{name} has no words"


@pytest.mark.parametrize("package", ["oneaccord", "oneaccord.api", "oneaccord_parallel"])
def test_public_names_are_described_with_all_arguments(package: str) -> None:
    assert list(missing(read(package))) == []


def test_an_argument_without_a_word_is_found(tmp_path: Path) -> None:
    package = tmp_path / "sample"
    package.mkdir()
    words = "Do it.\n\n    Parameters\n    ----------\n    told\n        A word.\n    "
    (package / "__init__.py").write_text(
        f'"""A sample."""\n__all__ = ["f"]\n\n\ndef f(told: int, *, silent: int = 0) -> None:\n    """{words}"""\n'
    )
    assert list(missing(read("sample", (tmp_path,)))) == ["f says nothing of its argument silent"]

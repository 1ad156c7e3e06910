"""``oneaccord plugin new``: a distribution with a backend that works, to begin with."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from oneaccord import UsageError

__all__ = ["new"]

_TEMPLATE = Path(__file__).resolve().parent.parent / "template" / "oneaccord-pigeon"
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the backend.", show_default=False)],
    folder: Annotated[
        Path | None, typer.Option(help="The folder to write to; oneaccord-NAME by default.", metavar="DIR", show_default=False)
    ] = None,
) -> None:
    """Write a new distribution oneaccord-NAME: a backend that works and conforms, with its tests.

    It moves bytes through sockets, which are there to be replaced.
    """
    _check_name(name)
    target = Path(f"oneaccord-{name}") if folder is None else folder
    files = {
        _named(str(path.relative_to(_TEMPLATE)), name): _named(path.read_text(encoding="utf-8"), name)
        for path in sorted(_TEMPLATE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    try:
        if target.is_dir() and any(target.iterdir()):
            raise UsageError(f"{target} exists and is not empty; name another folder with --folder")
        for relative, text in files.items():
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}; name another folder") from None
    print(f"{target}: wrote {len(files)} files. What to do next:\n")
    for line in (f"cd {target}", 'pip install -e ".[test]"', "oneaccord doctor", f"oneaccord check {name}", "pytest"):
        print(f"  {line}")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a backend: it must consist of small letters and digits, begin with a letter, and "
            "may have a - or _ between two of them, as in carrier-pigeon"
        )
    package = _package(name)
    taken = {_package(each.name) for each in entry_points(group="oneaccord")}
    if package in taken or name == "auto" or find_spec(f"oneaccord_{package}"):
        raise UsageError(
            f"the name {name!r} is taken by what is installed here: `oneaccord doctor` lists the backends; give another one"
        )


def _package(name: str) -> str:
    return name.replace("-", "_")


def _named(text: str, name: str) -> str:
    """Put the name in the place of the template's own."""
    return text.replace("oneaccord_pigeon", f"oneaccord_{_package(name)}").replace("pigeon", name)

"""``oneaccord plugin new``: a distribution with a backend, or a launcher, that works, to begin with."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from oneaccord import UsageError

__all__ = ["new"]

_TEMPLATES = Path(__file__).resolve().parent.parent / "template"
_PLACEHOLDERS: Final = {"hosts": "heron", "workers": "stork"}
"""The name of the template of each kind of launcher."""
_BACKEND: Final = "pigeon"
"""The name of the template of a backend."""
_SHARED: Final = (".gitignore", ".github/workflows/test.yml")
"""Its files that each distribution gets."""
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name.", show_default=False)],
    launcher: Annotated[bool, typer.Option("--launcher", help="Write a launcher in the place of a backend.")] = False,
    kind: Annotated[
        Literal["hosts", "workers"] | None,
        typer.Option(
            help="With --launcher: hosts, on which oneaccord starts the ranks, as ssh does (the default); or workers, processes of an engine that calls "
            "functions in them, as Ray does.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="The folder to write to; oneaccord-NAME by default.", metavar="DIR", show_default=False)
    ] = None,
) -> None:
    """Write a new distribution oneaccord-NAME: a backend, or with --launcher a launcher, that works and conforms, with its tests.

    A backend moves bytes through sockets, and a launcher starts processes on this computer, which are there to be replaced.
    """
    if kind is not None and not launcher:
        raise UsageError(f"--kind {kind} is for a launcher: give --launcher too")
    _check_name(name, is_launcher=launcher)
    placeholder = _PLACEHOLDERS[kind or "hosts"] if launcher else _BACKEND
    target = Path(f"oneaccord-{name}") if folder is None else folder
    template, backend = (_TEMPLATES / f"oneaccord-{each}" for each in (placeholder, _BACKEND))
    paths = {str(path.relative_to(template)): path for path in sorted(template.rglob("*")) if "__pycache__" not in path.parts}
    files = {
        _named(relative, placeholder, name): _named(path.read_text(encoding="utf-8"), placeholder, name)
        for relative, path in {**{each: backend / each for each in _SHARED}, **paths}.items()
        if path.is_file()
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
    check = f"oneaccord check {'launcher ' if launcher else ''}{name}"
    for line in (f"cd {target}", 'pip install -e ".[test]"', "oneaccord doctor", check, "pytest"):
        print(f"  {line}")


def _check_name(name: str, *, is_launcher: bool) -> None:
    what = "launcher" if is_launcher else "backend"
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a {what}: it must consist of small letters and digits, begin with a letter, and "
            "may have a - or _ between two of them, as in carrier-pigeon"
        )
    package = _package(name)
    taken = {_package(each.name) for each in entry_points(group="oneaccord.launchers" if is_launcher else "oneaccord")}
    if package in taken or name == ("local" if is_launcher else "auto") or find_spec(f"oneaccord_{package}"):
        raise UsageError(
            f"the name {name!r} is taken by what is installed here: `oneaccord doctor` lists the {what}s; give another one"
        )


def _package(name: str) -> str:
    return name.replace("-", "_")


def _named(text: str, placeholder: str, name: str) -> str:
    """Put the name in the place of the template's own."""
    return text.replace(f"oneaccord_{placeholder}", f"oneaccord_{_package(name)}").replace(placeholder, name)

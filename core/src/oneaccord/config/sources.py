"""The sources of configuration values: files, environment variables and arguments, merged with the origin of each value.

Nothing here knows what the values mean; `oneaccord.config` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from oneaccord.common.checks import UNREADABLE
from oneaccord.common.variables import PREFIX, Variable
from oneaccord.config.plugins.installed import nearest
from oneaccord.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "ARGUMENT",
    "DEFAULT",
    "FILE_NAME",
    "HIDDEN",
    "MAPPING",
    "PREFIX",
    "REQUIRED",
    "RESERVED",
    "Leaf",
    "Merged",
    "Problem",
    "as_toml",
    "find_file",
    "flatten",
    "merge",
    "read_environment",
    "read_file",
]

RESERVED: Final[frozenset[str]] = frozenset(Variable)
"""The variables that are not keys of the configuration."""

FILE_NAME: Final[str] = "oneaccord.toml"
"""The file that is looked for in the working directory."""

ARGUMENT: Final[str] = "argument"
"""The origin of a caller's value."""

MAPPING: Final[str] = "config argument"
"""The origin of a caller's value in a mapping in place of a file."""

DEFAULT: Final[str] = "default"
"""The origin of a value that is not set."""

REQUIRED: Final[str] = "required"
"""The origin of a value that is not set, and that a backend would need that is not chosen."""

HIDDEN: Final[str] = "(not shown)"
"""The text in place of a value that may be a secret."""

Leaf = tuple[tuple[str, ...], Any, str]
"""The path of a value in the tree of keys, the value, and its origin."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its line, and the fields of its `ConfigError`."""

    text: str
    file: str | None = None
    key: str | None = None
    value: object = None
    unknown_backend: bool = False


def flatten(values: Mapping[str, Any], origin: str, above: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Yield the leaves of nested mappings; an empty mapping is a leaf of its own, since naming a table means something."""
    for key, value in values.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value:
            yield from flatten(value, origin, path)
        else:
            yield path, value, origin


@dataclass(frozen=True, slots=True)
class Merged:
    """A tree of values, and the origin of each leaf by its path."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[tuple[str, ...], str] = field(default_factory=dict)

    def origin(self, path: Sequence[str]) -> str:
        """Return the origin of the value at ``path``, by the nearest path that is set; `DEFAULT` if none is."""
        whole = tuple(path)
        for length in range(len(whole), 0, -1):
            if whole[:length] in self.origins:
                return self.origins[whole[:length]]
        below = dict.fromkeys(origin for known, origin in self.origins.items() if known[: len(whole)] == whole)
        return ", ".join(below) or DEFAULT

    def get(self, path: Sequence[str]) -> Any:
        """Return the value at ``path``, None when there is none."""
        value: Any = self.tree
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                return None
            value = value[key]
        return value


def merge(layers: Sequence[Sequence[Leaf]]) -> Merged:
    """Merge layers of leaves; a later layer wins, leaf by leaf, and a table and a plain value replace each other."""
    merged = Merged()
    for leaf in (leaf for layer in layers for leaf in layer):
        path, value, origin = leaf
        table = merged.tree
        for depth, key in enumerate(path[:-1], start=1):
            if not isinstance(table.get(key), dict):
                table[key] = {}
            merged.origins.pop(path[:depth], None)
            table = table[key]
        there = table.get(path[-1])
        if isinstance(value, Mapping) and isinstance(there, dict) and there:
            continue  # an empty table takes nothing from one that is there
        table[path[-1]] = dict(value) if isinstance(value, Mapping) else value
        for known in [known for known in merged.origins if known[: len(path)] == path]:
            del merged.origins[known]
        merged.origins[path] = origin
    return merged


def read_environment(
    environ: Mapping[str, str], keys: Sequence[str], tables: Sequence[str]
) -> tuple[list[Leaf], list[Problem]]:
    """Read the configuration in environment variables.

    ``ONEACCORD_A__B`` is the key ``a.b``. A value that is a JSON list or object is read as one; any other is text, which
    the model of the key turns into its type.

    Parameters
    ----------
    environ
        The environment.
    keys
        The top-level keys that exist, as in ``"timeout_s"``.
    tables
        Those of them that hold other keys.

    Returns
    -------
    list of Leaf
        The values of the variables.
    list of Problem
        The variables that begin with ``ONEACCORD_`` and mean nothing.
    """
    leaves: list[Leaf] = []
    problems: list[Problem] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX):
            continue
        if name == Variable.PLUGINS:
            words = [word.strip() for word in environ[name].split(",") if word.strip()]
            leaves.append((("plugins",), words, name))
        elif name not in RESERVED:
            path = tuple(name.removeprefix(PREFIX).lower().split("__"))
            if path[0] in (keys if len(path) == 1 else tables) and all(path):
                value = _parse(environ[name])
                leaves.extend(flatten(value, name, path) if isinstance(value, dict) and value else [(path, value, name)])
            else:
                problems.append(_unknown_variable(name, keys, tables))
    return leaves, problems


def _parse(text: str) -> Any:
    if text.lstrip().startswith(("[", "{")):
        import json

        try:
            return json.loads(text)
        except (ValueError, RecursionError):  # an IPv6 address in brackets, for one
            return text
    return text


def _unknown_variable(name: str, keys: Sequence[str], tables: Sequence[str]) -> Problem:
    head, *rest = name.removeprefix(PREFIX).split("__")
    known = sorted({*RESERVED, *(PREFIX + key.upper() for key in keys)})
    heads = [table.upper() for table in tables] if rest else [variable.removeprefix(PREFIX) for variable in known]
    close = nearest(head, heads)
    hint = f"did you mean {'__'.join([PREFIX + close, *rest])}?" if close else f"there are {', '.join(known)}"
    # The value is not shown: a misspelled ONEACCORD_SECRET is a secret all the same.
    text = f"environment variable {name}: oneaccord has no variable of that name; {hint}"
    return Problem(text, file=name, key=name.removeprefix(PREFIX).lower().replace("__", "."), value=HIDDEN)


def find_file(environ: Mapping[str, str], directory: Path) -> Path | None:
    """Return the configuration file of this process: ``ONEACCORD_CONFIG``, ``oneaccord.toml``, ``pyproject.toml`` or None.

    A ``pyproject.toml`` counts when it has a table ``[tool.oneaccord]``.

    Raises
    ------
    ConfigError
        ``ONEACCORD_CONFIG`` names a file that is not there, ``pyproject.toml`` cannot be read, or the file that was found in the directory
        is another user's.
    """
    if named := environ.get(Variable.CONFIG):
        path = directory / named
        if not path.is_file():
            raise ConfigError(
                f"the configuration file {str(path)!r}, named by the environment variable ONEACCORD_CONFIG, does not exist",
                file=Variable.CONFIG,
                value=named,
            )
        return path
    own = directory / FILE_NAME
    if own.is_file():
        return _trusted(own, environ)
    project = directory / "pyproject.toml"
    if project.is_file() and "oneaccord" in _read_toml(project).get("tool", {}):
        return _trusted(project, environ)
    return None


def _trusted(path: Path, environ: Mapping[str, str]) -> Path:
    """Return a file that is found but not named, unless another user owns it: it selects code to run, and the secret."""
    if not hasattr(os, "geteuid"):
        return path
    trusted = {0, os.geteuid()}
    if os.geteuid() == 0 and (behind_sudo := environ.get("SUDO_UID", "")).isdecimal():
        trusted.add(int(behind_sudo))
    owner = next((status.st_uid for status in (path.lstat(), path.stat()) if status.st_uid not in trusted), None)
    if owner is not None:
        raise ConfigError(
            f"{str(path)!r} belongs to the user {owner}, but this process to {os.geteuid()}: oneaccord does not read another user's configuration file unless "
            f"it is named, because the file could select code to run. If you trust it, name it: --config {path.name}, ONEACCORD_CONFIG={path.name}, or config= of init(); "
            "otherwise work in another folder",
            file=str(path),
        )
    return path


def read_file(path: Path) -> dict[str, Any]:
    """Return the configuration in a TOML file: all of it, or ``[tool.oneaccord]`` when it is named ``pyproject.toml``.

    Raises
    ------
    ConfigError
        The file is not there, cannot be read, is not TOML (the message names the line), or lacks the table.
    """
    values = _read_toml(path)
    if path.name != "pyproject.toml":
        return values
    table = values.get("tool", {}).get("oneaccord")
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: there is no table [tool.oneaccord] in this file", file=str(path), key="tool.oneaccord")
    return table


def _read_toml(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the configuration file {str(path)!r} does not exist", file=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        where = f"{path}:{found[1]}:{found[2]}" if found else str(path)
        what = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError(f"{where}: this is not valid TOML: {what[:1].lower()}{what[1:]}", file=str(path)) from error
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"the configuration file {str(path)!r} cannot be read: {error}", file=str(path)) from error


def as_toml(value: object) -> str:
    """Return a value as TOML has it; a value that TOML does not know, such as a path, becomes text."""
    match value:
        case Enum():
            return as_toml(value.value)
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case date() | time():  # a datetime is a date
            return value.isoformat()
        case Mapping():
            items = [f"{_key(str(key))} = {as_toml(each)}" for key, each in value.items() if each is not None]
            return f"{{ {', '.join(items)} }}" if items else "{}"
        case list() | tuple() | set() | frozenset():
            return f"[{', '.join(map(as_toml, value))}]"
    import json

    # A string of TOML is one of JSON, save that the character 127 must be escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else as_toml(key)

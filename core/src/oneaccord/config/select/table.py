"""Tables as TOML files: one array of tables for each collective, whose rows are read from the top."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from oneaccord.common.checks import UNREADABLE
from oneaccord.common.units import bytes_text
from oneaccord.config.plugins.installed import did_you_mean
from oneaccord.config.select.rules import MAX_SEGMENTS, Rule
from oneaccord.config.sources import as_toml
from oneaccord.errors import ConfigError
from oneaccord.schedule.steps import Collective

__all__ = ["default_rules", "plugin_rules", "read_table", "write_table"]

_BOUNDS: Final[dict[str, int]] = {
    "min_world": 1,
    "max_world": 1,
    "min_hosts": 1,
    "max_hosts": 1,
    "min_ranks_per_host": 1,
    "min_bytes": 0,
    "max_bytes": 0,
    "segments": 1,
}
"""The keys of a row that hold whole numbers, each with the least that is allowed, in the order in which they are written."""

_FLAGS: Final[tuple[str, ...]] = ("reproducible", "uneven", "power_of_two")

_KEYS: Final[tuple[str, ...]] = ("algorithm", *_FLAGS, *_BOUNDS, "reason")


@functools.cache
def default_rules() -> tuple[Rule, ...]:
    """Return the table that comes with oneaccord."""
    text = Path(__file__).with_name("default.toml").read_text(encoding="utf-8")
    return tuple(_rules(tomllib.loads(text), "the table of oneaccord", None))


def read_table(path: str | os.PathLike[str], below: Iterable[Rule] | None = None) -> tuple[Rule, ...]:
    """Read a table, and put another one below it.

    Parameters
    ----------
    path
        A TOML file; docs/reference/configuration.md describes it. It may leave out any part.
    below
        The other one; by default that which comes with oneaccord, `default_rules`.

    Returns
    -------
    tuple of Rule
        The rows of the file, then those below.

    Raises
    ------
    ConfigError
        The file is not there or is no TOML, or a row has a key or a value that is not allowed. The message names the file, the
        row, the key and the value, and the attributes ``file``, ``key`` and ``value`` hold them.
    """
    name = os.fspath(path)
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the table {name!r} does not exist", file=name) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: this is not valid TOML: {error}", file=name) from None
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"the table {name!r} cannot be read: {error}", file=name) from None
    return (*_rules(tree, name, name), *(default_rules() if below is None else below))


def plugin_rules(reference: str) -> tuple[Rule, ...]:
    """Read the table that a backend brings, and put the table that comes with oneaccord below it.

    Parameters
    ----------
    reference
        ``"package:file"``, as in `BackendSpec.selection`.

    Raises
    ------
    ConfigError
        As `read_table`.
    """
    package, _, name = reference.partition(":")
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # of the package that it would be in
        found = None
    folders = None if found is None else found.submodule_search_locations
    if not folders:
        raise ConfigError(f"the table {reference!r} of a backend: there is no package {package!r}", file=reference)
    return read_table(Path(folders[0], name))


def write_table(rules: Iterable[Rule], heading: Sequence[str] = ()) -> str:
    """Return the text of a table file.

    Parameters
    ----------
    rules
        Its rows.
    heading
        Lines of a comment above them.
    """
    parts = ["".join(f"# {line}".rstrip() + "\n" for line in heading)]
    for rule in rules:
        lines = [f"[[{rule.collective.value}]]", f"algorithm = {as_toml(rule.algorithm)}"]
        lines += [f"{flag} = true" for flag in _FLAGS if getattr(rule, flag)]
        for key in _BOUNDS:
            value = getattr(rule, key)
            if value is not None:
                size = bytes_text(value) if key.endswith("_bytes") else ""
                lines.append(f"{key} = {value}{f'  # {size}' if size.endswith('iB') else ''}")
        lines.append(f"reason = {as_toml(rule.reason)}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(part for part in parts if part)


def _rules(tree: Mapping[str, Any], name: str, file: str | None) -> Iterable[Rule]:
    collectives = {collective.value: collective for collective in Collective}
    for collective_name, rows in tree.items():
        if collective_name not in collectives:
            hint = did_you_mean(collective_name, collectives)
            raise ConfigError(
                f"{name}: there is no collective {collective_name!r}{hint}", file=file, key=collective_name, value=rows
            )
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(
                f"{name}: {collective_name} = {rows!r}: expected rows, each below a line [[{collective_name}]]",
                file=file,
                key=collective_name,
                value=rows,
            )
        for number, row in enumerate(rows, start=1):
            origin = f"{name}: {collective_name}, row {number}"
            yield _rule(collectives[collective_name], row, origin, file)


def _rule(collective: Collective, row: Mapping[str, Any], origin: str, file: str | None) -> Rule:
    def wrong(key: str, value: object, what: str) -> ConfigError:
        return ConfigError(f"{origin}: {what}", file=file, key=f"{collective.value}.{key}", value=value)

    for key, value in row.items():
        if key not in _KEYS:
            raise wrong(key, value, f"{key} = {value!r}: this key is unknown{did_you_mean(key, _KEYS)}")
        if key in _BOUNDS:
            if not isinstance(value, int) or isinstance(value, bool) or value < _BOUNDS[key]:
                raise wrong(key, value, f"{key} = {value!r}: expected a whole number, {_BOUNDS[key]} or more")
        else:
            kind, words = (bool, "true or false") if key in _FLAGS else (str, "a text in quotes")
            if not isinstance(value, kind):
                raise wrong(key, value, f"{key} = {value!r}: expected {words}")
    if "algorithm" not in row:
        raise wrong("algorithm", None, "algorithm is missing: a row names the algorithm that it chooses")
    if row.get("segments", 1) > MAX_SEGMENTS:
        raise wrong("segments", row["segments"], f"segments = {row['segments']}: expected {MAX_SEGMENTS} at most")
    for what in ("bytes", "world", "hosts"):
        low, high = row.get(f"min_{what}"), row.get(f"max_{what}")
        if low is not None and high is not None and low > high:
            raise wrong(f"min_{what}", low, f"min_{what} = {low} is more than max_{what} = {high}: no call fits this row")
    return Rule(collective, **row, origin=origin, file=file)

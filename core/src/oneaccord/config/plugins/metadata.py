"""The entry points of installed distributions, from the files that `importlib.metadata` reads.

To import that takes a rank longer than all of this. It is used if folders may not be all: for a ``sys.path`` with an
archive, and if other code finds distributions, too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Final

__all__ = ["InstalledPlugin", "find_installed"]

_UNKNOWN: Final[str] = "(unknown)"


@dataclass(frozen=True, slots=True)
class InstalledPlugin:
    """The metadata of one entry point.

    Attributes
    ----------
    name
        The entry point's name; for a backend, the backend's.
    distribution
        The distribution that brings it, such as ``"oneaccord-tcp"``.
    version
        That distribution's version.
    value
        The import string of the plugin's module.
    group
        The entry-point group.
    """

    name: str
    distribution: str
    version: str
    value: str
    group: str = "oneaccord"


def find_installed(*groups: str) -> list[InstalledPlugin]:
    """List the entry points of some groups, duplicates included, sorted by name; import none of them."""
    infos = _infos(sys.path)
    found = _of_importlib(groups) if infos is None else [plugin for info in infos for plugin in _of(info, groups)]
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution))


def _infos(path: list[str]) -> list[str] | None:
    """Return the folder of each distribution, of those of one name the first; None if there may be more than folders have."""
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return None
    first: dict[str, str] = {}
    for folder in path:
        if folder.lower().endswith(".egg"):
            return None
        try:
            children = os.listdir(folder or ".")  # noqa: PTH208 - faster
        except NotADirectoryError:
            return None
        except OSError:
            continue
        for child in children:
            stem, _, kind = child.lower().rpartition(".")
            if kind in ("dist-info", "egg-info"):
                first.setdefault(re.sub(r"[-_.]+", "_", stem.partition("-")[0]), f"{folder or '.'}/{child}")
    return list(first.values())


def _text(info: str, name: str) -> str:
    try:
        with open(f"{info}/{name}", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - faster
            return file.read()
    except OSError:
        return ""


def _of(info: str, groups: tuple[str, ...]) -> Iterator[InstalledPlugin]:
    """Yield the entry points of one distribution."""
    header, group = None, ""
    for line in map(str.strip, _text(info, "entry_points.txt").splitlines()):
        if line.startswith("["):
            group = line.strip("[]")
        elif group in groups and "=" in line and not line.startswith("#"):
            header = header or _header(_text(info, "METADATA") or _text(info, "PKG-INFO"))
            name, _, value = line.partition("=")
            told = header.get("name", _UNKNOWN), header.get("version", _UNKNOWN)
            yield InstalledPlugin(name.strip(), *told, value.strip(), group)


def _header(text: str) -> dict[str, str]:
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.lower(): value.strip() for key, _, value in lines}


def _of_importlib(groups: tuple[str, ...]) -> list[InstalledPlugin]:
    from importlib.metadata import entry_points

    return [
        InstalledPlugin(
            name=entry.name,
            distribution=entry.dist.name if entry.dist is not None else _UNKNOWN,
            version=entry.dist.version if entry.dist is not None else _UNKNOWN,
            value=entry.value,
            group=group,
        )
        for group in groups
        for entry in entry_points(group=group)
    ]

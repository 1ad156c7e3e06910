"""Hosts as people name them: ``a:4,b:4``, and files with a line for each."""

from __future__ import annotations

import re
from pathlib import Path

from oneaccord.errors import ConfigError, UsageError

__all__ = ["read_hostfile", "read_hosts"]

_ENTRY = re.compile(r"(?P<name>\[[^\]]+\]|[^\s:,]+)(?::(?P<slots>\d+))?\Z")
_LINE = re.compile(r"(?P<name>\S+?)(?::(?P<after>\d+)|\s+slots\s*=\s*(?P<slots>\d+)(?:\s+max[-_]slots\s*=\s*\d+)?)?\Z")


def read_hosts(text: str) -> list[str]:
    """Return the hosts of a list such as ``a:4,b:4``, each as ``name`` or ``name:slots``.

    Raises
    ------
    UsageError
        It is no such list.
    """
    found = [part.strip() for part in text.split(",")]
    for part in found:
        _check(part, f"--hosts {text}")
    return found


def read_hostfile(path: Path) -> list[str]:
    """Return the hosts of a file, each as ``name`` or ``name:slots``.

    A line holds a host, and its slots as ``host:4`` or ``host slots=4``; ``#`` begins a comment.

    Raises
    ------
    ConfigError
        There is no such file; it names no host; or a line cannot be understood.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the hosts file {path} cannot be read: {error}", file=str(path)) from error
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.match(text)
        if found is None:
            raise ConfigError(
                f"{path}:{number}: {text!r} is no host: write a name, and its slots as host:4 or as host slots=4",
                file=str(path),
            )
        slots = found["after"] or found["slots"]
        hosts.append(f"{found['name']}:{slots}" if slots else found["name"])
        _check(hosts[-1], f"{path}:{number}")
    if not hosts:
        raise ConfigError(f"the hosts file {path} names no host: write one on each line, such as host:4", file=str(path))
    return hosts


def _check(host: str, where: str) -> None:
    found = _ENTRY.match(host)
    if found is None or found["slots"] == "0" or found["name"].startswith("-"):
        raise UsageError(f"{where}: {host!r} is no host: write a name and the number of its ranks, such as node1:4")

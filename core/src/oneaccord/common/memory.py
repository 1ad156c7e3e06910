"""How much memory is left for this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oneaccord.common.control_groups import control_groups, read_text

__all__ = ["memory_left"]

_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the version of control groups: the files of the limit and of what is used, and the part of it that the system gives back when asked."""


def memory_left(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process can still get: of the host, or of its control group if that has fewer; None if the system does not say.

    Parameters
    ----------
    root
        The folder of ``proc`` and ``sys``; for tests.
    """
    host = _table(read_text(root / "proc" / "meminfo").replace(":", ""))
    free = [(host["MemAvailable"] + host.get("SwapFree", 0)) * 1024] if "MemAvailable" in host else []
    return min([*free, *_of_groups(root)], default=None)


def _of_groups(root: Path) -> Iterator[int]:
    for version, folder in control_groups(root, "memory"):
        limit, used, idle = _FILES[version]
        words = [read_text(folder / name).strip() for name in (limit, used)]
        if all(word.isdigit() for word in words):  # and not max
            yield max(0, int(words[0]) - int(words[1]) + _table(read_text(folder / "memory.stat")).get(idle, 0))


def _table(text: str) -> dict[str, int]:
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}

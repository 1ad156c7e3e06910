"""The control groups of this process, which limit its processors and its memory: those of a container, or of a job of a scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["control_groups", "read_text"]


def control_groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield the version and a folder of each group that limits this process, from the innermost to the outermost; a folder need not exist.

    Parameters
    ----------
    root
        The folder of ``proc`` and ``sys``; for tests.
    controller
        What is limited: ``"cpu"`` or ``"memory"``.
    """
    groups = root / "sys" / "fs" / "cgroup"
    for line in read_text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        within = Path(name.lstrip("/"))
        if not controllers:  # version 2
            for folder in (within, *within.parents):
                yield 2, groups / folder
        elif controller in controllers.split(","):
            for folder in (within, *within.parents):
                for mount in dict.fromkeys((controllers, controller)):
                    yield 1, groups / mount / folder


def read_text(path: Path) -> str:
    """Return what a file says; nothing if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""

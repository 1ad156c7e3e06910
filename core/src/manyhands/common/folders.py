"""The folder in which this process works."""

from __future__ import annotations

from pathlib import Path

__all__ = ["here"]


def here() -> Path:
    """Return the working directory; ``Path(".")`` if it has been removed, in which nothing is found."""
    try:
        return Path.cwd()
    except OSError:
        return Path()

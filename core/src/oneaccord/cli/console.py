"""Printing: tables and text that fit the terminal, 80 columns where there is none; JSON for programs."""

from __future__ import annotations

import json
import shutil
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any, Final

from oneaccord.errors import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RANKS", "columns", "print_command", "print_json", "print_table", "print_text"]

_GAP = "  "

RANKS: Final[tuple[str, ...]] = ("-n", "--ranks", "--world")
"""The spellings of the number of ranks: the first is that of our pages, and each of them is somebody's habit."""


def columns() -> int:
    """Return how wide a line may be."""
    return shutil.get_terminal_size((80, 24)).columns


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout as aligned columns; the widest are wrapped where the table is wider than a line may be."""
    table = [[printable(str(cell)) for cell in row] for row in [headers, *rows]]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    # No word is broken: names, paths and numbers are there to be copied.
    least = [max((len(word) for cell in cells for word in cell.split()), default=0) for cells in zip(*table, strict=True)]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > columns():
        wide = [place for place, width in enumerate(widths) if width > least[place]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    for row in table:
        cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [lines[number] if number < len(lines) else "" for lines in cells]
            print(_GAP.join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())


def print_text(text: str, first: str = "", rest: str = "  ") -> None:
    """Print text to stdout, wrapped; ``first`` stands before its first line, and ``rest`` before the others."""
    for line in printable(text).splitlines() or [""]:
        print("\n".join(_wrapped(line, columns(), first, rest)))
        first = rest


def print_command(command: str, first: str) -> None:
    """Print a command to stdout; where it is too long, its lines end so that a shell takes them for one."""
    lines = _wrapped(printable(command), columns() - 2, first, " " * (len(first) + 2))
    print(" \\\n".join(lines))


def _wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    wrapper = TextWrapper(
        max(width, 1), initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text) or [first.rstrip()]


def print_json(value: Any) -> None:
    """Print a value as JSON to stdout; what JSON cannot say, such as a path, becomes text."""
    print(json.dumps(value, indent=2, default=str))

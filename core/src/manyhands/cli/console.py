"""Printing: tables for people on a terminal, plain lines for pipes, JSON for programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["print_json", "print_table"]


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout: drawn by rich on a terminal, else as aligned columns that are never wrapped."""
    if sys.stdout.isatty():
        _print_rich(headers, rows)
        return
    widths = [max(len(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    for row in [headers, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_rich(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text, since brackets in a value are not markup
    Console().print(table)


def print_json(value: Any) -> None:
    """Print a value as JSON to stdout; what JSON cannot say, such as a path, becomes text."""
    print(json.dumps(value, indent=2, default=str))

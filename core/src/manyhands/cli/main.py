"""The entry of the command line; imports typer only once it is called, and says what to type when it is missing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from manyhands.errors import ManyHandsError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        The words after the program's name; by default those of the process.

    Returns
    -------
    int
        The exit code: 2 when a command raised a `ManyHandsError`, whose message is printed to stderr without a traceback.

    Raises
    ------
    SystemExit
        The command ended by itself, well or badly; this is how typer leaves.
    """
    try:
        from manyhands.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "typer":
            raise
        print("error: the command line needs typer; try: pip install 'manyhands-core[cli]'", file=sys.stderr)
        return 2
    try:
        app(args=None if argv is None else list(argv), prog_name="manyhands")
    except ManyHandsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0

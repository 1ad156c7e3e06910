"""The entry of the command line; imports typer only where it is needed, and says what to type when it is missing."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TYPE_CHECKING

from oneaccord.cli.run import run
from oneaccord.common.folders import here
from oneaccord.errors import OneAccordError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_WITH_TYPER = "pip install 'oneaccord-core[cli]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        The words after the program's name; by default those of the process.

    Returns
    -------
    int
        The exit code: 2 when a command raised a `OneAccordError`, whose message is printed to stderr without a traceback; 130 when Ctrl-C
        came before the command had begun.

    Raises
    ------
    SystemExit
        The command ended by itself, well or badly; this is how typer leaves.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    _open_closed_streams()
    if (
        argv is None and here().is_absolute()
    ):  # `plugins` may name a module that lies here, as with `python -m oneaccord`; at the end it hides no other
        sys.path.append(str(here()))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold what the terminal cannot show, as may what a plugin says
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return run(words[1:]) if words[:1] == ["run"] else _with_typer(words)
    except OneAccordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\noneaccord: ended by SIGINT, while it started", file=sys.stderr)
        return 128 + signal.SIGINT


def _open_closed_streams() -> None:
    """Open the null device in the place of standard streams that are closed: else the next file gets the number, and what is printed with it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free, which is this one, and ranks inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - never closed


def _with_typer(words: list[str]) -> int:
    try:
        from oneaccord.cli.app import make_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "typer":
            raise
        from oneaccord.common.installing import install_command

        print(f"error: the command line needs typer; try: {install_command(_WITH_TYPER)}", file=sys.stderr)
        return 2
    make_app(words)(args=words, prog_name="oneaccord")
    return 0

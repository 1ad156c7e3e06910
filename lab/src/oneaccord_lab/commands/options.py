"""What the options of ``bench`` and ``bench overlap`` have in common: the checks of what is given, and whole options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from oneaccord.cli.console import RANKS
from oneaccord.errors import ConfigError, InvalidWorldSizeError, UsageError

__all__ = ["Config", "JsonFile", "Ranks", "Timeout", "at_least", "seconds"]


def at_least(least: int) -> Callable[[typer.CallbackParam, int | None], int | None]:
    """Return the callback of an option that may be a number, no smaller than ``least``."""

    def checked(param: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and value < least:
            raise UsageError(f"{param.opts[0]} {value}: expected at least {least}")
        return value

    return checked


def seconds(param: typer.CallbackParam, value: float | None) -> float | None:
    """Return the seconds that an option was given, if it was; this is its callback.

    Raises
    ------
    UsageError
        They are no time.
    """
    if value is not None and not 0 < value < float("inf"):
        raise UsageError(f"{param.opts[0]} {value:g}: expected a positive number of seconds")
    return value


def _ranks(value: int) -> int:
    if value < 1:
        raise InvalidWorldSizeError(f"-n {value}: a job has at least one rank; give -n 1 or more")
    return value


def _config(value: str | None) -> str | None:
    if value is None:
        return None
    if not Path(value).is_file():
        raise ConfigError(
            f"--config {value}: there is no such file in {Path.cwd()}", file="argument", key="config", value=value
        )
    return str(Path(value).resolve())


Ranks = Annotated[int, typer.Option(*RANKS, callback=_ranks, help="How many ranks to start on this host.")]
Timeout = Annotated[float, typer.Option("--timeout", callback=seconds, help="Seconds after which a call has failed.")]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the rows as JSON; - for standard output.", show_default=False),
]
Config = Annotated[
    str | None, typer.Option(callback=_config, metavar="FILE", help="The configuration file.", show_default=False)
]
"""The path of the configuration file, from the root on; None if none was named."""

"""``oneaccord config``: what is configured and where it came from, and the schema of the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from oneaccord.cli.console import columns, print_json
from oneaccord.config import json_schema, load
from oneaccord.config.plugins import get_plugin_manager
from oneaccord.config.sources import HIDDEN, REQUIRED, as_toml
from oneaccord.errors import printable

__all__ = ["config_app"]

config_app: typer.Typer = typer.Typer(
    no_args_is_help=True, help="Show the configuration, or the schema of its file.", rich_markup_mode=None
)


@config_app.command(short_help="Print each value and where it came from.")
def show(
    config: Annotated[Path | None, typer.Option(help="The file to read, instead of the one that is found.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print each value and where it came from, as a file that oneaccord could read.

    The tables of all installed backends are shown and checked; that of a backend which nobody chose may be incomplete.
    """
    resolved = load(config)
    manager = get_plugin_manager()
    usable = []
    for description in manager.describe_all():
        if description.error is None:
            usable.append(description.plugin.name)
        else:
            print(
                printable(f"note: the table of {description.plugin.name!r} cannot be checked: {description.error}"),
                file=sys.stderr,
            )
    rows = resolved.explain(backends=usable)
    if as_json:
        print_json(
            {
                "file": resolved.file,
                "values": [{"key": key, "value": value, "origin": origin} for key, value, origin in rows],
            }
        )
        return
    print(printable(f"# file: {resolved.file or 'none'}\n"))
    incomplete = tuple(key.rpartition(".")[0] + "." for key, _, origin in rows if origin == REQUIRED)
    lines = [
        (_line(key, value, origin, key.startswith(incomplete)), _shown(origin, resolved.file)) for key, value, origin in rows
    ]
    wide = columns()
    width = max((len(line) for line, origin in lines if len(line) + len(origin) + 4 <= wide), default=0)
    for line, origin in lines:
        if max(width, len(line)) + len(origin) + 4 <= wide:
            print(printable(f"{line.ljust(width)}  # {origin}"))
        else:
            print(printable(f"# {origin}:\n{line}"))


def _line(key: str, value: object, origin: str, incomplete: bool) -> str:
    """Return a line of TOML; what has no value, must not be shown, or belongs to an incomplete table is a comment."""
    if value is None:
        return f"# {key}: {'needed to use it' if origin == REQUIRED else 'none'}"
    if value == HIDDEN:
        return f"# {key}: {HIDDEN}"
    return f"{'# ' * incomplete}{key} = {as_toml(value)}"


def _shown(origin: str, file: Path | None) -> str:
    return file.name if file is not None and origin == str(file) else origin


@config_app.command(short_help="Print the JSON Schema of oneaccord.toml, for editors.")
def schema() -> None:
    """Print the JSON Schema of oneaccord.toml, with a table for each installed backend."""
    print_json(json_schema(get_plugin_manager()))

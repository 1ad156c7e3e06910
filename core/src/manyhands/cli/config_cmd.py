"""``manyhands config``: what is configured and where it came from, and the schema of the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.console import print_json, print_table
from manyhands.config import json_schema, load
from manyhands.plugins import get_plugin_manager

__all__ = ["config_app"]

config_app: typer.Typer = typer.Typer(
    no_args_is_help=True, help="Show the configuration, or the schema of its file.", rich_markup_mode=None
)


@config_app.command(short_help="Print each value and where it came from.")
def show(
    config: Annotated[Path | None, typer.Option(help="The file to read, instead of the one that is found.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print each value and where it came from; the tables of all installed backends are checked too."""
    resolved = load(config)
    manager = get_plugin_manager()
    usable = []
    for description in manager.describe_all():
        if description.error is None:
            usable.append(description.plugin.name)
        else:
            print(f"note: the table of {description.plugin.name!r} cannot be checked: {description.error}", file=sys.stderr)
    rows = resolved.explain(backends=usable)
    if as_json:
        print_json(
            {
                "file": resolved.file,
                "values": [{"key": key, "value": value, "origin": origin} for key, value, origin in rows],
            }
        )
        return
    print(f"file: {resolved.file or 'none'}\n")
    print_table(("key", "value", "origin"), [(key, json.dumps(value, default=str), origin) for key, value, origin in rows])


@config_app.command(short_help="Print the JSON Schema of manyhands.toml, for editors.")
def schema() -> None:
    """Print the JSON Schema of manyhands.toml, with a table for each installed backend."""
    print_json(json_schema(get_plugin_manager()))

"""The commands, put together; this module and its like import typer."""

from __future__ import annotations

from typing import Annotated

import typer

from manyhands._version import __version__
from manyhands.cli.bench import bench
from manyhands.cli.config_cmd import config_app
from manyhands.cli.doctor import doctor
from manyhands.cli.run import CONTEXT_SETTINGS, run
from manyhands.cli.show import show
from manyhands.cli.simulate import simulate

__all__ = ["app"]

app: typer.Typer = typer.Typer(
    name="manyhands",
    help="Many processes of one Python program, and the arrays that they share.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run", context_settings=CONTEXT_SETTINGS)(run)
app.command("doctor")(doctor)
app.command("bench")(bench)
app.command("show")(show)
app.command("simulate")(simulate)
app.add_typer(config_app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"manyhands {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Many processes of one Python program, and the arrays that they share."""

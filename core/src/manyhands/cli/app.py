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
    # Plain text: rich would take the brackets of [backends.tcp] for markup, and break paragraphs where the source does.
    rich_markup_mode=None,
)
# Where the words for the list are left out, the first sentence of the page is taken, and cut off.
app.command("run", short_help="Run a script as several ranks.", context_settings=CONTEXT_SETTINGS)(run)
app.command("doctor", short_help="List the backends: can they run here, and what to type.")(doctor)
app.command("bench", short_help="Measure backends, or algorithms, on ranks of this host.")(bench)
app.command("show", short_help="Draw an algorithm, or say which one a call takes and why.")(show)
app.command("simulate", short_help="Predict times on networks and worlds that need not exist.")(simulate)
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

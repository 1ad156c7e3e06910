"""The commands, put together: core's own, and those of other distributions; this module and its like import typer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Annotated, Any, Final

import typer
import typer.core
import typer.main

from oneaccord._version import __version__
from oneaccord.cli.certs import certs
from oneaccord.cli.config_cmd import config_app
from oneaccord.cli.doctor import doctor
from oneaccord.cli.explain import explain
from oneaccord.common.installing import install_command
from oneaccord.config.plugins.installed import COMMAND_GROUP, InstalledPlugin, find_installed
from oneaccord.config.plugins.loading import import_plugin, named, owner
from oneaccord.errors import PluginError, UsageError

__all__ = ["make_app"]

_OWN: Final[frozenset[str]] = frozenset({"run", "doctor", "config", "explain", "certs"})
_ELSEWHERE: Final = {
    "bench": "lab",
    "check": "conformance",
    "plugin new": "conformance",
    "show": "lab",
    "show pipeline": "parallel",
    "simulate": "lab",
}
"""The extra that brings each command of another distribution, for the words that say how to get it."""


def make_app(words: Sequence[str] = ()) -> typer.Typer:
    """Return the command line for these words; of the commands of other distributions, only the one that is meant is imported.

    All of them are imported where none is meant, as by ``--help``, which says what is wrong with one.

    Raises
    ------
    UsageError
        The words ask for a command of another distribution of oneaccord, which is not installed.
    PluginError
        The command that is meant cannot be imported, is none, or comes from two distributions.
    """
    app = typer.Typer(
        name="oneaccord",
        help="Many processes of one Python program, and the arrays that they share.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        cls=_Commands,
        # Plain text: rich would take the brackets of [backends.tcp] for markup, and break paragraphs where the source does.
        rich_markup_mode=None,
    )
    # Where the words for the list are left out, the first sentence of the page is taken, and cut off.
    app.command("run", short_help="Run a script as several ranks.")(
        lambda: None
    )  # `main` runs it; here is its line of the list
    app.command("doctor", short_help="List the backends: can they run here, and what to type.")(doctor)
    app.command("explain", short_help="Say which rank waits for which, from the files of flight recorders.")(explain)
    app.command("certs", short_help="Make certificates, by which ranks encrypt their connections.")(certs)
    app.add_typer(config_app, name="config")
    epilog = None
    place = next((place for place, word in enumerate(words) if not word.startswith("-")), None)
    asked = None if place is None else words[place]
    if asked not in _OWN:
        found = {_words(name): list(each) for name, each in groupby(find_installed(COMMAND_GROUP), lambda plugin: plugin.name)}
        if place is not None and (longer := " ".join(words[place : place + 2])) in found.keys() | _ELSEWHERE.keys():
            asked = longer
        missing = {name: extra for name, extra in _ELSEWHERE.items() if name not in found}
        if asked in missing:
            extra = missing[asked]
            raise UsageError(f"oneaccord {asked} comes with oneaccord-{extra}, which is not installed; try: {_install(extra)}")
        if missing:
            brought = {extra: ", ".join(name for name in missing if missing[name] == extra) for extra in missing.values()}
            # After \b a line stays as it is, so that the command can be copied.
            lines = "".join(f"\n  {_install(extra)}    # {names}" for extra, names in brought.items())
            epilog = f"More commands can be installed:\n\n\b{lines}"
        for name in [asked] if asked is not None and asked in found else sorted(found.keys() - _OWN):
            try:
                _add(app, name, _command_of(name, found[name]), [longer for longer in found if longer.startswith(f"{name} ")])
            except PluginError as error:
                if name == asked:
                    raise
                app.command(name, short_help=f"(broken) {error}")(lambda: None)
    app.callback(epilog=epilog)(_options)
    return app


class _Commands(typer.core.TyperGroup):
    """Commands whose names are one word or two."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first words name: two of them, if there is such a command."""
        longer = " ".join(args[:2])
        return super().resolve_command(ctx, [longer, *args[2:]] if longer in self.commands else args)


def _words(name: str) -> str:
    """Return what is typed for an entry point's name: ``show pipeline`` for ``show.pipeline``."""
    return name.replace(".", " ")


def _install(extra: str) -> str:
    return install_command(f"pip install 'oneaccord[{extra}]'")


def _add(app: typer.Typer, name: str, command: typer.Typer | Callable[..., object], longer: Sequence[str] = ()) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
        return
    epilog = f"See also: {', '.join(f'oneaccord {each} --help' for each in longer)}" if longer else None
    app.command(name, short_help=(inspect.getdoc(command) or "").partition("\n")[0], epilog=epilog)(command)


def _command_of(name: str, plugins: Sequence[InstalledPlugin]) -> typer.Typer | Callable[..., object]:
    """Import what a distribution brings under a name: a typer app with commands of its own, or a function that is a command."""
    plugin, *others = plugins
    if others:
        several = " and ".join(owner(each) for each in plugins)
        raise PluginError(f"the command {name!r} comes from {several}; uninstall all but one")
    command = import_plugin(plugin)
    if not isinstance(command, typer.Typer) and not inspect.isfunction(command):
        raise PluginError(
            f"{owner(plugin)} is {command!r}; a command must be a function or a typer.Typer, named as 'module:object' in the "
            f"entry point {name!r} of {COMMAND_GROUP}"
        )
    alone = typer.Typer()
    _add(alone, name, command)
    try:
        typer.main.get_command(alone)  # here, so that one that typer refuses breaks no other
    except Exception as error:
        raise PluginError(f"{owner(plugin)} cannot be a command: {named(error)}") from error
    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"oneaccord {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Many processes of one Python program, and the arrays that they share."""

"""Commands that other distributions add to ``oneaccord``, and what it says where one cannot be had."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from oneaccord.cli import app
from oneaccord.cli.main import main
from oneaccord.common.installing import install_command
from oneaccord.config.plugins.installed import COMMAND_GROUP, InstalledPlugin, find_installed

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.plugin_tools import PluginFactory

GREET = '''
def greet(name: str, loud: bool = False) -> None:
    """Say hello to somebody who may be far away from here, in more words than a line of a list of commands has room for.

    Loudly, if need be.
    """
    print(f"hello {name}{'!' * loud}")
'''
FARM = '''
import typer

app = typer.Typer(help="Look after animals.")

@app.command()
def feed(animal: str) -> None:
    """Feed one of them."""
    print(f"{animal} is fed")

@app.command()
def count() -> None:
    """Count them."""
    raise typer.Exit(3)
'''


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line here, and return the exit code and what it wrote to stdout and to stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_function_and_an_app_are_commands(plugins: PluginFactory, call: Callable[..., tuple[int, str, str]]) -> None:
    plugins("greet", GREET, group=COMMAND_GROUP, thing="greet")
    plugins("farm", FARM, group=COMMAND_GROUP, thing="app")

    assert call("greet", "Ada", "--loud") == (0, "hello Ada!\n", "")
    assert call("farm", "feed", "the goat") == (0, "the goat is fed\n", "")
    assert call("farm", "count")[0] == 3
    listed = " ".join(call("--help")[1].split())
    assert "Look after animals." in listed
    assert "in more words than a line of a list of commands has room for." in listed
    assert "Loudly" not in listed


def test_a_dot_in_the_name_of_an_entry_point_makes_a_command_of_two_words(
    plugins: PluginFactory, call: Callable[..., tuple[int, str, str]]
) -> None:
    greet = plugins("greet", GREET, group=COMMAND_GROUP, thing="greet")
    plugins("greet.all", GREET.replace("hello", "good day,"), group=COMMAND_GROUP, thing="greet")

    assert call("greet", "all", "Ada") == (0, "good day, Ada\n", "")
    assert greet not in sys.modules
    assert call("greet", "Ada") == (0, "hello Ada\n", "")
    assert "See also: oneaccord greet all --help" in call("greet", "--help")[1]
    assert "Usage: oneaccord greet all " in call("greet", "all", "--help")[1]
    assert "  greet all " in call("--help")[1]


def test_only_the_command_that_is_asked_for_is_imported(
    plugins: PluginFactory, call: Callable[..., tuple[int, str, str]]
) -> None:
    greet = plugins("greet", GREET, group=COMMAND_GROUP, thing="greet")
    farm = plugins("farm", FARM, group=COMMAND_GROUP, thing="app")

    def imported() -> tuple[bool, bool]:
        return greet in sys.modules, farm in sys.modules

    call("doctor", "--help")
    call("run", "--help")
    assert imported() == (False, False)
    call("greet", "Ada")
    assert imported() == (True, False)
    call("--help")
    assert imported() == (True, True)


def test_a_command_that_is_broken_names_its_distribution_and_breaks_no_other(
    plugins: PluginFactory, call: Callable[..., tuple[int, str, str]]
) -> None:
    plugins("greet", GREET, group=COMMAND_GROUP, thing="greet")
    module = plugins("farm", "import no_such_animal", distribution="dist-farm", group=COMMAND_GROUP, thing="app")
    wrong = plugins("zoo", "app = 3", group=COMMAND_GROUP, thing="app")

    odd = plugins("odd", "def odd(what: 'Nowhere') -> None: ...", group=COMMAND_GROUP, thing="odd")

    reason = "cannot be imported: ModuleNotFoundError: No module named 'no_such_animal'"
    said = f"the plugin '{module}:app' of dist-farm 1.0 {reason}"
    assert call("farm") == (2, "", f"error: {said}\n")
    code, out, err = call("zoo")
    assert (code, out) == (2, "")
    assert err.startswith(
        f"error: the plugin '{wrong}:app' of dist-zoo 1.0 is 3; a command must be a function or a typer.Typer"
    )
    code, out, err = call("odd")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: the plugin '{odd}:odd' of dist-odd 1.0 cannot be a command: ")
    assert call("greet", "Ada") == (0, "hello Ada\n", "")
    code, page, _ = call("--help")
    assert code == 0
    for words in ("run", "doctor", "config", "greet", f"(broken) {said}"):
        assert words in " ".join(page.split())


def test_two_distributions_with_one_command_are_both_named(
    plugins: PluginFactory, call: Callable[..., tuple[int, str, str]]
) -> None:
    first = plugins("greet", GREET, distribution="dist-a", group=COMMAND_GROUP, thing="greet")
    second = plugins("greet", GREET, distribution="dist-b", group=COMMAND_GROUP, thing="greet")

    code, out, err = call("greet", "Ada")

    several = f"the plugin '{first}:greet' of dist-a 1.0 and the plugin '{second}:greet' of dist-b 1.0"
    assert (code, out) == (2, "")
    assert err == f"error: the command 'greet' comes from {several}; uninstall all but one\n"


def test_the_commands_of_core_cannot_be_replaced(plugins: PluginFactory, call: Callable[..., tuple[int, str, str]]) -> None:
    module = plugins("doctor", GREET, group=COMMAND_GROUP, thing="greet")

    assert "List every installed backend" in call("doctor", "--help")[1]
    assert "Say hello" not in call("--help")[1]
    assert module not in sys.modules


def test_a_command_that_nobody_has_is_a_mistake_that_lists_what_is_near(
    plugins: PluginFactory, call: Callable[..., tuple[int, str, str]]
) -> None:
    plugins("greet", GREET, group=COMMAND_GROUP, thing="greet")

    code, out, err = call("gret")

    assert (code, out) == (2, "")
    assert "No such command 'gret'" in err


ELSEWHERE = {
    "bench": "lab",
    "show": "lab",
    "simulate": "lab",
    "check": "conformance",
    "plugin new": "conformance",
    "show pipeline": "parallel",
}


@pytest.fixture
def _core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def others(group: str) -> list[InstalledPlugin]:
        return [
            each for each in find_installed(group) if each.distribution.removeprefix("oneaccord-") not in ELSEWHERE.values()
        ]

    monkeypatch.setattr(app, "find_installed", others)


@pytest.mark.usefixtures("_core_alone")
def test_with_core_alone_the_other_commands_say_what_to_install(call: Callable[..., tuple[int, str, str]]) -> None:
    for name, extra in ELSEWHERE.items():
        command = install_command(f"pip install 'oneaccord[{extra}]'")
        code, out, err = call(*name.split(), "all_reduce", "--whatever")
        assert (code, out) == (2, "")
        assert err == f"error: oneaccord {name} comes with oneaccord-{extra}, which is not installed; try: {command}\n"


@pytest.mark.usefixtures("_core_alone")
def test_help_with_core_alone_lists_what_is_there_and_tells_of_what_is_not(
    plugins: PluginFactory, call: Callable[..., tuple[int, str, str]]
) -> None:
    plugins("greet", GREET, group=COMMAND_GROUP, thing="greet")

    code, page, err = call("--help")

    assert (code, err) == (0, "")
    listed, _, rest = page.partition("\n\n  More commands")
    assert "greet" in listed
    assert "simulate" not in listed
    brought = {"lab": "bench, show, simulate", "conformance": "check, plugin new", "parallel": "show pipeline"}
    commands = {install_command(f"pip install 'oneaccord[{extra}]'"): names for extra, names in brought.items()}
    assert rest == " can be installed:\n\n" + "".join(f"    {command}    # {names}\n" for command, names in commands.items())

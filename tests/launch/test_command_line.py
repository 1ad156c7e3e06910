"""The command line with the commands of all distributions: its pages of help, and its errors."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from oneaccord.cli.app import make_app
from oneaccord.cli.main import main


def _commands() -> dict[str, Any]:
    """Every command by its words, groups included."""
    found: dict[str, Any] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), get_command(make_app()))]
    for words, command in waiting:
        found[" ".join(words)] = command
        waiting.extend(((*words, name), each) for name, each in getattr(command, "commands", {}).items())
    return found


@pytest.mark.parametrize("words", _commands())
def test_every_help_page_says_all_that_is_written_within_80_columns(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = _commands()[words]
    listed = [each.short_help or each.help for each in getattr(command, "commands", {}).values()]

    with pytest.raises(SystemExit):
        main([*words.split(), "--help"])

    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    if words == "run":  # it has no need of typer
        assert "the table [backends.simulated] of the configuration" in " ".join(page.split())
        return
    for text in [command.help, *(parameter.help for parameter in command.params), *listed]:
        assert "".join((text or "").split()) in "".join(page.split())


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--config", "[bold]a[/bold].toml", "script.py"],
        ["run", "[/red].py"],
        ["run", "--[red]", "script.py"],
        ["bench", "[red]all_reduce"],
        ["show", "[/bold]"],
        ["simulate", "all_reduce", "--ranks", "2", "--network", "[i]net[/i]"],
        ["config", "show", "--config", "[b]:smile:.toml"],
        ["[link]"],
    ],
)
def test_what_was_given_stands_in_the_error_as_it_was_given(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given = next(word for word in words if "[" in word)

    with contextlib.suppress(SystemExit):
        main(words)

    assert given in capsys.readouterr().err


def test_a_module_that_plugins_names_may_lie_where_a_command_is_typed(tmp_path: Path) -> None:
    (tmp_path / "oneaccord.toml").write_text('plugins = ["of_mine"]')
    (tmp_path / "of_mine.py").touch()
    installed = Path(sys.executable).with_name("oneaccord")

    done = subprocess.run([installed, "config", "show"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert "of_mine" in done.stdout

"""The command line, run as users run it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.main import get_command

from manyhands.cli.app import app
from manyhands.cli.console import print_table
from manyhands.cli.main import main
from manyhands.plugins import EXTENSION_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

    from conftest import PluginFactory

    Run = Callable[..., CompletedProcess[str]]

# The plugins of the environment stay out of these tests.
ONLY = {"MANYHANDS_NO_AUTOLOAD": "1"}


@pytest.fixture
def manyhands(run_python: Run) -> Run:
    """``python -m manyhands``, with the backends that are named in MANYHANDS_PLUGINS alone."""

    def run(*args: str, plugins: str = "alpha", **variables: str) -> CompletedProcess[str]:
        return run_python("-m", "manyhands", *args, MANYHANDS_PLUGINS=plugins, **ONLY, **variables)

    return run


def test_doctor_tells_programs_what_is_there(plugins: PluginFactory, manyhands: Run, tmp_path: Path) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1")
    plugins.backend("beta", "factory='os:getcwd', probe=lambda: 'no GPU here', install='pip install it', auto_priority=2")
    plugins("broken", "raise RuntimeError('oh')", distribution="dist-three")
    plugins("tracer", "raise RuntimeError('ah')", group=EXTENSION_GROUP)
    (tmp_path / "manyhands.toml").write_text("backend = 'alpha'")

    result = manyhands("doctor", "--json", plugins="alpha,beta,broken")

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    alpha, beta, broken = report["backends"]
    assert alpha == {
        "name": "alpha",
        "distribution": "dist-alpha",
        "version": "1.0",
        "available": True,
        "reason": None,
        "install": "",
        "summary": "a backend for tests",
    }
    assert (beta["available"], beta["reason"], beta["install"]) == (False, "no GPU here", "pip install it")
    assert (broken["name"], broken["distribution"], broken["available"]) == ("broken", "dist-three", False)
    assert "RuntimeError: oh" in broken["reason"]
    assert report["auto"]["backend"] == "alpha"
    assert [each["name"] for each in report["auto"]["passed_over"]] == ["beta", "broken"]
    assert report["auto"]["passed_over"][0]["reason"] == "no GPU here"
    assert report["config"] == {"file": str(tmp_path / "manyhands.toml"), "error": None}
    assert set(report["versions"]) == {"manyhands-core", "python", "numpy"}
    assert report["extensions"] == []


def test_doctor_tells_people_what_to_type(plugins: PluginFactory, manyhands: Run, tmp_path: Path) -> None:
    long = "a-backend-whose-name-is-much-longer-than-any-terminal-would-like-it-to-be-without-wrapping-it-somewhere"
    plugins.backend("alpha")
    plugins.backend("beta", "factory='os:getcwd', probe=lambda: 'no GPU here', install='pip install it'")
    plugins.backend(long)
    plugins("tracer", "raise RuntimeError('ah')", group=EXTENSION_GROUP)
    (tmp_path / "manyhands.toml").write_text("backend = 'alhpa'")

    result = manyhands("doctor", plugins=f"alpha,beta,{long}")

    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert f"config file: {tmp_path}/manyhands.toml" in lines
    assert any(line.startswith("config error:") and "did you mean 'alpha'" in line for line in lines)
    assert any(line.split()[:4] == ["alpha", "dist-alpha", "1.0", "yes"] for line in lines)
    assert any(line.split()[0] == long for line in lines if line.strip())
    assert lines[lines.index("beta cannot run: no GPU here") + 1] == "  try: pip install it"
    assert "auto takes no backend" in lines


DIAGNOSED = """
from manyhands.backend import BackendSpec
from manyhands.hookspecs import hookimpl

@hookimpl
def manyhands_register_backends():
    return BackendSpec(name={name!r}, summary="a backend for tests", factory="os:getcwd", diagnose={diagnose})

def found():
    return [("driver", "13.0"), ("GPUs", 2)]

def broken():
    raise RuntimeError("the driver is upset")
"""


def test_doctor_tells_what_backends_find_out_themselves(plugins: PluginFactory, manyhands: Run) -> None:
    plugins("alpha", DIAGNOSED.format(name="alpha", diagnose="__name__ + ':found'"))
    plugins("beta", DIAGNOSED.format(name="beta", diagnose="__name__ + ':broken'"))
    plugins("gamma", DIAGNOSED.format(name="gamma", diagnose="'no_such_module:found'"))
    plugins("delta", DIAGNOSED.format(name="delta", diagnose="'found'"))
    plugins.backend("silent")
    names = "alpha,beta,gamma,delta,silent"

    as_json, as_text = manyhands("doctor", "--json", plugins=names), manyhands("doctor", plugins=names)

    assert (as_json.returncode, as_text.returncode) == (0, 0), as_json.stderr + as_text.stderr
    diagnoses = json.loads(as_json.stdout)["diagnoses"]
    assert list(diagnoses) == ["alpha", "beta", "delta", "gamma"]
    assert diagnoses["alpha"] == [{"what": "driver", "value": "13.0"}, {"what": "GPUs", "value": "2"}]
    assert diagnoses["beta"] == [{"what": "diagnosis", "value": "failed: RuntimeError: the driver is upset"}]
    assert "No module named 'no_such_module'" in diagnoses["gamma"][0]["value"]
    assert "it must have the form 'module:function'" in diagnoses["delta"][0]["value"]
    lines = as_text.stdout.splitlines()
    start = lines.index("alpha:")
    assert lines[start : start + 6] == [
        "alpha:",
        "  driver  13.0",
        "  GPUs    2",
        "",
        "beta:",
        "  diagnosis  failed: RuntimeError: the driver is upset",
    ]
    assert "silent:" not in lines


def test_config_show_prints_each_value_and_its_origin(plugins: PluginFactory, manyhands: Run, tmp_path: Path) -> None:
    plugins.backend("alpha")
    plugins("broken", "raise RuntimeError('oh')")
    file = tmp_path / "other.toml"
    file.write_text("timeout_s = 5\n[backends.alpha]\nmode = 'safe'\ntoken = 'hunter2'")
    variables = {"plugins": "alpha,broken", "MANYHANDS_BACKEND": "alpha", "MANYHANDS_SECRET": "hunter3"}

    as_json = manyhands("config", "show", "--config", str(file), "--json", **variables)
    as_text = manyhands("config", "show", "--config", str(file), **variables)

    values = {each["key"]: (each["value"], each["origin"]) for each in json.loads(as_json.stdout)["values"]}
    assert values["timeout_s"] == (5.0, str(file))
    assert values["backend"] == ("alpha", "MANYHANDS_BACKEND")
    assert values["backends.alpha.interface"] == ("lo", "default")
    assert values["backends.alpha.mode"] == ("safe", str(file))
    assert values["backends.alpha.token"] == ("(not shown)", str(file))
    assert any(line.split() == ["backends.alpha.mode", '"safe"', str(file)] for line in as_text.stdout.splitlines())
    assert "hunter" not in as_json.stdout + as_text.stdout
    assert "'broken' cannot be checked" in as_text.stderr
    assert "RuntimeError: oh" in as_text.stderr


def test_config_show_checks_the_tables_of_all_backends(plugins: PluginFactory, manyhands: Run, tmp_path: Path) -> None:
    plugins.backend("alpha")
    (tmp_path / "manyhands.toml").write_text("[backends.alpha]\nmode = 'sage'")

    result = manyhands("config", "show")

    assert result.returncode == 2
    assert result.stderr == (
        f"error: {tmp_path}/manyhands.toml: backends.alpha.mode = 'sage': it should be 'fast' or 'safe'; did you mean 'safe'?\n"
    )


def test_config_schema_is_json(plugins: PluginFactory, manyhands: Run) -> None:
    plugins.backend("alpha")

    schema = json.loads(manyhands("config", "schema").stdout)

    assert schema["properties"]["backends"]["properties"]["alpha"]["properties"]["mode"]["enum"] == ["fast", "safe"]


def test_version_and_help(manyhands: Run) -> None:
    version, usage = manyhands("--version", plugins=""), manyhands("--help", plugins="")

    assert (version.returncode, version.stdout.split()[0]) == (0, "manyhands")
    for command in ("run", "doctor", "config"):
        assert command in usage.stdout


def test_without_typer_it_says_what_to_install(run_python: Run) -> None:
    program = "import sys; sys.modules['typer'] = None; from manyhands.cli.main import main; sys.exit(main([]))"

    result = run_python("-c", program)

    assert result.returncode == 2
    assert result.stderr == "error: the command line needs typer; try: pip install 'manyhands-core[cli]'\n"


def test_a_table_on_a_terminal_takes_brackets_literally(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")

    print_table(("name", "value"), [("[bold]", "[/bold]")])

    assert "[bold]" in capsys.readouterr().out


def _commands() -> dict[str, Any]:
    """Every command by its words, groups included."""
    found: dict[str, Any] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), get_command(app))]
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
    for text in [command.help, *(parameter.help for parameter in command.params), *listed]:
        assert "".join((text or "").split()) in "".join(page.split())
    if words == "run":
        assert "the table [backends.simulated] of the configuration" in " ".join(page.split())


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

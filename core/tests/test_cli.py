"""The command line, run as users run it."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest

from oneaccord.cli.console import print_command, print_table, print_text
from oneaccord.common.installing import install_command
from oneaccord.config.plugins import EXTENSION_GROUP
from oneaccord.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

    from support.plugin_tools import PluginFactory

    Run = Callable[..., CompletedProcess[str]]

# The plugins of the environment stay out of these tests.
ONLY = {"ONEACCORD_NO_AUTOLOAD": "1"}


@pytest.fixture
def oneaccord(run_python: Run) -> Run:
    """``python -m oneaccord``, with the backends that are named in ONEACCORD_PLUGINS alone."""

    def run(*args: str, plugins: str = "alpha", **variables: str) -> CompletedProcess[str]:
        return run_python("-m", "oneaccord", *args, ONEACCORD_PLUGINS=plugins, **ONLY, **variables)

    return run


def test_doctor_tells_programs_what_is_there(plugins: PluginFactory, oneaccord: Run, tmp_path: Path) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1")
    plugins.backend("beta", "factory='os:getcwd', probe=lambda: 'no GPU here', install='pip install it', auto_priority=2")
    plugins("broken", "raise RuntimeError('oh')", distribution="dist-three")
    plugins("tracer", "raise RuntimeError('ah')", group=EXTENSION_GROUP)
    (tmp_path / "oneaccord.toml").write_text("backend = 'alpha'")

    result = oneaccord("doctor", "--json", plugins="alpha,beta,broken")

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
    file = str(tmp_path / "oneaccord.toml")
    assert report["config"] == {"file": file, "error": None, "backend": "alpha", "origin": file}
    assert set(report["versions"]) == {"oneaccord-core", "python", "numpy"}
    assert report["extensions"] == []


def test_doctor_tells_people_what_to_type(plugins: PluginFactory, oneaccord: Run, tmp_path: Path) -> None:
    long = "a-backend-whose-name-is-much-longer-than-any-terminal-would-like-it-to-be-without-wrapping-it-somewhere"
    plugins.backend("alpha")
    plugins.backend("beta", "factory='os:getcwd', probe=lambda: 'no GPU here', install='pip install it'")
    plugins.backend(long)
    plugins("tracer", "raise RuntimeError('ah')", group=EXTENSION_GROUP)
    (tmp_path / "oneaccord.toml").write_text("backend = 'alhpa'")

    result = oneaccord("doctor", plugins=f"alpha,beta,{long}")

    assert result.returncode == 1, result.stderr
    lines = result.stdout.splitlines()
    assert f"config file: {tmp_path}/oneaccord.toml" in lines
    assert "config error:" in result.stdout
    assert "did you mean 'alpha'?" in " ".join(result.stdout.split())
    assert any(line.split()[:3] == ["alpha", "1.0", "yes"] for line in lines)
    assert any(line.split()[0] == long for line in lines if line.strip())
    assert lines[lines.index("beta cannot run: no GPU here") + 1] == "  try: pip install it"
    assert "auto takes" not in result.stdout


def test_doctor_fits_80_columns_and_breaks_a_command_as_a_shell_does(plugins: PluginFactory, oneaccord: Run) -> None:
    command = "pip install " + " ".join(f"'package-{number}>={number}'" for number in range(20))
    reason = "the reason is long and has [brackets] " * 5
    plugins.backend("alpha", "factory='os:getcwd', probe=lambda: " + repr(reason) + ", install=" + repr(command))
    plugins(
        "beta", DIAGNOSED.format(name="beta", diagnose="__name__ + ':broken'"), distribution="a-distribution-of-a-long-name"
    )

    result = oneaccord("doctor", plugins="alpha,beta")

    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert reason.strip() in " ".join(result.stdout.split())
    shown = result.stdout.partition("try: ")[2].partition("\n\n")[0]
    assert shlex.split(shown.replace("\\\n", " ")) == shlex.split(command)


def test_doctor_tells_what_the_configuration_takes(plugins: PluginFactory, oneaccord: Run, tmp_path: Path) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1")
    plugins.backend("beta")
    plugins.backend("gamma", "factory='os:getcwd', probe=lambda: 'no GPU here'")
    (tmp_path / "oneaccord.toml").write_text("backend = 'beta'")
    names = "alpha,beta,gamma"

    fine, broken = (
        oneaccord("doctor", plugins=names),
        oneaccord("doctor", plugins=names, ONEACCORD_BACKEND="gamma", ONEACCORD_BACKENDS__ALPHA__MODE="sage"),
    )

    assert fine.returncode == 0
    assert " ".join(fine.stdout.split()).endswith(f"programs take beta, as {tmp_path}/oneaccord.toml says")
    assert "auto takes" not in fine.stdout
    assert broken.returncode == 1
    told = " ".join(broken.stdout.split())
    assert "config error: environment variable ONEACCORD_BACKENDS__ALPHA__MODE: backends.alpha.mode = 'sage': it should" in told
    assert "config error: the backend 'gamma' of dist-gamma 1.0 cannot run here: no GPU here; see: oneaccord doctor" in told


def test_doctor_goes_on_where_a_plugin_that_is_asked_for_is_broken(plugins: PluginFactory, oneaccord: Run) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1")
    plugins("tracer", "raise RuntimeError('ah')", group=EXTENSION_GROUP)
    variables = {"plugins": "alpha,no_such_module,tracer", "ONEACCORD_BAKEND": "alpha", "ONEACCORD_BACKEND": "alpha"}

    doctor, program, show = (
        oneaccord("doctor", **variables),
        oneaccord("doctor", "--json", **variables),
        oneaccord("config", "show", **variables),
    )

    assert (doctor.returncode, program.returncode, show.returncode) == (1, 1, 2), doctor.stderr
    told = " ".join(doctor.stdout.split())
    for error in (
        "environment variable ONEACCORD_BAKEND: oneaccord has no variable of that name; did you mean ONEACCORD_BACKEND?",
        "the plugin 'no_such_module' of this process cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
        f"the plugin '{plugins.modules['tracer']}' of dist-tracer 1.0 cannot be imported: RuntimeError: ah",
    ):
        assert told.count(f"config error: {error}") == 1
    assert any(line.split()[:3] == ["alpha", "1.0", "yes"] for line in doctor.stdout.splitlines())
    assert [each["name"] for each in json.loads(program.stdout)["backends"]] == ["alpha"]
    # An error of the environment does not hide behind that of the plugin.
    assert "did you mean ONEACCORD_BACKEND?" in show.stderr
    assert "No module named 'no_such_module'" in show.stderr


def test_doctor_finds_an_algorithm_that_is_not_there(plugins: PluginFactory, oneaccord: Run) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1")

    result = oneaccord("doctor", plugins="alpha", ONEACCORD_ALGORITHMS__ALL_REDUCE="rign")

    assert result.returncode == 1
    told = " ".join(result.stdout.split())
    assert "config error: ONEACCORD_ALGORITHMS__ALL_REDUCE: algorithms.all_reduce = 'rign'" in told
    assert told.endswith("first repair the configuration, as said above")


def test_doctor_says_once_what_is_wrong_with_an_extension(plugins: PluginFactory, run_python: Run) -> None:
    plugins("tracer", "raise RuntimeError('[red]ah[/red]')", group=EXTENSION_GROUP)

    result = run_python("-m", "oneaccord", "doctor")

    assert (result.stdout + result.stderr).count("RuntimeError: [red]ah[/red]") == 1


def test_a_path_that_no_terminal_can_show_is_no_error(oneaccord: Run, tmp_path: Path) -> None:
    name = "\udcff[b].toml"  # a byte that is no UTF-8
    (tmp_path / name).write_text("timeout_s = 5")

    for words in (["doctor"], ["config", "show"]):
        result = oneaccord(*words, plugins="", ONEACCORD_CONFIG=name)
        assert (result.returncode, "/\\udcff[b].toml" in result.stdout) == (0, True), result.stderr


def test_doctor_names_a_name_that_two_plugins_have_once(plugins: PluginFactory, oneaccord: Run) -> None:
    plugins.backend("alpha", distribution="dist-one")
    plugins.backend("alpha", distribution="dist-two")

    result, program = oneaccord("doctor"), oneaccord("doctor", "--json")
    chosen = oneaccord("doctor", ONEACCORD_BACKEND="alpha")

    assert sum(line.split()[:1] == ["alpha"] and line.split()[2:3] == ["no"] for line in result.stdout.splitlines()) == 1
    assert chosen.returncode == 1
    for page in (result, chosen):
        assert " ".join(page.stdout.split()).count("is provided more than once, by dist-one 1.0") == 1
    assert [each["name"] for each in json.loads(program.stdout)["backends"]] == ["alpha"]


DIAGNOSED = """
from oneaccord.contract.backend import BackendSpec
from oneaccord.contract.hookspecs import hookimpl

@hookimpl
def oneaccord_register_backends():
    return BackendSpec(name={name!r}, summary="a backend for tests", factory="os:getcwd", diagnose={diagnose})

def found():
    return [("driver", "13.0"), ("GPUs", 2)]

def broken():
    raise RuntimeError("the driver is upset")
"""


def test_doctor_tells_what_backends_find_out_themselves(plugins: PluginFactory, oneaccord: Run) -> None:
    plugins("alpha", DIAGNOSED.format(name="alpha", diagnose="__name__ + ':found'"))
    plugins("beta", DIAGNOSED.format(name="beta", diagnose="__name__ + ':broken'"))
    plugins("gamma", DIAGNOSED.format(name="gamma", diagnose="'no_such_module:found'"))
    plugins.backend("silent")
    names = "alpha,beta,gamma,silent"

    as_json, as_text = oneaccord("doctor", "--json", plugins=names), oneaccord("doctor", plugins=names)

    assert (as_json.returncode, as_text.returncode) == (0, 0), as_json.stderr + as_text.stderr
    diagnoses = json.loads(as_json.stdout)["diagnoses"]
    assert list(diagnoses) == ["alpha", "beta", "gamma"]
    assert diagnoses["alpha"] == [{"what": "driver", "value": "13.0"}, {"what": "GPUs", "value": "2"}]
    assert diagnoses["beta"] == [{"what": "diagnosis", "value": "failed: RuntimeError: the driver is upset"}]
    assert "No module named 'no_such_module'" in diagnoses["gamma"][0]["value"]
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


def test_config_show_prints_each_value_and_its_origin(plugins: PluginFactory, oneaccord: Run, tmp_path: Path) -> None:
    plugins.backend("alpha")
    plugins("broken", "raise RuntimeError('oh')")
    file = tmp_path / "other.toml"
    file.write_text("timeout_s = 5\n[backends.alpha]\nmode = 'safe'\ntoken = 'hunter2'")
    variables = {"plugins": "alpha,broken", "ONEACCORD_BACKEND": "alpha", "ONEACCORD_SECRET": "hunter3"}

    as_json = oneaccord("config", "show", "--config", str(file), "--json", **variables)
    as_text = oneaccord("config", "show", "--config", str(file), **variables)

    values = {each["key"]: (each["value"], each["origin"]) for each in json.loads(as_json.stdout)["values"]}
    assert values["timeout_s"] == (5.0, str(file))
    assert values["backend"] == ("alpha", "ONEACCORD_BACKEND")
    assert values["backends.alpha.interface"] == ("lo", "default")
    assert values["backends.alpha.mode"] == ("safe", str(file))
    assert values["backends.alpha.token"] == ("(not shown)", str(file))
    assert as_text.stdout.startswith(f"# file: {file}\n")
    lines = [" ".join(line.split()) for line in as_text.stdout.splitlines()]
    assert 'backends.alpha.mode = "safe" # other.toml' in lines
    assert 'backends.alpha.interface = "lo" # default' in lines
    assert "# backends.alpha.token: (not shown) # other.toml" in lines
    assert 'backend = "alpha" # ONEACCORD_BACKEND' in lines
    assert "# ranks_per_host: none # default" in lines
    assert "hunter" not in as_json.stdout + as_text.stdout
    assert "'broken' cannot be checked" in as_text.stderr
    assert "RuntimeError: oh" in as_text.stderr


NEEDY = """
from oneaccord.api import BackendConfig
from oneaccord.contract.backend import BackendSpec
from oneaccord.contract.hookspecs import hookimpl
from pydantic import Field, model_validator

class Config(BackendConfig):
    url: str = Field(description="Where it is.")
    path: Any = Path("x y")
    tries: int = 3

    @model_validator(mode="after")
    def check(self):
        {check}
        return self

@hookimpl
def oneaccord_register_backends():
    return BackendSpec(name={name!r}, summary="needs", config=Config, factory="os:getcwd", auto_priority=9)
"""
NEEDY = "from pathlib import Path\nfrom typing import Any\n" + NEEDY


def test_a_backend_that_nobody_chose_may_lack_what_it_needs(
    plugins: PluginFactory, oneaccord: Run, run_python: Run, tmp_path: Path
) -> None:
    plugins.backend("alpha", "factory='os:getcwd', auto_priority=1")
    plugins("needy", NEEDY.format(name="needy", check="pass"))
    plugins("upset", NEEDY.replace("url: str = Field(", "url: str = Field(default='x', ").format(name="upset", check="1 / 0"))
    odd = NEEDY.replace("tries: int = 3", "tries: Callable[[], int] = len").replace("import Any", "import Any, Callable")
    plugins("odd", odd.format(name="odd", check="pass"))
    names = {"plugins": "alpha,needy,odd,upset"}
    program = "import oneaccord as oa\nwith oa.init() as group: print(group.backend_name)"

    shown, doctor, schema = (
        oneaccord("config", "show", **names),
        oneaccord("doctor", "--json", **names),
        oneaccord("config", "schema", **names),
    )
    alone = run_python("-c", program, ONEACCORD_PLUGINS=names["plugins"], **ONLY)

    assert (shown.returncode, shown.stderr) == (0, "")
    assert max(map(len, shown.stdout.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "# backends.needy.url: needed to use it # required" in lines
    assert '# backends.needy.path = "x y" # default' in lines
    assert "backends.upset.tries = 3 # default" in lines
    # Neither `auto` nor a program is led astray by it.
    report = json.loads(doctor.stdout)
    assert (doctor.returncode, report["auto"]["backend"]) == (0, "alpha")
    assert "backends.needy.url is missing" in report["auto"]["passed_over"][0]["reason"]
    assert (alone.returncode, alone.stdout.strip()) == (0, "alpha"), alone.stderr
    assert set(json.loads(schema.stdout)["properties"]["backends"]["properties"]) == {"alpha", "needy", "odd", "upset"}

    for variables in ({"ONEACCORD_BACKEND": "needy"}, {"ONEACCORD_BACKENDS__NEEDY__TRIES": "2"}):
        chosen = oneaccord("config", "show", **names, **variables, ONEACCORD_BACKENDS__ALPHA__MODE="sage")
        assert chosen.returncode == 2
        assert "backends.needy.url is missing, and it has no default. It says: Where it is." in chosen.stderr
        assert "backends.alpha.mode = 'sage'" in chosen.stderr, "all errors are told, not the first alone"


def test_what_config_show_prints_is_a_file_with_the_same_values(plugins: PluginFactory, oneaccord: Run, tmp_path: Path) -> None:
    plugins.backend("alpha")
    plugins("needy", NEEDY.format(name="needy", check="pass"))
    variables = {
        "plugins": "alpha,needy",
        "ONEACCORD_BACKENDS__ALPHA__INTERFACE": 'a "name" with \\ and \x7f and é, too long for a line of eighty columns',
    }

    first = oneaccord("config", "show", **variables)
    (tmp_path / "copy.toml").write_text(first.stdout, encoding="utf-8")
    again, before = (
        oneaccord("config", "show", "--json", "--config", "copy.toml", plugins="alpha,needy"),
        oneaccord("config", "show", "--json", **variables),
    )

    assert again.returncode == 0, again.stderr
    one, other = ({each["key"]: each["value"] for each in json.loads(each.stdout)["values"]} for each in (before, again))
    assert one == other
    assert one["backends.alpha.interface"] == variables["ONEACCORD_BACKENDS__ALPHA__INTERFACE"]


def test_version_and_help(oneaccord: Run) -> None:
    version, usage = oneaccord("--version", plugins=""), oneaccord("--help", plugins="")

    assert (version.returncode, version.stdout.split()[0]) == (0, "oneaccord")
    for command in ("run", "doctor", "config"):
        assert command in usage.stdout


def test_without_typer_it_says_what_to_install(run_python: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a path may be a relative one, and shall be that of the program
    program = "import sys; sys.modules['typer'] = None; from oneaccord.cli.main import main; sys.exit(main([]))"

    result = run_python("-c", program)

    assert result.returncode == 2
    command = install_command("pip install 'oneaccord-core[cli]'")
    assert result.stderr == f"error: the command line needs typer; try: {command}\n"


def test_a_table_on_a_terminal_takes_brackets_literally(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")

    print_table(("name", "value"), [("[bold]", "[/bold]")])

    assert "[bold]" in capsys.readouterr().out


def test_tables_and_errors_show_control_characters_and_do_not_obey_them(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[31m\x9b\r\u202e"
    print_table([evil], [["a" + evil]])
    print_text(f"text {evil}")
    print_command(f"command {evil}", "$ ")
    shown = r"\x1b[31m\u009b\x0d\u202e"
    assert capsys.readouterr().out.splitlines() == [shown, "a" + shown, f"text {shown}", f"$ command {shown}"]
    assert str(UsageError(f"a\n\t{evil}")) == f"a\n\t{shown}"

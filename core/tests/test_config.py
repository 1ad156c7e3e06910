"""Where configuration values come from, and what is said of those that are wrong."""

from __future__ import annotations

import os
import pickle
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from oneaccord.config import RESERVED, Resolved, Settings, json_schema, load
from oneaccord.config.sources import as_toml, flatten, merge
from oneaccord.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

    from support.plugin_tools import PluginFactory

    from oneaccord.config.plugins import PluginManager

    Load = Callable[..., Resolved]


@pytest.fixture
def read(tmp_path: Path, plugins: PluginFactory, manager: PluginManager) -> Load:
    """``load`` in an empty folder and environment, with the backends alpha and beta."""
    plugins.backend("alpha")
    plugins.backend("beta")

    def read(config: Any = None, **keywords: Any) -> Resolved:
        keywords = {"environ": {}, "directory": tmp_path, "manager": manager, **keywords}
        return load(config, **keywords)

    return read


def complaint(read: Load, config: Any = None, **keywords: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(config, **keywords)
    return caught.value


def test_defaults(read: Load) -> None:
    resolved = read()

    assert resolved.settings == Settings()
    assert (resolved.settings.backend, resolved.settings.timeout_s, resolved.settings.gpu_fallback) == ("auto", 60.0, "error")
    assert resolved.file is None
    assert resolved.origin("timeout_s") == "default"


def test_each_source_goes_before_the_next_and_is_remembered(read: Load, tmp_path: Path) -> None:
    file = tmp_path / "oneaccord.toml"
    file.write_text(
        "backend = 'beta'\ntimeout_s = 10\ngpu_fallback = 'host'\n[rendezvous]\naddress = 'node:1'\ntimeout_s = 2\n"
        "[backends.alpha]\ninterface = 'eth0'\nmode = 'safe'\n"
    )
    environ = {
        "ONEACCORD_BACKEND": "alpha",
        "ONEACCORD_TIMEOUT_S": "20",
        "ONEACCORD_RENDEZVOUS__TIMEOUT_S": "3",
        "ONEACCORD_BACKENDS__ALPHA__INTERFACE": "eth1",
        "ONEACCORD_CHECK_INPUTS": "true",
        "ONEACCORD_RANK": "3",
    }

    resolved = read(environ=environ, arguments={"timeout_s": 30, "backend": None})

    settings = resolved.settings
    assert (settings.backend, settings.timeout_s, settings.gpu_fallback) == ("alpha", 30.0, "host")
    assert (settings.rendezvous.address, settings.rendezvous_timeout_s, settings.check_inputs) == ("node:1", 3.0, True)
    assert resolved.backend_config("alpha").model_dump() == {"interface": "eth1", "mode": "safe", "token": None}
    assert resolved.file == file
    origins = {key: origin for key, _, origin in resolved.explain(backends=["alpha"])}
    assert origins == {
        "backend": "ONEACCORD_BACKEND",
        "timeout_s": "argument",
        "gpu_fallback": str(file),
        "gpu_check": "default",
        "algorithms": "default",
        "selection": "default",
        "reproducible": "default",
        "check_inputs": "ONEACCORD_CHECK_INPUTS",
        "native": "default",
        "ranks_per_host": "default",
        "plugins": "default",
        "rendezvous.address": str(file),
        "rendezvous.timeout_s": "ONEACCORD_RENDEZVOUS__TIMEOUT_S",
        "rendezvous.secret_file": "default",
        "liveness.heartbeat_s": "default",
        "liveness.patience_s": "default",
        "gpu_staging.latency_s": "default",
        "gpu_staging.move_bytes_per_s": "default",
        "gpu_staging.copy_bytes_per_s": "default",
        "recorder.directory": "default",
        "recorder.calls": "default",
        "security.checksum": "default",
        "security.tls": "default",
        "security.tls_names": "default",
        "backends.alpha.interface": "ONEACCORD_BACKENDS__ALPHA__INTERFACE",
        "backends.alpha.mode": str(file),
        "backends.alpha.token": "default",
    }
    assert {key: resolved.origin(key) for key in origins} == origins


def test_a_mapping_stands_in_for_a_file(read: Load, tmp_path: Path) -> None:
    (tmp_path / "oneaccord.toml").write_text("timeout_s = 10")

    resolved = read({"backend": "alpha"}, environ={"ONEACCORD_GPU_FALLBACK": "host"})

    assert (resolved.settings.backend, resolved.settings.timeout_s, resolved.settings.gpu_fallback) == ("alpha", 60.0, "host")
    assert resolved.origin("backend") == "config argument"


def test_the_file_is_the_argument_or_the_variable_or_the_one_that_is_there(read: Load, tmp_path: Path) -> None:
    names = ["argument.toml", "variable.toml", "oneaccord.toml"]
    for number, name in enumerate(names, start=1):
        (tmp_path / name).write_text(f"timeout_s = {number}")
    (tmp_path / "pyproject.toml").write_text("[tool.oneaccord]\ntimeout_s = 4\n[tool.other]\nx = 1")
    environ = {"ONEACCORD_CONFIG": "variable.toml"}

    assert read("argument.toml", environ=environ).settings.timeout_s == 1
    assert read(tmp_path / "argument.toml").settings.timeout_s == 1
    assert read(environ=environ).settings.timeout_s == 2
    assert read().settings.timeout_s == 3
    (tmp_path / "oneaccord.toml").unlink()
    assert read().settings.timeout_s == 4
    assert read().file == tmp_path / "pyproject.toml"
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nx = 1")
    assert read().file is None


@pytest.mark.parametrize("name", ["oneaccord.toml", "pyproject.toml"])
@pytest.mark.parametrize("link", [False, True])
def test_a_file_of_another_user_is_taken_only_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, link: bool
) -> None:
    table = "[tool.oneaccord]\n" if name == "pyproject.toml" else ""
    file = tmp_path / "elsewhere" / name if link else tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{table}timeout_s = 10")
    if link:
        (tmp_path / name).symlink_to(file)
    if os.geteuid() == 0:
        os.chown(file, 54321, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 54321)
    with pytest.raises(ConfigError, match=f"{name}' belongs to the user .* If you trust it, name it: --config {name}"):
        load(None, environ={}, directory=tmp_path)
    assert load(None, environ={"ONEACCORD_CONFIG": name}, directory=tmp_path).settings.timeout_s == 10
    if os.geteuid() == 0:
        assert load(None, environ={"SUDO_UID": "54321"}, directory=tmp_path).settings.timeout_s == 10


def test_a_named_file_that_is_missing_is_an_error(read: Load, tmp_path: Path) -> None:
    assert str(complaint(read, "no.toml")) == f"the configuration file '{tmp_path}/no.toml' does not exist"
    error = complaint(read, environ={"ONEACCORD_CONFIG": "no.toml"})
    assert f"'{tmp_path}/no.toml', named by the environment variable ONEACCORD_CONFIG, does not exist" in str(error)
    assert (error.file, error.value) == ("ONEACCORD_CONFIG", "no.toml")


def test_a_named_pyproject_needs_the_table(read: Load, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nx = 1")

    assert "there is no table [tool.oneaccord]" in str(complaint(read, "pyproject.toml"))


def test_a_syntax_error_names_file_and_line(read: Load, tmp_path: Path) -> None:
    file = tmp_path / "oneaccord.toml"
    file.write_text("backend = 'alpha'\ntimeout_s = = 3\n")

    error = complaint(read)

    assert str(error) == f"{file}:2:13: this is not valid TOML: invalid value"
    assert error.file == str(file)


def test_config_must_be_a_path_or_a_mapping(read: Load) -> None:
    assert complaint(read, 7).key == "config"


@pytest.mark.parametrize(
    ("text", "key", "value", "message"),
    [
        (
            "timeout = 3",
            "timeout",
            3,
            (
                "timeout = 3: this key is unknown; did you mean 'timeout_s'? Valid here: backend, timeout_s, gpu_fallback, gpu_check, gpu_staging, "
                "algorithms, selection, reproducible, check_inputs, native, ranks_per_host, plugins, rendezvous, liveness, recorder, security, "
                "backends"
            ),
        ),
        (
            "[rendezvous]\nadress = 'x:1'",
            "rendezvous.adress",
            "x:1",
            (
                "rendezvous.adress = 'x:1': this key is unknown; did you mean 'rendezvous.address'? Valid here: address, "
                "timeout_s, secret_file"
            ),
        ),
        (
            "[backend.alpha]\nmode = 'safe'",
            "backend",
            {"alpha": {"mode": "safe"}},
            (
                "backend = {'alpha': {'mode': 'safe'}}: expected the name of a backend; its settings belong in the table "
                "[backends.NAME]"
            ),
        ),
        ("zzz = 1", "zzz", 1, "zzz = 1: this key is unknown. Valid here: backend, timeout_s"),
        (
            "backend = 'alhpa'",
            "backend",
            "alhpa",
            "backend = 'alhpa': there is no backend 'alhpa' (installed: alpha, beta); did you mean 'alpha'?",
        ),
        (
            "[backends.bta]\nx = 1",
            "backends.bta",
            {"x": 1},
            "backends.bta = {'x': 1}: there is no backend 'bta' (installed: alpha, beta); did you mean 'beta'?",
        ),
        ("timeout_s = 0", "timeout_s", 0, "timeout_s = 0: it should be greater than 0"),
        ("timeout_s = inf", "timeout_s", float("inf"), "timeout_s = inf: it should be a finite number"),
        ("timeout_s = true", "timeout_s", True, "timeout_s = True: expected a number of seconds"),
        ("timeout_s = 'soon'", "timeout_s", "soon", "timeout_s = 'soon': it should be a valid number"),
        (
            "gpu_fallback = 'hots'",
            "gpu_fallback",
            "hots",
            "gpu_fallback = 'hots': it should be 'error' or 'host'; did you mean 'host'?",
        ),
        (
            "[algorithms]\nallreduce = 'ring'",
            "algorithms.allreduce",
            "ring",
            "algorithms.allreduce = 'ring': there is no collective 'allreduce'; did you mean 'algorithms.all_reduce'?",
        ),
        ("plugins = 3", "plugins", 3, "plugins = 3: it should be a valid list"),
        (
            "[rendezvous]\naddress = 'node'",
            "rendezvous.address",
            "node",
            "rendezvous.address = 'node': expected 'host:port', such as 'node1:29500' or '[::1]:29500'",
        ),
        ("backends = 3", "backends", 3, "backends = 3: it should be a valid dictionary"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_file_key_value_and_remedy(
    read: Load, tmp_path: Path, text: str, key: str, value: object, message: str
) -> None:
    file = tmp_path / "oneaccord.toml"
    file.write_text(text)

    error = complaint(read)

    assert str(error).startswith(f"{file}: {message}")
    assert "\n" not in str(error)
    assert (error.file, error.key, error.value) == (str(file), key, value)


@pytest.mark.parametrize(("heartbeat_s", "patience_s"), [(6, 10), (1, 101), (1, 1), (20, 10)])
def test_patience_is_some_heartbeats(read: Load, heartbeat_s: int, patience_s: int) -> None:
    error = complaint(read, {"liveness": {"heartbeat_s": heartbeat_s, "patience_s": patience_s}})
    words = f"it should be from 2 to 100 times liveness.heartbeat_s, which is {heartbeat_s}"
    assert str(error) == f"config argument: liveness.patience_s = {patience_s}: {words}"
    assert (error.key, error.value) == ("liveness.patience_s", patience_s)


@pytest.mark.parametrize(("heartbeat_s", "patience_s"), [(5, 10), (1, 100), (1, 2)])
def test_heartbeats_are_taken(read: Load, heartbeat_s: int, patience_s: int) -> None:
    found = read({"liveness": {"heartbeat_s": heartbeat_s, "patience_s": patience_s}}).settings.liveness
    assert (found.heartbeat_s, found.patience_s) == (heartbeat_s, patience_s)


@pytest.mark.parametrize("address", ["node1:29500", "10.0.0.1:0", "[::1]:29500", "[fe80::1%eth0]:65535"])
def test_addresses_of_every_family_are_taken(read: Load, address: str) -> None:
    assert read({"rendezvous": {"address": address}}).settings.rendezvous.address == address


@pytest.mark.parametrize("address", ["node1", "::1:29500", "node:65536", "node:x", ":1", ""])
def test_what_is_no_address_is_refused(read: Load, address: str) -> None:
    assert "expected 'host:port'" in str(complaint(read, {"rendezvous": {"address": address}}))


def test_a_bad_variable_is_named_by_its_own_name(read: Load) -> None:
    error = complaint(read, environ={"ONEACCORD_TIMEOUT_S": "soon"})

    assert str(error).startswith("environment variable ONEACCORD_TIMEOUT_S: timeout_s = 'soon': it should be a valid number")
    assert (error.file, error.key, error.value) == ("ONEACCORD_TIMEOUT_S", "timeout_s", "soon")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("ONEACCORD_BACKED", "did you mean ONEACCORD_BACKEND?"),
        ("ONEACCORD_WORLDSIZE", "did you mean ONEACCORD_WORLD_SIZE?"),
        ("ONEACCORD_BACKENDZ__ALPHA__MODE", "did you mean ONEACCORD_BACKENDS__ALPHA__MODE?"),
        ("ONEACCORD_BACKEND__ALPHA__MODE", "did you mean ONEACCORD_BACKENDS__ALPHA__MODE?"),
        ("ONEACCORD_XYZZY", "there are ONEACCORD_ALGORITHMS, "),
    ],
)
def test_an_unknown_variable_is_an_error_with_the_nearest_name(read: Load, name: str, suggestion: str) -> None:
    error = complaint(read, environ={name: "x"})

    assert str(error).startswith(f"environment variable {name}: oneaccord has no variable of that name; {suggestion}")
    assert error.file == name


def test_reserved_variables_are_no_configuration(read: Load, tmp_path: Path) -> None:
    environ = dict.fromkeys(RESERVED - {"ONEACCORD_CONFIG"}, "alpha")

    assert read(environ=environ).settings == Settings(plugins=["alpha"])


def test_a_bad_argument_is_called_an_argument(read: Load) -> None:
    error = complaint(read, arguments={"backend": "alhpa"})

    assert str(error).startswith("argument: backend = 'alhpa': there is no backend 'alhpa'")
    assert error.file == "argument"


def test_all_problems_are_told_at_once_one_per_line(read: Load, tmp_path: Path) -> None:
    (tmp_path / "oneaccord.toml").write_text(
        "backend = 'alhpa'\ntimeout_s = -1\nzzz = 1\n[backends.bta]\n[backends.alpha]\nmode = 'sage'\n"
    )

    lines = str(complaint(read, environ={"ONEACCORD_BACKED": "x"})).splitlines()

    words = ["ONEACCORD_BACKED", "timeout_s = -1", "zzz = 1", "backend =", "backends.bta", "backends.alpha.mode = 'sage'"]
    for line, word in zip(lines, words, strict=True):
        assert word in line


def test_a_backends_table_is_checked_by_its_own_model_when_asked(read: Load, tmp_path: Path) -> None:
    file = tmp_path / "oneaccord.toml"
    file.write_text("backend = 'alpha'\n[backends.alpha]\nmode = 'sage'\nintreface = 'eth0'\n[backends.beta]\nmode = 3")

    resolved = read()
    with pytest.raises(ConfigError) as caught:
        resolved.backend_config("alpha")

    assert str(caught.value).splitlines() == [
        f"{file}: backends.alpha.mode = 'sage': it should be 'fast' or 'safe'; did you mean 'safe'?",
        (
            f"{file}: backends.alpha.intreface = 'eth0': this key is unknown; did you mean 'backends.alpha.interface'? "
            "Valid here: interface, mode, token"
        ),
    ]
    assert (caught.value.file, caught.value.key, caught.value.value) == (str(file), "backends.alpha.mode", "sage")
    assert caught.value.__cause__ is None


def test_another_plugin_that_is_broken_does_not_matter(read: Load, plugins: PluginFactory) -> None:
    plugins("broken", "raise RuntimeError('oh')")

    resolved = read({"backend": "alpha", "backends": {"broken": {"x": 1}}})

    assert resolved.backend_config("alpha").model_dump()["mode"] == "fast"
    assert ("backends.broken.x", 1, "config argument") in resolved.explain()
    with pytest.raises(PluginError, match="RuntimeError: oh"):
        resolved.backend_config("broken")


def test_a_table_of_a_blocked_backend_is_no_error_but_choosing_it_is(read: Load) -> None:
    config = {"plugins": ["no:beta"], "backends": {"beta": {}}}

    assert read(config).settings.plugins == ["no:beta"]
    assert "'beta' is blocked by the switch 'no:beta'" in str(complaint(read, {**config, "backend": "beta"}))


def test_variables_hold_lists_and_objects_as_json_and_plugins_with_commas(read: Load) -> None:
    environ = {
        "ONEACCORD_ALGORITHMS": '{"all_reduce": "ring"}',
        "ONEACCORD_ALGORITHMS__BROADCAST": "tree",
        "ONEACCORD_PLUGINS": "alpha, no:beta",
        "ONEACCORD_RENDEZVOUS__ADDRESS": "[::1]:29500",
    }

    settings = read(environ=environ).settings

    assert settings.algorithms == {"all_reduce": "ring", "broadcast": "tree"}
    assert settings.plugins == ["alpha", "no:beta"]
    assert settings.rendezvous.address == "[::1]:29500"


def test_a_variable_finds_a_backend_whatever_its_spelling(plugins: PluginFactory, read: Load) -> None:
    plugins.backend("my-Net")

    resolved = read(environ={"ONEACCORD_BACKENDS__MY_NET__INTERFACE": "eth0"})

    assert resolved.backend_config("my-Net").model_dump()["interface"] == "eth0"
    assert resolved.origin("backends.my-Net.interface") == "ONEACCORD_BACKENDS__MY_NET__INTERFACE"


def test_secrets_are_never_shown(read: Load) -> None:
    secret = "hunter2"
    shown = [
        str(complaint(read, {"secret": secret})),
        repr(complaint(read, {"secret": secret}).value),
        str(complaint(read, environ={"ONEACCORD_SECRETT": secret})),
        str(read(environ={"ONEACCORD_SECRET": secret}).explain()),
        str(read({"backends": {"alpha": {"token": secret}}}).explain(backends=["alpha"])),
    ]
    with pytest.raises(ConfigError) as caught:
        read({"backends": {"alpha": {"token": [secret]}}}).backend_config("alpha")

    assert secret not in "".join([*shown, str(caught.value), repr(caught.value.value)])
    assert "(not shown)" in shown[0]


def test_settings_are_frozen_and_errors_survive_pickling(read: Load) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read().settings.timeout_s = 3  # type: ignore[misc]
    error = complaint(read, {"timeout_s": 0})
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.file, copy.key, copy.value) == (str(error), "config argument", "timeout_s", 0)


def test_the_schema_holds_every_installed_backend(read: Load, plugins: PluginFactory, manager: PluginManager) -> None:
    plugins("broken", "raise RuntimeError('oh')")

    schema = json_schema(manager)

    assert schema["properties"]["backend"]["enum"] == ["auto", "alpha", "beta", "broken"]
    tables = schema["properties"]["backends"]["properties"]
    assert tables["alpha"]["properties"]["mode"]["enum"] == ["fast", "safe"]
    assert tables["alpha"]["additionalProperties"] is False
    assert "RuntimeError: oh" in tables["broken"]["description"]
    assert schema["additionalProperties"] is False
    assert "all_reduce" in schema["properties"]["algorithms"]["propertyNames"]["enum"]


trees = st.recursive(st.integers(), lambda below: st.dictionaries(st.sampled_from("abc"), below, max_size=3), max_leaves=8)
tables = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


@given(tables, tables)
def test_the_later_layer_wins_leaf_by_leaf(low: dict[str, Any], high: dict[str, Any]) -> None:
    merged = merge([list(flatten(low, "low")), list(flatten(high, "high"))])

    def expected(below: Any, above: Any) -> Any:
        if isinstance(below, dict) and isinstance(above, dict):
            return {key: expected(below.get(key, above.get(key)), above.get(key, below.get(key))) for key in below | above}
        return above

    assert merged.tree == expected(low, high)
    of_high = {path for path, _, _ in flatten(high, "")}
    leaves = {path: value for path, value, _ in flatten(merged.tree, "")}
    assert merged.origins == {path: "high" if path in of_high else "low" for path in leaves}
    for path, value in leaves.items():
        assert merged.origin(path) == merged.origins[path]
        assert merged.get(path) == value


_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.datetimes() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(_values)
def test_a_value_written_as_toml_is_read_as_it_was(value: Any) -> None:
    assert tomllib.loads(f"key = {as_toml(value)}") == {"key": value}


PROGRAM = """
import sys
import numpy, pydantic
before = set(sys.modules)
import oneaccord

with oneaccord.init({backend!r}, timeout_s=30) as group:
    assert group.all_reduce(numpy.ones(2))[0] == group.world_size == 2
    # The dearest of what was loaded without a need, or of what would be.
    print(*sorted({{"asyncio", "difflib", "multiprocessing", "subprocess"}} & set(sys.modules) - before))
"""


@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_a_rank_loads_nothing_dear_to_make_its_first_call(
    backend: str, run_python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(backend=backend))

    words = ("-n", "2", "--no-fork", "--no-prefix", "--backend", backend, "program.py")
    done = run_python("-m", "oneaccord", "run", *words, PYTHONSAFEPATH="1")  # a variable with which none is forked for the test

    assert (done.returncode, done.stderr, done.stdout) == (0, "", "\n\n")

"""Discovery in three tiers, and what is said of plugins that cannot be used."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oneaccord.common.installing import install_command
from oneaccord.config import load
from oneaccord.config.plugins import BACKEND_GROUP, InstalledPlugin, PluginManager, Switches, get_plugin_manager
from oneaccord.config.plugins.installed import unknown_backend_text
from oneaccord.contract.backend import BackendSpec, NoConfig
from oneaccord.contract.hookspecs import hookimpl
from oneaccord.errors import (
    ApiVersionError,
    BackendUnavailableError,
    ConfigError,
    DuplicatePluginError,
    PluginError,
    UnknownBackendError,
)

if TYPE_CHECKING:
    from support.plugin_tools import PluginFactory

TCP = install_command("pip install 'oneaccord[tcp]'")


class InProcess:
    """A plugin that is an object."""

    def __init__(self, *names: str) -> None:
        self.names = names

    @hookimpl
    def oneaccord_register_backends(self) -> list[BackendSpec]:
        return [BackendSpec(name=name, summary="", factory="os:getcwd") for name in self.names]


def test_listing_reads_metadata_and_imports_nothing(plugins: PluginFactory, manager: PluginManager) -> None:
    module = plugins("broken", "raise RuntimeError('imported')", distribution="dist-one")

    assert manager.names() == ["broken"]
    assert manager.entries() == [InstalledPlugin("broken", "dist-one", "1.0", module, BACKEND_GROUP)]
    assert module not in sys.modules


def test_describing_imports_that_plugin_alone(plugins: PluginFactory, manager: PluginManager) -> None:
    alpha, beta = plugins.backend("alpha"), plugins.backend("beta")

    spec = manager.describe("alpha")

    assert (spec.name, spec.summary, spec.devices) == ("alpha", "a backend for tests", ("cpu",))
    assert spec.config().model_dump() == {"interface": "lo", "mode": "fast", "token": None}
    assert alpha in sys.modules
    assert beta not in sys.modules
    assert manager.describe("alpha") is spec


def test_a_config_may_be_named_and_is_imported_when_it_is_asked_for(plugins: PluginFactory, manager: PluginManager) -> None:
    module = plugins("configs", "from oneaccord.api import BackendConfig\nclass Config(BackendConfig):\n    birds: int = 2\n")
    source = "from oneaccord.api import *\n@hookimpl\ndef oneaccord_register_backends():\n    return BackendSpec({!r}, '', 'os:getcwd', config={!r})\n"
    for name, place in {
        "good": f"{module}:Config",
        "absent": f"{module}:Other",
        "none": "no_such_module:Config",
        "other": "os:getcwd",
    }.items():
        plugins(name, source.format(name, place))

    good = manager.describe("good")
    assert module not in sys.modules
    assert manager.config_kind(good)().birds == 2  # type: ignore[attr-defined]
    for name, error, words in (
        ("absent", PluginError, "names its config '.*:Other', but there is no such class"),
        ("none", BackendUnavailableError, "No module named 'no_such_module'"),
        (
            "other",
            PluginError,
            "names its config 'os:getcwd', which is neither a subclass of oneaccord.api.BackendConfig nor a frozen dataclass",
        ),
    ):
        with pytest.raises(error, match=words):
            manager.config_kind(manager.describe(name))


DATACLASS = """
from dataclasses import dataclass, field
from pathlib import Path
from oneaccord.api import BackendSpec, hookimpl

@dataclass(frozen=True)
class Nest:
    birds: int = field(default=2, metadata={"ge": 1})
    loft: Path = Path("north")

    def legs(self):
        return 2 * self.birds

@hookimpl
def oneaccord_register_backends():
    return BackendSpec("nest", "", "os:getcwd", config=Nest)
"""


def test_a_config_may_be_a_frozen_dataclass(plugins: PluginFactory, manager: PluginManager, tmp_path: Path) -> None:
    plugins("nest", DATACLASS)

    def read(**table: object) -> Any:
        resolved = load({"backends": {"nest": table}}, environ={}, directory=tmp_path, manager=manager)
        return resolved.backend_config("nest")

    made = read(birds="3", loft="south")
    assert (type(made).__name__, made.birds, made.loft, made.legs()) == ("Nest", 3, Path("south"), 6)
    with pytest.raises(ConfigError, match=r"backends\.nest\.birds = 0: it should be greater than or equal to 1"):
        read(birds=0)
    with pytest.raises(ConfigError, match=r"this key is unknown; did you mean 'backends.nest.birds'"):
        read(bird=1)


def test_two_distributions_of_one_name_are_both_named(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("alpha", distribution="dist-one")
    plugins.backend("alpha", distribution="dist-two")

    with pytest.raises(DuplicatePluginError, match=r"'alpha' is provided more than once.*dist-one 1\.0.*dist-two 1\.0"):
        manager.describe("alpha")
    assert manager.names() == ["alpha"]
    assert [plugin.distribution for plugin in manager.entries()] == ["dist-one", "dist-two"]
    manager.switch(["no:dist-one"])  # as the error advises
    assert [plugin.distribution for plugin in manager.entries()] == ["dist-two"]
    assert manager.describe("alpha").name == "alpha"


def test_a_core_takes_plugins_of_its_version_and_of_the_one_before(
    plugins: PluginFactory, manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oneaccord.config.plugins.specs.API_VERSION", 3)
    plugins.backend("silent")  # what states no version was built for the first one
    for version in (1, 2, 3, 4):
        plugins.backend(f"of{version}", f"factory='os:getcwd', api_version={version}")

    assert [manager.describe(f"of{version}").api_version for version in (2, 3)] == [2, 3]
    for name, upgrade in [("silent", "dist-silent"), ("of1", "dist-of1"), ("of4", "oneaccord-core")]:
        with pytest.raises(
            ApiVersionError, match=rf"this oneaccord-core supports versions 2 and 3; try: .*--upgrade {upgrade}$"
        ):
            manager.describe(name)


def test_the_spec_must_bear_the_name_of_the_entry_point(plugins: PluginFactory, manager: PluginManager) -> None:
    source = """
    from oneaccord.contract.backend import BackendSpec
    from oneaccord.contract.hookspecs import hookimpl

    @hookimpl
    def oneaccord_register_backends():
        return [BackendSpec(name="other", summary="", factory="os:getcwd")]
    """
    plugins("alpha", source)

    with pytest.raises(PluginError, match=r"registers 'other', and its entry point is named 'alpha'"):
        manager.describe("alpha")


def test_an_unknown_name_lists_what_is_there_and_the_nearest(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("alpha")
    plugins.backend("beta")

    with pytest.raises(UnknownBackendError, match=r"no backend 'alhpa' \(installed: alpha, beta\); did you mean 'alpha'\?"):
        manager.describe("alhpa")
    with pytest.raises(UnknownBackendError):
        manager.available("alhpa")


def test_a_backend_of_our_own_that_is_not_installed_comes_with_its_command() -> None:
    assert unknown_backend_text("tcp", [], Switches()) == (
        "there is no backend 'tcp' (installed: none); install it with: " + TCP
    )
    assert unknown_backend_text("tpc", ["alpha"], Switches()) == (
        "there is no backend 'tpc' (installed: alpha); did you mean 'tcp'? It is installed with: " + TCP
    )


def test_creating_imports_the_factory_and_names_the_command_that_helps(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("alpha")
    plugins.backend("beta", "factory='a_module_that_is_not_there:make', install='pip install it'")
    plugins.backend("gamma", "factory='os:no_such_function'")
    plugins.backend("delta", "factory='os'")

    assert manager.load_factory(manager.describe("alpha")) is os.getcwd
    with pytest.raises(
        BackendUnavailableError, match=r"'beta' of dist-beta 1\.0 cannot be loaded: ModuleNotFoundError.*; try: pip install it"
    ) as e:
        manager.load_factory(manager.describe("beta"))
    assert isinstance(e.value, ImportError)
    with pytest.raises(PluginError, match="no such function"):
        manager.load_factory(manager.describe("gamma"))
    with pytest.raises(PluginError, match="'module:function'"):
        manager.load_factory(manager.describe("delta"))


def test_a_launcher_is_optional(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("alpha")
    plugins.backend("beta", "factory='os:getcwd', launcher='os:getpid'")

    assert manager.load_launcher(manager.describe("alpha")) is None
    assert manager.load_launcher(manager.describe("beta")) is os.getpid


def test_a_blocked_plugin_does_not_count(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("alpha")
    plugins.backend("beta")

    manager.switch(["no:alpha"])

    assert manager.names() == ["beta"]
    assert manager.installed_names() >= {"alpha", "beta"}
    with pytest.raises(UnknownBackendError, match=r"'alpha' is blocked by the switch 'no:alpha'"):
        manager.describe("alpha")
    manager.switch(["alpha"])
    assert manager.names() == ["alpha", "beta"]


def test_without_autoload_only_named_plugins_count(plugins: PluginFactory) -> None:
    plugins.backend("alpha")
    plugins.backend("beta")
    manager = PluginManager(Switches.from_environment({"ONEACCORD_NO_AUTOLOAD": "1", "ONEACCORD_PLUGINS": "beta"}))

    assert manager.names() == ["beta"]
    assert manager.describe("beta").name == "beta"
    with pytest.raises(UnknownBackendError, match="try ONEACCORD_PLUGINS=alpha"):
        manager.describe("alpha")


def test_switches_are_read_from_the_environment() -> None:
    environ = {"ONEACCORD_PLUGINS": "a, no:b,c,no:c,", "ONEACCORD_TRACE_HOOKS": "1", "ONEACCORD_NO_AUTOLOAD": "0"}

    assert Switches.from_environment(environ) == Switches(("a",), frozenset({"b", "c"}), autoload=True, trace=True)
    assert Switches.from_environment({}) == Switches()


def test_a_switch_loads_a_module_that_is_no_entry_point(
    plugins: PluginFactory, manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
    from oneaccord.contract.backend import BackendSpec
    from oneaccord.contract.hookspecs import hookimpl

    @hookimpl
    def oneaccord_register_backends():
        return BackendSpec(name="epsilon", summary="", factory="os:getcwd")
    """
    module = plugins("unused", source, group="some.other.group")

    manager.switch([module])

    assert manager.names() == ["epsilon"]
    assert manager.describe("epsilon").factory == "os:getcwd"


def test_a_switch_that_names_nothing_is_an_error(manager: PluginManager) -> None:
    manager.switch(["a_module_that_is_not_there"])

    with pytest.raises(PluginError, match="'a_module_that_is_not_there' of this process cannot be imported"):
        manager.names()


def test_a_plugin_of_this_process_counts_like_an_installed_one(manager: PluginManager) -> None:
    manager.register(InProcess("one", "two"), "mine")

    assert manager.names() == ["one", "two"]
    assert manager.describe("two").config is NoConfig


def test_a_plugin_of_this_process_cannot_take_a_name_that_is_taken(plugins: PluginFactory, manager: PluginManager) -> None:
    plugins.backend("alpha", distribution="dist-one")

    class Observing(InProcess):
        @hookimpl
        def oneaccord_collective_started(self, event: object) -> None:
            pass

    with pytest.raises(DuplicatePluginError, match=r"'alpha', which the plugin .* of dist-one 1\.0 provides already"):
        manager.register(Observing("zeta", "alpha"), "mine")

    assert manager.names() == ["alpha"]
    assert not manager.observed
    manager.switch(["no:alpha"])
    manager.register(InProcess("zeta"), "mine")
    assert manager.names() == ["zeta"]


def test_trace_writes_hook_calls_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    PluginManager(Switches(trace=True)).register(InProcess("one"), "mine")

    assert "oneaccord_register_backends" in capsys.readouterr().err


def test_the_process_has_one_manager() -> None:
    assert get_plugin_manager() is get_plugin_manager()

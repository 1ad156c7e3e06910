"""Plugins that are wrong, each in one way: each is named with its distribution, and none stands in the way of another backend."""

from __future__ import annotations

import json
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from support.worlds import free_port, on_threads

import oneaccord as oa
from oneaccord.cli.doctor import _diagnose
from oneaccord.config.plugins import PluginManager, Switches
from oneaccord.config.plugins.choice import weigh
from oneaccord.errors import ApiVersionError, BackendUnavailableError, DuplicatePluginError, PluginError

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

    from support.plugin_tools import PluginFactory

SPEC = """
from oneaccord.api import BackendConfig, BackendSpec, hookimpl

@hookimpl
def oneaccord_register_backends():
    return BackendSpec(**{{"name": {name!r}, "summary": "", "factory": "os:getcwd", "auto_priority": 99, {extra}}})
"""
EXTRAS = {
    "capability": (
        '"capabilities": frozenset({"transports"})',
        r"registers a backend with capabilities=frozenset\({'transports'}\); it must be a frozenset of some of \['calling thread', 'nati",
    ),
    "device": ('"devices": "cpu"', r"registers a backend with devices='cpu'; it must be a tuple of some of \['cpu', 'cuda'\]$"),
    "device2": ('"devices": ("gpu",)', r"registers a backend with devices=\('gpu',\); it must be a tuple of some of"),
    "model": (
        '"config": dict',
        r"registers a backend with config=<class 'dict'>; it must be a subclass of oneaccord.api.BackendConfig or a frozen dataclass, or 'module:class'$",
    ),
    "function": (
        '"factory": print',
        r"registers a backend with factory=<built-in .*; it must be a text of the form 'module:function'$",
    ),
    "form": ('"factory": "os"', r"registers a backend with factory='os'; it must be a text of the form 'module:function'$"),
    "priority": (
        '"auto_priority": "high"',
        r"registers a backend with auto_priority='high'; it must be a whole number or None$",
    ),
    "probes": ('"probe": True', r"registers a backend with probe=True; it must be a function$"),
    "version": ('"api_version": "1"', r"states api_version='1'; it must be a whole number$"),
    "newer": (
        '"api_version": 99',
        r"is built for version 99 of the plugin contract, .*; try: pip install --upgrade oneaccord-core$",
    ),
    "older": ('"api_version": 0', r"is built for version 0 of the plugin contract, .*; try: pip install --upgrade dist-older$"),
    "field": ('"devises": ()', r"raised TypeError: .*unexpected keyword argument 'devises'.* while it described its backends$"),
}
SOURCES = {
    "import": ("import no_such_thing", r"cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'$"),
    "exits": ("raise SystemExit(3)", r"cannot be imported: SystemExit: 3$"),
    "empty": ("", r"does not implement oneaccord_register_backends; did it forget @hookimpl\?$"),
    "type": (
        "from oneaccord.api import hookimpl\n@hookimpl\ndef oneaccord_register_backends(): return {}",
        r"registers {}, which is not a BackendSpec$",
    ),
    "argument": (
        "from oneaccord.api import hookimpl\n@hookimpl\ndef oneaccord_register_backends(config): return []",
        r"has a wrong implementation of a hook: (?s:.*)Argument\(s\) {'config'}",
    ),
    "hook": (
        "from oneaccord.api import hookimpl\n@hookimpl\ndef oneaccord_register_backend(): return []",
        r"implements 'oneaccord_register_backend', which is not a hook of oneaccord; did it mean 'oneaccord_register_backends'\?",
    ),
    "old": (
        "from oneaccord.api import Pigeon",
        r"cannot be imported: ImportError: cannot import name 'Pigeon' from 'oneaccord.api'",
    ),
}
REASONS = {
    "module": (
        '"factory": "no_such_module:create"',
        "its factory is 'no_such_module:create', and there is no module 'no_such_module'",
    ),
    "raises": ('"probe": lambda: 1 / 0', "its probe raised ZeroDivisionError: division by zero"),
    "leaves": ('"probe": exit', "its probe raised SystemExit: None"),
    "answers": ('"probe": lambda: 7', "its probe returned 7 instead of None or a reason"),
}


def install(plugins: PluginFactory) -> None:
    """Install every wrong plugin, and a right one."""
    for name, (extra, _) in (EXTRAS | REASONS).items():
        plugins(name, SPEC.format(name=name, extra=extra))
    for name, (source, _) in SOURCES.items():
        plugins(name, source)
    for distribution in ("dist-one", "dist-two"):
        plugins("twice", SPEC.format(name="twice", extra=""), distribution=distribution)
    plugins("right", SPEC.format(name="right", extra='"auto_priority": 1'))


def test_each_is_named_to_who_asks_and_auto_takes_the_right_one(plugins: PluginFactory, manager: PluginManager) -> None:
    install(plugins)

    for name, (_, words) in (EXTRAS | SOURCES).items():
        with pytest.raises(PluginError, match=rf"^the plugin '\w+' of dist-{name} 1\.0 ({words})") as caught:
            manager.describe(name)
        assert isinstance(caught.value, ApiVersionError) == (name in ("newer", "older"))
        assert isinstance(caught.value.__cause__, ImportError) == (name in ("import", "old"))
        assert manager.available(name) == str(caught.value)
    with pytest.raises(
        DuplicatePluginError, match=r"'twice' is provided more than once, by dist-one 1\.0 .* and dist-two 1\.0"
    ):
        manager.describe("twice")
    for name, (_, reason) in REASONS.items():
        assert manager.available(name) == reason
    assert weigh(manager)[0] == "right"


def test_doctor_says_one_sentence_of_each(
    plugins: PluginFactory, manager: PluginManager, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    install(plugins)
    names = {*EXTRAS, *SOURCES, *REASONS, "twice", "right"}
    expected = {name: manager.available(name) for name in names}

    result = run_python("-m", "oneaccord", "doctor", "--json", ONEACCORD_PLUGINS=",".join(names), ONEACCORD_NO_AUTOLOAD="1")

    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert {each["name"]: each["reason"] for each in report["backends"]} == expected
    assert report["auto"]["backend"] == "right"


def test_a_factory_that_is_not_where_the_spec_says_is_found_without_an_import(
    plugins: PluginFactory, manager: PluginManager
) -> None:
    (plugins.folder / "loft_for_tests.py").write_text("raise RuntimeError('imported')\ndef create(bootstrap): pass")
    (plugins.folder / "lazy_for_tests.py").write_text("from os import *\nraise RuntimeError('imported')")
    for name, factory in [
        ("there", "loft_for_tests:create"),
        ("star", "lazy_for_tests:getcwd"),
        ("typo", "loft_for_tests:creat"),
    ]:
        plugins(name, SPEC.format(name=name, extra=f'"factory": {factory!r}'))

    assert [manager.available(name) for name in ("there", "star")] == [None, None]
    assert manager.available("typo") == "its factory is 'loft_for_tests:creat', and there is no 'creat' in loft_for_tests"
    with pytest.raises(
        BackendUnavailableError, match=r"^the backend 'there' of dist-there 1\.0 cannot be loaded: RuntimeError: imp"
    ):
        manager.load_factory(manager.describe("there"))


def test_a_probe_that_hangs_is_waited_for_once(
    plugins: PluginFactory, manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins(
        "hangs",
        "import threading\nGO, CALLS = threading.Event(), []"
        + SPEC.format(name="hangs", extra='"probe": lambda: CALLS.append(1) or GO.wait()'),
    )
    spec = manager.describe("hangs")
    calls, go = spec.probe.__globals__["CALLS"], spec.probe.__globals__["GO"]  # type: ignore[attr-defined]
    monkeypatch.setattr("oneaccord.config.plugins.loading.PROBE_S", 0.05)

    assert [manager.available("hangs") for _ in range(3)] == ["its probe did not return within 10 s"] * 3
    assert calls == [1]
    go.set()


def test_a_diagnosis_that_hangs_is_left_behind(
    plugins: PluginFactory, manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        SPEC.format(name="hangs", extra='"diagnose": __name__ + ":stuck"')
        + "import threading\nGO = threading.Event()\nstuck = GO.wait"
    )
    module = plugins("hangs", source)
    monkeypatch.setattr("oneaccord.cli.doctor._DIAGNOSIS_S", 0.05)

    assert _diagnose(manager) == {"hangs": [("diagnosis", "its diagnosis did not end within 0.05 s")]}
    sys.modules[module].GO.set()


WORLD = """
import threading
from oneaccord.api import Backend, BackendSpec, hookimpl

GO = threading.Event()
CLOSED = []

class Late(Backend):
    def open_transport(self, channel): raise NotImplementedError
    def abort(self): CLOSED.append("aborted")
    def close(self): CLOSED.append("closed")

def nonsense(bootstrap):
    return "pigeon"

def fails(bootstrap):
    raise KeyError("pigeon")

def hangs(bootstrap):
    bootstrap.deadline.at = 0.0
    GO.wait(60)
    return Late()

def __getattr__(name):
    raise AttributeError(name)

@hookimpl
def oneaccord_register_backends():
    return BackendSpec("wrong", "", __name__ + ":" + {factory!r}, auto_priority=99)
"""


@pytest.fixture
def world(plugins: PluginFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make ranks that are threads, and that meet as processes do, of which some backends are installed: tcp, and a wrong one."""

    def run(factory: str, backend: str) -> tuple[list[Any], Any]:
        module = plugins("wrong", WORLD.format(factory=factory))
        manager = PluginManager(Switches(load=("tcp", "wrong"), autoload=False))
        for user in ("oneaccord.group.init", "oneaccord.config.resolve"):
            monkeypatch.setattr(f"{user}.get_plugin_manager", lambda: manager)
        config = {"backend": backend, "rendezvous": {"address": f"127.0.0.1:{free_port()}"}}

        def body(rank: int) -> Any:
            with oa.init(config=config, rank=rank, world_size=2, timeout_s=30) as group:
                return group.backend_name, group.all_reduce(1).item()

        return on_threads(body, 2), __import__(module)

    return run


@pytest.mark.parametrize("factory", ["nonsense", "typo"])
def test_auto_goes_on_from_a_factory_that_makes_no_backend(world: Callable[..., Any], factory: str) -> None:
    assert world(factory, "auto")[0] == [("tcp", 2)] * 2


def test_a_factory_that_returns_nonsense_is_named_to_who_asks_for_it(world: Callable[..., Any]) -> None:
    outcomes, module = world("nonsense", "wrong")
    words = (
        rf"^the factory '{module.__name__}:nonsense' of the backend 'wrong' of dist-wrong 1\.0 returned 'pigeon' instead of a "
    )
    errors = [each for each in outcomes if isinstance(each, PluginError)]
    assert errors
    for error in errors:
        with pytest.raises(PluginError, match=words):
            raise error


def test_a_factory_that_raises_is_named_in_a_note(world: Callable[..., Any]) -> None:
    outcomes, module = world("fails", "auto")
    errors = [each for each in outcomes if isinstance(each, KeyError)]
    assert errors
    assert errors[0].__notes__ == [f"raised in the factory '{module.__name__}:fails' of the backend 'wrong' of dist-wrong 1.0"]


@pytest.mark.parametrize("backend", ["wrong", "auto"])
def test_a_factory_that_hangs_ends_at_the_deadline_and_what_it_makes_later_is_closed(
    world: Callable[..., Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The ranks have 30 s to meet, and the factory, which then uses them up, a moment.
    monkeypatch.setattr("oneaccord.job.bootstrap._FACTORY_GRACE_S", 0.2 - 30)
    outcomes, module = world("hangs", backend)

    errors = [each for each in outcomes if isinstance(each, PluginError)]
    assert errors, outcomes
    assert (
        f"the factory '{module.__name__}:hangs' of the backend 'wrong' of dist-wrong 1.0 did not return within 30 s, the time in which "
        "the ranks must be ready; choose another backend, or leave this one out by plugins = ['no:wrong']"
    ) in str(errors[0])
    assert all(isinstance(each, PluginError | oa.CommError) for each in outcomes)
    threads = [each for each in threading.enumerate() if each.name == "oneaccord-wrong-factory"]
    module.GO.set()
    for thread in threads:
        thread.join(30)
    assert threads
    assert sorted(module.CLOSED) == sorted(["aborted", "closed"] * len(threads))

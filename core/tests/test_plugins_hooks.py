"""Hooks beyond backends: algorithms, native collectives and observers."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from oneaccord.config.plugins import EXTENSION_GROUP, PluginManager, Switches
from oneaccord.contract.backend import CollectiveRequest
from oneaccord.contract.hookspecs import hookimpl
from oneaccord.contract.observe import OperationEvent
from oneaccord.errors import PluginError
from oneaccord.schedule.algorithms import tree
from oneaccord.schedule.algorithms.registry import Algorithm
from oneaccord.schedule.steps import Collective

if TYPE_CHECKING:
    from support.plugin_tools import PluginFactory

REQUEST = CollectiveRequest("tcp", Collective.ALL_REDUCE, "cpu", np.dtype("f4"), "sum", 1024, 4)
EVENT = OperationEvent("world", 0, "all_reduce", 3, "ring", 1024, "float32", started_ns=5)


class Observer:
    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[tuple[str, OperationEvent]] = []
        self.error = error

    @hookimpl
    def oneaccord_collective_started(self, event: OperationEvent) -> None:
        self.seen.append(("started", event))
        if self.error:
            raise self.error

    @hookimpl
    def oneaccord_collective_finished(self, event: OperationEvent) -> None:
        self.seen.append(("finished", event))


class Native:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    @hookimpl
    def oneaccord_collective(self, request: CollectiveRequest) -> object:
        assert request is REQUEST
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Algorithms:
    def __init__(self, *algorithms: object) -> None:
        self.algorithms = algorithms

    @hookimpl
    def oneaccord_register_algorithms(self) -> tuple[object, ...]:
        if not self.algorithms:
            raise ValueError("no algorithms")
        return self.algorithms


def test_observers_hear_of_each_operation(manager: PluginManager) -> None:
    assert not manager.observed
    manager.notify_started(EVENT)
    observer = Observer()
    manager.register(observer, "observer")

    assert manager.observed
    manager.notify_started(EVENT)
    manager.notify_finished(EVENT)
    assert observer.seen == [("started", EVENT), ("finished", EVENT)]


def test_a_settled_manager_says_in_attributes_who_takes_part(manager: PluginManager) -> None:
    assert not manager.settled
    manager.load_extensions()
    assert (manager.settled, manager.observed, manager.performs) == (True, False, False)
    manager.register(Observer(), "observer")
    assert (manager.settled, manager.observed) == (True, True)
    manager.switch(["no:nobody"])
    assert not manager.settled
    manager.load_extensions()
    assert (manager.settled, manager.observed) == (True, True)


def test_an_observer_that_raises_is_logged_once_and_stops_nobody(
    manager: PluginManager, caplog: pytest.LogCaptureFixture
) -> None:
    bad, first, last = Observer(ValueError("oops")), Observer(), Observer()
    for name, observer in [("first", first), ("bad", bad), ("last", last)]:
        manager.register(observer, name)

    with caplog.at_level(logging.WARNING):
        manager.notify_started(EVENT)
        manager.notify_started(EVENT)

    assert [len(observer.seen) for observer in (first, bad, last)] == [2, 2, 2]
    [record] = caplog.records
    assert "observer 'bad' raised in oneaccord_collective_started" in record.getMessage()
    assert record.exc_info is not None
    assert "oops" in str(record.exc_info[1])


def test_the_first_plugin_that_offers_performs_a_collective(manager: PluginManager) -> None:
    assert manager.native_collective(REQUEST) is None
    manager.register(Native(print), "offers")
    manager.register(Native(None), "does not")

    assert manager.performs
    assert manager.native_collective(REQUEST) is print


def test_a_plugin_that_raises_when_asked_for_a_collective_is_an_error(manager: PluginManager) -> None:
    manager.register(Native(ValueError("oops")), "raises")

    with pytest.raises(PluginError, match=r"ValueError: oops when .* all_reduce on the backend 'tcp'") as caught:
        manager.native_collective(REQUEST)
    assert isinstance(caught.value.__cause__, ValueError)


def test_algorithms_are_collected_and_a_broken_plugin_left_out(
    manager: PluginManager, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = (Algorithm(name, Collective.BROADCAST, tree.broadcast, "") for name in "abc")
    manager.register(Algorithms(a, b), "good")
    manager.register(Algorithms(), "bad")
    manager.register(Algorithms(c), "better")

    assert sorted(each.name for each in manager.algorithms()) == ["a", "b", "c"]
    assert "no algorithms" in str(manager.extension_errors()["bad"])
    assert "bad" in caplog.text


def test_extensions_load_when_they_are_first_needed(plugins: PluginFactory, manager: PluginManager) -> None:
    source = """
    from oneaccord.contract.hookspecs import hookimpl

    seen = []

    @hookimpl
    def oneaccord_collective_started(event):
        seen.append(event)
    """
    backend = plugins.backend("alpha")
    module = plugins("tracer", source, group=EXTENSION_GROUP)

    assert manager.names() == ["alpha"]
    assert module not in sys.modules
    assert [plugin.name for plugin in manager.extensions()] == ["tracer"]
    manager.load_extensions()
    assert manager.observed
    manager.notify_started(EVENT)
    assert sys.modules[module].seen == [EVENT]
    assert backend not in sys.modules


def test_a_broken_extension_is_recorded_and_breaks_nothing(
    plugins: PluginFactory, manager: PluginManager, caplog: pytest.LogCaptureFixture
) -> None:
    plugins("tracer", "raise RuntimeError('oh')", group=EXTENSION_GROUP)

    manager.load_extensions()
    manager.load_extensions()
    assert not manager.observed

    assert "RuntimeError: oh" in str(manager.extension_errors()["tracer"])
    assert len(caplog.records) == 1


@pytest.mark.parametrize("switches", [Switches(block=frozenset({"tracer"})), Switches(autoload=False)])
def test_a_blocked_extension_is_not_imported(plugins: PluginFactory, switches: Switches) -> None:
    module = plugins("tracer", "raise RuntimeError('oh')", group=EXTENSION_GROUP)
    manager = PluginManager(switches)

    assert "tracer" not in [plugin.name for plugin in manager.extensions()]
    manager.load_extensions()
    assert module not in sys.modules
    assert "tracer" not in manager.extension_errors()


def test_an_extension_that_was_asked_for_must_load(plugins: PluginFactory) -> None:
    plugins("tracer", "raise RuntimeError('oh')", group=EXTENSION_GROUP)

    with pytest.raises(PluginError, match="RuntimeError: oh"):
        PluginManager(Switches(load=("tracer",), autoload=False)).load_extensions()

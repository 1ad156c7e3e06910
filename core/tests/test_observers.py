"""What observers see, and collectives that a plugin performs itself; with a backend that lives in this file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import (
    Backend,
    BackendSpec,
    Bootstrap,
    CollectiveRequest,
    Deadline,
    Group,
    LinkLost,
    NativeCollective,
    OperationEvent,
    Transfer,
    Transport,
    hookimpl,
)
from oneaccord.config.plugins import PluginManager

MODULE = "a_backend_of_the_tests"


class Table(Backend):
    """A backend whose ranks are threads that lay their arrays on a common table; it moves no messages."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        shared: dict[str, Any] = {} if bootstrap.shared is None else bootstrap.shared  # a world of one shares nothing
        self.rank = bootstrap.rank
        self.arrays: dict[int, Any] = shared.setdefault("arrays", {})
        self.together: threading.Barrier = shared.setdefault("together", threading.Barrier(bootstrap.world_size))

    def all_arrays(self, mine: Any) -> list[Any]:
        """Lay down an array; return those of all ranks."""
        self.together.wait(30)
        self.arrays[self.rank] = mine.copy()
        self.together.wait(30)
        return [self.arrays[rank] for rank in sorted(self.arrays)]

    def open_transport(self, channel: int) -> Transport:
        return Nothing()

    def abort(self) -> None:
        self.together.abort()

    def close(self) -> None:
        pass


class Nothing(Transport):
    """A transport that cannot do anything: whoever comes here was not performed natively."""

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        raise LinkLost(peers[0], "this backend has no messages")

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        raise AssertionError

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        raise AssertionError

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


class Plugin:
    """Brings the backend, offers all_reduce and barrier natively, and notes what it is asked and told."""

    def __init__(self) -> None:
        self.requests: list[CollectiveRequest] = []
        self.events: list[OperationEvent] = []
        self.native_calls = 0

    @hookimpl
    def oneaccord_register_backends(self) -> BackendSpec:
        return BackendSpec(name="table", summary="for tests", factory=f"{MODULE}:Table")

    @hookimpl
    def oneaccord_collective(self, request: CollectiveRequest) -> NativeCollective | None:
        self.requests.append(request)
        if request.backend != "table" or request.collective.value not in ("all_reduce", "barrier"):
            return None

        def native(backend: Backend, source: Any, target: Any, root: int, deadline: Deadline, on_stall: Any) -> None:
            assert isinstance(backend, Table)
            self.native_calls += 1
            if request.op == "max":
                raise LinkLost(1 - backend.rank, "this backend cannot take a maximum")
            total = np.sum(backend.all_arrays(source), axis=0)
            target[...] = total / request.world_size if request.op == "mean" else total

        return native

    @hookimpl
    def oneaccord_collective_started(self, event: OperationEvent) -> None:
        self.events.append(event)

    @hookimpl
    def oneaccord_collective_finished(self, event: OperationEvent) -> None:
        self.events.append(event)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Plugin:
    """Register the plugin with a manager that takes the place of this process's own, for one test."""
    module = ModuleType(MODULE)
    module.Table = Table  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    manager = PluginManager()
    monkeypatch.setattr("oneaccord.config.plugins.manager._process_manager", lambda: manager)
    plugin = Plugin()
    manager.register(plugin, "table-plugin")
    return plugin


def run(program: Callable[[Group], Any]) -> list[Any]:
    """Run ``program`` on two threads over the table; return what each rank returned or raised."""
    return thread_world(program, 2, "table", timeout_s=30)


@pytest.fixture
def alone(plugin: Plugin) -> Iterator[Group]:
    """A world of one that the plugin observes."""
    with oa.init("table", config={}, rank=0, world_size=1) as group:
        yield group


def test_a_native_collective_is_used(plugin: Plugin) -> None:
    results = run(lambda group: group.all_reduce(np.arange(3.0) + group.rank))
    for result in results:
        np.testing.assert_array_equal(result, [1.0, 3.0, 5.0])
    assert plugin.native_calls == 2


def test_plugins_are_asked_once_per_kind_of_call_on_each_rank(plugin: Plugin) -> None:
    def program(group: Group) -> None:
        for _ in range(3):
            group.all_reduce(np.ones(3))
            group.barrier()
        group.all_reduce(np.ones((2, 2), np.float32))

    assert run(program) == [None, None]
    asked = sorted((r.collective.value, str(r.dtype), r.op, r.nbytes) for r in plugin.requests)
    kinds = [("all_reduce", "float32", "sum", 16), ("all_reduce", "float64", "sum", 24), ("barrier", "uint8", None, 0)]
    assert asked == sorted(kinds * 2)
    assert {(r.backend, r.device, r.world_size) for r in plugin.requests} == {("table", "cpu", 2)}
    assert plugin.native_calls == 14


def test_a_native_collective_performs_what_it_was_asked_for(plugin: Plugin) -> None:
    for result in run(lambda group: group.all_reduce(np.arange(2.0) + 2 * group.rank, op="mean")):
        np.testing.assert_array_equal(result, [1.0, 2.0])


def test_what_no_plugin_performs_goes_by_messages(plugin: Plugin) -> None:
    results = run(lambda group: group.all_gather(np.ones(1)))
    assert [type(result) for result in results] == [oa.PeerLostError] * 2
    assert "this backend has no messages" in str(results[0])
    assert {r.collective.value for r in plugin.requests} == {"all_gather"}


def test_a_native_collective_that_loses_a_peer_fails_as_any(plugin: Plugin) -> None:
    results = run(lambda group: group.all_reduce(np.ones(1), op="max"))
    assert [type(result) for result in results] == [oa.PeerLostError] * 2
    assert "this backend cannot take a maximum" in str(results[0])
    finished = [event for event in plugin.events if event.finished_ns is not None]
    assert {type(event.error) for event in finished} == {oa.PeerLostError}
    assert len(plugin.events) == 2 * len(finished)  # a rank that is late learns of it before its own call begins


def test_observers_see_each_collective_start_and_end(plugin: Plugin) -> None:
    before = time.monotonic_ns()

    def program(group: Group) -> None:
        group.all_reduce(np.ones((2, 3), np.float32))
        group.barrier()

    assert run(program) == [None, None]
    for rank in range(2):
        events = [event for event in plugin.events if event.rank == rank]
        told = [(e.operation, e.sequence, e.algorithm, e.nbytes, e.dtype, e.finished_ns is None) for e in events]
        assert told == [
            ("all_reduce", 0, "table", 24, "float32", True),
            ("all_reduce", 0, "table", 24, "float32", False),
            ("barrier", 1, "table", 0, "", True),
            ("barrier", 1, "table", 0, "", False),
        ]
        assert all(event.error is None for event in events)
        times = [time_ns for event in events for time_ns in (event.started_ns, event.finished_ns) if time_ns is not None]
        assert before <= times[0]
        assert times[0] == times[1] <= times[2] <= times[3] == times[4] <= times[5] <= time.monotonic_ns()
    assert len({event.group for event in plugin.events}) == 1


def test_observers_see_calls_in_the_background_however_often(plugin: Plugin) -> None:
    def program(group: Group) -> None:
        x = np.ones(3)
        for _ in range(2):
            group.all_reduce(x)
        for _ in range(3):
            group.all_reduce_async(x).wait()

    assert run(program) == [None, None]
    assert [event.sequence for event in plugin.events if event.rank == 0] == [n for n in range(5) for _ in range(2)]


def test_observers_see_who_performs_a_collective_in_a_world_of_one(plugin: Plugin, alone: Group) -> None:
    np.testing.assert_array_equal(alone.all_gather(np.ones(2)), [1.0, 1.0])
    started, finished = plugin.events
    assert (started.operation, started.rank, started.nbytes) == ("all_gather", 0, 16)
    assert started.algorithm not in ("", "table")
    assert (started.finished_ns, finished.error) == (None, None)


def test_a_call_that_is_refused_is_not_observed(plugin: Plugin, alone: Group) -> None:
    with pytest.raises(oa.DTypeError):
        alone.all_reduce(np.ones(2, int), op="mean")
    assert plugin.events == []


def test_an_observer_that_raises_breaks_nothing(
    plugin: Plugin, alone: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Clumsy(list[OperationEvent]):
        def append(self, event: OperationEvent) -> None:
            raise ValueError("an observer's own affair")

    plugin.events = Clumsy()
    for _ in range(3):
        np.testing.assert_array_equal(alone.all_reduce(np.ones(2)), [1.0, 1.0])
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2  # once for each of the two hooks
    assert all("table-plugin" in message for message in messages)


def test_a_plugin_that_raises_when_it_is_asked_ends_the_call_in_words(plugin: Plugin, alone: Group) -> None:
    class Clumsy(list[CollectiveRequest]):
        def append(self, request: CollectiveRequest) -> None:
            raise ValueError("no such table")

    plugin.requests = Clumsy()
    with pytest.raises(oa.PluginError, match=r"ValueError.*no such table.*all_reduce on the backend 'table'"):
        alone.all_reduce(np.ones(1))


@pytest.mark.parametrize("backend", ["shm", "simulated"])
def test_observers_see_sends_and_receives(plugin: Plugin, backend: str) -> None:
    def program(group: Group) -> None:
        for _ in range(2):  # the second time, a call that was made before
            if group.rank == 0:
                group.send(np.zeros(3), 1)
                group.send(np.zeros(4, np.int16), 1, tag=5)
                group.send_object([1], 1, tag=6)
            else:
                group.recv(0)
                group.recv(oa.ANY, tag=5)
                group.recv_object(0, tag=6)

    assert thread_world(program, 2, backend, timeout_s=30) == [None, None]
    assert len(plugin.events) == 24
    finished = [event for event in plugin.events if event.finished_ns is not None]
    assert {event.error for event in finished} == {None}
    seen = [(event.rank, event.operation, event.nbytes, event.dtype, event.call) for event in finished]
    assert seen.count((0, "send", 24, "float64", "send to rank 1")) == 2
    assert seen.count((1, "recv", 24, "float64", "recv from rank 0")) == 2
    assert seen.count((0, "send", 8, "int16", "send to rank 1, tag 5")) == 2
    assert seen.count((1, "recv", 8, "int16", "recv from any rank, tag 5")) == 2
    assert seen.count((1, "recv_object", 2, "", "recv_object from rank 0, tag 6")) == 2


@pytest.mark.parametrize("backend", ["shm", "simulated"])
@pytest.mark.parametrize("own", [False, True])
def test_observers_see_each_call_of_a_window_once(plugin: Plugin, backend: str, own: bool) -> None:
    def program(group: Group) -> None:
        with group.window(np.zeros(300_000) if own else 300_000) as win:
            if group.rank == 0:
                win.put(np.zeros(250_000), 1, at=7)
                win.get(1, np.s_[:4:2])
                win.flush(1)
                with win.lock(1):
                    win.accumulate(1.0, 1)

    must(thread_world(program, 2, backend))
    finished = [event for event in plugin.events if event.finished_ns is not None and event.operation.startswith("window.")]
    seen = [(event.rank, event.operation, event.nbytes, event.dtype, event.call) for event in finished]
    assert seen.count((0, "window.put", 2_000_000, "float64", "window.put at rank 1, [7:250007]")) == 1
    assert seen.count((0, "window.get", 16, "float64", "window.get at rank 1, [0:4:2]")) == 1
    assert seen.count((0, "window.accumulate", 8, "float64", "window.accumulate at rank 1, [0]")) == 1
    calls = [each[1] for each in seen if each[0] == 0]
    for name in ("put", "get", "lock", "accumulate", "unlock"):
        assert calls.count(f"window.{name}") == 1, calls
    assert {event.error for event in finished} == {None}


@pytest.mark.parametrize("backend", ["shm", "simulated"])
def test_observers_get_the_error_of_a_receive_that_failed(plugin: Plugin, backend: str) -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.arange(9), 1, tag=1)
        else:
            with pytest.raises(oa.SizeMismatchError):
                group.recv(0, tag=1, out=np.empty(2, np.int64))

    must(thread_world(program, 2, backend))
    (ended,) = [event for event in plugin.events if event.operation == "recv"][1:]
    assert isinstance(ended.error, oa.SizeMismatchError)


def _told(events: list[OperationEvent], rank: int, operation: str) -> list[tuple[str, int, str, str, bool]]:
    """Return what was told of a rank's calls of a kind, each with whether it has ended."""
    return [
        (each.call, each.nbytes, each.dtype, type(each.error).__name__, each.finished_ns is not None)
        for each in events
        if (each.rank, each.operation) == (rank, operation)
    ]


@pytest.mark.parametrize("backend", ["shm", "simulated"])
def test_observers_see_requests_begin_and_end(plugin: Plugin, backend: str) -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            again = group.persistent_send(np.zeros(3), 1, tag=1)
            for _ in range(2):
                again.start().wait()
            group.send_async(np.zeros(60_000, np.int16), 1, tag=2, mode="sync").wait()
            group.send(np.zeros(2), 1, tag=3, mode="buffered")
            group.recv(1, tag=4)
        else:
            assert group.probe(0, 1).count == 3
            work = group.recv_async(oa.ANY, tag=1)
            assert work.wait().shape == (3,)
            assert group.take(0, 1).recv().shape == (3,)
            group.recv_async(0, tag=2).wait()
            group.recv(0, tag=3)
            never = group.recv_async(0, tag=9)
            assert never.cancel()
            group.send(np.ones(1), 0, tag=4)

    must(thread_world(program, 2, backend))
    sends = _told(plugin.events, 0, "send")
    for call, nbytes, dtype, times in (
        ("send to rank 1, tag 1", 24, "float64", 2),
        ("send to rank 1, tag 2", 120_000, "int16", 1),
        ("send to rank 1, tag 3", 16, "float64", 1),
    ):
        assert sends.count((call, nbytes, dtype, "NoneType", False)) == times, sends
        assert sends.count((call, nbytes, dtype, "NoneType", True)) == times, sends
    receives = _told(plugin.events, 1, "recv")
    assert receives[:2] == [
        ("recv from any rank, tag 1", 0, "", "NoneType", False),
        ("recv from any rank, tag 1", 24, "float64", "NoneType", True),
    ]
    assert receives.count(("recv from rank 0, tag 2", 120_000, "int16", "NoneType", True)) == 1
    assert receives[-2:] == [
        ("recv from rank 0, tag 9", 0, "", "NoneType", False),
        ("recv from rank 0, tag 9", 0, "", "Cancelled", True),
    ]
    assert _told(plugin.events, 1, "probe") == [
        ("probe from rank 0, tag 1", 0, "", "NoneType", False),
        ("probe from rank 0, tag 1", 24, "float64", "NoneType", True),
    ]
    assert _told(plugin.events, 1, "take")[1] == ("take from rank 0, tag 1", 24, "float64", "NoneType", True)
    for each in plugin.events:
        begun = [other for other in plugin.events if (other.rank, other.sequence) == (each.rank, each.sequence)]
        assert [other.finished_ns is None for other in begun] == [True, False], begun


@pytest.mark.parametrize("backend", ["shm", "simulated"])
def test_observers_get_the_error_of_a_request_once(plugin: Plugin, backend: str) -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.arange(9), 1, tag=1)
            oa.sleep(1.5)
        else:
            fits = group.recv_async(0, tag=1, out=np.empty(2, np.int64))
            with pytest.raises(oa.SizeMismatchError):
                fits.wait()
            late = group.recv_async(0, tag=2, timeout_s=0.2)
            with pytest.raises(oa.DeadlineError):
                late.wait()
            with pytest.raises(oa.DeadlineError):
                late.wait()

    thread_world(program, 2, backend)
    assert [(each[3], each[4]) for each in _told(plugin.events, 1, "recv")] == [
        ("NoneType", False),
        ("SizeMismatchError", True),
        ("NoneType", False),
        ("DeadlineError", True),
    ]


def test_an_observer_that_raises_breaks_no_request(plugin: Plugin, caplog: pytest.LogCaptureFixture) -> None:
    class Clumsy(list[OperationEvent]):
        def append(self, event: OperationEvent) -> None:
            raise ValueError("an observer's own affair")

    plugin.events = Clumsy()

    def program(group: Group) -> None:
        other = 1 - group.rank
        works = [group.recv_async(other, tag=tag) for tag in range(8)]
        works += [group.send_async(np.full(3, tag), other, tag=tag) for tag in range(8)]
        assert [int(work.wait()[0]) for work in works[:8]] == list(range(8))

    must(thread_world(program, 2, "shm"))
    assert len(caplog.records) == 2  # once for each of the two hooks


@pytest.mark.parametrize("backend", ["shm", "simulated"])
def test_observers_see_a_sendrecv_with_tags_by_its_name(plugin: Plugin, backend: str) -> None:
    def program(group: Group) -> None:
        other = 1 - group.rank
        group.sendrecv(np.zeros(3), other, other, tag=1)
        group.sendrecv_async(np.zeros(3), other, other, tag=2).wait()

    must(thread_world(program, 2, backend))
    assert [call for call, *_, ended in _told(plugin.events, 0, "sendrecv") if ended] == [
        f"send to rank 1, tag {tag} and recv from rank 1, tag {tag}" for tag in (1, 2)
    ]
    assert not _told(plugin.events, 0, "send")


@pytest.mark.parametrize("backend", ["shm", "simulated"])
def test_observers_see_the_end_of_requests_that_a_failure_has_left(plugin: Plugin, backend: str) -> None:
    def program(group: Group) -> None:
        other = 1 - group.rank
        group.recv_async(other, tag=1)
        group.send_async(np.zeros(300_000), other, tag=2)
        group.barrier()
        if group.rank == 1:
            raise ValueError("of the program")
        group.recv(oa.ANY, tag=3)

    thread_world(program, 2, backend)
    started = [(event.rank, event.sequence, event.call) for event in plugin.events if event.finished_ns is None]
    ended = [(event.rank, event.sequence, event.call) for event in plugin.events if event.finished_ns is not None]
    assert sorted(started) == sorted(ended)

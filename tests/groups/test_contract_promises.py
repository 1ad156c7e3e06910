"""What core promises to a backend, seen by one that watches every call; and what a backend may do that no other test does."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import HEADER_BYTES, BackendSpec, Deadline, Group, LinkLost, Transfer, hookimpl
from oneaccord.config.plugins import get_plugin_manager
from oneaccord_tcp.backend import TcpBackend, TcpTransport
from oneaccord_tcp.plugin import TcpConfig

PATIENCE_S = 20.0


class Config(TcpConfig):
    whole: bool = False
    eager: bool = False


class Seen:
    """What the backends of a world have seen, and what they may wait for."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self.lengths: set[int] = set()
        self.ends: list[str] = []
        self.waiting = 0
        self.timeouts: list[set[int]] = []
        self.two_wait = threading.Event()
        self.timed_out = threading.Event()
        self.connecting: threading.Barrier | None = None

    def check(self, holds: bool, words: str) -> None:
        if not holds:
            self.broken.append(words)


seen = Seen()


class Done(Transfer):
    """A message that was copied."""

    def __init__(self, nbytes: int) -> None:
        self.done, self.moved = True, nbytes


class WatchingTransport(TcpTransport):
    """A transport of TCP that looks at what core does with it."""

    def __init__(self, backend: WatchingBackend, channel: int) -> None:
        super().__init__(backend, channel)
        self.streams = backend.table.whole
        self.number, self.eager, self.rank = channel, backend.table.eager, backend.rank
        self.connected: set[int] = set()
        self.moving: dict[tuple[str, int], Transfer] = {}
        self.inside = threading.Lock()
        self.closed = False
        self.copies: queue.Queue[tuple[int, bytes, bytes] | None] = queue.Queue()
        if self.eager:
            threading.Thread(target=self.push, daemon=True).start()

    def mailbox(self, peer: int) -> None:
        seen.check(peer in self.connected, f"mailbox({peer}) before connect")

    @contextlib.contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """Watch that one thread at a time is in a transport of collectives."""
        seen.check(not self.closed, f"{call} after close")
        taken = self.number % 2 or self.inside.acquire(blocking=False)
        seen.check(bool(taken), f"{call} while another thread is in a transport of an even channel")
        try:
            yield
        finally:
            if taken and not self.number % 2:
                self.inside.release()

    def start(self, way: str, peer: int, header: bytes, payload: memoryview | None) -> None:
        seen.check(peer in self.connected and peer != self.rank, f"{way} to or from {peer}, which is not connected")
        seen.check(len(header) == HEADER_BYTES, f"a header of {len(header)} bytes")
        before = self.moving.get((way, peer))
        seen.check(before is None or before.done, f"a second {way} while one is on its way")
        if payload is not None:
            seen.check(payload.ndim == 1 and payload.format == "B" and payload.c_contiguous, f"a payload like {payload!r}")
            seen.check(way == "send" or not payload.readonly or not payload.nbytes, "a payload that cannot be filled")
            seen.lengths.add(payload.nbytes)

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        seen.check(bool(peers) and self.rank not in peers, f"connect({peers})")
        if seen.connecting is not None and self.number % 2:
            seen.connecting.wait(PATIENCE_S)
        with self.alone("connect"):
            super().connect(peers, deadline)
            self.connected.update(peers)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        with self.alone("send"):
            self.start("send", peer, header, payload)
            if self.eager:
                self.copies.put((peer, header, bytes(payload)))
                return Done(len(payload))
            self.moving["send", peer] = transfer = super().send(peer, header, payload)
            return transfer

    def push(self) -> None:
        """Send what was copied."""
        with contextlib.suppress(LinkLost):
            while (item := self.copies.get()) is not None:
                transfer = super().send(item[0], item[1], memoryview(item[2]))
                while not transfer.done:
                    super().wait([transfer], Deadline(PATIENCE_S))

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        with self.alone("recv"):
            self.start("recv", peer, header, payload)
            self.moving["recv", peer] = transfer = super().recv(peer, header, payload)
            return transfer

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Any) -> Transfer:
        with self.alone("consume"):
            self.start("recv", peer, header, None)
            seen.check(nbytes > 0, "consume of nothing")
            self.moving["recv", peer] = transfer = super().consume(peer, header, nbytes, sink)
            return transfer

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        with self.alone("wait"):
            mine = list(self.moving.values())
            seen.check(bool(transfers) and all(each in mine for each in transfers), f"wait for {transfers}")
            seen.waiting += 1
            if seen.waiting > 1 and self.number % 2:
                seen.two_wait.set()
            try:
                super().wait(transfers, deadline)
            except TimeoutError:
                seen.timeouts.append(set(map(id, transfers)))
                seen.timed_out.set()
                raise
            except LinkLost:
                raise LinkLost(1_000_000, "aborted") from None
            finally:
                seen.waiting -= 1

    def close(self) -> None:
        seen.check(not self.closed, "a transport was closed twice")
        self.closed = True
        self.copies.put(None)
        super().close()


class WatchingBackend(TcpBackend):
    def __init__(self, bootstrap: Any) -> None:
        super().__init__(bootstrap)
        self.table: Config = bootstrap.config
        self.channels: set[int] = set()

    def open_transport(self, channel: int) -> WatchingTransport:
        seen.check(channel not in self.channels, f"channel {channel} was opened twice")
        self.channels.add(channel)
        return WatchingTransport(self, channel)

    def abort(self) -> None:
        seen.ends.append(f"abort {self.rank}")
        super().abort()

    def close(self) -> None:
        seen.ends.append(f"close {self.rank}")
        super().close()


class Plugin:
    @hookimpl
    def oneaccord_register_backends(self) -> BackendSpec:
        return BackendSpec("watching", "", "watching_for_tests:WatchingBackend", config=Config, api_version=1)


@pytest.fixture(scope="module", autouse=True)
def watching() -> Iterator[None]:
    module = types.ModuleType("watching_for_tests")
    module.WatchingBackend = WatchingBackend  # type: ignore[attr-defined]
    sys.modules["watching_for_tests"] = module
    get_plugin_manager().register(Plugin(), "watching")
    yield
    del sys.modules["watching_for_tests"]


def watch(program: Any, world_size: int, *, connecting: threading.Barrier | None = None, **table: bool) -> list[Any]:
    global seen  # noqa: PLW0603 - the backends of one world after the other look there
    seen = Seen()
    seen.connecting = connecting
    outcomes = thread_world(program, world_size, "watching", config={"backends": {"watching": table}})
    assert seen.broken == []
    return outcomes


def everything(group: Group) -> list[Any]:
    """Make calls of all kinds, short and long, and return what they gave."""
    rank, size = group.rank, group.world_size
    right, left = (rank + 1) % size, (rank - 1) % size
    given: list[Any] = []
    for count in (0, 1, 1000, 1 << 18):
        data = np.arange(count, dtype=np.int64) + rank
        given.append(int(group.all_reduce(data).sum()))
        given.append(int(group.all_gather(data).sum()))
        given.append(int(group.sendrecv(data, right, left).sum()))
        given.append(int(group.broadcast(data, root=size - 1).sum()))
    group.barrier()
    with group.split(rank % 2) as part:
        given.append(int(part.all_reduce(np.ones(10)).sum()))
    works = [group.recv_async(left), group.send_async(np.full(1 << 17, rank), right), group.all_reduce_async(np.ones(9))]
    given += [np.sum(work.wait()).item() for work in works if work is not works[1]]
    works[1].wait()
    return given


@pytest.mark.parametrize("table", [{}, {"whole": True}, {"eager": True}], ids=["cut", "streams", "eager"])
def test_core_keeps_its_promises_and_a_send_may_be_done_once_it_is_copied(table: dict[str, bool]) -> None:
    expected = must(thread_world(everything, 3, "tcp"))
    assert must(watch(everything, 3, **table)) == expected
    assert 0 in seen.lengths  # empty messages are messages
    for rank in range(3):
        ends = [each.split()[0] for each in seen.ends if each.endswith(str(rank))]
        assert ends[:2] == ["abort", "close"]
        assert ends.count("close") >= 1


def test_threads_wait_in_one_transport_at_once() -> None:
    def program(group: Group) -> Any:
        if group.rank == 0:
            works = [group.recv_async(1), group.recv_async(2)]
            return [work.wait().item() for work in works]
        assert seen.two_wait.wait(PATIENCE_S)
        return group.send(np.array(group.rank), 0)

    assert must(watch(program, 3))[0] == [1, 2]


def test_threads_connect_to_one_peer_at_once() -> None:
    barrier = threading.Barrier(4)  # both directions of both ranks

    def program(group: Group) -> Any:
        work = group.recv_async(1 - group.rank)
        group.send_async(np.array(group.rank), 1 - group.rank).wait()
        return work.wait().item()

    assert must(watch(program, 2, connecting=barrier)) == [1, 0]


def test_after_a_timeout_core_waits_for_the_same_transfers_again() -> None:
    def program(group: Group) -> Any:
        if group.rank == 0:
            return group.recv(1).sum().item()
        assert seen.timed_out.wait(PATIENCE_S)
        return group.send(np.ones(1 << 17), 0)

    assert must(watch(program, 2))[0] == 1 << 17
    assert seen.timeouts


def test_of_an_abort_core_reads_neither_the_peer_nor_the_reason() -> None:
    def program(group: Group) -> Any:
        if group.rank == 0:
            return group.recv(1)
        assert seen.timed_out.wait(PATIENCE_S)
        raise ArithmeticError("no more pigeons")

    waiting, failed = watch(program, 2)
    assert isinstance(failed, ArithmeticError)
    assert isinstance(waiting, oa.AbortedError)
    assert "rank 1 ended with ArithmeticError: no more pigeons" in str(waiting)
    assert "1000000" not in str(waiting)
    assert next(each for each in seen.ends if each.endswith("0")) == "abort 0"

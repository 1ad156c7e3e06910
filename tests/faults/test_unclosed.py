"""No connection loses its owner unclosed, whatever fails on the way from one owner to the next.

The collector of garbage finds what does, and says so by a ResourceWarning: long after, and in the midst of something else.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import socket
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.loops import loop
from support.waiting import PATIENCE_S, until
from support.worlds import held_port, over_sockets

import oneaccord as oa
from oneaccord.api import Group
from oneaccord.cli.main import main
from oneaccord.common.bounded import bounded
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.seal import Seal
from oneaccord.control.connection import Control
from oneaccord.control.remote import CONTROL_HELLO, SocketControl
from oneaccord.job.job import Job
from oneaccord.net import network, tls
from oneaccord.net.credentials import Credentials
from oneaccord.net.finding import dial_patiently
from oneaccord.net.loop import Loop
from oneaccord.net.network import Listener, dial
from oneaccord.net.proven import ProvenSocket
from oneaccord.net.tls import Tls, TlsHandshake
from oneaccord_tcp.backend import TcpBackend

__all__ = ["loop"]

NO_SECRET = Credentials(b"")


@contextlib.contextmanager
def all_closed() -> Iterator[None]:
    """Require that nothing becomes garbage meanwhile that is still open."""
    gc.collect()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert [str(warning.message) for warning in told if warning.category is ResourceWarning] == []


class JoinAddress:
    """Where others dial; it keeps who came."""

    def __init__(self, loop: Loop, credentials: Credentials = NO_SECRET) -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = sock.getsockname()
        self.came: queue.Queue[socket.socket] = queue.Queue()
        self._listener = Listener(loop, sock, credentials, lambda sock, _: self.came.put(sock))

    def close(self) -> None:
        self._listener.close()
        while not self.came.empty():
            self.came.get().close()


@pytest.fixture
def door(loop: Loop) -> Iterator[JoinAddress]:
    door = JoinAddress(loop)
    yield door
    door.close()


def raising(error: BaseException, when: Callable[..., bool] = lambda *_, **__: True, then: Any = None) -> Callable[..., Any]:
    """Return what raises when it should, and else does what it did."""

    def act(*given: Any, **named: Any) -> Any:
        if when(*given, **named):
            raise type(error)(*error.args)  # another one each time: each keeps alive what it has come through
        return then(*given, **named)

    return act


# The loop and what it serves


def test_what_is_emptied_after_a_broken_frame_is_closed_with_its_job() -> None:
    ended: list[type] = []
    with all_closed(), held_port() as port:
        address = "127.0.0.1", port.getsockname()[1]

        def meet() -> None:
            try:
                oa.init(
                    config={"backend": "tcp", "rendezvous": {"address": f"{address[0]}:{address[1]}"}}, rank=0, world_size=2
                )
            except oa.OneAccordError as error:
                ended.append(type(error))

        rank = threading.Thread(target=meet, daemon=True)
        rank.start()
        with dial_patiently(address, NO_SECRET, CONTROL_HELLO, 1, Deadline(PATIENCE_S), lambda: False) as peer:
            peer.send(bytes(100))  # with wrong seals; and it stays there, which the store waits for
            rank.join(PATIENCE_S)
            assert ended == [oa.ProtocolError]
            gc.collect()


def test_a_loop_that_fails_closes_what_it_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        logging.getLogger("oneaccord.network"), "disabled", True
    )  # pytest would keep what it logs, and so the job
    threads: list[threading.Thread] = []

    def program(group: Group) -> None:
        group.barrier()
        if group.rank:
            threads.append(group._job.loop._thread)
            group._job.loop.call(raising(RuntimeError("a fault")))
        group.recv(1 - group.rank)

    with all_closed():
        assert [type(error) for error in over_sockets(program)] == [oa.PeerLostError, oa.InternalError]
        threads.pop().join(PATIENCE_S)


def test_a_connection_that_is_given_to_a_loop_too_late_is_closed() -> None:
    loop = Loop("test", lambda _: None)
    loop.stop()
    job = Job(0, 2, "tcp")
    job._loop = loop
    with all_closed():
        ours, theirs = socket.socketpair()
        connection = job.frames(ProvenSocket.over(ours, (Seal(b"one"), Seal(b"other"))), lambda _: None, lambda _: None, 100)
        connection.send(b"to nobody")
        connection.close()
        theirs.settimeout(PATIENCE_S)
        assert theirs.recv(1) == b""
        theirs.close()
        del connection
        Listener(loop, socket.create_server(("127.0.0.1", 0)), NO_SECRET, lambda *_: None).close()


# Who dials


def test_who_is_interrupted_as_it_dials_leaves_nothing_open(door: JoinAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_wait_until", raising(KeyboardInterrupt()))
    with all_closed(), pytest.raises(KeyboardInterrupt):
        dial(door.address, NO_SECRET, b"hello", Deadline(PATIENCE_S))


def test_a_proven_connection_that_cannot_be_made_is_closed(door: JoinAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    here, keep = threading.current_thread(), network.close_after_fork

    def is_dialled(_: socket.socket) -> bool:
        return threading.current_thread() is here

    monkeypatch.setattr("oneaccord.net.proven.close_after_fork", raising(MemoryError(), is_dialled, keep))
    with all_closed(), pytest.raises(MemoryError):
        dial(door.address, NO_SECRET, b"hello", Deadline(PATIENCE_S))


@pytest.mark.parametrize("seam", ["_hold_place", "_post"])
def test_a_control_that_fails_as_it_is_made_is_closed(seam: str, door: JoinAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SocketControl, seam, raising(MemoryError()))
    config = {"backend": "tcp", "rendezvous": {"address": f"127.0.0.1:{door.address[1]}"}}
    with all_closed(), pytest.raises(MemoryError):
        oa.init(config=config, rank=1, world_size=2)


def test_what_comes_as_a_factory_is_interrupted_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            super().wait(timeout)
            raise KeyboardInterrupt

    monkeypatch.setattr("oneaccord.common.bounded.threading", _Threading(Interrupted))
    given_back: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        bounded(lambda: "made", PATIENCE_S, "test", given_back.append)
    assert given_back == ["made"]


class _Threading:
    """The module, with another event."""

    Lock = staticmethod(threading.Lock)

    def __init__(self, event: type[threading.Event]) -> None:
        self.Event = event


def test_who_fails_between_the_meeting_and_the_backend_leaves_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_second(job: Job, *_: object) -> bool:
        return job.rank == 1

    monkeypatch.setattr(Job, "record", raising(OSError("no such folder"), is_second, Job.record))
    with all_closed():
        errors = over_sockets(lambda _: None)
    assert [type(error) for error in errors] == [oa.AbortedError, OSError]
    assert "rank 1 ended with OSError: no such folder" in str(errors[0])


# The backend tcp


def test_links_that_come_to_a_rank_whose_backend_fails_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    has_come = threading.Event()
    exchange, add = Control.exchange, TcpBackend._add

    def exchanging(control: Control, name: str, *given: Any) -> Any:
        answer = exchange(control, name, *given)
        if (control.rank, name) == (1, "tcp"):
            assert has_come.wait(PATIENCE_S)
            raise OSError("no memory")
        return answer

    def adding(backend: TcpBackend, *given: Any) -> None:
        add(backend, *given)
        if backend.rank == 1:
            has_come.set()

    monkeypatch.setattr(Control, "exchange", exchanging)
    monkeypatch.setattr(TcpBackend, "_add", adding)

    def program(group: Group) -> None:
        group.send(np.ones(1), 1)
        group.recv(1)

    with all_closed():
        assert [type(error) for error in over_sockets(program)] == [oa.AbortedError, OSError]


def test_connections_of_a_link_for_which_a_thread_is_refused_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    begin: Any = ThreadPoolExecutor._adjust_thread_count  # type: ignore[attr-defined]

    def is_second(pool: Any) -> bool:
        return pool._thread_name_prefix == "oneaccord-tcp-dial" and bool(pool._threads)

    refused = raising(RuntimeError("can't start new thread"), is_second, begin)
    monkeypatch.setattr(ThreadPoolExecutor, "_adjust_thread_count", refused)

    def program(group: Group) -> None:
        if group.rank:  # which asks for no link: rank 0 would dial in the background, as nobody waits for here
            until(lambda: group._job.control.failed)
        else:
            group.send(np.ones(1), 1)

    with all_closed():
        errors = over_sockets(program, streams=2)
        assert type(errors[0]) is RuntimeError, errors


def test_a_backend_that_cannot_be_closed_keeps_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_second(backend: TcpBackend) -> bool:
        return backend.rank == 1

    def program(group: Group) -> None:
        group.barrier()
        loops[group.rank] = group._job.loop

    loops: dict[int, Loop] = {}
    monkeypatch.setattr(TcpBackend, "abort", raising(RuntimeError("no end"), is_second, TcpBackend.abort))
    with all_closed():
        assert [type(error) for error in over_sockets(program)] == [type(None), RuntimeError]
        for loop in loops.values():
            loop._thread.join(PATIENCE_S)
            assert not loop._thread.is_alive()


# TLS, which makes a socket of its own


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls") / "job"
    with pytest.raises(SystemExit, match="0"):
        main(["certs", str(folder)])
    return Tls(folder)


@pytest.mark.parametrize("is_server", [False, True])
def test_who_goes_just_before_tls_begins_leaves_nothing_open(
    is_server: bool, certificates: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = tls._over
    with all_closed(), socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        sock, _ = server.accept()

        def gone(*given: Any) -> Any:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            return over(*given)

        monkeypatch.setattr(tls, "_over", gone)
        proven = ProvenSocket.over(sock, (Seal(b"one"), Seal(b"other")))
        with contextlib.closing(proven), pytest.raises(ConnectionResetError):
            TlsHandshake(certificates, proven, is_server, b"secret", b"words")


def test_a_name_that_no_certificate_can_have_leaves_nothing_open(certificates: Tls) -> None:
    ours, theirs = socket.socketpair()
    with all_closed(), theirs:
        proven = ProvenSocket.over(ours, (Seal(b"one"), Seal(b"other")))
        with (
            contextlib.closing(proven),
            pytest.raises(oa.AuthenticationError, match="no certificate can name the dialled host"),
        ):
            tls._over(certificates.current().client, proven, False, "a" * 64)

"""Sockets that prove a secret, and the frames of a control connection."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.loops import loop
from support.waiting import PATIENCE_S
from support.worlds import on_threads

from oneaccord.contract.backend import LinkLost
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.seal import Seal
from oneaccord.control.local import LocalHub
from oneaccord.errors import AuthenticationError, RendezvousError
from oneaccord.job.job import Job
from oneaccord.net import network
from oneaccord.net.credentials import Credentials, is_loopback
from oneaccord.net.frames import FrameConnection
from oneaccord.net.handshake import (
    CLIENT_BYTES,
    GREETING_BYTES,
    HELLO_BYTES,
    KNOCK_BYTES,
    MAGIC,
    REPLY_BYTES,
    ClientHandshake,
    knock,
    refusal,
)
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.network import Listener, bind, dial, show_address
from oneaccord.net.proven import ProvenSocket

__all__ = ["loop"]

SECRET = b"the secret of the tests"
CREDENTIALS = Credentials(SECRET)
HELLO = b"hello".ljust(HELLO_BYTES, b"\0")


def receive(sock: socket.socket, count: int) -> bytes:
    """Return the next ``count`` bytes; fewer when the connection ends."""
    data = b""
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return data


class Door:
    """A listener, who came in by it, and who was refused."""

    def __init__(self, loop: Loop, host: str = "127.0.0.1") -> None:
        sock = bind(host, 0)
        self.address: tuple[str, int] = sock.getsockname()[:2]
        self.came: queue.Queue[tuple[socket.socket, bytes]] = queue.Queue()
        self.refused: queue.Queue[Any] = queue.Queue()
        self.listener = Listener(loop, sock, CREDENTIALS, lambda *who: self.came.put(who), lambda *who: self.refused.put(who))

    def close(self) -> None:
        self.listener.close()
        while not self.came.empty():
            self.came.get()[0].close()


@pytest.fixture
def door(loop: Loop) -> Iterator[Door]:
    door = Door(loop)
    yield door
    door.close()


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    """Let this process open nothing more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    while taken[-1] + 1 < max(int(path.name) for path in Path("/proc/self/fd").iterdir()):  # to list them takes one more
        taken.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


def call(door: Door, secret: bytes = SECRET) -> socket.socket:
    return dial(door.address, Credentials(secret), b"hello", Deadline(PATIENCE_S))


def test_who_proves_the_secret_comes_in(door: Door) -> None:
    with call(door) as ours:
        theirs, hello = door.came.get(timeout=PATIENCE_S)
        with theirs:
            assert hello == HELLO
            assert not ours.getblocking()
            assert not theirs.getblocking()
            theirs.send(b"welcome")
            ours.setblocking(True)
            assert ours.recv(16) == b"welcome"


def test_accept_that_finds_the_other_end_gone_closes_the_connection(loop: Loop) -> None:
    given: queue.Queue[socket.socket] = queue.Queue()

    def accept(sock: socket.socket, _: bytes) -> None:
        given.put(sock)
        raise ConnectionResetError("the other end has gone")

    sock = bind("127.0.0.1", 0)
    address = sock.getsockname()[:2]
    listener = Listener(loop, sock, CREDENTIALS, accept)
    with dial(address, Credentials(SECRET), b"hello", Deadline(PATIENCE_S)) as ours:
        ours.setblocking(True)
        ours.settimeout(PATIENCE_S)
        assert ours.recv(1) == b""
        assert given.get(timeout=PATIENCE_S).fileno() == -1
    listener.close()


def test_who_does_not_is_refused_and_told(door: Door) -> None:
    with pytest.raises(AuthenticationError, match="holds another secret than this rank"):
        call(door, b"another")
    address, why = door.refused.get(timeout=PATIENCE_S)
    assert (address[0], why) == ("127.0.0.1", "with another secret")
    assert door.came.empty()


def test_nothing_that_is_sent_with_the_proof_is_lost(door: Door) -> None:
    """The listener reads the handshake and not a byte more: what follows belongs to whoever takes the connection."""
    with call(door) as ours:
        ours.send(b"and this")
        theirs, _ = door.came.get(timeout=PATIENCE_S)
        with theirs:
            theirs.setblocking(True)
            assert theirs.recv(64) == b"and this"


@pytest.mark.parametrize("words", [b"", b"M", MAGIC, MAGIC + bytes(CLIENT_BYTES - len(MAGIC) - 1)])
def test_strangers_that_wait_are_no_obstacle(door: Door, words: bytes) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(door.address)).sendall(words)
        stack.enter_context(call(door))
        stack.enter_context(door.came.get(timeout=PATIENCE_S)[0])


def test_a_stranger_is_dropped_at_its_first_wrong_byte(door: Door) -> None:
    with socket.create_connection(door.address, timeout=PATIENCE_S) as sock:
        sock.sendall(b"ACCORX")
        assert sock.recv(1) == b""


def test_the_oldest_of_too_many_strangers_goes_and_nobody_who_knocked(door: Door) -> None:
    with contextlib.ExitStack() as stack:
        caller = stack.enter_context(socket.create_connection(door.address, timeout=PATIENCE_S))
        caller.sendall(knock(SECRET))
        greeting = receive(caller, GREETING_BYTES)
        strangers = [stack.enter_context(socket.create_connection(door.address, timeout=PATIENCE_S)) for _ in range(129)]
        assert strangers[0].recv(1) == b""
        strangers[-1].sendall(knock(SECRET))
        assert receive(strangers[-1], GREETING_BYTES).startswith(MAGIC)  # the newest has stayed
        client = ClientHandshake(SECRET, b"hello")
        caller.sendall(client.answer(greeting))
        assert client.accepts(receive(caller, REPLY_BYTES))
        stack.enter_context(door.came.get(timeout=PATIENCE_S)[0])


@pytest.mark.long
def test_two_thousand_strangers_do_not_delay_a_rank(door: Door) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(door.address)
        stack.enter_context(dial(door.address, CREDENTIALS, b"hello", Deadline(PATIENCE_S)))
        stack.enter_context(door.came.get(timeout=PATIENCE_S)[0])


def test_a_knock_that_was_recorded_opens_nothing(door: Door) -> None:
    words = knock(SECRET)
    with (
        socket.create_connection(door.address, timeout=PATIENCE_S) as first,
        socket.create_connection(door.address, timeout=PATIENCE_S) as second,
    ):
        first.sendall(words)
        assert receive(first, GREETING_BYTES).startswith(MAGIC)
        second.sendall(words)
        assert second.recv(1) == b""
    assert door.refused.empty()  # nobody who was started with another secret


def test_a_stranger_and_a_caller_that_say_no_more_are_given_up(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(network, "_HANDSHAKE_S", 0.2)  # which begins to pass once both are known
    with (
        socket.create_connection(door.address, timeout=PATIENCE_S) as stranger,
        socket.create_connection(door.address, timeout=PATIENCE_S) as caller,
    ):
        caller.sendall(knock(SECRET))
        assert receive(caller, GREETING_BYTES).startswith(MAGIC)
        clock[0] = 1.0
        assert (caller.recv(1), stranger.recv(1)) == (b"", b"")


def test_a_knock_with_another_secret_is_refused_at_once(door: Door) -> None:
    with socket.create_connection(door.address, timeout=PATIENCE_S) as sock:
        sock.sendall(knock(b"another"))
        assert receive(sock, GREETING_BYTES + 1) == refusal(bytes(32))
    door.refused.get(timeout=PATIENCE_S)


def test_without_descriptors_a_stranger_goes_and_a_rank_comes_in(door: Door) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(socket.create_connection(door.address, timeout=PATIENCE_S))
        with call(door):
            door.came.get(timeout=PATIENCE_S)[0].close()  # those before it have been taken as well
        caller = stack.enter_context(socket.socket())
        caller.settimeout(PATIENCE_S)
        with without_descriptors():
            caller.connect(door.address)
            caller.sendall(knock(SECRET))
            assert receive(caller, GREETING_BYTES).startswith(MAGIC)


def test_closing_drops_those_that_have_not_proved_themselves(loop: Loop) -> None:
    door = Door(loop)
    with (
        socket.create_connection(door.address, timeout=PATIENCE_S) as stranger,
        socket.create_connection(door.address, timeout=PATIENCE_S) as caller,
    ):
        caller.sendall(knock(SECRET))
        receive(caller, GREETING_BYTES)
        door.close()
        assert (stranger.recv(1), caller.recv(1)) == (b"", b"")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(door.address, timeout=PATIENCE_S)


@contextlib.contextmanager
def server(talk: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Serve one connection with ``talk``; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def serve() -> None:
            connection, _ = sock.accept()
            with connection, contextlib.suppress(OSError):
                talk(connection)
                while connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield sock.getsockname()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_another_program_is_recognised_by_its_first_bytes() -> None:
    with (
        server(lambda sock: sock.sendall(b"220 mail.example.org ESMTP")) as address,
        pytest.raises(RendezvousError, match=r"not a oneaccord job: it sent b'220"),
    ):
        dial(address, CREDENTIALS, b"", Deadline(PATIENCE_S))


def test_a_server_without_the_secret_is_not_believed() -> None:
    def pretend(sock: socket.socket) -> None:
        receive(sock, KNOCK_BYTES)
        sock.sendall(MAGIC + bytes(32))
        receive(sock, CLIENT_BYTES)
        sock.sendall(MAGIC + bytes(REPLY_BYTES - len(MAGIC)))

    with server(pretend) as address, pytest.raises(AuthenticationError):
        dial(address, CREDENTIALS, b"", Deadline(PATIENCE_S))


def test_silence_ends_at_the_deadline() -> None:
    def nothing(sock: socket.socket) -> None:
        pass

    with server(nothing) as address, pytest.raises(TimeoutError):
        dial(address, CREDENTIALS, b"", Deadline(0.2))


def test_a_connection_that_is_closed_early_is_a_connection_error() -> None:
    def leave(sock: socket.socket) -> None:
        sock.sendall(MAGIC)
        sock.shutdown(socket.SHUT_RDWR)

    with server(leave) as address, pytest.raises(ConnectionError):
        dial(address, CREDENTIALS, b"", Deadline(PATIENCE_S))


def test_nobody_there_is_a_connection_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        with pytest.raises(ConnectionError):
            dial(taken.getsockname(), CREDENTIALS, b"", Deadline(PATIENCE_S))


@contextlib.contextmanager
def hole() -> Iterator[tuple[str, int]]:
    """Yield an address that swallows whatever comes: the queue of a listener that takes no connection is full."""
    with socket.socket() as sock, contextlib.ExitStack() as stack:
        sock.bind(("127.0.0.2", 0))
        sock.listen(0)
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(sock.getsockname())
        yield sock.getsockname()


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    """Let every name have these addresses."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_a_name_whose_first_address_swallows_everything_is_reached_by_its_second(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "Deadline", lambda share: Deadline(min(share, 0.1)))  # of one address
    with hole() as swallowing:
        resolving(monkeypatch, swallowing, door.address)
        with dial(("a.name", 1), CREDENTIALS, b"hello", Deadline(PATIENCE_S)):
            theirs, hello = door.came.get(timeout=PATIENCE_S)
            theirs.close()
    assert hello == HELLO


def test_a_name_whose_addresses_all_swallow_everything_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with hole() as one, hole() as other:
        resolving(monkeypatch, one, other)
        with pytest.raises(TimeoutError):
            dial(("a.name", 1), CREDENTIALS, b"", Deadline(0.2))


@pytest.mark.parametrize("name", ["a.name", "node1", "gpu-0012"])
def test_a_resolver_that_hangs_does_not_outlast_the_deadline(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    answered = threading.Event()

    def hang(*_: object, flags: int, **__: object) -> None:
        answered.wait(0 if flags & socket.AI_NUMERICHOST else 2 * PATIENCE_S)
        raise socket.gaierror("too late")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with pytest.raises(TimeoutError, match=f"the resolver does not answer for '{name}'"):
        dial((name, 1), CREDENTIALS, b"", Deadline(0.1))
    answered.set()


def come_together(door: Door, count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let so many ranks come in, all of which are greeted before the first one answers; return how often they answered."""
    answer = network.ClientHandshake.answer
    all_greeted = threading.Barrier(count)
    places, tries = iter(range(count)), list[None]()

    def together(self: ClientHandshake, greeting: bytes) -> bytes:
        tries.append(None)
        if next(places, None) is not None:
            all_greeted.wait(PATIENCE_S)
        return answer(self, greeting)

    monkeypatch.setattr(network.ClientHandshake, "answer", together)
    job = Job(1, 2, "tcp")
    job._credentials, door.listener._credentials = CREDENTIALS, CREDENTIALS.towards("rank 0")
    job.control = LocalHub(2).connect(1, "tcp", "")
    assert [None] * count == on_threads(lambda _: job.dial(0, door.address, b"", Deadline(40), "rank 0").close(), count)
    for _ in range(count):
        door.came.get(timeout=PATIENCE_S)[0].close()
    return len(tries)


def test_more_slow_peers_than_a_listener_keeps_all_come_in(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has knocked is no stranger, and newcomers do not push it out."""
    monkeypatch.setattr(network, "_MAX_STRANGERS", 8)
    assert come_together(door, 12, monkeypatch) == 12


def test_who_is_dropped_for_a_newcomer_dials_again(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_MAX_CALLERS", 1)
    assert come_together(door, 4, monkeypatch) > 4


def test_only_the_address_that_was_asked_for_is_listened_on() -> None:
    with bind("127.0.0.2", 0) as sock:
        port = sock.getsockname()[1]
        socket.create_connection(("127.0.0.2", port), timeout=PATIENCE_S).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", port), timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("192.0.2.1", False),
     ("128.0.0.1", False), ("1.127.0.0", False), ("::ffff:127.0.0.1", True)],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_an_address_is_shown_as_people_write_it() -> None:
    assert show_address(("node1", 29500)) == "node1:29500"
    assert show_address(("::1", 29500)) == "[::1]:29500"


class Line:
    """A frame connection, the raw other end, and what it heard."""

    def __init__(self, loop: Loop, max_bytes: int = 1000) -> None:
        ours, self.raw = socket.socketpair()
        self.raw.settimeout(PATIENCE_S)
        there, here = bytes(32), b"here".ljust(32)
        self.seal, self.expected = Seal(there), Seal(here)
        self.frames: queue.Queue[bytes] = queue.Queue()
        self.lost: queue.Queue[str] = queue.Queue()
        proven = ProvenSocket.over(ours, (Seal(here), Seal(there)))
        self.loop = loop
        self.connection = FrameConnection(loop, proven, self.frames.put, self.lost.put, max_bytes, Liveness())

    def says(self, *frames: bytes) -> bytes:
        """Return the bytes that carry the next frames to the connection."""
        return b"".join(framed(frame, self.seal) for frame in frames)

    def hears(self, *frames: bytes) -> bytes:
        """Return the bytes that must come from it for the next frames."""
        return b"".join(framed(frame, self.expected) for frame in frames)

    def catch_up(self) -> None:
        """Wait until the loop has done all that it was told to do so far."""
        done = threading.Event()
        self.loop.call(done.set)
        assert done.wait(PATIENCE_S)

    def close(self) -> None:
        self.connection.close()
        self.raw.close()


@pytest.fixture
def line(loop: Loop) -> Iterator[Line]:
    line = Line(loop)
    yield line
    line.close()


def framed(frame: bytes, seal: Seal) -> bytes:
    length = struct.pack("<I", len(frame))
    return length + seal.of(length) + frame + seal.of(frame)


def test_frames_come_whole_however_they_are_cut(line: Line) -> None:
    frames = [b"", b"one", b"two" * 300, b"\xff"]
    wire = line.says(*frames)
    for start in range(0, len(wire), 7):
        line.raw.sendall(wire[start : start + 7])
    assert [line.frames.get(timeout=PATIENCE_S) for _ in frames] == frames


def test_frames_are_sent_in_order(line: Line) -> None:
    for number in range(50):
        line.connection.send(b"%d" % number)
    wire = line.hears(*(b"%d" % number for number in range(50)))
    assert receive(line.raw, len(wire)) == wire


@pytest.mark.parametrize("length", [1001, 1 << 20, (1 << 32) - 1])
def test_a_frame_that_is_too_long_is_refused_before_it_comes(line: Line, length: int) -> None:
    announced = struct.pack("<I", length)
    line.raw.sendall(announced + line.seal.of(announced))
    assert line.lost.get(timeout=PATIENCE_S) == f"a frame of {length} bytes was announced, but at most 1000 are allowed"
    assert line.raw.recv(1) == b""
    assert line.frames.get_nowait() is None  # told as a frame that cannot be read
    assert line.frames.empty()


def _flip(place: int) -> Callable[[bytes, bytes], bytes]:
    return lambda one, two: bytes(byte ^ (8 * (at == place)) for at, byte in enumerate(one)) + two


@pytest.mark.parametrize(
    "tamper",
    [*map(_flip, (0, 3, 4, 19, 20, 24, 25, -17 + 42)), lambda one, two: one[:22] + one[23:] + two, lambda one, two: two + one,
     lambda _, two: two, lambda one, two: one + one + two],
    ids=["length", "long", "its seal", "end of that", "frame", "its end", "seal of it", "end", "left out", "swapped", "dropped", "again"],
)  # fmt: skip
def test_what_is_not_what_was_sent_ends_the_connection(line: Line, tamper: Callable[[bytes, bytes], bytes]) -> None:
    """A proxy may flip a bit anywhere, repeat, drop, swap: no frame that was not sent, or not now, is ever told."""
    one, two = line.says(b"first"), line.says(b"second")
    wire = tamper(one, two)
    line.raw.sendall(wire)
    told = []
    while (frame := line.frames.get(timeout=PATIENCE_S)) is not None:
        told.append(frame)
    assert told == ([b"first"] if wire.startswith(one) else [])
    assert "the connection was tampered with" in line.lost.get(timeout=PATIENCE_S)
    assert "the connection was tampered with" in line.connection.flaw
    with contextlib.suppress(ConnectionResetError):
        assert line.raw.recv(1) == b""


def test_a_frame_of_the_greatest_length_comes(line: Line) -> None:
    line.raw.sendall(line.says(bytes(1000)))
    assert line.frames.get(timeout=PATIENCE_S) == bytes(1000)


def test_a_connection_that_ends_is_told_once_after_its_last_frame(line: Line) -> None:
    line.raw.sendall(line.says(b"last") + b"\x05\x00")
    line.raw.close()
    assert line.lost.get(timeout=PATIENCE_S) == "the connection was closed"
    assert line.frames.get_nowait() == b"last"
    line.connection.send(b"to nobody")
    line.connection.close()
    line.catch_up()
    assert line.lost.empty()


def test_closing_lets_what_was_queued_out(loop: Loop) -> None:
    line = Line(loop)
    line.connection.send(b"goodbye")
    line.connection.close()
    wire = line.hears(b"goodbye")
    assert receive(line.raw, len(wire)) == wire
    line.raw.close()


def test_a_reader_that_is_slow_gets_all(loop: Loop) -> None:
    line = Line(loop, 1 << 24)
    frame = bytes(range(256)) * 8192
    line.connection.send(frame)
    expected, wire = line.hears(frame), b""
    while len(wire) < len(expected):
        wire += line.raw.recv(10_000)
    assert wire == expected
    line.close()


@pytest.mark.parametrize("why", ["deadline", "closed"])
def test_dialling_again_after_a_reset_ends(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def reset(*_: object, **__: object) -> None:
        raise ConnectionResetError("again")

    monkeypatch.setattr("oneaccord.job.job.dial", reset)
    job = Job(1, 2, "tcp")
    job.control = LocalHub(2).connect(1, "tcp", "")
    failures: list[BaseException] = []

    def dialling() -> None:
        try:
            job.dial(0, ("127.0.0.1", 1), b"hello", Deadline(0.1 if why == "deadline" else 2 * PATIENCE_S), "rank 0")
        except (TimeoutError, ConnectionError) as error:
            failures.append(error)

    dialler = threading.Thread(target=dialling, daemon=True)
    dialler.start()
    if why == "closed":
        job.closed = True
    dialler.join(PATIENCE_S)
    assert not dialler.is_alive()
    assert [type(failure) for failure in failures] == [TimeoutError if why == "deadline" else LinkLost]

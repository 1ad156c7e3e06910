"""Links of several connections: what goes on each, how many there are, and how they end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bootstraps import ThreadBootstrap
from support.transport_tools import PATIENCE_S, finish
from support.waiting import until
from support.worlds import must, on_threads, over_sockets

import oneaccord as oa
from oneaccord import Group
from oneaccord.api import HEADER_BYTES, Deadline, HeaderMismatch, LinkLost, Seal, Transfer, Transport
from oneaccord.config import load
from oneaccord_tcp import backend as module
from oneaccord_tcp.backend import TcpBackend
from oneaccord_tcp.plugin import TcpConfig
from oneaccord_tcp.streams import SEGMENT_BYTES, enough_streams, segments

HEADER, OTHER = b"expected".ljust(HEADER_BYTES), b"another".ljust(HEADER_BYTES)
LONG = 16 * SEGMENT_BYTES

lengths = st.builds(
    lambda whole, more: max(0, whole * SEGMENT_BYTES + more),
    st.integers(0, 4),
    st.sampled_from([-65, -64, -1, 0, 1, 63, 64, 65]),
)


def connection() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other = server.accept()[0]
    one.setblocking(False)
    other.setblocking(False)
    return one, other


class Wire(ThreadBootstrap):
    """The bootstrap of a rank that reaches the other one without a handshake."""

    sealed: bool
    made: dict[socket.socket, tuple[Seal, Seal]]
    ends: dict[int, Callable[[socket.socket, bytes], None]]
    connect: Callable[[bytes], tuple[socket.socket, socket.socket]]

    def listen(self, host: str, accept: Callable[[socket.socket, bytes], None]) -> tuple[str, int]:
        self.ends[self.rank] = accept
        return f"127.0.0.{1 + self.rank}", 1

    def dial(self, peer: int, address: tuple[str, int], hello: bytes, deadline: Deadline) -> socket.socket:
        own, others = self.connect(hello)
        self.ends[peer](others, hello.ljust(64, b"\0"))
        return own

    def seals(self, sock: socket.socket) -> tuple[Seal, Seal] | None:
        if self.sealed and sock not in self.made:
            own, others = (str(name).encode().ljust(32) for name in (sock.getsockname(), sock.getpeername()))
            self.made[sock] = Seal(own), Seal(others)
        return self.made.get(sock)


class Pair:
    """The tcp backends of two ranks, and a transport of each."""

    def __init__(
        self,
        streams: Any,
        connect: Callable[[bytes], tuple[socket.socket, socket.socket]] = lambda _: connection(),
        *,
        sealed: bool = False,
    ) -> None:
        cards: dict[str, dict[int, bytes]] = {}
        ends: dict[int, Any] = {}
        together = threading.Barrier(2)

        def make(rank: int) -> TcpBackend:
            wire = Wire(rank, cards, together, TcpConfig(streams=streams, buffer_bytes=1 << 16))
            wire.ends, wire.connect, wire.sealed, wire.made = ends, connect, sealed, {}
            return TcpBackend(wire)

        self.backends: list[TcpBackend] = must(on_threads(make, 2))
        self.transports: list[Transport] = [backend.open_transport(0) for backend in self.backends]

    def connect(self, timeout_s: float = PATIENCE_S) -> None:
        for rank, transport in enumerate(self.transports):
            transport.connect([1 - rank], Deadline(timeout_s))

    def links(self) -> list[list[tuple[socket.socket, ...]]]:
        return [list(backend._links.values()) for backend in self.backends]

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[tuple[int, bool], Pair]]:
    """Two ranks for each number of connections, with seals and without."""
    made = {(streams, sealed): Pair(streams, sealed=sealed) for streams in (1, 2, 3, 16) for sealed in (False, True)}
    for pair in made.values():
        pair.connect()
    yield made
    for pair in made.values():
        pair.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ranks with a link of four connections."""
    made = Pair(4)
    made.connect()
    yield made
    made.close()


def random_bytes(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


@given(lengths | st.integers(0, 1 << 40), st.integers(1, 16))
def test_segments_follow_each_other_from_the_first_byte_to_the_last(nbytes: int, streams: int) -> None:
    spans = segments(nbytes, streams)
    assert len(spans) == max(1, min(streams, nbytes // SEGMENT_BYTES))
    assert (spans[0][0], spans[-1][1]) == (0, nbytes)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(stop > start for start, stop in spans) or not nbytes


@given(st.sampled_from([1, 2, 3, 16]), st.lists(lengths, min_size=1, max_size=2), st.booleans(), st.booleans(), st.booleans())
def test_messages_of_any_length_arrive_whole_and_in_order(
    pairs: dict[tuple[int, bool], Pair], streams: int, sizes: Sequence[int], is_consumed: bool, goes_up: bool, is_sealed: bool
) -> None:
    ends = pairs[streams, is_sealed].transports
    sender, receiver = (0, 1) if goes_up else (1, 0)

    def body(rank: int) -> Any:
        if rank == sender:
            sent: list[Transfer] = []
            for size in sizes:
                sent.append(ends[rank].send(receiver, HEADER, random_bytes(size).data))
                finish(ends[rank], sent[-1])
            return [transfer.moved for transfer in sent]
        arrived = []
        for size in sizes:
            memory, parts = np.zeros(size, np.uint8), [0] * is_consumed

            def sink(data: memoryview, offset: int, into: Any = memory, parts: list[int] = parts) -> None:
                assert data.readonly
                assert offset % 64 == 0
                parts[0] += len(data)
                into[offset : offset + len(data)] += np.frombuffer(data, np.uint8)

            if is_consumed and size:
                transfer = ends[rank].consume(sender, HEADER, size, sink)
            else:
                transfer = ends[rank].recv(sender, HEADER, memory.data)
            finish(ends[rank], transfer)
            assert parts in ([], [size])
            arrived.append((memory, transfer.moved))
        return arrived

    results = must(on_threads(body, 2))
    for size, moved_out, (memory, moved_in) in zip(sizes, results[sender], results[receiver], strict=True):
        np.testing.assert_array_equal(memory, random_bytes(size))
        assert moved_out == moved_in == HEADER_BYTES + size


@pytest.mark.parametrize("how", ["recv", "consume"])
@pytest.mark.parametrize("streams", [(4, False), (4, True)], ids=["plain", "sealed"])
def test_where_another_message_came_nothing_is_read_on_the_other_connections(streams: tuple[int, bool], how: str) -> None:
    with contextlib.closing(Pair(streams[0], sealed=streams[1])) as pair:
        pair.connect()
        _other_message(pair, how)


def _other_message(pair: Pair, how: str) -> None:
    ends = pair.transports
    ends[0].send(1, OTHER, np.ones(LONG, np.uint8).data)
    memory = np.zeros(LONG, np.uint8)

    def receive() -> None:
        if how == "recv":
            finish(ends[1], ends[1].recv(0, HEADER, memory.data))
        else:
            finish(ends[1], ends[1].consume(0, HEADER, LONG, lambda *_: pytest.fail("it was handed over")))

    with pytest.raises(HeaderMismatch) as caught:
        receive()
    assert (caught.value.peer, caught.value.header) == (0, OTHER)
    assert not memory[LONG // 4 :].any()


def test_without_a_header_what_has_come_on_the_other_connections_is_left_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it wake the one who waits for the header again and again."""
    sleeps = []
    block = module._block
    monkeypatch.setattr(module, "_block", lambda *given: (sleeps.append(1), block(*given)))
    for sock in pair.links()[0][0][1:]:
        sock.send(bytes([1]) * 1000)
    memory = np.zeros(LONG, np.uint8)
    transfer = pair.transports[1].recv(0, HEADER, memory.data)
    with pytest.raises(TimeoutError):
        pair.transports[1].wait([transfer], Deadline(0.05))
    assert len(sleeps) <= 3
    assert not memory.any()


@pytest.mark.parametrize("broken", range(4))
@pytest.mark.parametrize("breaker", [0, 1])
def test_a_stream_that_breaks_ends_the_message_at_both_ends(pair: Pair, broken: int, breaker: int) -> None:
    ends, memory = pair.transports, np.zeros(LONG, np.uint8)
    sending, receiving = ends[0].send(1, HEADER, memory.data), ends[1].recv(0, HEADER, memory.copy().data)
    pair.links()[breaker][0][broken].shutdown(socket.SHUT_RDWR)
    outcomes = on_threads(lambda rank: finish(ends[rank], (sending, receiving)[rank]), 2)
    assert [type(outcome) for outcome in outcomes] == [LinkLost] * 2, outcomes
    assert [outcome.peer for outcome in outcomes] == [1, 0]


def test_a_wait_that_is_overdue_gives_the_processor_to_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted() -> None:
        raise AssertionError("it waited beyond its deadline")

    end = pair.transports[1]
    transfer = end.recv(0, bytes(HEADER_BYTES), memoryview(bytearray(8)))
    monkeypatch.setattr("oneaccord_tcp.backend.yield_processor", unwanted)
    with pytest.raises(TimeoutError):
        end.wait([transfer], Deadline(1e-9))


@pytest.mark.parametrize("came", [0, 1])
def test_an_abort_wakes_who_waits_for_a_long_message(pair: Pair, came: int) -> None:
    """Whether it waits for the header, or has it and the whole of the first segment."""
    first = HEADER + bytes(LONG // 4)
    sock = pair.links()[0][0][0]
    sock.setblocking(True)
    sending = threading.Thread(target=sock.sendall, args=(first * came,))
    sending.start()
    end, memory = pair.transports[1], np.ones(LONG, np.uint8)
    transfer = end.recv(0, HEADER, memory.data)
    while transfer.moved < len(first) * came:
        with pytest.raises(TimeoutError):
            end.wait([transfer], Deadline(0.01))
    sending.join()
    aborting = threading.Thread(target=pair.backends[1].abort)
    aborting.start()
    with pytest.raises(LinkLost):
        end.wait([transfer], Deadline(PATIENCE_S))
    aborting.join()


def test_collectives_are_exact() -> None:
    count = 9 * SEGMENT_BYTES // 8 + 8  # for each rank, several segments, none of them a whole number of parts
    data = [np.arange(count, dtype=np.float64) * (rank + 1) for rank in range(3)]

    def program(group: Group) -> list[Any]:
        x, peer = data[group.rank], (group.rank + 1) % 3
        pieces = group.reduce_scatter(np.concatenate([x] * 3))
        return [
            group.all_reduce(x),
            group.broadcast(x, 1),
            group.all_gather(x),
            pieces,
            group.sendrecv(x, peer, (group.rank - 1) % 3),
        ]

    for rank, (total, copied, gathered, piece, received) in enumerate(must(over_sockets(program, 3, streams=3))):
        np.testing.assert_array_equal(total, sum(data))
        np.testing.assert_array_equal(copied, data[1])
        np.testing.assert_array_equal(gathered, np.concatenate(data))
        np.testing.assert_array_equal(piece, sum(data))
        np.testing.assert_array_equal(received, data[(rank - 1) % 3])


def test_two_channels_at_once_each_have_links_of_their_own() -> None:
    """The collectives of a group, its messages, and the collectives of a part of it."""
    x = np.arange(LONG // 8, dtype=np.float64)

    def program(group: Group) -> Any:
        peer = 1 - group.rank
        part = group.split(0)
        works = [group.send_async(x, peer), group.recv_async(peer), group.all_reduce_async(x), part.all_reduce_async(2 * x)]
        received, total, doubled = [work.wait() for work in works][1:]
        assert (received == x).all()
        assert (total == 2 * x).all()
        assert (doubled == 4 * x).all()
        backend: Any = group._job.backend
        links = dict(backend._links)
        part.close()
        group.barrier()
        return {channel: len(link) for (channel, _), link in links.items()}

    ranks = must(over_sockets(program, streams=3))
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) >= 3
    assert set(ranks[0].values()) == {3}


def test_every_connection_is_closed_again() -> None:
    socks: list[socket.socket] = []

    def program(group: Group) -> None:
        group.barrier()
        backend: Any = group._job.backend
        before = set(backend._links)
        with group.split(0) as part:
            part.all_reduce(np.ones(LONG // 8))
            (key,) = set(backend._links) - before
            mine = backend._links[key]
            assert len(mine) == 16
        until(lambda: all(sock.fileno() == -1 for sock in mine))
        socks.extend(sock for link in backend._links.values() for sock in link)

    must(over_sockets(program, streams=16))
    assert len(socks) == 32
    until(lambda: all(sock.fileno() == -1 for sock in socks))


def test_another_call_with_a_long_message_is_a_mismatch_on_every_rank() -> None:
    def program(group: Group) -> None:
        x = np.ones(LONG // 8)
        if group.rank:
            group.all_reduce(x)
        else:
            group.broadcast(x)

    results = over_sockets(program, 3, streams=4)
    assert [type(result) for result in results] == [oa.CollectiveMismatchError] * 3, results


def test_a_link_whose_dial_failed_half_way_never_mixes_with_the_next() -> None:
    dialled = itertools.count()
    kept: list[socket.socket] = []

    def connect(hello: bytes) -> tuple[socket.socket, socket.socket]:
        is_first = hello[5] == 0  # of the link's connections, which are dialled at once
        if is_first and next(dialled) == 0:
            raise TimeoutError("nobody answers")
        ends = connection()
        kept.append(ends[1])
        return ends

    pair = Pair(4, connect)
    with pytest.raises(TimeoutError):
        pair.connect()
    assert pair.links() == [[], []]
    pair.connect()
    assert [[len(link) for link in links] for links in pair.links()] == [[4], [4]]
    lower, upper = (links[0] for links in pair.links())
    assert [sock.getpeername() for sock in lower] == [sock.getsockname() for sock in upper]
    assert [sock.fileno() >= 0 for sock in kept] == [False] * 3 + [True] * 4
    pair.close()
    assert [sock.fileno() for sock in kept] == [-1] * 7


def test_too_many_connections_are_refused_in_words_and_none_is_left_open() -> None:
    dialled = itertools.count()
    kept: list[socket.socket] = []

    def connect(_: bytes) -> tuple[socket.socket, socket.socket]:
        if next(dialled) == 9:
            raise OSError(errno.EMFILE, "Too many open files")
        ends = connection()
        kept.extend(ends)
        return ends

    pair = Pair(16, connect)
    with pytest.raises(OSError, match=r"Too many open files; two ranks share 16 connections here; backends.tcp.streams = 1"):
        pair.connect()
    pair.close()
    assert [sock.fileno() for sock in kept] == [-1] * 30


class Link:
    """What the kernel says of a connection."""

    def __init__(self, round_trip_us: int, buffer_bytes: int) -> None:
        self.says = {
            (socket.IPPROTO_TCP, socket.TCP_INFO): struct.pack("=148xI", round_trip_us),
            (socket.SOL_SOCKET, socket.SO_SNDBUF): 2 * buffer_bytes,
            (socket.SOL_SOCKET, socket.SO_RCVBUF): 2 * buffer_bytes,
        }

    def getsockopt(self, level: int, option: int, length: int = 0) -> Any:
        return self.says[level, option][:length] if length else self.says[level, option]


@pytest.mark.parametrize(
    ("round_trip_us", "buffer_bytes", "descriptors", "expected"),
    [
        (30, 1 << 20, 1024, 1),
        (330, 1 << 20, 1024, 1),
        (340, 1 << 20, 1024, 2),
        (1000, 1 << 20, 1024, 3),
        (50_000, 1 << 20, 1024, 8),
        (100, 212_992, 1024, 2),
        (50_000, 1 << 20, 200, 5),
        (50_000, 1 << 20, 20, 1),
        (50_000, 1 << 20, -1, 8),
    ],
)
def test_auto_takes_as_many_windows_as_the_link_holds_and_the_descriptors_allow(
    monkeypatch: pytest.MonkeyPatch, round_trip_us: int, buffer_bytes: int, descriptors: int, expected: int
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (descriptors, descriptors))
    link: Any = Link(round_trip_us, buffer_bytes)
    assert enough_streams(link, 10) == expected


def test_auto_asks_once_for_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def enough(sock: socket.socket, peers: int) -> int:
        asked.append((sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), peers))
        return 5

    monkeypatch.setattr(module, "enough_streams", enough)
    pair = Pair("auto")
    pair.connect()
    for channel in range(2, 5):
        pair.backends[0].link(channel, 1, Deadline(PATIENCE_S))
    assert [[len(link) for link in links] for links in pair.links()] == [[5] * 4, [5] * 4]
    assert asked == [(1 << 17, 1)]
    pair.close()


def test_auto_takes_one_connection_where_the_round_trip_is_short() -> None:
    def program(group: Group) -> list[int]:
        backend: Any = group._job.backend
        if group.rank == 0:
            assert backend._streams == {"127.0.0.1": 1}  # known without asking
            backend._streams.clear()  # as if the other were elsewhere
        assert (group.all_reduce(np.ones(LONG)) == 2).all()
        assert set(backend._streams.values()) == {1}
        return [len(link) for link in backend._links.values()]

    assert must(over_sockets(program)) == [[1], [1]]


class Delaying:
    """A link on which a connection moves at most 64 KiB each round trip of 12 ms, as one does whose window is small."""

    def __init__(self) -> None:
        self.socks: list[socket.socket] = []
        self.threads: list[threading.Thread] = []

    def connect(self, _: bytes) -> tuple[socket.socket, socket.socket]:
        own, near = connection()
        far, others = connection()
        for source, target in ((near, far), (far, near)):
            source.setblocking(True)
            self.socks.append(source)
            self.threads.append(threading.Thread(target=self.forward, args=(source, target)))
            self.threads[-1].start()
        return own, others

    def forward(self, source: socket.socket, target: socket.socket) -> None:
        window = bytearray(1 << 16)
        with contextlib.suppress(OSError):  # both ends are closed at once
            while count := source.recv_into(window):
                time.sleep(0.012)
                target.sendall(memoryview(window)[:count])
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close what the ranks have closed on their side."""
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for sock in self.socks:
            sock.close()


@pytest.mark.long
def test_on_a_link_with_a_long_round_trip_four_streams_are_faster_than_one() -> None:
    data = random_bytes(LONG)
    took = {}
    for streams in (1, 4):
        link = Delaying()
        pair = Pair(streams, link.connect)
        pair.connect()
        ends, memory = pair.transports, np.zeros(LONG, np.uint8)

        def body(rank: int, ends: list[Transport] = ends, into: Any = memory) -> None:
            finish(ends[rank], ends[rank].recv(0, HEADER, into.data) if rank else ends[rank].send(1, HEADER, data.data))

        started = time.monotonic()
        must(on_threads(body, 2))
        took[streams] = time.monotonic() - started
        np.testing.assert_array_equal(memory, data)
        pair.close()
        link.close()
    assert took[1] / took[4] > 2, took


@pytest.mark.parametrize("value", [0, -1, 17, 2.0, True, "many", "", "٣", None])
def test_a_number_of_streams_that_makes_no_sense_is_refused(value: Any) -> None:
    resolved = load({"backends": {"tcp": {"streams": value}}}, environ={})
    with pytest.raises(oa.ConfigError, match=r'backends.tcp.streams = .*: it should be "auto" or a number from 1 to 16'):
        resolved.backend_config("tcp")


@pytest.mark.parametrize(("value", "meant"), [(1, 1), (16, 16), ("4", 4), ("auto", "auto")])
def test_a_number_of_streams_may_be_a_text_as_variables_have_it(value: Any, meant: Any) -> None:
    config = load({"backends": {"tcp": {"streams": value}}}, environ={}).backend_config("tcp")
    assert config.streams == meant
    assert type(config.streams) is type(meant)

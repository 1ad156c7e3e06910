"""What transports promise, over UCX itself (`make test-peers`) and over a libucp of Python."""

from __future__ import annotations

import contextlib
import gc
import secrets
import threading
from collections.abc import Callable
from ctypes import byref, c_void_p
from typing import Any

import pytest
from support.transport_tools import PATIENCE_S, connected, finish, held
from support.waiting import until
from support.worlds import must, on_threads

from oneaccord.api import BackendUnavailableError, ConfigError, Deadline, HeaderMismatch, LinkLost, Transfer, Transport
from oneaccord_ucx.backend import UcxBackend, UcxTransport
from oneaccord_ucx.config import UcxConfig
from oneaccord_ucx.library import EndpointParams

Backends = Callable[..., list[UcxBackend]]

HEADER = bytes(range(64))
LONGEST_SHORT = UcxTransport.short_bytes


def data(nbytes: int) -> bytes:
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


@pytest.mark.parametrize("nbytes", [0, 1, LONGEST_SHORT, LONGEST_SHORT + 1, 3_000_000])
def test_messages_arrive_whole_in_order_and_in_both_directions(backends: Backends, nbytes: int):
    transports = connected(backends())
    payload = data(nbytes)

    def body(rank: int) -> None:
        transport, peer = transports[rank], 1 - rank
        for number in range(5):
            header = bytes([number]) * 64
            memory = bytearray(nbytes)
            sending = transport.send(peer, header, memoryview(payload))  # read-only memory
            receiving = transport.recv(peer, header, memoryview(memory))
            finish(transport, sending, receiving)
            assert memory == payload
            assert sending.moved == receiving.moved == 64 + nbytes
            del sending, receiving
            memory.append(0)  # which fails while somebody keeps a view of it

    must(on_threads(body, 2))


def test_channels_and_senders_do_not_mix(backends: Backends):
    started = backends(3)
    first, second = connected(started, 0), connected(started, 2)
    sent = [
        first[1].send(0, HEADER, memoryview(b"1 to 0, first")),
        second[1].send(0, HEADER, memoryview(b"1 to 0, second")),
        first[2].send(0, HEADER, memoryview(b"2 to 0, first")),
        first[2].send(1, HEADER, memoryview(b"2 to 1, first")),
    ]
    for here, rank, peer, words in [
        (first, 0, 2, b"2 to 0, first"),
        (second, 0, 1, b"1 to 0, second"),
        (first, 1, 2, b"2 to 1, first"),
        (first, 0, 1, b"1 to 0, first"),
    ]:
        memory = bytearray(len(words))
        receiving = here[rank].recv(peer, HEADER, memoryview(memory))
        must(on_threads(lambda side: finish(here[rank], receiving) if side else finish_all(sent, first, second), 2))  # noqa: B023
        assert memory == words


def finish_all(sent: list[Transfer], first: list[Transport], second: list[Transport]) -> None:
    for transport, transfer in zip([first[1], second[1], first[2], first[2]], sent, strict=True):
        finish(transport, transfer)


@pytest.mark.parametrize("sent", [8, LONGEST_SHORT + 1, 3_000_000])
@pytest.mark.parametrize("expected", [8, 3_000_000])
def test_another_header_is_told_at_once_and_the_payload_is_not_touched(backends: Backends, sent: int, expected: int):
    transports = connected(backends())
    other = bytes(64)
    memory = bytearray(expected)

    def body(rank: int) -> None:
        if rank == 0:
            transfer = transports[0].send(1, other, memoryview(data(sent)))
            if sent < 1_000_000:  # the receiver takes no more of a long one
                finish(transports[0], transfer)
            else:
                with pytest.raises(TimeoutError):
                    transports[0].wait([transfer], Deadline(0.1))
            return
        with pytest.raises(HeaderMismatch) as caught:
            finish(transports[1], transports[1].recv(0, HEADER, memoryview(memory)))
        assert (caught.value.peer, caught.value.header) == (0, other)

    must(on_threads(body, 2))
    assert memory == bytes(expected)


def test_after_a_timeout_a_transfer_may_be_waited_for_again(backends: Backends):
    transports = connected(backends())
    memory = bytearray(3)
    receiving = transports[1].recv(0, HEADER, memoryview(memory))
    with pytest.raises(TimeoutError):
        transports[1].wait([receiving], Deadline(0.05))
    sending = transports[0].send(1, HEADER, memoryview(b"abc"))
    must(on_threads(lambda rank: finish(transports[rank], (sending, receiving)[rank]), 2))
    assert memory == b"abc"


@pytest.mark.parametrize("spin_us", [0, 1000])
def test_threads_that_wait_at_once_all_get_their_messages(backends: Backends, spin_us: int):
    """Whichever thread lets UCX work, the message of another one may come by that."""
    started = backends(2, spin_us=spin_us)
    channels = [connected(started, channel) for channel in range(6)]

    def body(number: int) -> None:
        rank, transport = number % 2, channels[number // 2][number % 2]
        for turn in range(100):
            memory = bytearray(4)
            if turn % 2 == rank:
                finish(transport, transport.send(1 - rank, HEADER, memoryview(b"%04d" % turn)))
            else:
                finish(transport, transport.recv(1 - rank, HEADER, memoryview(memory)))
                assert memory == b"%04d" % turn

    must(on_threads(body, 12))


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("spin_us", [0, 1000])
def test_an_end_wakes_every_thread(backends: Backends, how: str, spin_us: int):
    backend, _ = started = backends(2, spin_us=spin_us)
    channels = [connected(started, channel)[0] for channel in range(3)]
    waiting = threading.Barrier(4)

    def body(number: int) -> None:
        if number == 3:
            waiting.wait(PATIENCE_S)
            until(lambda: spin_us > 0 or len(backend.worker._sleepers) == 3)
            getattr(backend, how)()
            return
        transfer = channels[number].recv(1, HEADER, memoryview(bytearray(8)))
        waiting.wait(PATIENCE_S)
        with pytest.raises(LinkLost):
            channels[number].wait([transfer], Deadline(1000))  # who is not woken hangs

    must(on_threads(body, 4))
    with pytest.raises(LinkLost):
        channels[0].send(1, HEADER, memoryview(b""))
    with pytest.raises(LinkLost):
        channels[0].connect([1], Deadline(1))
    backend.close()
    backend.close()


def test_a_peer_that_has_gone_is_named(backends: Backends):
    started = backends(3)
    transports = connected(started)

    must(on_threads(lambda rank: [exchange(transports[rank], peer) for peer in sorted({0, 1, 2} - {rank})], 3))
    started[2].close()
    with pytest.raises(LinkLost) as caught:  # as the receive begins, where the end of rank 2 was seen before
        transports[0].wait([transports[0].recv(2, HEADER, memoryview(bytearray(9)))], Deadline(PATIENCE_S))
    assert caught.value.peer == 2
    with pytest.raises(LinkLost, match="rank 2"):
        transports[0].send(2, HEADER, memoryview(b"anybody?"))
    # The others go on.
    must(on_threads(lambda rank: rank == 2 or exchange(transports[rank], 1 - rank), 3))


def exchange(transport: Transport, peer: int) -> None:
    memory = memoryview(bytearray(2))
    finish(transport, transport.send(peer, HEADER, memory), transport.recv(peer, HEADER, memory))


def test_a_stranger_who_knows_the_address_changes_nothing(backends: Backends, ucp: Any):
    started = backends()
    transports = connected(started)
    victim, stranger = started[1], backends(1)[0]
    endpoint = c_void_p()
    params = EndpointParams(field_mask=1, address=victim.worker.address)
    with stranger.worker.lock:
        assert ucp.ep_create(stranger.worker.handle, byref(params), byref(endpoint)) == 0
        guesses = [*range(200), *(secrets.randbits(64) for _ in range(200))]
        forged = HEADER + b"wrong"
        for tag in guesses:
            ucp.tag_send_nbx(endpoint.value, forged, len(forged), tag, stranger.worker.request)
    for _ in range(20):  # the stranger connects, and sends what it has
        with stranger.worker.lock:
            ucp.worker_progress(stranger.worker.handle)
        memory = bytearray(5)
        receiving = transports[1].recv(0, HEADER, memoryview(memory))
        with pytest.raises(TimeoutError):
            transports[1].wait([receiving], Deadline(0.02))
        sending = transports[0].send(1, HEADER, memoryview(b"right"))
        must(on_threads(lambda rank: finish(transports[rank], (sending, receiving)[rank]), 2))  # noqa: B023
        assert memory == b"right"
    same = {backend.tag(0, 0, 1) for backend in started}
    others = {started[0].tag(*what) for what in [(0, 1, 0), (1, 0, 1), (0, 0, 2), (0, 0, 1)]}
    assert (len(same), len(others)) == (1, 4)


def test_what_must_be_alike_is_compared(backends: Backends):
    with pytest.raises(ConfigError, match=r"backends\.ucx\.transports is tcp on rank 0 and ib,tcp on rank 1"):
        backends(2, configs=[UcxConfig(transports=("tcp",)), UcxConfig()])


def test_transports_that_ucx_does_not_have_are_told(backends: Backends):
    with pytest.raises(BackendUnavailableError, match=r"transports is \['pigeon'\]"):
        backends(1, transports=("pigeon",))


def test_a_variable_that_ucx_does_not_take_is_told(backends: Backends):
    with pytest.raises(ConfigError, match="does not accept 'many' for UCX_RNDV_THRESH"):
        backends(1, variables={"RNDV_THRESH": "many"})


def test_ranks_wait_asleep(backends: Backends):
    started = backends()
    transports = connected(started)

    def body(rank: int) -> None:
        if rank == 0:
            until(lambda: len(started[1].worker._sleepers) == 1)
            finish(transports[0], transports[0].send(1, HEADER, memoryview(b"a")))
        else:
            finish(transports[1], transports[1].recv(0, HEADER, memoryview(bytearray(1))))

    must(on_threads(body, 2))


def test_nothing_is_left_after_closing(backends: Backends):
    def use() -> None:
        started = backends()
        transports = connected(started)
        must(on_threads(lambda rank: exchange(transports[rank], 1 - rank), 2))
        for backend in started:
            backend.close()
            assert not backend.worker._background.is_alive()

    use()  # what UCX makes once
    before = held("")[0]
    use()
    until(lambda: gc.collect() >= 0 and held("")[0] <= before)


@pytest.mark.parametrize("transports", [("tcp",), ("shm", "tcp")])
@pytest.mark.parametrize("first", [0, 1])
def test_closing_with_messages_on_their_way_neither_hangs_nor_crashes(
    backends: Backends, transports: tuple[str, ...], first: int
):
    started = backends(2, transports=transports)
    channels = [connected(started, channel) for channel in range(3)]
    must(on_threads(lambda rank: exchange(channels[0][rank], 1 - rank), 2))
    memory = bytearray(3_000_000)
    for rank in range(2):
        channels[0][rank].send(1 - rank, HEADER, memoryview(memory))  # nobody receives it
        channels[1][rank].recv(1 - rank, HEADER, memoryview(memory))  # nobody sends it
    channels[2][0].send(1, HEADER, memoryview(memory))
    receiving = channels[2][1].recv(0, HEADER, memoryview(bytearray(3_000_000)))
    with contextlib.suppress(TimeoutError):  # its payload has begun, or is there where UCX takes it from the sender's memory
        channels[2][1].wait([receiving], Deadline(0.02))
    for backend in (started[first], started[1 - first]):
        backend.close()
    if "shm" not in transports:  # there, the library may not let go
        memory.append(0)  # which fails while somebody keeps a view of it


def test_a_short_message_goes_on_while_its_sender_computes(backends: Backends):
    transports = connected(backends())
    transports[0].send(
        1, HEADER, memoryview(b"abc")
    )  # the connection is still to be made, for which UCX must work on both sides
    memory = bytearray(3)
    finish(transports[1], transports[1].recv(0, HEADER, memoryview(memory)))
    assert memory == b"abc"

"""Two transports as one: whom a wait asks, what it tells, and under which number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from oneaccord.api import Damaged, Deadline, HeaderMismatch, LinkLost, Mailbox, Sink, Transfer, Transport
from oneaccord.runtime.computer import COMPUTER
from oneaccord_hybrid import wrapping
from oneaccord_hybrid.routing import RoutedTransport, Way
from oneaccord_hybrid.wrapping import PollingTransport, SharedTransport

HEADER = bytes(64)
NOTHING = memoryview(b"")


class Moving(Transfer):
    def __init__(self, peer: int) -> None:
        self.peer, self.done, self.moved = peer, False, 0


class Scripted(Transport):
    """A transport whose waits do what a test says: ``waits`` are called one after the other, the last again and again."""

    streams = True

    def __init__(self, *waits: Callable[[Sequence[Any], Deadline], None]) -> None:
        self.waits = list(waits)
        self.asked: list[tuple[int, float]] = []
        self.raises: Exception | None = None

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        self._tell()

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        self._tell()
        return Moving(peer)

    recv = send

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        return self.send(peer, header, NOTHING)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        self.asked.append((len(transfers), deadline.timeout_s))
        (self.waits.pop(0) if len(self.waits) > 1 else self.waits[0])(transfers, deadline)

    def mailbox(self, peer: int) -> Mailbox:
        return Box(self, peer)

    def _tell(self) -> None:
        if self.raises is not None:
            raise self.raises


class Box(Mailbox):
    def __init__(self, transport: Scripted, peer: int) -> None:
        self._transport, self._peer = transport, peer
        self.outgoing = self.incoming = (memoryview(bytearray(8)),) * 2
        self.next_out = self.next_in = 0

    def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        self.next_out = 1 - self.next_out
        return None if nbytes else self._transport.send(self._peer, HEADER, NOTHING)

    def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        self.next_in = 1 - self.next_in
        return None if nbytes else self._transport.send(self._peer, HEADER, NOTHING)


def late(transfers: Sequence[Any], deadline: Deadline) -> None:
    raise TimeoutError


def ends(transfers: Sequence[Any], deadline: Deadline) -> None:
    transfers[0].done = True


def moves(transfers: Sequence[Any], deadline: Deadline) -> None:
    transfers[0].moved += 1
    raise TimeoutError


def fails(error: Exception) -> Callable[[Sequence[Any], Deadline], None]:
    def wait(transfers: Sequence[Any], deadline: Deadline) -> None:
        raise error

    return wait


def routed(near: Transport, far: Transport) -> RoutedTransport:
    """Return what rank 2 of two hosts of two ranks each talks by."""
    ways = Way(near, [2, 3]), Way(far, range(4))
    return RoutedTransport(ways, {0: ways[1], 1: ways[1], 3: ways[0]}, COMPUTER)


def start(transport: Transport, *peers: int) -> list[Transfer]:
    return [transport.recv(peer, HEADER, NOTHING) for peer in peers]


def test_a_wait_for_messages_of_one_way_is_that_way_s_own() -> None:
    near, far = Scripted(ends), Scripted(ends)
    transport = routed(near, far)
    deadline = Deadline(7)
    transport.wait(start(transport, 0, 1), deadline)
    assert (near.asked, far.asked) == ([], [(2, 7)])
    transport.wait(start(transport, 3), deadline)
    assert near.asked == [(1, 7)]


@pytest.mark.parametrize("ending", ["near", "far"])
def test_a_wait_for_both_ends_with_the_first_that_does(ending: str) -> None:
    waits = {name: Scripted(*([late] * 10), ends if name == ending else late) for name in ("near", "far")}
    transport = routed(**waits)
    transfers = start(transport, 0, 3)
    transport.wait(transfers, Deadline(20))
    assert [transfer.done for transfer in transfers] == [ending == "far", ending == "near"]
    slices = [seconds for _, seconds in waits[ending].asked]
    assert slices == pytest.approx([min(50e-6 * 2**number, 5e-3) for number in range(11)])


def test_what_moves_is_looked_at_often() -> None:
    near, far = Scripted(late, late, late, moves, late, ends), Scripted(late)
    transport = routed(near, far)
    transport.wait(start(transport, 0, 3), Deadline(20))
    assert [seconds for _, seconds in near.asked] == pytest.approx([50e-6, 100e-6, 200e-6, 400e-6, 50e-6, 100e-6])


def test_a_message_that_another_way_ended_meanwhile_is_seen() -> None:
    def end_far(transfers: Sequence[Any], deadline: Deadline) -> None:
        of_far[0].inner.done = True
        raise TimeoutError

    near, far = Scripted(end_far), Scripted(late)
    transport = routed(near, far)
    of_near, of_far = start(transport, 3), start(transport, 0)
    transport.wait([*of_near, *of_far], Deadline(20))
    assert (len(near.asked), len(far.asked)) == (1, 0)


def test_a_wait_for_both_ends_at_its_deadline() -> None:
    near, far = Scripted(late), Scripted(late)
    transport = routed(near, far)
    deadline = Deadline(0.02)
    with pytest.raises(TimeoutError):
        transport.wait(start(transport, 0, 3), deadline)
    assert deadline.passed()


def test_what_lives_on_a_virtual_clock_is_asked_rarely_and_in_the_end() -> None:
    clock = [0.0]

    def passes(transfers: Sequence[Any], deadline: Deadline) -> None:
        clock[0] += deadline.timeout_s
        raise TimeoutError

    near, far = Scripted(passes), Scripted(passes)
    ways = Way(near, [2, 3], is_virtual=True), Way(far, range(4))
    computer: Any = SimpleNamespace(now=lambda: clock[0])
    transport = RoutedTransport(ways, {0: ways[1], 3: ways[0]}, computer)
    with pytest.raises(TimeoutError):
        transport.wait(start(transport, 0, 3), Deadline(2.5, computer.now))
    assert len(near.asked) == 3  # once a second, and in the end
    assert len(far.asked) > 100


FAILURES = [LinkLost(1, "it broke"), HeaderMismatch(1, b"another"), Damaged(1, "one bit")]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_of_a_wait_names_the_rank_of_the_world(failure: Any) -> None:
    transport = routed(Scripted(fails(failure)), Scripted(late))
    with pytest.raises(type(failure)) as caught:
        transport.wait(start(transport, 3, 0), Deadline(20))
    found: Any = caught.value
    assert (found.peer, getattr(found, "reason", None), getattr(found, "header", None)) == (
        3,
        getattr(failure, "reason", None),
        getattr(failure, "header", None),
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda transport: transport.connect([3], Deadline(1)),
        lambda transport: transport.send(3, HEADER, NOTHING),
        lambda transport: transport.recv(3, HEADER, NOTHING),
        lambda transport: transport.consume(3, HEADER, 0, print),
        lambda transport: transport.mailbox(3).post(HEADER, 0),
        lambda transport: transport.mailbox(3).fetch(HEADER, 0),
    ],
)
def test_a_failure_of_any_call_names_the_rank_of_the_world(call: Any) -> None:
    for failure in FAILURES:
        near = Scripted(late)
        near.raises = failure
        with pytest.raises(type(failure)) as caught:
            call(routed(near, Scripted(late)))
        assert caught.value.peer == 3  # type: ignore[attr-defined]


def test_failures_of_a_way_for_all_ranks_pass_as_they_are() -> None:
    failure = LinkLost(1, "it broke")
    transport = routed(Scripted(late), Scripted(fails(failure)))
    with pytest.raises(LinkLost) as caught:
        transport.wait(start(transport, 0, 3), Deadline(20))
    assert caught.value is failure


def test_a_mailbox_shows_the_slots_of_its_own_way() -> None:
    transport = routed(Scripted(ends), Scripted(late))
    box = transport.mailbox(3)
    assert box is not None
    assert (box.post(HEADER, 1), box.next_out, box.next_in) == (None, 1, 0)
    assert (box.fetch(HEADER, 1), box.next_out, box.next_in) == (None, 1, 1)
    unfinished = box.fetch(HEADER, 0)
    assert unfinished is not None
    transport.wait([unfinished], Deadline(1))
    assert unfinished.done


def test_a_mailbox_has_the_c_form_of_its_own_way() -> None:
    transport = routed(Scripted(ends), Scripted(late))
    plain = transport.mailbox(0)
    assert plain is not None
    assert (plain.compiled, plain.c_mailbox, plain.unsent()) == (None, None, None)

    class Compiled(Box):
        compiled, c_mailbox = math, object()

        def unsent(self) -> Transfer | None:
            return Moving(self._peer)

    near = Scripted(ends)
    near.mailbox = lambda peer: Compiled(near, peer)  # type: ignore[method-assign]
    transport = routed(near, Scripted(late))
    box = transport.mailbox(3)
    assert box is not None
    assert (box.compiled, box.c_mailbox) == (Compiled.compiled, Compiled.c_mailbox)
    unfinished = box.unsent()
    assert unfinished is not None
    transport.wait([unfinished], Deadline(1))
    assert unfinished.done


def test_it_streams_where_both_ways_do_whichever_this_rank_uses() -> None:
    streaming, whole = Scripted(late), Scripted(late)
    whole.streams = False
    for near, far in ((streaming, streaming), (streaming, whole), (whole, streaming)):
        ways = Way(near, [2]), Way(far, range(3))
        assert RoutedTransport(ways, {0: ways[1], 1: ways[1]}, COMPUTER).streams is (near is far)
    for inner in (streaming, whole):
        assert SharedTransport(inner, print).streams is PollingTransport(inner, COMPUTER).streams is inner.streams


def test_polling_lets_virtual_time_catch_up_with_the_computers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks have waited in between, each of them for a moment."""
    clock = {"computer": 0.0, "virtual": 0.0}

    def others_run(transfers: Sequence[Any], deadline: Deadline) -> None:
        clock["computer"] += 0.25
        raise TimeoutError

    def pass_time(seconds: float, wake: Any) -> None:
        clock["virtual"] += seconds

    place = SimpleNamespace(wake=None, wait=lambda _: None)
    world: Any = SimpleNamespace(
        outside=nullcontext, now=lambda: clock["virtual"], place=lambda for_good: place, call_later=pass_time
    )
    monkeypatch.setattr(wrapping, "time", SimpleNamespace(monotonic=lambda: clock["computer"]))
    transport = PollingTransport(Scripted(*[others_run] * 4, ends), world)
    transport.wait([Moving(0)], Deadline(20))
    assert clock["virtual"] == pytest.approx(clock["computer"]) == 1.0


def test_a_mailbox_that_is_shared_is_asked_for_once() -> None:
    transport = SharedTransport(Scripted(late), print)
    assert transport.mailbox(1) is transport.mailbox(1)
    assert transport.mailbox(1) is not transport.mailbox(0)

"""The bare transport: promises on which core relies, and that no call of a group shows by itself.

Each program opens a channel of its own on the backend of its group, far above those that core opens.
"""

from __future__ import annotations

import contextvars
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import oneaccord as oa
from oneaccord.api import HEADER_BYTES, Backend, Deadline, Group, HeaderMismatch, LinkLost, Transfer, Transport
from oneaccord_conformance import patience
from oneaccord_conformance.arrays import bits
from oneaccord_conformance.ranks import ending, outcome_of
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_LONG: Final = 1 << 23
"""More bytes than a message on its way may take from the sender at once."""
_SLICE_S: Final = 0.002
_SIZES: Final = (0, 1, 0, 63, 4096, 4097, 3, 70_001, 1 << 20, 0, 5)
_GUARD: Final = b"\xa5" * 16
_channels = itertools.count((1 << 20) + 1, 2)


def _new_channel() -> int:
    """Return an odd channel, which threads may share, that no world has opened yet."""
    return next(_channels)


def _backend(group: Group) -> Backend:
    backend = group.backend()
    assert backend is not None
    return backend


def _opened(group: Group, channel: int, peers: Sequence[int] = ()) -> Transport:
    """Open a channel, and connect to some ranks, by default to all."""
    transport = _backend(group).open_transport(channel)
    transport.connect(peers or [rank for rank in range(group.world_size) if rank != group.rank], Deadline(patience.TIMEOUT_S))
    return transport


def _header(number: int, source: int) -> bytes:
    return f"message {number} of rank {source}".encode().ljust(HEADER_BYTES, b"\0")


def _payload(number: int, source: int, nbytes: int) -> memoryview:
    """Return the bytes of a message, in memory that cannot be written to."""
    return memoryview(bits(source, nbytes, seed=number).tobytes())


class _Room:
    """Memory for a message, and a little next to it that must not be touched."""

    def __init__(self, nbytes: int) -> None:
        self._whole = bytearray(_GUARD + bytes(nbytes) + _GUARD)
        self.payload = memoryview(self._whole)[len(_GUARD) : len(_GUARD) + nbytes]

    def look(self, number: int, source: int) -> None:
        """Raise AssertionError unless a message is here."""
        what = f"message {number} of rank {source}, of {len(self.payload)} bytes"
        got, expected = (np.frombuffer(each, np.uint8) for each in (self.payload, _payload(number, source, len(self.payload))))
        wrong = np.flatnonzero(got != expected)
        assert not wrong.size, f"{what}: {wrong.size} bytes are wrong, the first is byte {wrong[0]}"
        assert self._whole.startswith(_GUARD), f"{what}: memory in front of it was written to"
        assert self._whole.endswith(_GUARD), f"{what}: memory behind it was written to"


def _wait(transport: Transport, transfers: Sequence[Transfer], timeout_s: float) -> None:
    """Wait until one of some transfers is done."""
    pending = [each for each in transfers if not each.done]
    began = [each.moved for each in pending]
    try:
        transport.wait(pending, Deadline(timeout_s))
    except TimeoutError:
        moved = [each.moved - before for each, before in zip(pending, began, strict=True)]
        raise AssertionError(
            f"none of {len(pending)} transfers was done within {timeout_s:g} s; they moved {moved} bytes meanwhile"
        ) from None
    assert any(each.done for each in pending), "wait() returned, but none of its transfers is done"


def _finish(transport: Transport, *transfers: Transfer, timeout_s: float | None = None) -> None:
    """Wait until all transfers are done."""
    while not all(each.done for each in transfers):
        _wait(transport, transfers, timeout_s or patience.TIMEOUT_S)


def _becomes(condition: Callable[[], bool], patience_s: float) -> bool:
    """Wait until something is so; return whether it is."""
    limit = time.monotonic() + patience_s
    while not condition() and time.monotonic() < limit:
        oa.sleep(0.002)
    return condition()


def _fail(group: Group) -> None:
    """Let the job fail on all ranks, as it does when core learns what this rank learned."""
    ending(lambda: group.barrier(timeout_s=patience.SHORT_S))  # to which no other rank comes


def _to_all(group: Group, channel: int) -> None:
    rank = group.rank
    transport = _opened(group, channel)
    others = [other for other in range(group.world_size) if other != rank]
    transport.connect(others, Deadline(patience.TIMEOUT_S))  # core may name a peer again
    for number, nbytes in enumerate(_SIZES):
        rooms = {peer: _Room(nbytes) for peer in others}
        receives = [transport.recv(peer, _header(number, peer), room.payload) for peer, room in rooms.items()]
        sends = [transport.send(peer, _header(number, rank), _payload(number, rank, nbytes)) for peer in others]
        try:
            _finish(transport, *receives, *sends)
        except HeaderMismatch as other:
            came = bytes(other.header).rstrip(b"\0").decode(errors="replace") or "another message"
            raise AssertionError(f"message {number} of rank {other.peer} was expected, but {came} came") from None
        for peer, room in rooms.items():
            room.look(number, peer)
        assert all(each.done for each in (*receives, *sends)), f"`done` of a message of {nbytes} bytes became False again"


@check(chapter="transport")
def check_messages(worlds: WorldMaker) -> None:
    """Messages of every length, empty ones too, come whole and in order, from memory that may be read-only."""
    worlds.run(_to_all, 3, channel=_new_channel())


def _silent(group: Group, channel: int, folder: str) -> bool:
    """Send, and make no call until all has come, as the other rank says by a file; return whether it did so in time."""
    transport = _opened(group, channel)
    has_come, last, in_time = Path(folder, "all came"), 5, True
    for number in range(last + 1):
        if group.rank == 1:
            if number == last:
                in_time = _becomes(has_come.exists, patience.PROMPT_S)
            _finish(transport, transport.send(0, _header(number, 1), _payload(number, 1, 900)))
        else:
            if number == last:
                has_come.touch()
            room = _Room(900)
            _finish(transport, transport.recv(1, _header(number, 1), room.payload))
            room.look(number, 1)
    return in_time


@check(chapter="transport", needs="cpu clock")
def check_done_arrives(worlds: WorldMaker) -> None:
    """A send that is done arrives without any further call of its rank."""
    with tempfile.TemporaryDirectory(prefix="oa-check-") as folder:
        _, in_time = worlds.run(_silent, 2, channel=_new_channel(), folder=folder)
    assert in_time, (
        f"rank 1 sent short messages, and made no call for {patience.PROMPT_S:g} s: not all came before it made another one"
    )


def _alone(group: Group, channel: int) -> None:
    rank = group.rank
    if rank:
        group.recv(0)  # before it opens the channel
    transport = _opened(group, channel, [1, 2] if rank == 0 else [0])
    if rank == 0:
        sends = [transport.send(peer, _header(peer, 0), _payload(peer, 0, 9)) for peer in (1, 2)]
        for peer in (1, 2):
            group.send(np.ones(1), peer)
        _finish(transport, *sends)
    else:
        room = _Room(9)
        _finish(transport, transport.recv(0, _header(rank, 0), room.payload))
        room.look(rank, 0)


@check(chapter="transport")
def check_connects_alone(worlds: WorldMaker) -> None:
    """A rank connects, and sends, to others that have not opened the channel yet."""
    worlds.run(_alone, 3, channel=_new_channel())


def _at_once(group: Group, channel: int) -> bool:
    """Return on rank 1 whether rank 0 had begun to send and to receive before rank 1 began either."""
    transport = _opened(group, channel)
    room, payload = _Room(_LONG), _payload(0, group.rank, _LONG)
    if group.rank == 0:
        receive = transport.recv(1, _header(0, 1), room.payload)
        send = transport.send(1, _header(0, 0), payload)
        group.send(np.ones(1), 1)
        _finish(transport, receive, send)
        room.look(0, 1)
        return True
    word = group.recv_async(0)
    in_time = _becomes(word.done, patience.PROMPT_S)
    send = transport.send(0, _header(0, 1), payload)
    _finish(transport, send, transport.recv(0, _header(0, 0), room.payload))
    word.wait()
    room.look(0, 0)
    return in_time


@check(chapter="transport")
def check_begins_at_once(worlds: WorldMaker) -> None:
    """A send and a recv return at once, though the peer has begun neither."""
    in_time = worlds.run(_at_once, 2, channel=_new_channel())[1]
    assert in_time, f"recv and send of rank 0 did not return within {patience.PROMPT_S:g} s, while rank 1 began neither"


def _last_first(group: Group, channel: int) -> None:
    transport = _opened(group, channel)
    if group.rank == 0:
        rooms = [_Room(9), _Room(9)]
        receives = [transport.recv(peer, _header(0, peer), room.payload) for peer, room in enumerate(rooms, 1)]
        group.send(np.ones(1), 2)  # which sends when both receives have begun
        while not receives[1].done:
            _wait(transport, receives, patience.TIMEOUT_S)
        _finish(transport, transport.send(1, _header(0, 0), _payload(0, 0, 9)))
        _finish(transport, *receives)
        for peer, room in enumerate(rooms, 1):
            room.look(0, peer)
        return
    if group.rank == 2:
        group.recv(0)
    else:  # it sends when the message of rank 2 is there
        room = _Room(9)
        _finish(
            transport, transport.recv(0, _header(0, 0), room.payload), timeout_s=2 * patience.TIMEOUT_S
        )  # rank 0 must learn first
    _finish(transport, transport.send(0, _header(0, group.rank), _payload(0, group.rank, 9)))


@check(chapter="transport")
def check_waits_for_all(worlds: WorldMaker) -> None:
    """A wait lets all of its transfers make progress, and ends when the first is done."""
    worlds.run(_last_first, 3, channel=_new_channel())


def _times_out(transport: Transport, transfer: Transfer, what: str) -> None:
    """Wait for a transfer that cannot be done yet."""
    outcome, error = outcome_of(lambda: transport.wait([transfer], Deadline(patience.SHORT_S)))
    assert isinstance(error, TimeoutError), f"a wait of {patience.SHORT_S} s for {what} {outcome}; expected TimeoutError"
    assert 0.9 * patience.SHORT_S <= outcome.took_s < patience.SHORT_S + patience.PROMPT_S, (
        f"a wait of {patience.SHORT_S} s for {what} ended after {outcome.took_s:.3f} s"
    )


def _again(group: Group, channel: int) -> None:
    transport = _opened(group, channel)
    for number, nbytes in enumerate((0, _LONG)):
        if group.rank == 0:
            room = _Room(nbytes)
            receive = transport.recv(1, _header(number, 1), room.payload)
            for _ in range(2):
                _times_out(transport, receive, "a message that was not sent yet")
                assert not receive.done, "a receive is done before the send"
            group.send(np.ones(1), 1)
            _finish(transport, receive)
            room.look(number, 1)
            group.recv(1)  # a send is waited for before its receive has begun
            _finish(transport, transport.recv(1, _header(number + 10, 1), room.payload))
            room.look(number + 10, 1)
        else:
            group.recv(0)
            _finish(transport, transport.send(0, _header(number, 1), _payload(number, 1, nbytes)))
            send = transport.send(0, _header(number + 10, 1), _payload(number + 10, 1, nbytes))
            if not send.done:
                outcome, error = outcome_of(lambda: transport.wait([send], Deadline(patience.SHORT_S)))  # noqa: B023 - called at once
                assert error is None or isinstance(error, TimeoutError), f"a wait for a send {outcome}"
            group.send(np.ones(1), 0)
            _finish(transport, send)


@check(chapter="transport", needs="cpu clock")
def check_timeout(worlds: WorldMaker) -> None:
    """A wait ends at its deadline with TimeoutError, and a later one continues with the same transfers."""
    worlds.run(_again, 2, channel=_new_channel())


def _watched(group: Group, channel: int, slice_s: float) -> None:
    rank, peer = group.rank, 1 - group.rank
    transport = _opened(group, channel)
    for number, nbytes in enumerate((0, 9, 5000, 2 * _LONG)):
        room = _Room(nbytes)
        transfers = [
            transport.send(peer, _header(number, rank), _payload(number, rank, nbytes)),
            transport.recv(peer, _header(number, peer), room.payload),
        ]
        moved, deadline = [0, 0], Deadline(patience.TIMEOUT_S)
        while True:
            dones = [each.done for each in transfers]  # first: a done one has moved all
            now = [each.moved for each in transfers]
            for name, done, before, after in zip(("send", "receive"), dones, moved, now, strict=True):
                what = f"Transfer.moved of a {name} of {nbytes} bytes"
                assert type(after) is int, f"{what} is {after!r}"
                assert after >= before, f"{what} shrank from {before} to {after}"
                assert after <= HEADER_BYTES + nbytes, f"{what} is {after}"
                assert not done or after >= nbytes, f"{what}, which is done, is {after}"
            if all(dones):
                break
            moved = now
            waits = [each for each in transfers if not each.done]
            error = outcome_of(lambda: transport.wait(waits, Deadline(slice_s)))[1]  # noqa: B023 - called at once
            if error is not None and (not isinstance(error, TimeoutError) or deadline.passed()):
                raise error
        room.look(number, peer)


@check(chapter="transport")
def check_moved(worlds: WorldMaker) -> None:
    """Transfer.moved counts bytes, never shrinks, and has come to the end when the transfer is done."""
    # A clock that is not the computer's would leap to a deadline.
    worlds.run(_watched, 2, channel=_new_channel(), slice_s=patience.TIMEOUT_S if worlds.lacks("clock") else _SLICE_S)


def _unexpected(group: Group, channel: int, sent: int, expected: int) -> Any:
    transport = _opened(group, channel)
    if group.rank == 1:

        def send() -> None:
            transfer = transport.send(0, _header(1, 1), _payload(1, 1, sent))
            if not transfer.done:  # it may never be done, and only awaited transfers move
                transport.wait([transfer], Deadline(1.0))

        outcome, error = outcome_of(send)
        assert isinstance(error, TimeoutError | LinkLost | None), f"the unexpected send {outcome}"
        return None

    def receive() -> None:
        transfer = transport.recv(1, _header(2, 1), _Room(expected).payload)
        _finish(transport, transfer)

    outcome, error = outcome_of(receive)
    _fail(group)
    what = f"rank 1 sent {sent} bytes with another header than rank 0 expected for {expected} bytes: rank 0"
    assert isinstance(error, HeaderMismatch), f"{what} {outcome}; expected HeaderMismatch"
    assert error.peer == 1, f"{what} got an error about rank {error.peer}"
    header = bytes(error.header)
    assert _header(1, 1).startswith(header), f"{what} got the header {header!r}, but {_header(1, 1)!r} came"
    return None


@check(chapter="transport", needs="cpu clock")
def check_header_mismatch(worlds: WorldMaker) -> None:
    """A message with another header is a HeaderMismatch with the header that came, for any length."""
    cases = ((9, 9), (0, 1 << 20), (1 << 20, 0), (_LONG, _LONG), (9, 0))
    each = [{"channel": _new_channel(), "sent": sent, "expected": expected} for sent, expected in cases]
    few = each if worlds.has_threads and not worlds.quick else each[: 2 if worlds.has_threads else 1]
    for outcomes in worlds.attempts(_unexpected, few, 2):
        for outcome in outcomes:
            assert not outcome.errors, outcome.text if outcome.error == "AssertionError" else str(outcome)


def _lost(group: Group, channel: int, watcher: int) -> dict[str, Any] | None:
    transport = _opened(group, channel)
    # A rank that still connects or sends to one that has left fails, and the job with it.
    if group.rank == 1:
        for peer in (2 - watcher, watcher):
            group.recv(peer)
    else:
        group.send(np.ones(1), 1)
    group.split(0)  # over core's own connections: each rank comes here when its messages are done
    if group.rank == 1:
        _backend(group).abort()  # and core does not know
        _backend(group).close()
    if group.rank != watcher:
        return None
    transfers: list[Transfer] = []

    def wait() -> None:
        peers = (2 - watcher, 1)  # the first one lives, and sends nothing
        transfers.extend(transport.recv(peer, _header(0, peer), _Room(9).payload) for peer in peers)
        transport.wait(transfers, Deadline(patience.LOST_S))

    found = ending(wait)
    found["value"] = any(each.done for each in transfers)
    _fail(group)
    return found


@check(chapter="transport", needs="cpu clock")
def check_lost_rank(worlds: WorldMaker) -> None:
    """If the connection to a rank breaks, LinkLost names that rank, and none of its messages is done."""
    for watcher in (0, 2) if worlds.has_threads else (0,):
        outcome = worlds.attempt(_lost, 3, timeout_s=patience.LONG_S, channel=_new_channel(), watcher=watcher)[watcher]
        what = f"rank 1 of 3 left, and rank {watcher} waited for it and for rank {2 - watcher}: it"
        assert not outcome.errors, f"{what} {outcome}"
        found = outcome.value
        assert not found["value"], f"{what} learned of a message that no rank sent"
        # A transport that cannot see that a peer is lost need not.
        assert {"LinkLost", "TimeoutError"}.intersection(found["errors"]), (
            f"{what} got {found['errors'][:1] or 'no error'} instead of LinkLost: {found['text']}"
        )
        assert "LinkLost" not in found["errors"] or found["peer"] == 1, (
            f"{what} got an error about rank {found['peer']}: {found['text']}"
        )


def _wakes(group: Group, channel: int) -> list[dict[str, Any]]:
    transport = _opened(group, channel)
    if group.rank == 1:
        group.send(np.ones(1), 0)
        return []
    group.recv(1)
    receive = transport.recv(1, _header(0, 1), _Room(9).payload)
    transport.send(1, _header(0, 0), _payload(0, 0, _LONG))
    found: list[dict[str, Any]] = []
    begins = threading.Event()

    def wait() -> None:
        begins.set()
        transport.wait([receive], Deadline(patience.TIMEOUT_S))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(lambda: found.append(ending(wait)),), daemon=True)
    thread.start()
    begins.wait()
    time.sleep(patience.SHORT_S)  # for it to be in the middle of it
    ends = [ending(_backend(group).abort)]
    thread.join(patience.TIMEOUT_S + patience.PROMPT_S)
    assert not thread.is_alive(), "a wait in another thread ended neither by Backend.abort nor at its deadline"
    ends += [ending(_backend(group).close), ending(_backend(group).close)]
    _fail(group)
    return [*found, *ends]


@check(chapter="transport", needs="cpu clock")
def check_abort_wakes(worlds: WorldMaker) -> None:
    """Backend.abort wakes a thread that waits, and neither it nor close blocks though messages are on their way."""
    outcome = worlds.attempt(_wakes, 2, timeout_s=patience.LONG_S, channel=_new_channel())[0]
    assert not outcome.errors, str(outcome)
    waited, *ends = outcome.value
    assert "LinkLost" in waited["errors"], (
        f"a wait in another thread got {waited['errors'][:1] or 'no error'} from Backend.abort instead of LinkLost: {waited['text']}"
    )
    assert waited["took_s"] < patience.PROMPT_S, f"a wait in another thread was woken {waited['took_s']:.1f} s after it began"
    for name, end in zip(("abort", "close", "close a second time"), ends, strict=True):
        assert not end["errors"], f"Backend.{name} raised {end['errors'][0]}: {end['text']}"
        assert end["took_s"] < patience.AT_ONCE_S, f"Backend.{name} blocked for {end['took_s']:.1f} s"


def _afterwards(group: Group, channels: Sequence[int]) -> dict[str, dict[str, Any]]:
    transports = [_opened(group, channel) for channel in channels]
    if group.rank == 1:
        group.send(np.ones(1), 0)
        return {}
    group.recv(1)
    backend, found = _backend(group), {}

    def finish(transport: Transport, begin: Callable[[Transport], Transfer]) -> None:
        transfer = begin(transport)
        if not transfer.done:
            transport.wait([transfer], Deadline(patience.PROMPT_S))

    for end, transport in zip((backend.abort, backend.close), transports, strict=True):
        end()
        after = f"after Backend.{end.__name__}"
        found[f"connect {after}"] = ending(lambda: transport.connect([1], Deadline(patience.PROMPT_S)))  # noqa: B023 - called at once
        found[f"send {after}"] = ending(
            lambda: finish(transport, lambda link: link.send(1, _header(0, 0), _payload(0, 0, 9)))  # noqa: B023
        )
        found[f"recv {after}"] = ending(
            lambda: finish(transport, lambda link: link.recv(1, _header(0, 1), _Room(9).payload))  # noqa: B023
        )
    _fail(group)
    return found


@check(chapter="transport")
def check_after_the_end(worlds: WorldMaker) -> None:
    """After Backend.abort and after close, later calls end at once, and raise nothing but LinkLost."""
    outcome = worlds.attempt(_afterwards, 2, timeout_s=patience.LONG_S, channels=[_new_channel(), _new_channel()])[0]
    assert not outcome.errors, str(outcome)
    for what, found in outcome.value.items():
        kind = found["errors"][:1] or "no error"
        # Nothing is lost if connect has nothing to do, and if a send that no rank receives is done.
        assert "LinkLost" in found["errors"] or (not found["errors"] and not what.startswith("recv")), (
            f"{what} got {kind}; expected LinkLost: {found['text']}"
        )

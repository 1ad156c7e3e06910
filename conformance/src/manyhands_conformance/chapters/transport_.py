"""The transport itself, without what core does with it: what `manyhands.api.Transport` and `Backend.abort` promise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import manyhands as mh
from manyhands.api import HEADER_BYTES, Backend, Deadline, Group, HeaderMismatch, LinkLost, Transfer, Transport
from manyhands_conformance.ranks import Outcome
from manyhands_conformance.registry import check
from manyhands_conformance.worlds import WorldMaker

_CHANNEL = 901
"""One that no group of these worlds has: an odd one, for messages."""
_PATIENCE_S = 10.0
_A_MOMENT_S = 0.15
_PROMPT_S = 3.0
"""Within what time what never blocks is over, and who waits is woken: the machine may be busy."""
_LONG = 8 << 20
_SIZES = (0, 1, 63, 64, 65, 4097, 70_000, 1_048_577)


def _open(group: Group) -> tuple[Backend, Transport]:
    """Return the backend of a group, and a transport of its own that is connected to all other ranks."""
    backend = group.backend()
    assert backend is not None
    transport = backend.open_transport(_CHANNEL)
    transport.connect([rank for rank in range(group.world_size) if rank != group.rank], Deadline(_PATIENCE_S))
    return backend, transport


def _header(number: int) -> bytes:
    return bytes([number % 251]) * HEADER_BYTES


def _payload(number: int, size: int) -> bytes:
    return bytes((number * 31 + place) % 256 for place in range(min(size, 1021))) * (size // 1021 + 1)


def _wait(transport: Transport, *transfers: Transfer, patience_s: float | None = None) -> None:
    """Wait for all transfers."""
    limit = Deadline(_PATIENCE_S if patience_s is None else patience_s)
    while left := [each for each in transfers if not each.done]:
        transport.wait(left, limit)
        assert any(each.done for each in left), "wait() returned, and none of its transfers is done"


def _caught(call: Callable[[], object]) -> tuple[str, str, float]:
    """Make a call; return the name of what it raised, the words, and how long it lasted."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, the check is told
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _ended(error: str, text: str) -> str:
    """Return in words how a call ended that `_caught` made."""
    return f"raised {error}{text and ': '}{text}" if error else "returned"


def _find_fault(outcomes: Sequence[Outcome], what: str = "") -> None:
    """Find what a rank saw to be wrong, or raised: a rank that sees something leaves, and the others lose it."""
    size = len(outcomes)
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome.value, str) or not outcome.value, f"{what}rank {rank} of {size}: {outcome.value}"
    for rank, outcome in sorted(enumerate(outcomes), key=lambda each: each[1].error == "LinkLost"):
        assert not outcome.errors, f"{what}rank {rank} of {size} {outcome}"


def _exchange(group: Group) -> str:
    """Send to the next rank and receive from the one before it, all sizes; return what is wrong."""
    _, transport = _open(group)
    to, whence = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    for number, size in enumerate(_SIZES):
        given = _payload(group.rank + number, size)[:size]
        expected, came = _payload(whence + number, size)[:size], bytearray(size)
        sending = transport.send(to, _header(number), memoryview(given))
        try:
            receiving = transport.recv(whence, _header(number), memoryview(came))
            _wait(transport, receiving, sending)
        except HeaderMismatch as other:
            instead = f"message {other.header[0]}" if other.header else "another one"
            return f"message {number} from rank {whence} was expected, and {instead} came"
        if came != expected:
            return f"{size} bytes from rank {whence} came as others"
        for name, transfer in (("send", sending), ("recv", receiving)):
            if transfer.moved < 0 or (name == "recv" and transfer.moved < size):
                return f"{name} of {size} bytes is done, and its `moved` is {transfer.moved}"
        time.sleep(0)
        if not (sending.done and receiving.done):
            return f"`done` of a message of {size} bytes became False again"
    group.barrier()
    transport.close()
    return ""


@check(chapter="transport", needs="cpu clock")
def check_messages(worlds: WorldMaker) -> None:
    """Messages of any length arrive as they were sent, in their order; `done` stays True, and `moved` counts all bytes."""
    _find_fault(worlds.attempt(_exchange, 3))


def _alone(group: Group) -> float:
    """Connect while the peer does not; return how long it took."""
    backend = group.backend()
    assert backend is not None
    transport = backend.open_transport(_CHANNEL)
    took_s = 0.0
    if group.rank == 0:
        began = time.monotonic()
        transport.connect([1], Deadline(_PATIENCE_S))
        took_s = time.monotonic() - began
    group.barrier()
    if group.rank == 1:
        transport.connect([0], Deadline(_PATIENCE_S))
    peer, came = 1 - group.rank, bytearray(5)
    _wait(transport, transport.send(peer, _header(1), memoryview(b"hello")), transport.recv(peer, _header(1), memoryview(came)))
    assert came == b"hello", bytes(came)
    return took_s


@check(chapter="transport", needs="cpu clock")
def check_connect_alone(worlds: WorldMaker) -> None:
    """`connect` does not wait until the peer calls `connect` too: that may be much later, or never."""
    outcomes = worlds.attempt(_alone, 2)
    _find_fault(outcomes, "while rank 1 did not connect until rank 0 had: ")
    for outcome in outcomes:
        assert outcome.value < _PROMPT_S, f"connect of rank 0 took {outcome.value:.1f} s, while rank 1 did not connect"


def _again(group: Group) -> str:
    """Wait in vain, and then again; return what is wrong."""
    _, transport = _open(group)
    peer, moved = 1 - group.rank, -1
    memory = bytearray(_LONG)
    group.barrier()
    if group.rank == 1:
        mh.sleep(4 * _A_MOMENT_S)
        given = _payload(7, _LONG)[:_LONG]
        _wait(transport, transport.send(peer, _header(3), memoryview(given)))
        return ""
    transfer = transport.recv(peer, _header(3), memoryview(memory))
    for _ in range(2):
        error, text, took_s = _caught(lambda: transport.wait([transfer], Deadline(_A_MOMENT_S)))
        if error != "TimeoutError":
            return f"wait() for {_A_MOMENT_S} s, while nothing came, {_ended(error, text)}, and did not raise TimeoutError"
        if not _A_MOMENT_S * 0.5 < took_s < _A_MOMENT_S + _PROMPT_S:
            return f"wait() with a deadline of {_A_MOMENT_S} s raised TimeoutError after {took_s:.2f} s"
        if transfer.moved < moved or transfer.done:
            return f"after a TimeoutError `moved` is {transfer.moved}, after {moved}, and `done` is {transfer.done}"
        moved = transfer.moved
    _wait(transport, transfer)
    return "" if memory == _payload(7, _LONG)[:_LONG] else "after two TimeoutErrors the message came as another one"


@check(chapter="transport", needs="cpu clock")
def check_waiting_again(worlds: WorldMaker) -> None:
    """`wait` ends at its deadline with TimeoutError; the transfer goes on, and can be waited for again."""
    _find_fault(worlds.attempt(_again, 2))


def _other_header(group: Group, sent: int, expected: int) -> str:
    """Send with another header than the peer expects; return what is wrong with what it is told."""
    _, transport = _open(group)
    group.barrier()
    if group.rank == 1:
        transfer = transport.send(0, _header(1), memoryview(bytes(sent)))
        if not transfer.done:
            _caught(lambda: transport.wait([transfer], Deadline(_A_MOMENT_S)))
        mh.sleep(2 * _A_MOMENT_S)
        return ""
    came = bytearray(expected)
    try:
        transfer = transport.recv(1, _header(2), memoryview(came))
        _wait(transport, transfer, patience_s=_PROMPT_S)
    except HeaderMismatch as mismatch:
        if mismatch.peer != 1:
            return f"HeaderMismatch.peer is {mismatch.peer}, and rank 1 sent it"
        if not mismatch.header or not _header(1).startswith(bytes(mismatch.header)):
            return f"HeaderMismatch.header is {bytes(mismatch.header)!r}, and {_header(1)!r} came"
        return ""
    return "it was taken for the expected one"


@check(chapter="transport", needs="cpu clock")
def check_other_header(worlds: WorldMaker) -> None:
    """A message with another header is a HeaderMismatch that has the sender and the header that came, whatever the lengths."""
    for sent, expected in ((8, 8), (0, 8), (8, 0), (100_000, 8), (8, 300_000), (300_000, 300_000)):
        outcomes = worlds.attempt(_other_header, 2, sent=sent, expected=expected)
        what = f"rank 1 sent {sent} bytes with another header than rank 0 expected, with {expected} bytes"
        assert not outcomes[0].errors, f"{what}: rank 0 {outcomes[0]}"
        assert not outcomes[0].value, f"{what}: {outcomes[0].value}"


def _all_go_on(group: Group) -> str:
    """Wait for a message that does not come, and beside it for one that does; return what is wrong."""
    _, transport = _open(group)
    rank = group.rank
    never: Transfer | None = None
    group.barrier()
    if rank == 2:
        mh.sleep(_A_MOMENT_S)  # rank 0 waits already
        _wait(transport, transport.send(0, _header(5), memoryview(_payload(5, _LONG)[:_LONG])))
    elif rank == 0:
        never = transport.recv(1, _header(4), memoryview(bytearray(16)))
        memory = bytearray(_LONG)
        other = transport.recv(2, _header(5), memoryview(memory))
        while not other.done:
            error, text, _ = _caught(lambda: transport.wait([never, other], Deadline(_PROMPT_S)))
            if error:
                return f"wait() for a message that does not come and one that does {_ended(error, text)}"
        if memory != _payload(5, _LONG)[:_LONG]:
            return "the second one came as another one"
    group.barrier()
    if rank == 1:
        _wait(transport, transport.send(0, _header(4), memoryview(bytes(16))))
    elif never is not None:
        _wait(transport, never)
    return ""


@check(chapter="transport", needs="cpu clock")
def check_all_transfers_go_on(worlds: WorldMaker) -> None:
    """`wait` moves all of its transfers, and returns when any of them is done."""
    _find_fault(worlds.attempt(_all_go_on, 3))


def _without_help(group: Group) -> list[bool]:
    """Send, and make no call any more where the sends are done; return whether they were."""
    _, transport = _open(group)
    peer, done = 1 - group.rank, []
    group.barrier()
    if group.rank == 1:
        memory = [bytes(_payload(number, 900)[:900]) for number in range(5)]
        sends: list[Transfer] = []
        for number, each in enumerate(memory):
            sends.append(transport.send(peer, _header(number), memoryview(each)))
            if not sends[-1].done:
                _wait(transport, sends[-1])
        done = [each.done for each in sends]
        time.sleep(_PROMPT_S / 3)  # without a call: what is done arrives by itself
        return done
    began = time.monotonic()
    for number in range(5):
        came = bytearray(900)
        _wait(transport, transport.recv(peer, _header(number), memoryview(came)))
        done.append(came == _payload(number, 900)[:900])
    return [*done, time.monotonic() - began < _PROMPT_S / 3]


@check(chapter="transport", needs="cpu clock")
def check_done_arrives(worlds: WorldMaker) -> None:
    """A send that is done arrives without any further call of its rank."""
    outcomes = worlds.attempt(_without_help, 2)
    _find_fault(outcomes)
    *came, in_time = outcomes[0].value
    assert all(came), f"of five short messages these came as they were sent: {came}"
    assert in_time, "the messages came only after their sender had made another call, or ended"


def _aborted(group: Group, waits_for: str) -> dict[str, Any]:
    """Abort the backend from another thread while this one waits; return how the wait and later calls ended."""
    backend, transport = _open(group)
    group.barrier()
    if group.rank == 1:
        mh.sleep(6 * _A_MOMENT_S)
        return {}
    if waits_for == "recv":
        transfer = transport.recv(1, _header(1), memoryview(bytearray(64)))
    else:
        memory = memoryview(bytes(64 << 20))
        transfer = transport.send(1, _header(1), memory)
        if transfer.done:
            return {}
    timer = threading.Timer(_A_MOMENT_S, backend.abort)
    timer.start()
    woken = _caught(lambda: transport.wait([transfer], Deadline(_PATIENCE_S)))
    timer.join()
    if transfer.done and not woken[0]:
        return {}  # a thread of the backend took the bytes before the abort
    later = {
        "send": _caught(lambda: _wait(transport, transport.send(1, _header(2), memoryview(bytes(8))))),
        "recv": _caught(lambda: _wait(transport, transport.recv(1, _header(2), memoryview(bytearray(8))))),
        "connect": _caught(lambda: backend.open_transport(_CHANNEL + 2).connect([1], Deadline(_PATIENCE_S))),
    }
    blocked = [_caught(call)[2] for call in (backend.abort, transport.close, backend.close, backend.abort, backend.close)]
    return {"woken": woken, "later": later, "blocked": max(blocked)}


@check(chapter="transport", needs="cpu clock")
def check_abort(worlds: WorldMaker) -> None:
    """`abort` from another thread ends a wait with LinkLost, and waits that come after it. Neither `abort` nor `close` blocks."""
    for waits_for in ("recv", "send"):
        outcome = worlds.attempt(_aborted, 2, waits_for=waits_for)[0]
        what = f"the backend was aborted while rank 0 waited for its {waits_for}"
        assert not outcome.errors, f"{what}: rank 0 {outcome}"
        if not outcome.value:
            continue  # 64 MiB were sent before the abort, so that nobody waited
        error, text, took_s = outcome.value["woken"]
        assert error == "LinkLost", f"{what}: wait() {_ended(error, text)}, and did not raise LinkLost"
        assert took_s < _A_MOMENT_S + _PROMPT_S, f"{what}: wait() ended {took_s:.1f} s later"
        for name, (error, text, took_s) in outcome.value["later"].items():
            assert error in ("LinkLost", ""), f"{what}: {name} after that {_ended(error, text)}, and did not raise LinkLost"
            assert name != "recv" or error, f"{what}: {name} after that returned, and did not raise LinkLost"
            assert took_s < _PROMPT_S, f"{what}: {name} after that took {took_s:.1f} s"
        assert outcome.value["blocked"] < _PROMPT_S, f"abort or close blocked for {outcome.value['blocked']:.1f} s"


def _lost(group: Group) -> str:
    """Wait for a rank whose backend ends, and for one that goes on; return what is wrong with what is raised."""
    backend, transport = _open(group)
    rank = group.rank
    group.barrier()
    if rank == 2:
        backend.abort()
        backend.close()
        time.sleep(_PROMPT_S / 2)
        return ""
    if rank == 1:
        time.sleep(_PROMPT_S / 2)
        return ""
    try:
        transfers: Sequence[Transfer] = [transport.recv(peer, _header(peer), memoryview(bytearray(16))) for peer in (1, 2)]
        transport.wait(transfers, Deadline(_PROMPT_S / 3))
    except TimeoutError:
        return ""  # it leaves the death of ranks to core
    except LinkLost as lost:
        return "" if lost.peer == 2 else f"LinkLost.peer is {lost.peer}"
    return "wait() returned, though nothing was sent"


@check(chapter="transport", needs="cpu clock")
def check_lost_link(worlds: WorldMaker) -> None:
    """Where a connection breaks, LinkLost has the rank at its other end, and nobody else's; or `wait` leaves it to core."""
    outcome = worlds.attempt(_lost, 3)[0]
    assert not outcome.errors, f"rank 2 of 3 let go of its backend: rank 0 {outcome}"
    assert not outcome.value, f"rank 2 of 3 let go of its backend, and rank 0 waited for ranks 1 and 2: {outcome.value}"

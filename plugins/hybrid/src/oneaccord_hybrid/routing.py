"""Messages by place: to each peer by one of two transports, which core sees as one.

A transfer on its way remembers the transport that carries it, so that a wait for several messages knows which to wait for. Each transport may number
ranks in its own way: one that serves a host knows only the ranks of that host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, cast

from oneaccord.api import Damaged, Deadline, HeaderMismatch, LinkLost, Mailbox, Runtime, Sink, Transfer, Transport

__all__ = ["RoutedTransport", "Way"]

_FIRST_S, _LONGEST_S = 50e-6, 5e-3
"""How long one transport is waited for before the other has its turn: at first, and when nothing has moved for a while."""
_VIRTUAL_S = 1.0
"""How often a wait for both looks at a transport on a virtual clock. Its messages end by themselves, so that a look only shows
a failure; and no other rank can run while a rank waits there in vain."""

_Failure = LinkLost | HeaderMismatch | Damaged


class Way:
    """A transport, and the ranks that it reaches.

    Parameters
    ----------
    transport
        The transport for the bytes.
    ranks
        For each rank as it counts them, the rank in the world.
    is_virtual
        Whether it lives on a virtual clock.
    """

    __slots__ = ("_number", "_ranks", "is_virtual", "transport")

    def __init__(self, transport: Transport, ranks: Sequence[int], *, is_virtual: bool = False) -> None:
        self.transport: Transport = transport
        self.is_virtual: bool = is_virtual
        self._ranks = ranks
        self._number = {rank: number for number, rank in enumerate(ranks)}

    def number(self, peer: int) -> int:
        """Return the transport's number of a rank of the world."""
        return self._number[peer]

    def told(self, failure: _Failure) -> _Failure:
        """Return a failure of the transport with the peer's rank in the world."""
        peer = self._ranks[failure.peer]
        if peer == failure.peer:
            return failure
        if isinstance(failure, HeaderMismatch):
            return HeaderMismatch(peer, failure.header)
        return type(failure)(peer, failure.reason)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """As `Transport.wait`."""
        try:
            self.transport.wait(transfers, deadline)
        except (LinkLost, HeaderMismatch, Damaged) as failure:
            raise self.told(failure) from None

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """As `Transport.poll`."""
        try:
            self.transport.poll(transfers)
        except (LinkLost, HeaderMismatch, Damaged) as failure:
            raise self.told(failure) from None


class _Routed(Transfer):
    """A message on its way, and which way that is."""

    __slots__ = ("inner", "way")

    def __init__(self, inner: Transfer, way: Way) -> None:
        self.inner = inner
        self.way = way

    @property
    def done(self) -> bool:
        return self.inner.done

    @done.setter
    def done(self, value: bool) -> None:
        self.inner.done = value

    @property
    def moved(self) -> int:
        return self.inner.moved

    @moved.setter
    def moved(self, value: int) -> None:
        self.inner.moved = value


class _RoutedMailbox(Mailbox):
    """A mailbox whose unfinished messages know their way. The compiled executor uses the C form of the mailbox inside."""

    __slots__ = ("_box", "_fetch", "_post", "_way", "c_mailbox", "compiled", "posted_bytes")

    def __init__(self, box: Mailbox, way: Way) -> None:
        self._box = box
        self._way = way
        self._post = box.post
        self._fetch = box.fetch
        self.outgoing = box.outgoing
        self.incoming = box.incoming
        self.compiled: ModuleType | None = box.compiled
        self.c_mailbox: Any = box.c_mailbox
        self.posted_bytes: int | None = box.posted_bytes

    @property
    def next_out(self) -> int:
        return self._box.next_out

    @next_out.setter
    def next_out(self, value: int) -> None:
        self._box.next_out = value

    @property
    def next_in(self) -> int:
        return self._box.next_in

    @next_in.setter
    def next_in(self, value: int) -> None:
        self._box.next_in = value

    def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """As the mailbox itself."""
        try:
            transfer = self._post(header, nbytes)
        except (LinkLost, HeaderMismatch, Damaged) as failure:
            raise self._way.told(failure) from None
        return None if transfer is None else _Routed(transfer, self._way)

    def unsent(self) -> Transfer | None:
        """As the mailbox itself."""
        transfer = self._box.unsent()
        return None if transfer is None else _Routed(transfer, self._way)

    def recall(self, transfer: Transfer) -> bool:
        """As the mailbox itself."""
        return isinstance(transfer, _Routed) and self._box.recall(transfer.inner)

    def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        """As the mailbox itself."""
        try:
            transfer = self._fetch(header, nbytes)
        except (LinkLost, HeaderMismatch, Damaged) as failure:
            raise self._way.told(failure) from None
        return None if transfer is None else _Routed(transfer, self._way)


class RoutedTransport(Transport):
    """Messages of one channel, each by the way to its peer.

    Parameters
    ----------
    ways
        All ways, alike on all ranks.
    peers
        For each peer the way to it.
    runtime
        The runtime of this rank.
    """

    def __init__(self, ways: Sequence[Way], peers: Mapping[int, Way], runtime: Runtime) -> None:
        self._all = ways
        self._ways = dict(peers)
        self._now = runtime.now
        self._is_interrupted = False
        allowed = [way.transport.eager_bytes for way in ways if way.transport.eager_bytes is not None]
        self.eager_bytes: int | None = min(allowed, default=None)
        # Also that of a way which this rank alone does not use, since it is alike on all ranks.
        self.streams: bool = all(way.transport.streams for way in ways)

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Connect to each peer by its way."""
        for way in self._all:
            numbers = [way.number(peer) for peer in peers if self._ways[peer] is way]
            try:
                if numbers:
                    way.transport.connect(numbers, deadline)
            except (LinkLost, HeaderMismatch, Damaged) as failure:
                raise way.told(failure) from None

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send."""
        way = self._ways[peer]
        try:
            return _tagged(way.transport.send(way.number(peer), header, payload), way)
        except (LinkLost, HeaderMismatch, Damaged) as failure:
            raise way.told(failure) from None

    def lend(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send what the peer receives by `recv`."""
        way = self._ways[peer]
        try:
            return _tagged(way.transport.lend(way.number(peer), header, payload), way)
        except (LinkLost, HeaderMismatch, Damaged) as failure:
            raise way.told(failure) from None

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive."""
        way = self._ways[peer]
        try:
            return _tagged(way.transport.recv(way.number(peer), header, payload), way)
        except (LinkLost, HeaderMismatch, Damaged) as failure:
            raise way.told(failure) from None

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        """Start to receive in parts."""
        way = self._ways[peer]
        try:
            return _tagged(way.transport.consume(way.number(peer), header, nbytes, sink), way)
        except (LinkLost, HeaderMismatch, Damaged) as failure:
            raise way.told(failure) from None

    def mailbox(self, peer: int) -> Mailbox | None:
        """Return the mailbox that the peer's way has for it."""
        way = self._ways[peer]
        box = way.transport.mailbox(way.number(peer))
        return None if box is None else _RoutedMailbox(box, way)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Wait if all messages are on one way; otherwise look at one way after the other, at first often."""
        waits = _by_way(transfers)
        if len(waits) == 1:
            ((way, inner),) = waits.items()
            way.wait(inner, deadline)
        else:
            self._wait_for_any(waits, deadline)

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Move what can be moved now, on each way."""
        for way, inner in _by_way(transfers).items():
            way.poll(inner)

    def interrupt(self) -> bool:
        """Wake the thread that waits, on whichever way."""
        self._is_interrupted = True
        answers = [way.transport.interrupt() for way in self._all]
        return all(answers)

    def close(self) -> None:
        """Close every way."""
        for way in self._all:
            way.transport.close()

    def _wait_for_any(self, waits: Mapping[Way, Sequence[Transfer]], deadline: Deadline) -> None:
        transfers = [transfer for each in waits.values() for transfer in each]
        pause_s, moved = _FIRST_S, sum(transfer.moved for transfer in transfers)
        patience = Deadline(_VIRTUAL_S, self._now)
        while True:
            is_over = deadline.passed()
            asks_virtual = is_over or patience.passed()
            for way, its_own in waits.items():
                if way.is_virtual and not asks_virtual:
                    continue
                try:
                    way.wait(its_own, Deadline(max(min(pause_s, deadline.remaining()), 1e-9), self._now))
                except TimeoutError:
                    pass
                else:
                    return
                if any(transfer.done for transfer in transfers):
                    return
            if self._is_interrupted:
                self._is_interrupted = False
                raise TimeoutError("the wait was interrupted")
            if is_over:
                raise TimeoutError("the deadline passed")
            if asks_virtual:
                patience = Deadline(_VIRTUAL_S, self._now)
            before, moved = moved, sum(transfer.moved for transfer in transfers)
            pause_s = _FIRST_S if moved != before else min(2 * pause_s, _LONGEST_S)


def _by_way(transfers: Sequence[Transfer]) -> dict[Way, list[Transfer]]:
    """Return the messages on each way, as that knows them."""
    waits: dict[Way, list[Transfer]] = {}
    for each in cast("Sequence[_Routed]", transfers):  # made by send, recv, consume and mailboxes
        waits.setdefault(each.way, []).append(each.inner)
    return waits


def _tagged(transfer: Transfer, way: Way) -> Transfer:
    """Let a message that is still on its way know it."""
    return transfer if transfer.done else _Routed(transfer, way)

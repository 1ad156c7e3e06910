"""Transports around another one: one that serves two ends of core, and one of this computer in a simulated world.

Of the ranks of a simulated world one runs at a time, until it waits for an event of that world. A message on a socket is not such an event:
it comes from a rank that may have to run first, or that waits for virtual time. So the rank waits outside of the world, for a moment at a time;
in between virtual time passes as the computer's did, so that deadlines hold.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from oneaccord.api import Deadline, Mailbox, Runtime, Sink, Transfer, Transport

__all__ = ["PollingTransport", "SharedTransport"]

_GLANCE_S, _GLANCES = 20e-6, 100
"""How often a rank that waits only looks, and for how long it lets others run in between; nearly always that is all that it takes."""
_NO_TIME_S = 1e-9
_SLICE_S = 1e-3
"""The length of such a wait: a message that is still missing may take the computer's time."""
_FIRST_CONNECT_S, _LONGEST_CONNECT_S = 2.0, 10.0
"""Connecting takes several messages, and starts again with each try; a peer that was about to answer takes an abandoned try for a lost rank."""


class _Wrapped(Transport):
    """A transport that hands on all that it is asked for, but mailboxes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.streams: bool = transport.streams

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Connect."""
        self._transport.connect(peers, deadline)

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send."""
        return self._transport.send(peer, header, payload)

    def lend(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to send what the peer receives by `recv`."""
        return self._transport.lend(peer, header, payload)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Start to receive."""
        return self._transport.recv(peer, header, payload)

    def consume(self, peer: int, header: bytes, nbytes: int, sink: Sink) -> Transfer:
        """Start to receive in parts."""
        return self._transport.consume(peer, header, nbytes, sink)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Wait."""
        self._transport.wait(transfers, deadline)

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()


class SharedTransport(_Wrapped):
    """A transport that serves two ends of core, barriers and the other collectives that go the same way: it is asked for each mailbox once, and
    closed once.

    Parameters
    ----------
    transport
        The transport for the bytes.
    on_close
        Called when it is closed.
    """

    def __init__(self, transport: Transport, on_close: Callable[[], object]) -> None:
        super().__init__(transport)
        self._on_close = on_close
        self._boxes: dict[int, Mailbox | None] = {}
        self._closed = False

    def mailbox(self, peer: int) -> Mailbox | None:
        """Return the mailbox of a peer, the same each time."""
        if peer not in self._boxes:
            self._boxes[peer] = self._transport.mailbox(peer)
        return self._boxes[peer]

    def close(self) -> None:
        """Close the transport; both ends close together."""
        if not self._closed:
            self._closed = True
            self._on_close()
            self._transport.close()


class PollingTransport(_Wrapped):
    """A transport that others than simulated ranks could use.

    Parameters
    ----------
    transport
        The transport for the bytes, on the computer's clock.
    runtime
        The simulated world.
    """

    def __init__(self, transport: Transport, runtime: Runtime) -> None:
        super().__init__(transport)
        self._runtime = runtime

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Connect, again and again."""
        slices = (min(_FIRST_CONNECT_S * 2**number, _LONGEST_CONNECT_S) for number in itertools.count())
        self._poll(lambda limit: self._transport.connect(peers, limit), deadline, slices)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Wait, again and again. There are no mailboxes, which would wait by themselves."""
        slices = itertools.chain(itertools.repeat(0.0, _GLANCES), itertools.repeat(_SLICE_S))
        self._poll(lambda limit: self._transport.wait(transfers, limit), deadline, slices)

    def _poll(self, attempt: Callable[[Deadline], None], deadline: Deadline, slices: Iterable[float]) -> None:
        self._nap(0.0)  # the sender can usually send at once
        began, entered = time.monotonic(), self._runtime.now()
        for seconds in slices:
            try:
                with self._runtime.outside():  # it waits on the computer's clock
                    attempt(Deadline(seconds or _NO_TIME_S))
            except TimeoutError:
                if deadline.passed():
                    raise
                # The other ranks have waited and computed one after the other, for which the computer's clock advanced as well.
                behind = (time.monotonic() - began) - (self._runtime.now() - entered)
                self._nap(max(seconds, _GLANCE_S, behind))
            else:
                return

    def _nap(self, seconds: float) -> None:
        """Let the others run, and virtual time pass. It is no `Runtime.sleep`, which is a call of the program."""
        place = self._runtime.place(for_good=False)
        self._runtime.call_later(seconds, place.wake)
        place.wait(None)

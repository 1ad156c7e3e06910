"""The point-to-point half of one group: who may use which direction, message numbers, and what failures mean."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from functools import partial

import numpy as np

from manyhands.arrays import Array
from manyhands.backend import Transport
from manyhands.collectives import check_usable, guarded
from manyhands.deadline import Deadline
from manyhands.errors import DeadlineError
from manyhands.job import Job
from manyhands.point_to_point import SIGNATURE, DescriptionMismatch, Incoming, Outgoing, move
from manyhands.rendezvous.messages import Report

__all__ = ["Peers"]


class _Direction:
    """One direction between this rank and another; ``begun`` counts its messages where the store can ask for them."""

    def __init__(self, begun: dict[int, int], peer: int) -> None:
        self.lock = threading.Lock()
        self._begun = begun
        self._peer = peer

    def next(self) -> int:
        """Return the number of the next message."""
        number = self._begun.get(self._peer, 0)
        self._begun[self._peer] = number + 1
        return number


class Peers:
    """Sends and receives of one group; safe to use from several threads.

    Parameters
    ----------
    job
        Where the group lives.
    channel
        The channel that its messages go by.
    """

    def __init__(self, job: Job, channel: int) -> None:
        self._job = job
        self._channel = channel
        self._transport: Transport | None = None
        self._opening = threading.Lock()
        self._directions: dict[tuple[int, bool], _Direction] = {}
        self._calls = 0

    def exchange(
        self, array: Array | None, dest: int | None, source: int | None, out: Array | None, deadline: Deadline
    ) -> Array:
        """Send ``array`` to ``dest`` and receive from ``source``, each where it is not None; return what was received.

        Raises
        ------
        DeadlineError
            Another thread was still using the same direction when the time was up; nothing was sent.
        CommError
            The first cause, alike on all ranks; ``out`` is then undefined.
        """
        check_usable(self._job)
        what = self._words(dest, source)
        with ExitStack() as stack:
            # Both directions first, and only then their numbers: who gives up while it waits must not have used one.
            sending = None if dest is None else self._take(stack, dest, True, deadline, what)
            receiving = None if source is None else self._take(stack, source, False, deadline, what)
            check_usable(self._job)
            flows: list[Outgoing | Incoming] = []
            incoming: Incoming | None = None
            if sending is not None and array is not None and dest is not None:
                flows.append(Outgoing(self._job.rank, dest, self._channel, sending.next(), array))
            if receiving is not None and source is not None:
                incoming = Incoming(source, self._channel, receiving.next(), out)
                flows.append(incoming)
            self._move(flows, what, deadline)
        return incoming.array if incoming is not None else np.empty(0)

    def _move(self, flows: list[Outgoing | Incoming], what: str, deadline: Deadline) -> None:
        transport = self._open()
        self._calls = call = self._calls + 1
        record = self._job.control.recorder.start(self._channel, call, what)
        stall = partial(self._stalled, what, call, flows)

        def action() -> None:
            try:
                move(transport, flows, deadline, stall)
            except DescriptionMismatch as mismatch:
                text = f"{what} on rank {self._job.rank}: {mismatch.problem}"
                raise self._job.fail(Report("mismatch", text, mismatch.peer, what, self._channel)) from None

        guarded(self._job, self._channel, call, SIGNATURE, deadline, action, what)
        record.finished = time.monotonic()

    def _open(self) -> Transport:
        with self._opening:
            if self._transport is None:
                self._transport = self._job.open_transport(self._channel)
            return self._transport

    def _take(self, stack: ExitStack, peer: int, is_send: bool, deadline: Deadline, what: str) -> _Direction:
        """Take a direction for this thread until ``stack`` ends."""
        direction = self._directions.get((peer, is_send))
        if direction is None:
            progress = self._job.control.progress
            begun = (progress.sends if is_send else progress.receives).setdefault(self._channel, {})
            direction = self._directions.setdefault((peer, is_send), _Direction(begun, peer))
        if not direction.lock.acquire(timeout=deadline.remaining()):
            raise DeadlineError(
                f"{what} did not begin within {deadline.timeout_s:g} s: another thread of rank {self._job.rank} was still talking with "
                f"rank {peer}; nothing was sent",
                rank=self._job.rank,
                peer=peer,
            )
        stack.callback(direction.lock.release)
        return direction

    def _stalled(self, what: str, call: int, flows: list[Outgoing | Incoming], peers: list[int]) -> None:
        messages = [(flow.peer, flow.is_send, flow.number) for flow in flows if not flow.finished]
        self._job.control.stalled(self._channel, call, what, b"", peers, messages)

    def _words(self, dest: int | None, source: int | None) -> str:
        if dest is None:
            return f"recv from rank {source}"
        return f"send to rank {dest}" if source is None else f"sendrecv to rank {dest} and from rank {source}"

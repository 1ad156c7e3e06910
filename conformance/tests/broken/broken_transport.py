"""The defects of `broken_family` that the checks on the bare transport find; a group's calls show few of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from broken_family import fault
from broken_loft import Letter, Loft, LoftTransport

from manyhands.api import Deadline, HeaderMismatch, LinkLost, Transfer, Transport

BARE = 1 << 20
"""From here on, channels are those of the checks: what core does stays whole."""


@fault("memory that is read-only is not sent", "transport.messages", r"raised TypeError: it cannot be written to")
class ReadOnly(LoftTransport):
    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        if payload.readonly:
            raise TypeError("it cannot be written to")
        return super().send(peer, header, payload)


@fault(
    "a message is overtaken by the next one",
    "transport.messages",
    "message 2 of rank 0 was expected, and message 3 of rank 0 came",
)
class Overtaken(LoftTransport):
    held: tuple[int, bytes, memoryview] | None = None

    def put(self, peer: int, header: bytes, payload: memoryview) -> None:
        if header.startswith(b"message 2 of rank 0"):
            self.held = peer, header, payload
            return
        super().put(peer, header, payload)
        if self.held is not None:
            held, self.held = self.held, None
            super().put(*held)


@fault("done becomes False again", "transport.messages", r"`done` of a message of \d+ bytes became False again")
class Undone(LoftTransport):
    class Once(Letter):
        looks = 0

        @property
        def done(self) -> bool:  # type: ignore[override]
            self.looks += self.is_done
            return self.is_done and self.looks < 2

        @done.setter
        def done(self, value: bool) -> None:
            self.is_done = value

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        sent = super().send(peer, header, payload)
        return sent if self.channel < BARE else self.Once(peer, header, payload).end()


@fault("a send goes with the next call", "transport.done_arrives", r"not all came before it made another one")
class Held(LoftTransport):
    held: tuple[int, bytes, memoryview] | None = None

    def put(self, peer: int, header: bytes, payload: memoryview) -> None:
        held, self.held = self.held, None
        if held is not None:
            super().put(*held)
        if self.channel < BARE or header.startswith(b"message 5"):
            super().put(peer, header, payload)
        else:
            self.held = peer, header, payload


@fault("connect waits for the peer's connect", "transport.connects_alone", r"raised TimeoutError: rank \d does not connect")
class Together(LoftTransport):
    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        if self.channel < BARE:
            return
        for peer in peers:
            self.put(peer, b"connected", memoryview(b""))
        with self.own.changed:
            for peer in peers:
                came = self.own.messages[self.channel, peer]
                if not self.own.changed.wait_for(lambda: came, deadline.remaining()):  # noqa: B023 - called at once
                    raise TimeoutError(f"rank {peer} does not connect")
                came.popleft()


@fault("a recv blocks until its message is there", "transport.begins_at_once", r"recv and send blocked rank 0 for \d\.\d s")
class BlockingRecv(LoftTransport):
    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        letter = super().recv(peer, header, payload)
        if self.channel > BARE and not letter.done:
            self.wait([letter], Deadline(5.0))
        return letter


@fault(
    "only the first transfer goes on", "transport.waits_for_all", r"none of 2 transfers was done within .* moved \[0, 0\] bytes"
)
class OnlyFirst(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        super().wait(transfers[:1], deadline)


@fault("a timeout comes too early", "transport.timeout", r"a wait of 0\.1 s for what was not sent yet ended after 0\.0\d+ s")
class TooSoon(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        super().wait(transfers, Deadline(max(deadline.remaining() / 4, 1e-9)))


@fault("wait returns at its deadline", "transport.timeout", r"what was not sent yet returned .* expected was TimeoutError")
class Returns(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        try:
            super().wait(transfers, deadline)
        except TimeoutError:
            return


@fault("moved stays at zero", "transport.moved", r"Transfer.moved of a send of 9 bytes, which is done, is 0")
class NothingMoved(LoftTransport):
    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        transfer = super().send(peer, header, payload)
        transfer.moved = 0
        return transfer


@fault("moved is a share of the whole", "transport.moved", r"Transfer.moved of a receive of 0 bytes is \d\.0")
class Share(LoftTransport):
    def take(self, letter: Letter) -> None:
        super().take(letter)
        letter.moved = float(letter.done)  # type: ignore[assignment]


@fault(
    "moved counts what is left", "transport.moved", r"Transfer.moved of a receive of \d+ bytes(, which is done, is 0| shrank)"
)
class Left(LoftTransport):
    def take(self, letter: Letter) -> None:
        super().take(letter)
        letter.moved = 0 if letter.done else len(letter.payload)


@fault("a mismatch tells the header that was expected", "transport.header_mismatch", r"was told of the header .* came")
class ExpectedHeader(LoftTransport):
    def take(self, letter: Letter) -> None:
        try:
            super().take(letter)
        except HeaderMismatch as error:
            raise HeaderMismatch(error.peer, letter.header) from None


@fault("a mismatch names the rank that found it", "transport.header_mismatch", r"rank 0 was told of rank 0")
class FinderNamed(LoftTransport):
    def take(self, letter: Letter) -> None:
        try:
            super().take(letter)
        except HeaderMismatch as error:
            raise HeaderMismatch(self.backend.rank, error.header) from None


@fault("a lost connection names another rank", "transport.lost_rank", r"rank 1 of 3 left, .* it was told of rank 2")
class OtherPeer(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        try:
            super().wait(transfers, deadline)
        except LinkLost as error:
            raise LinkLost((error.peer + 1) % self.backend.world_size, error.reason) from None


@fault("a lost rank's message counts as received", "transport.lost_rank", r"was told that a message came, which nobody sent")
class Swallowed(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        try:
            super().wait(transfers, deadline)
        except LinkLost as error:
            if self.own.aborted:
                raise
            for letter in transfers:
                if letter.peer == error.peer:
                    letter.end()


@fault("abort wakes nobody", "transport.abort_wakes", r"a wait in another thread was woken \d\.\d s after it began")
class SilentAbort(Loft):
    def abort(self) -> None:
        self.inboxes[self.rank].aborted = True


@fault("abort waits for the messages on their way", "transport.abort_wakes", r"Backend.abort blocked for \d\.\d s")
class SlowAbort(Loft):
    is_slow = False

    def open_transport(self, channel: int) -> Transport:
        self.is_slow = self.is_slow or channel > BARE
        return super().open_transport(channel)

    def abort(self) -> None:
        super().abort()
        if self.is_slow:
            time.sleep(0.7)


@fault("who comes after abort waits", "transport.after_the_end", r"recv after Backend.abort got .*TimeoutError")
class DeafToAbort(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        with self.own.changed:
            if self.own.aborted:
                self.own.changed.wait(deadline.remaining())
                raise TimeoutError
        super().wait(transfers, deadline)


@fault("abort ends one wait alone", "transport.after_the_end", r"recv after Backend.(abort|close) got .*TimeoutError")
class Forgets(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        try:
            super().wait(transfers, deadline)
        except LinkLost:
            self.own.aborted = False
            raise


@fault("a send after close raises another error", "transport.after_the_end", r"send after Backend.close got .*AttributeError")
class Forgetful(LoftTransport):
    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        inboxes = None if self.backend.rank in self.backend.inboxes[peer].gone else self.backend.inboxes
        inboxes.__getitem__(peer)  # type: ignore[union-attr]
        return super().send(peer, header, payload)

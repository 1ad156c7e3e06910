"""The defects of `broken_family` that the checks on the bare transport find; a group's calls show few of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from broken_family import fault, where
from broken_loft import Letter, Loft, LoftTransport

from oneaccord.api import Deadline, HeaderMismatch, LinkLost, Transfer

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
    "message 2 of rank 0 was expected, but message 3 of rank 0 came",
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


@fault("a send goes with the next call", "transport.done_arrives", r"not all came before it made another one", PROMPT_S=0.2)
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


@fault(
    "connect waits for the peer's connect",
    "transport.connects_alone",
    r"raised TimeoutError: rank \d does not connect|DeadlineError",
    TIMEOUT_S=0.5,
)
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


@fault(
    "a recv blocks until its message is there",
    "transport.begins_at_once",
    r"recv and send of rank 0 did not return",
    PROMPT_S=0.2,
)
class BlockingRecv(LoftTransport):
    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        letter = super().recv(peer, header, payload)
        if self.channel > BARE and not letter.done:
            self.wait([letter], Deadline(60.0))
        return letter


@fault(
    "only the first transfer goes on",
    "transport.waits_for_all",
    r"none of 2 transfers was done within .* moved \[0, 0\] bytes|DeadlineError",
    TIMEOUT_S=0.5,
)
class OnlyFirst(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        super().wait(transfers[:1], deadline)


@fault(
    "a timeout comes too early",
    "transport.timeout",
    r"a wait of 2\.0 s for a message that was not sent yet ended after",
    SHORT_S=2.0,
)
class TooSoon(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        super().wait(transfers, Deadline(max(deadline.remaining() / 50, 1e-9)))


@fault(
    "wait returns at its deadline",
    "transport.timeout",
    r"a message that was not sent yet returned .* expected TimeoutError",
)
@where("wait", raises=TimeoutError)
def returns(self: Any, transfers: Any, error: Exception) -> None:
    """Say nothing."""


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


@fault("a mismatch tells the header that was expected", "transport.header_mismatch", r"got the header .* came")
@where("take", raises=HeaderMismatch)
def expected_header(self: Any, letter: Any, error: Any) -> None:
    raise HeaderMismatch(error.peer, letter.header) from None


@fault("a mismatch names the rank that found it", "transport.header_mismatch", r"rank 0 got an error about rank 0")
@where("take", raises=HeaderMismatch)
def finder_named(self: Any, letter: Any, error: Any) -> None:
    raise HeaderMismatch(self.backend.rank, error.header) from None


@fault(
    "a lost connection names another rank",
    "transport.lost_rank",
    r"rank 1 of 3 left, .* it got an error about rank 2",
    LOST_S=20.0,
)
@where("wait", raises=LinkLost)
def other_peer(self: Any, transfers: Any, error: Any) -> None:
    raise LinkLost((error.peer + 1) % self.backend.world_size, error.reason) from None


@fault(
    "a lost rank's message counts as received",
    "transport.lost_rank",
    r"learned of a message that no rank sent",
    LOST_S=20.0,
)
@where("wait", raises=LinkLost)
def swallowed(self: Any, transfers: Any, error: Any) -> None:
    if self.own.aborted:
        raise error
    for letter in transfers:
        if letter.peer == error.peer:
            letter.end()


@fault(
    "abort wakes nobody",
    "transport.abort_wakes",
    r"a wait in another thread was woken \d\.\d s after it began",
    TIMEOUT_S=1.0,
    PROMPT_S=0.5,
)
class SilentAbort(Loft):
    def abort(self) -> None:
        self.inboxes[self.rank].aborted = True


@fault(
    "abort waits for the messages on their way", "transport.abort_wakes", r"Backend.abort blocked for \d\.\d s", AT_ONCE_S=0.2
)
class SlowAbort(Loft):
    def abort(self) -> None:
        super().abort()
        if any(channel > BARE for channel, _ in self.inboxes[1 - self.rank].messages):
            time.sleep(0.3)


@fault(
    "abort ends one wait alone", "transport.after_the_end", r"recv after Backend.(abort|close) got .*TimeoutError", PROMPT_S=0.3
)
@where("wait", raises=LinkLost)
def forgets(self: Any, transfers: Any, error: Any) -> None:
    self.own.aborted = False
    raise error

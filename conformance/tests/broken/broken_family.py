"""What careless authors write: each is the backend of `broken_loft` with one defect; beside it the check that must find it, and in which words."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from broken_loft import Letter, Loft, LoftTransport

from oneaccord.api import Deadline, HeaderMismatch, LinkLost, Transfer

WRONG = r"\d+ of \d+ elements are wrong, the first is element \d+"


@dataclass(frozen=True)
class Fault:
    """A broken backend, the check that must find it, and what that must say.

    ``patience`` are constants of `oneaccord_conformance.patience`: short ones for what such a backend never does, long ones for what it does in time.
    """

    backend: type[Loft]
    check: str
    words: str
    is_long: bool
    patience: dict[str, float]


FAULTS: dict[str, Fault] = {}


def fault(name: str, check: str, words: str, *, is_long: bool = False, **patience: float) -> Callable[[type], type]:
    def enter(kind: type) -> type:
        backend = kind if issubclass(kind, Loft) else type(kind.__name__, (Loft,), {"transport": kind})
        assert name not in FAULTS
        FAULTS[name] = Fault(backend, check, words, is_long, patience)
        return kind

    return enter


def where(method: str, raises: type[Exception]) -> Callable[[Callable[[Any, Any, Any], None]], type]:
    """Make a transport of what it does where ``take`` or ``wait`` raises something: with the argument, and with the error."""

    def make(handle: Callable[[Any, Any, Any], None]) -> type:
        whole = getattr(LoftTransport, method)

        def call(self: LoftTransport, argument: Any, *more: Any) -> None:
            try:
                whole(self, argument, *more)
            except raises as error:
                handle(self, argument, error)

        return type(handle.__name__, (LoftTransport,), {method: call})

    return make


def create(bootstrap: Any) -> Loft:
    name = bootstrap.config.fault
    return FAULTS[name].backend(bootstrap) if name else Loft(bootstrap)


# Bytes


@fault("the last byte of odd lengths above 64 KiB is lost", "messages.every_size", rf"recv of uint8\[\d+[13579]\]: {WRONG}")
class LastByte(LoftTransport):
    def fill(self, letter: Letter, payload: memoryview) -> None:
        whole = len(payload) if len(payload) <= 1 << 16 else len(payload) // 2 * 2
        letter.payload[:whole] = payload[:whole]


@fault("zeros are delivered where memory was reused", "bytes.calls_that_are_repeated", rf"number \d+ of int64\[\d+\]: {WRONG}")
class Zeros(LoftTransport):
    count = 0

    def fill(self, letter: Letter, payload: memoryview) -> None:
        self.count += 1
        letter.payload[:] = payload if self.count % 40 else bytes(len(payload))


@fault("halves of long messages are swapped", "bytes.every_size", rf"of uint8\[\d+\]: {WRONG}")
class Swapped(LoftTransport):
    def fill(self, letter: Letter, payload: memoryview) -> None:
        half = len(payload) // 2 if len(payload) > 4096 else 0
        letter.payload[:] = bytes(payload[half:]) + bytes(payload[:half])


@fault(
    "payloads are read after the send is done",
    "messages.memory_is_free",
    rf"(wrote to it after send returned|written to afterwards|input is gone): {WRONG}|CollectiveMismatchError: recv from rank . on rank .",
)
class ReadLater(LoftTransport):
    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        self.put(peer, bytes(header), payload)
        return Letter(peer, header, payload).end()


@fault(
    "memory of the backend is given twice",
    "bytes.memory_of_the_group",
    rf"array 0 of four made by group.empty that live at the same time: {WRONG}",
)
class Twice(Loft):
    memory_given: memoryview | None = None

    def allocate(self, nbytes: int) -> memoryview | None:
        if self.memory_given is None or len(self.memory_given) < nbytes:
            array = np.zeros(nbytes + 64, np.uint8)
            start = -array.ctypes.data % 64
            self.memory_given = memoryview(array[start : start + nbytes])  # type: ignore[arg-type]
        return self.memory_given[:nbytes]


# Order, channels and peers


@fault(
    "short messages overtake long ones",
    "messages.order",
    r"CollectiveMismatchError: in send #\d+ rank 0 sends \d+ bytes that rank 1 does not expect|message \d+ from rank",
)
class Overtaking(LoftTransport):
    def put(self, peer: int, header: bytes, payload: memoryview) -> None:
        inbox = self.backend.inboxes[peer]
        with inbox.changed:
            super().put(peer, header, payload)
            waiting = inbox.messages[self.channel, self.backend.rank]
            if len(waiting) > 1 and len(waiting[-1][1]) < 2000 < len(waiting[-2][1]):
                waiting[-1], waiting[-2] = waiting[-2], waiting[-1]


@fault("empty messages are lost", "bytes.barriers", r"DeadlineError|DeadlockError|did not return", TIMEOUT_S=0.5)
class NoEmpty(LoftTransport):
    def put(self, peer: int, header: bytes, payload: memoryview) -> None:
        if payload:
            super().put(peer, header, payload)


@fault(
    "messages and collectives share a channel", "messages.apart_from_collectives", "CollectiveMismatchError|elements are wrong"
)
class OneChannel(LoftTransport):
    def __init__(self, backend: Loft, channel: int) -> None:
        super().__init__(backend, channel // 2)


@fault(
    "groups share channels",
    "groups.messages_stay_in_their_group",
    "in group . of three with the same ranks|CollectiveMismatchError",
)
class FewChannels(LoftTransport):
    def __init__(self, backend: Loft, channel: int) -> None:
        super().__init__(backend, channel % 2)


@fault(
    "messages to a channel that is not open yet are lost",
    "transport.connects_alone",
    "none of 1 transfers was done|DeadlineError",
    TIMEOUT_S=0.5,
)
class NotOpen(LoftTransport):
    def __init__(self, backend: Loft, channel: int) -> None:
        super().__init__(backend, channel)
        self.close()


@fault("a group's close ends all channels", "groups.many", r"raised|did not return")
class CloseAll(LoftTransport):
    def close(self) -> None:
        self.backend.abort()


@fault("only worlds of powers of two work", "bytes.every_world_and_root", r"rank \d+ of (3|5|6|7) raised IndexError")
class Powers(LoftTransport):
    def put(self, peer: int, header: bytes, payload: memoryview) -> None:
        range(1 << (self.backend.world_size.bit_length() - 1))[peer]
        super().put(peer, header, payload)


# Waiting


@fault(
    "one thread at a time waits",
    "threads.one_waits_while_another_talks",
    r"messages there and back took .* while another thread waited in recv|DeadlineError",
    TIMEOUT_S=1.0,
)
class OneThread(Loft):
    def __init__(self, bootstrap: Any) -> None:
        super().__init__(bootstrap)
        self.turn = threading.Lock()

    class transport(LoftTransport):  # noqa: N801 - the attribute of Loft
        def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
            with self.backend.turn:  # type: ignore[attr-defined]
                super().wait(transfers, deadline)


@fault("a timeout drops the transfer", "deadlines.rank_in_time", r"DeadlineError|DeadlockError|did not return", TIMEOUT_S=1.0)
@where("wait", raises=TimeoutError)
def dropped(self: Any, transfers: Any, error: Exception) -> None:
    for letter in transfers:
        letter.peer = self.backend.rank
    raise error


@fault(
    "deadlines are ignored", "deadlines.late_rank", r"did not return from _late:\n  rank \d: \w+\.py:\d+ \w+ < ", PROGRAM_S=1.5
)
class NoDeadline(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        super().wait(transfers, Deadline(3600.0))


@fault("a deadline raises an error of another type", "deadlines.late_rank", r"got .*Error|broke off .* with OSError")
@where("wait", raises=TimeoutError)
def wrong_type(self: Any, transfers: Any, error: Exception) -> None:
    raise OSError("timed out, in a way of its own") from None


@fault(
    "the other's header is not compared",
    "mismatches.arguments",
    r"a mismatch \(.*got no error|instead of CollectiveMismatchError",
)
class NoHeader(LoftTransport):
    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        return super().recv(peer, bytes(len(header)), payload)

    def put(self, peer: int, header: bytes, payload: memoryview) -> None:
        super().put(peer, bytes(len(header)), payload)

    def fill(self, letter: Letter, payload: memoryview) -> None:
        count = min(len(payload), len(letter.payload))
        letter.payload[:count] = payload[:count]


@fault(
    "a mismatch names no header",
    "mismatches.arguments",
    r"got ValueError instead of CollectiveMismatchError: another header came",
)
@where("take", raises=HeaderMismatch)
def no_header_told(self: Any, letter: Any, error: Exception) -> None:
    raise ValueError("another header came") from error


# The end


@fault(
    "abort is ignored",
    "close.error_of_a_rank",
    r"learned of it after|did not return|not all ranks left",
    is_long=True,
    PROGRAM_S=2.0,
    TIMEOUT_S=2.0,
    LONG_S=2.0,
)
class NoAbort(Loft):
    def abort(self) -> None:
        """Forget it."""


@fault("a lost rank is an error without a rank", "close.rank_that_leaves", r"got|got an error about rank None")
@where("wait", raises=LinkLost)
def no_peer(self: Any, transfers: Any, error: Exception) -> None:
    raise ConnectionError(str(error)) from None


@fault("close blocks", "close.twice_and_used_afterwards", r"Backend.close, abort and close blocked for \d\.\d s", AT_ONCE_S=0.1)
class CloseBlocks(Loft):
    def close(self) -> None:
        threading.Event().wait(0.2)


@fault("close of a second time raises", "close.twice_and_used_afterwards", r"raised RuntimeError.*closed already")
class CloseOnce(Loft):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True
        super().close()


# What is left behind

LEFT: list[Any] = []


def clear() -> None:
    for each in LEFT:
        if isinstance(each, threading.Event):
            each.set()
        elif isinstance(each, socket.socket):
            each.close()
        elif isinstance(each, Path):
            each.unlink()
    LEFT.clear()


@fault(
    "much is left behind",
    "leaks.worlds",
    r"it holds more: \d+ threads, \d+ open files and sockets, \d+ shared memory segments, \d+ temporary files, "
    r"\d+ files in /dev/shm, \d+ MiB of memory",
    PROMPT_S=0.0,
)
class Careless(Loft):
    def __init__(self, bootstrap: Any) -> None:
        super().__init__(bootstrap)
        end, name = threading.Event(), Path(f"/dev/shm/loft-{uuid.uuid4().hex}")
        threading.Thread(target=end.wait, daemon=True).start()
        os.close(tempfile.mkstemp()[0])
        name.write_bytes(b"x" * 4096)
        with name.open("r+b") as segment:
            LEFT.extend([end, *socket.socketpair(), name, mmap.mmap(segment.fileno(), 4096), b"x" * (1 << 20)])


@fault("each call keeps memory", "leaks.calls", r"rank . of 2 holds more: \d+ MiB of memory", PROMPT_S=0.0)
class Memory(LoftTransport):
    def fill(self, letter: Letter, payload: memoryview) -> None:
        super().fill(letter, payload)
        LEFT.append(bytes(payload))


@fault("channels are not given back", "leaks.groups", r"holds more: \d+ open files and sockets", PROMPT_S=0.0)
class Channels(LoftTransport):
    def __init__(self, backend: Loft, channel: int) -> None:
        super().__init__(backend, channel)
        LEFT.append(socket.socket())


# Speed


@fault(
    "every message sleeps for ten milliseconds",
    "speed.share",
    r"short messages there and back: \d+ us, but two plain threads need \d+ us",
    is_long=True,
)
class Slow(LoftTransport):
    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        time.sleep(0.01)
        return super().send(peer, header, payload)


@fault(
    "waiting keeps a processor busy",
    "speed.waiting_is_idle",
    r"rank 0 waited in recv, its process was busy for \d+% of the time",
)
class Busy(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                return super().wait(transfers, Deadline(1e-9))
            if deadline.passed():
                raise TimeoutError


# Native collectives

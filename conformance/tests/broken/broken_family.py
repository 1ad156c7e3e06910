"""What careless authors write: each is the backend of `broken_loft` with one defect; beside it the check that must find it, and in which words."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from broken_loft import Letter, Loft, LoftTransport

from manyhands.api import Deadline, HeaderMismatch, LinkLost, Transfer

WRONG = r"\d+ of \d+ elements are wrong, the first is element \d+"


@dataclass(frozen=True)
class Fault:
    """A broken backend, the check that must find it, and what that must say."""

    backend: type[Loft]
    check: str
    words: str
    in_make_test: bool


FAULTS: dict[str, Fault] = {}


def fault(name: str, check: str, words: str, *, in_make_test: bool = True) -> Callable[[type], type]:
    def enter(kind: type) -> type:
        backend = kind if issubclass(kind, Loft) else type(kind.__name__, (Loft,), {"transport": kind})
        assert name not in FAULTS
        FAULTS[name] = Fault(backend, check, words, in_make_test)
        return kind

    return enter


def create(bootstrap: Any) -> Loft:
    name = bootstrap.config.fault
    return FAULTS[name].backend(bootstrap) if name else Loft(bootstrap)


# Bytes


@fault("the last byte of odd lengths is lost", "messages.every_size", rf"recv of uint8\[\d+\]: {WRONG}")
class LastByte(LoftTransport):
    def fill(self, letter: Letter, payload: memoryview) -> None:
        even = len(payload) // 2 * 2
        letter.payload[:even] = payload[:even]


@fault("messages above 64 KiB are cut", "messages.every_size", rf"of uint8\[262079\]: {WRONG}")
class Cut(LoftTransport):
    def fill(self, letter: Letter, payload: memoryview) -> None:
        letter.payload[: 1 << 16] = payload[: 1 << 16]


@fault(
    "odd lengths are received into a copy that is not written back", "messages.every_size", rf"of uint8\[\d+[13579]\]: {WRONG}"
)
class Copy(LoftTransport):
    def fill(self, letter: Letter, payload: memoryview) -> None:
        target = letter.payload if len(payload) % 2 == 0 else memoryview(bytearray(letter.payload))
        target[:] = payload


@fault("zeros are delivered where memory was reused", "bytes.calls_that_are_repeated", rf"number \d+ of int64\[\d+\]: {WRONG}")
class Zeros(LoftTransport):
    count = 0

    def fill(self, letter: Letter, payload: memoryview) -> None:
        self.count += 1
        letter.payload[:] = payload if self.count % 7 else bytes(len(payload))


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


@fault("a receive is done before its bytes are there", "bytes.calls_that_are_repeated", rf"number \d+ of int64\[\d+\]: {WRONG}")
class TooEarly(LoftTransport):
    def fill(self, letter: Letter, payload: memoryview) -> None:
        threading.Timer(0.002, super().fill, (letter, payload)).start()


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


@fault("empty messages are lost", "bytes.barriers", r"DeadlineError|DeadlockError|did not return")
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


@fault("a second group hangs", "groups.many", r"DeadlineError|DeadlockError|did not return")
class OneGroup(LoftTransport):
    def put(self, peer: int, header: bytes, payload: memoryview) -> None:
        if self.channel < 4:
            super().put(peer, header, payload)


@fault("messages to a channel that is not open yet are lost", "groups.many", r"DeadlineError|DeadlockError|did not return")
class NotOpen(LoftTransport):
    def __init__(self, backend: Loft, channel: int) -> None:
        super().__init__(backend, channel)
        self.close()


@fault("a group's close ends all channels", "groups.many", r"raised|did not return")
class CloseAll(LoftTransport):
    def close(self) -> None:
        self.backend.abort()


@fault("only worlds of powers of two work", "bytes.every_world_and_root", r"rank \d+ of (3|5|6|7)\b")
class Powers(LoftTransport):
    def put(self, peer: int, header: bytes, payload: memoryview) -> None:
        largest = 1 << (self.backend.world_size.bit_length() - 1)
        super().put(peer % largest, header, payload)


# Waiting


@fault(
    "a send blocks until it is received",
    "messages.every_size",
    r"did not return from _ring:\n.*broken_family.py:\d+ send",
    in_make_test=False,
)
class Blocking(LoftTransport):
    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        transfer = super().send(peer, header, payload)
        inbox = self.backend.inboxes[peer]
        while inbox.messages[self.channel, self.backend.rank] and not self.own.aborted:
            time.sleep(0.0005)
        return transfer


@fault("wait returns when nothing is done", "deadlines.rank_in_time", r"wait\(\) returned, and none of the transfers is done")
class Hasty(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        with self.own.changed:
            self.own.changed.wait(0.001)
            for letter in transfers:
                self.take(letter)


@fault(
    "one thread at a time waits",
    "threads.one_waits_while_another_talks",
    r"messages there and back took .* while another thread waited in recv|DeadlineError: recv from rank",
)
class OneThread(Loft):
    def __init__(self, bootstrap: Any) -> None:
        super().__init__(bootstrap)
        self.turn = threading.Lock()

    class transport(LoftTransport):  # noqa: N801 - the attribute of Loft
        def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
            with self.backend.turn:  # type: ignore[attr-defined]
                super().wait(transfers, deadline)


@fault("a timeout drops the transfer", "deadlines.rank_in_time", r"DeadlineError|DeadlockError|did not return")
class Dropped(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        try:
            super().wait(transfers, deadline)
        except TimeoutError:
            for letter in transfers:
                letter.peer = self.backend.rank
            raise


@fault("deadlines are ignored", "deadlines.late_rank", r"did not return from _late|ended after|got")
class NoDeadline(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        super().wait(transfers, Deadline(3600.0))


@fault("a deadline raises an error of another type", "deadlines.late_rank", r"got .*Error")
class WrongType(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        try:
            super().wait(transfers, deadline)
        except TimeoutError:
            raise OSError("timed out, in a way of its own") from None


@fault(
    "the other's header is not compared",
    "mismatches.arguments",
    r"a mismatch \(.*was told nothing|and not CollectiveMismatchError",
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
    r"got ValueError, and not CollectiveMismatchError: another header came",
)
class NoHeaderTold(LoftTransport):
    def take(self, letter: Letter) -> None:
        try:
            super().take(letter)
        except HeaderMismatch as error:
            raise ValueError("another header came") from error


# The end


@fault("abort is ignored", "close.error_of_a_rank", r"was told after|did not return|not all ranks left", in_make_test=False)
class NoAbort(Loft):
    def abort(self) -> None:
        """Forget it."""


@fault("a lost rank is an error without a rank", "close.rank_that_leaves", r"got|was told of rank None")
class NoPeer(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        try:
            super().wait(transfers, deadline)
        except LinkLost as error:
            raise ConnectionError(str(error)) from None


@fault("close blocks", "close.twice_and_used_afterwards", r"Backend.close, abort and close blocked for \d\.\d s")
class CloseBlocks(Loft):
    def close(self) -> None:
        threading.Event().wait(1.2)


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
        if isinstance(each, socket.socket):
            each.close()
        elif isinstance(each, Path):
            each.unlink()
    LEFT.clear()


@fault("sockets are left behind", "leaks.worlds", r"it holds more: \d+ open files and sockets")
class Sockets(Loft):
    def __init__(self, bootstrap: Any) -> None:
        super().__init__(bootstrap)
        LEFT.extend(socket.socketpair())


@fault("threads are left behind", "leaks.worlds", r"it holds more: \d+ threads")
class Threads(Loft):
    def __init__(self, bootstrap: Any) -> None:
        super().__init__(bootstrap)
        threading.Thread(target=threading.Event().wait, args=(20.0,), daemon=True).start()


@fault("files are left behind", "leaks.worlds", r"it holds more: \d+ files in ")
class Files(Loft):
    def __init__(self, bootstrap: Any) -> None:
        super().__init__(bootstrap)
        descriptor, name = tempfile.mkstemp()
        os.close(descriptor)
        LEFT.append(Path(name))


@fault("each call keeps memory", "leaks.calls", r"rank . of 2 holds more: \d+ MiB of memory")
class Memory(LoftTransport):
    def fill(self, letter: Letter, payload: memoryview) -> None:
        super().fill(letter, payload)
        LEFT.append(bytes(payload))


@fault("channels are not given back", "leaks.groups", r"holds more: \d+ open files and sockets")
class Channels(LoftTransport):
    def __init__(self, backend: Loft, channel: int) -> None:
        super().__init__(backend, channel)
        LEFT.append(socket.socket())


# Speed


@fault(
    "every message sleeps for ten milliseconds",
    "speed.share",
    r"short messages there and back: \d+ us, and two plain threads need \d+ us",
    in_make_test=False,
)
class Slow(LoftTransport):
    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        time.sleep(0.01)
        return super().send(peer, header, payload)


@fault("waiting keeps a processor busy", "speed.waiting_is_idle", r"rank 0 waited in recv .* busy for \d+% of the time")
class Busy(LoftTransport):
    def wait(self, transfers: Sequence[Any], deadline: Deadline) -> None:
        while True:
            try:
                return super().wait(transfers, Deadline(1e-9))
            except TimeoutError:
                if deadline.passed():
                    raise


# Native collectives

"""Messages that both ranks copy, from where they lie to where they go: two rings of one process, moved by hand."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

native = pytest.importorskip("oneaccord_native._core", reason="there was no C compiler", exc_type=ImportError)

MIB = 1 << 20
SLOTS, LINE, LABELS = 4, 128, 128
PAYLOADS = LABELS + SLOTS * LINE
HEADER = bytes(range(64))
JOINED = LABELS + 72 + 32
"""Where the receiver of a first message writes its number, if the sender may copy, too."""
Bytes = npt.NDArray[np.uint8]


class Ends:
    """A sender and a receiver, and what they share; ``pledge`` is that of both."""

    def __init__(self, fork: bool = False) -> None:
        rings = [memoryview(mmap.mmap(-1, 1 << 14)) for _ in range(2)]
        sleepers = memoryview(bytearray(8)).cast("Q")
        self.pledge = np.frombuffer(bytearray(os.urandom(32)), np.uint8)
        self.token = self.pledge.tobytes()
        self.child = os.fork() if fork else None
        if self.child == 0:
            signal.pause()

        def end(out: memoryview, into: memoryview, pid: int) -> Any:
            numbers = {
                "slots": SLOTS,
                "slot_bytes": 1024,
                "labels": LABELS,
                "payloads": PAYLOADS,
                "line": LINE,
                "number_at": 64,
            }
            lending = {
                "extent_at": 72,
                "pid": pid,
                "pledge_at": self.pledge.ctypes.data,
                "token": self.token,
                "lent_bytes": 4096,
            }
            return native.Ring(out, into, sleepers, lambda: None, **numbers, fenced=False, tries=10, spin_s=0.0, **lending)

        self.rings = [ring.cast("Q") for ring in rings]
        self.sender = end(rings[0], rings[1], self.child or os.getpid())
        self.receiver = end(rings[1], rings[0], os.getpid())


def content(nbytes: int) -> Bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def drawn(end: Any, into: Bytes) -> int:
    return int(end.draw_parts(into))


@pytest.mark.parametrize("nbytes", [4097, 128 << 10, (128 << 10) + 1, 300_001, MIB, 9 * MIB + 13])
@pytest.mark.parametrize("turn", [lambda ends: None, lambda ends: ends.sender.help_peer()], ids=["alone", "in halves"])
def test_all_of_a_lent_message_comes(nbytes: int, turn: Callable[[Ends], object]) -> None:
    ends = Ends()
    for number in range(1, 2 * SLOTS + 1):
        source, into = content(nbytes), np.zeros(nbytes, np.uint8)
        assert ends.sender.lend_whole(HEADER, source) == number
        while drawn(ends.receiver, into) < nbytes:
            turn(ends)
        np.testing.assert_array_equal(into, source)


def test_the_sender_copies_what_the_receiver_has_left_to_it() -> None:
    ends = Ends()
    source, into = content(9 * MIB), np.zeros(9 * MIB, np.uint8)
    ends.sender.lend_whole(HEADER, source)
    assert not ends.sender.help_peer()  # where to is not known yet
    assert drawn(ends.receiver, into) == 4 * MIB
    helped = 0
    while ends.sender.help_peer():
        helped += 1
    assert helped == 10  # of 512 KiB
    np.testing.assert_array_equal(into, source)
    assert drawn(ends.receiver, into) == 9 * MIB
    assert not ends.sender.help_peer()


@pytest.mark.parametrize("is_taken", [True, False], ids=["an answer", "an exchange"])
def test_a_rank_copies_an_answer_together_with_its_sender(is_taken: bool) -> None:
    # Who lends as well lets the peer copy that message instead; but not one that the peer has taken already.
    ends = Ends()
    source, into = content(2 * MIB), np.zeros(2 * MIB, np.uint8)
    ends.sender.lend_whole(HEADER, source)
    while is_taken and drawn(ends.receiver, into) < len(into):
        pass
    ends.receiver.lend_whole(HEADER, source)
    drawn(ends.sender, into)
    assert ends.rings[1][JOINED // 8] == is_taken
    np.testing.assert_array_equal(into, source)


def test_a_receiver_that_gives_up_is_written_to_no_more() -> None:
    ends = Ends()
    source, into = content(9 * MIB), np.zeros(9 * MIB, np.uint8)
    ends.sender.lend_whole(HEADER, source)
    drawn(ends.receiver, into)
    ends.sender.help_peer()
    ends.receiver.revoke_parts()
    before = into.copy()
    assert not ends.sender.help_peer()
    assert drawn(ends.receiver, into) == -1
    np.testing.assert_array_equal(into, before)
    assert into[: 4 * MIB].any()


def test_a_receiver_that_has_given_up_joins_no_message() -> None:
    ends = Ends()
    into = np.zeros(MIB, np.uint8)
    ends.receiver.revoke_parts()
    ends.sender.lend_whole(HEADER, content(MIB))
    assert drawn(ends.receiver, into) == -1
    assert not ends.sender.help_peer()
    assert not into.any()


def test_what_a_failed_sender_has_is_not_taken_for_its_message() -> None:
    ends = Ends()
    source, into = content(9 * MIB), np.zeros(9 * MIB, np.uint8)
    ends.sender.lend_whole(HEADER, source)
    drawn(ends.receiver, into)
    ends.pledge[:] = 0
    assert drawn(ends.receiver, into) == -1


def test_a_sender_does_not_write_to_a_process_without_the_pledge() -> None:
    ends = Ends()
    source, into = content(9 * MIB), np.zeros(9 * MIB, np.uint8)
    ends.sender.lend_whole(HEADER, source)
    drawn(ends.receiver, into)
    ends.pledge[:] = 0
    assert not ends.sender.help_peer()
    ends.pledge[:] = np.frombuffer(ends.token, np.uint8)
    assert not ends.sender.help_peer()  # this message is the receiver's alone
    while drawn(ends.receiver, into) < len(into):
        pass
    np.testing.assert_array_equal(into, source)


def test_what_the_sender_cannot_write_the_receiver_reads() -> None:
    # The process that the sender writes to has the pledge, but not the memory, which is mapped later.
    ends = Ends(fork=True)
    assert ends.child
    try:
        source, memory = content(9 * MIB), mmap.mmap(-1, 9 * MIB)
        into = np.frombuffer(memory, np.uint8)
        ends.sender.lend_whole(HEADER, source)
        drawn(ends.receiver, into)
        assert ends.sender.help_peer()  # it has tried
        assert not ends.sender.help_peer()
        while drawn(ends.receiver, into) < len(into):
            pass
        np.testing.assert_array_equal(into, source)
    finally:
        os.kill(ends.child, signal.SIGKILL)
        os.waitpid(ends.child, 0)

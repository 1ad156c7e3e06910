"""What measures the machine does what it says, and ends when nobody answers. How fast it is, no test asks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

native = pytest.importorskip("oneaccord_native", reason="there was no C compiler", exc_type=ImportError)

PATIENCE_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def together(*sides: Callable[[], float]) -> list[float]:
    """Call both sides at once; return how long each took."""
    with ThreadPoolExecutor(len(sides)) as pool:
        return [each.result() for each in [pool.submit(side) for side in sides]]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 1000])
def test_arrays_are_copied_and_added(length: int) -> None:
    left, right = np.arange(length, dtype=np.float32), np.full(length, 0.5, np.float32)
    target = np.zeros(length, np.float32)
    assert native.measure_copy(target, left, 2) >= 0
    assert target.tolist() == left.tolist()
    assert native.measure_add(target, left, right, 2) >= 0
    assert target.tolist() == (left + right).tolist()
    assert native.measure_add(target, target, right, 4) >= 0  # as often as it is asked for
    assert target.tolist() == (left + 5 * right).tolist()


@pytest.mark.parametrize("other", [np.zeros(3, np.float32), np.zeros(5, np.uint8)])
def test_arrays_that_do_not_fit_are_refused(other: np.ndarray) -> None:
    target = np.zeros_like(other) if other.dtype == np.uint8 else np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="whole aligned numbers of 4 bytes"):
        native.measure_copy(target, other, 1)
    with pytest.raises((BufferError, ValueError), match=r"writable|read-only"):
        native.measure_copy(b"1234", target, 1)


def test_a_stream_carries_its_bytes_both_ways_or_one(ends: tuple[socket.socket, socket.socket]) -> None:
    rng = np.random.default_rng(0)
    given = rng.integers(0, 256, (2, 600_001), np.uint8)
    for out, back in ((given[0], given[1]), (given[0], given[1][:0])):
        # Three times all that is sent; the receiver's memory is too small for it, and holds what came last.
        got = np.zeros(max(1, back.size), np.uint8), np.zeros(400_000, np.uint8)
        seconds = together(
            lambda out=out, back=back, got=got: native.measure_stream(
                ends[0].fileno(), out, 3 * out.size, got[0], 3 * back.size, PATIENCE_S
            ),
            lambda out=out, back=back, got=got: native.measure_stream(
                ends[1].fileno(), back, 3 * back.size, got[1], 3 * out.size, PATIENCE_S
            ),
        )
        assert all(each > 0 for each in seconds)
        assert got[0][: back.size].tobytes() == back.tobytes()
        whole = np.tile(out, 3)
        last, before = whole[1_600_000:], whole[1_200_000 + len(whole[1_600_000:]) : 1_600_000]
        assert got[1].tobytes() == np.concatenate([last, before]).tobytes()


def test_pings_take_turns_and_may_be_repeated(ends: tuple[socket.socket, socket.socket]) -> None:
    memory = bytearray(256)
    for _ in range(2):
        together(*(lambda first=first: native.measure_flags(memory, first, 30, PATIENCE_S) for first in (True, False)))
        together(
            *(lambda n=n, end=end: native.measure_pings(end.fileno(), not n, 30, PATIENCE_S) for n, end in enumerate(ends))
        )
    assert np.frombuffer(memory, np.uint64)[[0, 16]].tolist() == [480, 480]  # eight in a batch
    for end in ends:
        end.setblocking(False)
        with pytest.raises(BlockingIOError):
            end.recv(1)  # nothing is left over


def test_nobody_waits_for_ever(ends: tuple[socket.socket, socket.socket]) -> None:
    one = ends[0].fileno()
    attempts: list[Callable[[], float]] = [
        lambda: native.measure_flags(bytearray(256), True, 1, 0.01),
        lambda: native.measure_pings(one, True, 1, 0.01),
        lambda: native.measure_stream(one, b"", 0, bytearray(8), 8, 0.01),
    ]
    for attempt in attempts:
        with pytest.raises(TimeoutError, match="did not come in time"):
            attempt()


def test_a_connection_that_ends_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        native.measure_stream(ends[0].fileno(), b"", 0, bytearray(8), 8, PATIENCE_S)
    with pytest.raises(ConnectionError):
        native.measure_pings(ends[0].fileno(), True, 1, PATIENCE_S)
    with pytest.raises(OSError, match="Bad file"):
        native.measure_pings(-1, True, 1, PATIENCE_S)


@pytest.mark.parametrize("batches", [0, 1025])
def test_no_batches_and_too_many_are_refused(batches: int, ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ValueError, match="expected 1 to 1024 batches"):
        native.measure_flags(bytearray(256), True, batches, PATIENCE_S)
    with pytest.raises(ValueError, match="expected 1 to 1024 batches"):
        native.measure_pings(ends[0].fileno(), True, batches, PATIENCE_S)


def test_memory_that_holds_no_two_flags_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 256 aligned bytes"):
        native.measure_flags(bytearray(200), True, 1, PATIENCE_S)


def test_a_stream_that_has_no_memory_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ValueError, match="there is no memory"):
        native.measure_stream(ends[0].fileno(), b"", 1, bytearray(8), 8, PATIENCE_S)

"""The limits of the machine itself, measured by C between the turns of the backends; `oneaccord_lab.bench.limits` explains their use."""

from __future__ import annotations

import contextlib
import mmap
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from oneaccord.arrays.memory import aligned_empty
from oneaccord.common.installing import install_command
from oneaccord.common.native import native, why_not_native
from oneaccord.errors import CommError, UnsupportedError
from oneaccord.group.group import Group
from oneaccord_lab.bench.plan import Limits, Point

__all__ = ["Probes", "compiled"]

_BATCH_BYTES: Final[int] = 32 << 20
"""The bytes that are copied or added in a turn, if it takes that many calls; a turn is then some milliseconds."""
_MOST_CALLS: Final[int] = 10_000
_STREAM_BYTES: Final[int] = 16 << 20
"""The least bytes of a stream: with fewer, its start would be measured."""
_STREAM_MEMORY_BYTES: Final[int] = 256 << 10
"""From how much memory a stream is sent at least, and into how much it is received, which stays in the cache."""
_SOCKET_BYTES: Final[int] = 1 << 20
_FLAG_BATCHES: Final[int] = 1000
_PING_BATCHES: Final[int] = 40
"""So many that they continue when ranks without a part in them have stopped looking for the next barrier, and sleep."""
_PAGE: Final[int] = 4096
_NAMES: Final[tuple[str, ...]] = ("copy_1", "copy_2", "copy_all", "add_all", "both_ways", "one_way", "flag", "ping")

Seconds = Callable[[], float]


def compiled() -> ModuleType:
    """Return the module ``oneaccord_native``, without which the machine cannot be measured.

    Raises
    ------
    UnsupportedError
        It is not here.
    """
    found = native()
    if found is None:
        command = install_command("pip install 'oneaccord[native]'")
        raise UnsupportedError(
            f"--limits measures the machine in C, and the compiled part of oneaccord is missing ({why_not_native()}); try: {command}"
        )
    return found


class Probes:
    """Measures the machine; every rank must call the same methods in the same order.

    Parameters
    ----------
    control
        The ranks, and how they wait for each other.
    folder
        A folder that all of them see, for a file.
    timeout_s
        Seconds that a ping or a stream may take.

    Raises
    ------
    UnsupportedError
        The compiled part of oneaccord is missing.
    CommError
        A rank did not connect to its neighbour in time.
    OSError
        There is no memory to share, or there are no sockets.
    """

    def __init__(self, control: Group, folder: Path, timeout_s: float) -> None:
        self._control = control
        self._native: Any = compiled()
        self._timeout_s = timeout_s
        self._rank = control.rank
        self._turns: list[list[float]] = []
        self._actions: list[Seconds | None] = []
        with ExitStack() as stack:
            self._flags = stack.enter_context(_shared_page(control, folder / "flags"))
            self._socket = _neighbour(control, timeout_s)
            if self._socket is not None:
                stack.enter_context(self._socket)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the opened resources."""
        self._actions = []  # they hold the arrays
        self._stack.close()

    def begin(self, nbytes: int) -> float:
        """Prepare for calls of that many bytes, and run every probe once; return the seconds that this took."""
        self._actions = []  # so that the arrays of the last size are gone before there are others
        self._actions = self._prepare(nbytes)
        begin = time.monotonic()
        self.turn()
        self._turns.clear()
        return time.monotonic() - begin

    def turn(self) -> None:
        """Run every probe once, one after the other, all ranks together.

        Raises
        ------
        CommError
            A neighbour did not answer in time, or its connection broke.
        """
        seconds = []
        for action in self._actions:
            self._control.barrier()
            try:
                seconds.append(0.0 if action is None else action())
            except OSError as error:
                raise CommError(f"rank {self._rank} cannot measure the machine with its neighbour: {error}") from error
        self._turns.append(seconds)

    def result(self, point: Point) -> Limits | None:
        """Return the medians over all turns since `begin`, on rank 0; if several ranks took part, the slowest counts."""
        everyone = self._control.gather(np.array(self._turns))
        if everyone is None:
            return None
        slowest = everyone.reshape(self._control.world_size, -1, len(_NAMES)).max(axis=0)
        medians = 1e6 * np.median(slowest, axis=0)
        # A probe that no rank ran, such as one for two ranks in a world of one, took no time.
        return Limits(point.benchmark, point.nbytes, *(float(each) or None for each in medians))

    def _prepare(self, nbytes: int) -> list[Seconds | None]:
        """Return the probes in the order of `_NAMES`, each of which returns the seconds of one call; None if this rank has no part."""
        world_size, rank, native = self._control.world_size, self._rank, self._native
        copy = add = both = one = flag = ping = None
        if nbytes:
            whole = -(-nbytes // 4) * 4
            source, target = _touched(whole), _touched(whole)
            calls = max(1, min(_MOST_CALLS, _BATCH_BYTES // whole))
            copy = partial(_each, calls, partial(native.measure_copy, target, source, calls))
            add = partial(_each, calls, partial(native.measure_add, target, target, source, calls))
            if self._socket is not None:
                out = max(source, _touched(_STREAM_MEMORY_BYTES), key=len)
                back = _touched(_STREAM_MEMORY_BYTES)
                total = max(nbytes, _STREAM_BYTES)
                stream = partial(native.measure_stream, self._socket.fileno())
                both = partial(_each, total / nbytes, partial(stream, out, total, back, total, self._timeout_s))
                ways = (0, total) if rank % 2 else (total, 0)
                one = partial(_each, total / nbytes, partial(stream, out, ways[0], back, ways[1], self._timeout_s))
        if self._socket is not None and rank < 2:
            first = rank == 0
            flag = partial(_each, 2, partial(native.measure_flags, self._flags, first, _FLAG_BATCHES, self._timeout_s))
            ping = partial(
                _each, 2, partial(native.measure_pings, self._socket.fileno(), first, _PING_BATCHES, self._timeout_s)
            )
        alone, in_two = (copy if rank < count <= world_size else None for count in (1, 2))
        return [alone, in_two, copy, add, both, one, flag, ping]


def _each(calls: float, measure: Seconds) -> float:
    return measure() / calls


def _touched(nbytes: int) -> npt.NDArray[np.float32]:
    """Return zeros in memory that the system has handed out."""
    array: npt.NDArray[np.float32] = aligned_empty(nbytes).view(np.float32)
    array.fill(0)
    return array


def _shared_page(control: Group, file: Path) -> mmap.mmap:
    """Return a page that all ranks share, of zeros."""
    if control.rank == 0:
        file.write_bytes(bytes(_PAGE))
    control.barrier()
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), _PAGE)


def _neighbour(control: Group, timeout_s: float) -> socket.socket | None:
    """Return a TCP connection to the neighbour: ranks 0 and 1 are neighbours, 2 and 3, and so on; None for a rank without one."""
    rank = control.rank
    with contextlib.closing(socket.socket()) as own:
        own.bind(("127.0.0.1", 0))
        if rank % 2 == 0:
            own.listen(1)
        ports: Sequence[int] = control.all_gather(np.array([own.getsockname()[1]])).tolist()
        neighbour = rank ^ 1
        if neighbour >= control.world_size:
            return None
        own.settimeout(timeout_s)
        try:
            connection = _accept(own, ports[neighbour]) if rank % 2 == 0 else _connect(own, ports[neighbour])
        except OSError as error:
            raise CommError(f"rank {rank} has no TCP connection to rank {neighbour} of this host: {error}") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
    with contextlib.suppress(OSError, AttributeError):  # as the backend tcp does: the host's default may be slow on loopback
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return connection


def _accept(listener: socket.socket, port: int) -> socket.socket:
    while True:
        connection, address = listener.accept()
        if address[1] == port:
            return connection
        connection.close()  # a stranger's


def _connect(own: socket.socket, port: int) -> socket.socket:
    own.connect(("127.0.0.1", port))
    return own.dup()

# What C has. Core and the backends use it; see docs/native.md.

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Memory: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.generic]

class Ring:
    # The rings in shared memory between this rank and one peer; the counters are those of `manyhands_shm.link.Link`.

    _sent: int
    _received: int
    _room: int
    next_out: int
    next_in: int

    def __init__(
        self,
        out: _Memory,
        into: _Memory,
        sleepers: _Memory,
        ring: Callable[[], object],
        slots: int,
        slot_bytes: int,
        labels: int,
        payloads: int,
        line: int,
        number_at: int,
        fenced: bool,
        tries: int,
        spin_s: float,
    ) -> None: ...
    def post_short(
        self, header: _Memory, /
    ) -> bool: ...  # Send what is in slot ``next_out``; tell whether the next one is free.
    def fetch_short(
        self, header: _Memory, /
    ) -> int: ...  # Wait a moment for the next short message: 1 it came, 0 not yet, -1 with another header.

class Stream:
    # Short messages from and to one peer, over a socket that does not block.

    _fd: int
    _sent: int
    _sending: int
    _got: int

    def __init__(self, fd: int, outgoing: _Memory, incoming: _Memory, tries: int, spin_s: float) -> None: ...
    def post_short(
        self, header: _Memory, nbytes: int, /
    ) -> (
        bool
    ): ...  # Send the first bytes of the slot; tell whether all went at once. Raises OSError where the connection broke.
    def fetch_short(
        self, header: _Memory, nbytes: int, /
    ) -> bool: ...  # Wait a moment for the next short message; False where it did not come as it should.

class Program:
    # What one rank does in a call whose messages are all short.

    def __init__(
        self,
        steps: tuple[tuple[object, ...], ...],
        operands: tuple[tuple[int, int, int], ...],
        ufunc: np.ufunc | None,
        number: int,
        itemsize: int,
        work_bytes: int,
        work: _Memory | None,
    ) -> None: ...
    def run(
        self, source: _Memory, target: _Memory, number: int, work: _Memory | None = None, /
    ) -> int: ...  # Carry out the program as call ``number``; return -1, or the step at which Python must go on.

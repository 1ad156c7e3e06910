# What C has. Core and the backends use it; see docs/explanation/native.md.

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

_Memory: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.generic]

class Ring:
    # The rings in shared memory between this rank and one peer; the counters are those of `oneaccord_shm.link.Link`.

    _sent: int
    _received: int
    _room: int
    next_out: int
    next_in: int
    _lending: int
    c_mailbox: object

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
        extent_at: int,
        pid: int,
        pledge_at: int,
        token: bytes,
        lent_bytes: int,
    ) -> None: ...
    def lend_whole(
        self, header: bytes, payload: _Memory, /
    ) -> int: ...  # Send a message from the memory where it lies; return its number.
    def help_peer(
        self,
    ) -> bool: ...  # Copy a part of the lent message, if the peer is there and one is left; return whether it did.
    def draw_parts(
        self, payload: _Memory, /
    ) -> int: ...  # Copy parts of the lent message that has come; return how many bytes are here, -1 if it is lost.
    def revoke_parts(self) -> None: ...  # Let the peer write no more of the message that it lends.
    def post_short(
        self, header: _Memory, /
    ) -> bool: ...  # Send what is in slot ``next_out``; return whether the next one is free.
    def fetch_short(
        self, header: _Memory, /
    ) -> int: ...  # Wait a moment for the next short message: 1 it came, 0 not yet, -1 with another header.

class Stream:
    # Short messages from and to one peer, over a socket that does not block.

    _fd: int
    _sent: int
    _sending: int
    _got: int
    c_mailbox: object

    def __init__(self, fd: int, outgoing: _Memory, incoming: _Memory, tries: int, spin_s: float) -> None: ...
    def post_short(
        self, header: _Memory, nbytes: int, /
    ) -> bool: ...  # Send the first bytes of the slot; return whether all went at once. Raises OSError if the connection broke.
    def fetch_short(
        self, header: _Memory, nbytes: int, /
    ) -> bool: ...  # Wait a moment for the next short message; False if it did not come as it should.

class Program:
    # What one rank does in a call whose messages are all short.

    def __init__(
        self,
        steps: tuple[tuple[object, ...], ...],
        operands: tuple[tuple[int, int, int], ...],
        ufunc: np.ufunc | Low | None,
        number: int,
        itemsize: int,
        work_bytes: int,
        work: _Memory | None,
    ) -> None: ...
    def run(
        self, source: _Memory, target: _Memory, number: int, work: _Memory | None = None, /
    ) -> int: ...  # Carry out the program as call ``number``; return -1, or the step at which Python must go on.

class Counters:
    # `oneaccord.calls.order.counters.Counters`.

    busy: bool
    next: int
    messages: int
    call: int
    started: float

    def __init__(self, channel: int = -1, counted: Counters | None = None, kept: int = 32) -> None: ...
    def take(self, turn: object = None, /) -> bool: ...
    def give(self) -> Any: ...
    def drop(self, turn: object, /) -> bool: ...
    def begin(self, what: object, /) -> int: ...
    def leave(self) -> None: ...
    def undo(self) -> None: ...
    def count_message(self) -> int: ...
    def short(self) -> list[tuple[int, int, object, float, float]]: ...

class Call:
    # A collective that was made before; ``python`` goes on where C stops, and ``given`` and ``result`` are arrays of those dtypes and shapes.

    def __init__(
        self,
        python: object,
        turns: object,
        counters: Counters,
        what: object,
        given: npt.NDArray[Any],
        result: npt.NDArray[Any],
        nothing: npt.NDArray[Any],
        program: Program,
        gives: bool,
        takes: bool,
        in_place: bool,
        quotient: np.ufunc | None = None,
        divisor: npt.NDArray[Any] | None = None,
    ) -> None: ...

class Send:
    # Sends to one rank, of one dtype and shape.

    stale: bool

    def __init__(
        self,
        python: object,
        turns: object,
        counters: Counters,
        what: object,
        given: npt.NDArray[Any],
        box: object,
        header: _Memory,
        number_at: int,
        opening_bytes: int,
        tag: int,
        rest_header: bytes,
    ) -> None: ...

class Recv:
    # Receives from one rank.

    def __init__(
        self,
        python: object,
        turns: object,
        counters: Counters,
        what: object,
        given: npt.NDArray[Any],
        box: object,
        header: _Memory,
        number_at: int,
        opening_bytes: int,
    ) -> None: ...
    def know(
        self, tag: int, example: npt.NDArray[Any], rest_header: bytes, /
    ) -> None: ...  # Say of what dtype and shape the arrays are that a tag stands for.

class Exchange:
    # Sends to one rank and receives from one, at once.

    def __init__(self, python: object, send: Send, recv: Recv, what: object) -> None: ...

class Caller:
    # What leads from a call to the fast way that it has: for each key of ``table`` those of arrays of different kinds.

    def __init__(
        self,
        table: dict[Any, list[Any]],
        otherwise: Callable[..., Any],
        resume: Callable[..., Any],
        job: object,
        control: object,
        left: set[int],
        group: int,
        plugins: object,
        seconds: float,
    ) -> None: ...
    def call(self, key: object, array: object, out: object, timeout_s: float | None, /) -> Any: ...

class Lane:
    # What C needs of the records with tags to and from one peer: `oneaccord.calls.post.lines.Line`.

    partial: bool
    stopped: bool
    full: bool

    def __init__(
        self,
        line: object,
        peer: int,
        box: object,
        counters: tuple[Counters, Counters, Counters, Counters],
        out: bytes,
        into: bytes,
        number_at: int,
        nbytes_at: int,
        index_at: int,
        opening_bytes: int,
        most: int,
    ) -> None: ...

class Post:
    # The messages with tags of one group: the common case of `oneaccord.group.tagged.TaggedCalls`.

    def __init__(
        self,
        caller: Caller,
        send: Callable[..., Any],
        send_on: Callable[..., Any],
        recv: Callable[..., Any],
        recv_on: Callable[..., Any],
        iprobe: Callable[..., Any],
        isend: Callable[..., Any],
        irecv: Callable[..., Any],
        words: Callable[[str, str, int, int], object],
        status: type,
        any_rank: object,
        any_tag: object,
        sent: type,
        receive: type,
        receiving: type,
        lock: Callable[[], object],
        queue: Callable[[], object],
        path: object,
        seconds: float,
        context: int,
        rank: int,
        ranks: tuple[int, ...],
        codes: dict[np.dtype[Any], int],
    ) -> None: ...
    def open(
        self,
        office: object,
        inside: set[int],
        parked: dict[Any, Any],
        kept: dict[Any, Any],
        owing: set[Any],
        lanes: dict[int, Lane],
        receives: dict[Any, Any],
        letters: dict[Any, Any],
        shorts: Counters,
        matching: object,
        courier: object,
        posted: Posted,
        /,
    ) -> None: ...  # Begin to make calls: the post office of this rank is there.
    def deliver(self, lane: Lane, /) -> int: ...  # Let messages that have come meet receives that wait; return how many.
    def isend(self, array: object, dest: object, tag: object, mode: object, timeout_s: object, /) -> Any: ...
    def irecv(self, source: object, tag: object, out: object, timeout_s: object, /) -> Any: ...
    def send(self, array: object, dest: object, tag: object, mode: object, timeout_s: object, /) -> None: ...
    def send_bytes(
        self, data: bytearray, dest: object, tag: object, mode: object, timeout_s: object, /
    ) -> bool: ...  # Send an object; return whether that was done.
    def recv(self, source: object, tag: object, out: object, status: object, timeout_s: object, /) -> Any: ...
    def recv_bytes(
        self, source: object, tag: object, status: object, timeout_s: object, /
    ) -> tuple[bytearray, int] | None: ...  # Receive an object: its bytes and its sender; None if nothing was done.
    def iprobe(self, source: object, tag: object, /) -> Any: ...

class Window:
    # The calls of a window in memory that the ranks of a host share: the common case of `oneaccord.group.window_base.WindowBase`.

    def __init__(
        self,
        caller: Caller,
        change: Callable[..., Any],
        flush: Callable[..., None],
        lock: Callable[..., None],
        unlock: Callable[..., None],
        ops: tuple[str, ...],
        held: dict[int, bool],
        shorts: Counters,
        dtype: np.dtype[Any],
        ufuncs: tuple[np.ufunc | None, ...],
        targets: tuple[tuple[npt.NDArray[Any] | None, int, int], ...],
        changes: _Memory | None,
        apart: int,
        tickets: _Memory | None,
        place: int,
        places: int,
    ) -> None: ...
    def change(
        self,
        kind: int,
        values: object,
        target: object,
        at: object,
        op: object,
        out: object,
        expected: object,
        timeout_s: object,
        /,
    ) -> Any: ...  # Read or change elements.
    def flush(self, target: object, timeout_s: object, name: str, /) -> None: ...
    def lock(self, target: object, shared: object, timeout_s: object, /) -> None: ...
    def unlock(self, target: object, timeout_s: object, /) -> None: ...
    def close(self) -> None: ...  # Make no more calls, and let go of the memory.

class Posted:
    # The receives that C has posted and that wait for their messages, of one rank.
    @property
    def drives(self) -> int: ...  # How often a thread of the program has driven in C.
    @property
    def looks(self) -> int: ...  # How many other receives were passed in the search for one.
    def hand_over(self) -> None: ...  # Let Python have all receives that wait, in order.
    def earliest(
        self, now: float, /
    ) -> float: ...  # Return when the first time of theirs is up, or something between now and then.
    def __len__(self) -> int: ...

class Low:
    # A reduction of floats of 16 or 8 bits: `oneaccord.arrays.low_precision`.

    def __init__(self, name: str, table: npt.NDArray[np.uint16] | None = None) -> None: ...
    def combine(
        self, left: npt.NDArray[Any], right: npt.NDArray[Any], out: npt.NDArray[Any], start: int, /
    ) -> int: ...  # Reduce from an element on; return the first one that Python must do.

def mailbox_slot_bytes(
    box: object, /
) -> int: ...  # The length of the slots of a mailbox with a C form. Raises AttributeError or ValueError if it has none.

# What the machine allows: each does something so often, and returns how many seconds that took; of pings, the median of a round trip.

def measure_copy(target: _Memory, source: _Memory, times: int, /) -> float: ...
def measure_add(target: _Memory, left: _Memory, right: _Memory, times: int, /) -> float: ...  # Of float32.
def measure_stream(
    fd: int, outgoing: _Memory, send_bytes: int, incoming: _Memory, recv_bytes: int, timeout_s: float, /
) -> float: ...  # Both ways at once. Raises OSError where the connection broke, TimeoutError where nothing moves any more.
def measure_flags(
    memory: _Memory, first: bool, batches: int, timeout_s: float, /
) -> float: ...  # Eight round trips a batch, over two flags in shared memory. Raises TimeoutError.
def measure_pings(
    fd: int, first: bool, batches: int, timeout_s: float, /
) -> float: ...  # Eight round trips of 8 bytes a batch, over a socket. Raises OSError, TimeoutError.
def take_word(
    memory: _Memory, index: int, owner: int, tries: int, /
) -> int: ...  # Take the lock of a word of 8 bytes; return 0, or the owner who has it after so many looks.
def free_word(memory: _Memory, index: int, owner: int, /) -> bool: ...  # Give it back; return whether it was this owner's.

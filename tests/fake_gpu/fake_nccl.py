"""A stand-in for ``nccl.bindings.nccl``: communicators of threads of one process, whose kernels run on the streams of `fake_cuda`.

It does as much as NCCL does, and no more: ranks that do not make the same call hang, until they abort; a communicator whose last call is in
progress refuses the next one; what uses one that was freed, or calls it from two threads at once, is a crime, and is kept in
`FakeNccl.crimes`. `FakeNccl.install` puts it into ``sys.modules``.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fake_gpu import fake_cuda

__all__ = ["FakeNccl"]

_PATIENCE_S = 30.0
_UNSET = -2147483648
_IN_PROGRESS, _INVALID_ARGUMENT, _INVALID_USAGE = 7, 4, 5
_ERRORS = {
    1: "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    2: "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    3: "internal error - please report this issue to the NCCL developers",
    4: "invalid argument (run with NCCL_DEBUG=WARN for details)",
    5: "invalid usage (run with NCCL_DEBUG=WARN for details)",
    6: "remote process exited or there was a network error",
    7: "NCCL operation in progress",
    8: "operation timed out",
}
_NAMES = dict(
    enumerate(
        "Success UnhandledCudaError SystemError InternalError InvalidArgument InvalidUsage RemoteError InProgress Timeout".split()
    )
)
_DTYPES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64".split()
_LOW_PRECISION = {9: "bfloat16", 10: "float8_e4m3fn", 11: "float8_e5m2"}
_SUM, _PRODUCT, _MAX, _MIN, _MEAN = range(5)
_SHORT = 3
"""How often one asks until a call is done that is in progress."""


class NCCLError(Exception):
    """As nccl4py's, which has no words for what NCCL has added since."""

    def __init__(self, status: int) -> None:
        if status not in _NAMES:
            raise ValueError(f"{status} is not a valid Result")
        self.status = status
        super().__init__(f"{_NAMES[status]} ({status}): {_ERRORS[status]}")


class Config:
    """As the binding's; ``ptr`` is the address that calls take."""

    def __init__(self) -> None:
        self.ptr = next(_addresses)
        self.blocking = self.max_ctas = self.launch_order_implicit = _UNSET
        _configs[self.ptr] = self


_addresses = itertools.count(0x1000, 0x100)
_configs: weakref.WeakValueDictionary[int, Config] = weakref.WeakValueDictionary()


class UniqueId:
    def __init__(self) -> None:
        self.content = bytes(128)

    @staticmethod
    def from_buffer(buffer: Any) -> UniqueId:
        made = UniqueId()
        made.content = bytes(buffer)
        assert len(made.content) == 128
        return made

    def __bytes__(self) -> bytes:
        return self.content


class Comm:
    """What the binding gives for an ``ncclComm_t``."""

    def __init__(self, handle: int = 0) -> None:
        self.handle = handle


@dataclass(eq=False)
class _Meeting:
    """What all ranks of a communicator share."""

    size: int
    members: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)
    collectives: dict[int, dict[int, _Part]] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    messages: dict[tuple[int, int, int], bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """What one rank brings to a collective."""

    what: tuple[Any, ...]
    data: np.ndarray[Any, Any] | None


@dataclass
class _Call:
    """A call on its way to a stream."""

    kind: str
    source: int
    target: int
    count: int
    type: int
    op: int = -1
    peer: int = -1

    @property
    def what(self) -> tuple[Any, ...]:
        return self.kind, self.count, self.type, self.op, self.peer


class _Rank:
    """A rank's side of a communicator."""

    def __init__(self, meeting: _Meeting, rank: int, config: Config | None) -> None:
        self.meeting = meeting
        self.rank = rank
        self.device = fake_cuda.get_device()
        self.max_ctas = _UNSET if config is None else config.max_ctas
        self.is_ordered = config is not None and config.launch_order_implicit == 1
        self.is_blocking = config is None or config.blocking != 0
        self.error = 0
        self.pending: Callable[[], bool] | None = None
        self.is_aborted = False
        self.is_freed = False
        self.is_connected = False
        self.busy = threading.Lock()
        self.completing = threading.Lock()
        self.last: tuple[int, int] | None = None
        self.counts: dict[str, itertools.count[int]] = {}

    def number(self, what: str) -> int:
        return next(self.counts.setdefault(what, itertools.count()))

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for the others, as a kernel does; tell whether to go on."""
        with self.meeting.changed:
            came = self.meeting.changed.wait_for(lambda: self.is_aborted or condition(), _PATIENCE_S)
        assert came, "a kernel of NCCL hangs, and nobody aborts it"
        return not self.is_aborted

    def run(self, calls: list[_Call]) -> None:
        """Be the kernel: give all, then take all."""
        taken = [self._give(call) for call in calls]
        for take in taken:
            take()

    def _give(self, call: _Call) -> Callable[[], None]:
        width = _dtype(call.type).itemsize
        meeting, rank = self.meeting, self.rank
        if call.kind == "send":
            key = (rank, call.peer, self.number(f"to {call.peer}"))
            with meeting.changed:
                meeting.messages[key] = _read(call.source, call.count * width).tobytes()
                meeting.changed.notify_all()
            return lambda: None
        if call.kind == "recv":
            key = (call.peer, rank, self.number(f"from {call.peer}"))
            return lambda: self._receive(key, call, width)
        number = self.number("collectives")
        part = _Part(call.what, self._input(call, width))
        with meeting.changed:
            meeting.collectives.setdefault(number, {})[rank] = part
            meeting.changed.notify_all()
        return lambda: self._take(number, call)

    def _input(self, call: _Call, width: int) -> np.ndarray[Any, Any] | None:
        blocks = self.meeting.size if call.kind == "reduce_scatter" else 1
        if call.kind == "broadcast" and self.rank != call.peer:
            return None
        return _read(call.source, call.count * width * blocks).copy().view(_dtype(call.type))

    def _receive(self, key: tuple[int, int, int], call: _Call, width: int) -> None:
        messages = self.meeting.messages
        if self.wait(lambda: key in messages):
            data = np.frombuffer(messages.pop(key), np.uint8)
            common = min(len(data), call.count * width)  # as NCCL does, which compares no lengths
            _read(call.target, common)[:] = data[:common]

    def _take(self, number: int, call: _Call) -> None:
        meeting = self.meeting
        parts = meeting.collectives[number]
        # Those that make different calls wait for each other for ever.
        if not self.wait(lambda: len(parts) == meeting.size and len({part.what for part in parts.values()}) == 1):
            return
        data = [parts[rank].data for rank in range(meeting.size)]
        result: np.ndarray[Any, Any] | None
        if call.kind == "broadcast":
            result = data[call.peer]
        elif call.kind == "all_gather":
            result = np.concatenate([part for part in data if part is not None])
        else:
            result = _reduced([part for part in data if part is not None], call.op)
            if call.kind == "reduce_scatter":
                result = result[self.rank * call.count : (self.rank + 1) * call.count]
            elif call.kind == "reduce" and self.rank != call.peer:
                result = None
        if result is not None:
            _read(call.target, result.nbytes)[:] = result.view(np.uint8)
        with meeting.changed:
            meeting.done[number] = meeting.done.get(number, 0) + 1
            if meeting.done[number] == meeting.size:
                del meeting.collectives[number], meeting.done[number]


def _read(pointer: int, nbytes: int) -> np.ndarray[Any, Any]:
    return fake_cuda.view(pointer, nbytes)


def _dtype(number: int) -> np.dtype[Any]:
    if number in _LOW_PRECISION:
        return np.dtype(getattr(pytest.importorskip("ml_dtypes"), _LOW_PRECISION[number]))
    return np.dtype(_DTYPES[number])


def _reduced(parts: list[np.ndarray[Any, Any]], op: int) -> np.ndarray[Any, Any]:
    dtype = parts[0].dtype
    wide = np.stack(parts).astype(np.float32 if dtype.itemsize < 4 and dtype.kind not in "iu" else dtype)
    if op == _MEAN:
        total = wide.sum(axis=0, dtype=wide.dtype)
        return (total // len(parts) if dtype.kind in "iu" else total / len(parts)).astype(dtype)
    ufunc: np.ufunc = {_SUM: np.add, _PRODUCT: np.multiply, _MAX: np.maximum, _MIN: np.minimum}[op]
    return ufunc.reduce(wide, axis=0, dtype=wide.dtype).astype(dtype)


class FakeNccl:
    """The module, and the switches of a test.

    Parameters
    ----------
    version
        As NCCL numbers it.

    Attributes
    ----------
    crimes
        What NCCL would have answered by a crash.
    calls
        The names of all calls in their order, with their arguments.
    pollers
        The names of the threads that asked for the state of a call in progress.
    hanging
        What does not end while its name is in it: ``"comm_abort"`` and collectives do not come back, the latter until they are revoked; ``"comm_init"``, ``"connect"``, which is the first
        launch, and ``"comm_finalize"`` stay in progress.
    """

    NCCLError = NCCLError
    Config = Config
    UniqueId = UniqueId
    Comm = Comm
    __version__ = "2.32.3"

    def __init__(self, version: int = 23203) -> None:
        self.version = version
        self.crimes: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.pollers: set[str] = set()
        self.hanging: set[str] = set()
        self._lock = threading.Lock()
        self._meetings: dict[bytes, _Meeting] = {}
        self._ids = itertools.count(1)
        self._handles = itertools.count(0x10)
        self._ranks: dict[int, _Rank] = {}
        self._thread = threading.local()
        self._refusals: dict[str, int] = {}
        self._late = threading.Event()
        self.blocking_communicators = 0
        self._launcher = ThreadPoolExecutor(1, "fake nccl")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let ``import nccl.bindings.nccl`` find this, until the test ends."""
        package, bindings = types.ModuleType("nccl"), types.ModuleType("nccl.bindings")
        package.__path__ = bindings.__path__ = []
        vars(package)["bindings"], vars(bindings)["nccl"] = bindings, self
        for name, module in (("nccl", package), ("nccl.bindings", bindings), ("nccl.bindings.nccl", self)):
            monkeypatch.setitem(sys.modules, name, module)

    # The switches.

    def refuse(self, name: str, status: int) -> None:
        """Let the next call of a name fail."""
        self._refusals[name] = status

    def fail(self, rank: int, status: int) -> None:
        """Let an asynchronous error show in all communicators of a rank."""
        for found in self._ranks.values():
            if found.rank == rank:
                found.error = status

    def release(self) -> None:
        """Let all calls come back that hang."""
        self.hanging.clear()
        self._late.set()
        for found in self._ranks.values():
            with found.meeting.changed:
                found.meeting.changed.notify_all()

    def open_communicators(self) -> int:
        """Return how many were made and not freed."""
        return sum(not rank.is_freed for rank in self._ranks.values())

    def names(self) -> list[str]:
        """Return the names of all calls."""
        return [call[0] for call in self.calls]

    # The binding: what is not about communicators.

    def get_version(self) -> int:
        return self.version

    def get_library_path(self) -> str:
        return "/fake/libnccl.so.2"

    def get_error_string(self, status: int) -> str:
        return _ERRORS.get(status, "unknown result code")

    def get_last_error(self, comm: Comm) -> str:
        return ""

    def get_unique_id(self) -> UniqueId:
        self._called("get_unique_id")
        return UniqueId.from_buffer(next(self._ids).to_bytes(128, "little"))

    def _called(self, name: str, *details: Any) -> None:
        self.calls.append((name, *details))
        if name in self._refusals:
            raise NCCLError(self._refusals.pop(name))

    # Communicators.

    def comm_init_rank_config(self, nranks: int, comm_id: UniqueId, rank: int, config: int) -> Comm:
        self._called("comm_init_rank_config", nranks, rank)
        found = _configs[config]
        with self._lock:
            meeting = self._meetings.setdefault(bytes(comm_id), _Meeting(nranks))
        return self._join(meeting, rank, found, "comm_init")

    def _join(self, meeting: _Meeting, rank: int, config: Any, name: str) -> Comm:
        made = _Rank(meeting, rank, config)
        with meeting.changed:
            assert rank not in meeting.members, "two ranks have one number"
            meeting.members.add(rank)
            meeting.changed.notify_all()
        if made.is_blocking:
            self.blocking_communicators += 1
            made.wait(lambda: len(meeting.members) == meeting.size)
            made.is_connected = True
        else:
            made.pending = lambda: name not in self.hanging and len(meeting.members) == meeting.size
        comm = Comm(next(self._handles))
        self._ranks[comm.handle] = made
        return comm

    def _rank(self, comm: Comm, name: str) -> _Rank:
        if not isinstance(comm, Comm):
            raise TypeError(f"Cannot convert {type(comm).__name__} to nccl.bindings.nccl.Comm")
        if comm.handle not in self._ranks:
            raise NCCLError(_INVALID_ARGUMENT)
        found = self._ranks[comm.handle]
        if found.is_freed:
            self.crimes.append(f"{name} of a communicator that was freed")
            raise NCCLError(_INVALID_ARGUMENT)
        return found

    @contextlib.contextmanager
    def _alone(self, comm: Comm, name: str) -> Iterator[_Rank]:
        found = self._rank(comm, name)
        if not found.busy.acquire(blocking=False):
            self.crimes.append(f"{name} while another thread calls the same communicator")
            raise NCCLError(_INVALID_USAGE)
        try:
            yield found
        finally:
            found.busy.release()

    def comm_get_async_error(self, comm: Comm) -> int:
        found = self._rank(comm, "comm_get_async_error")
        if found.error:
            return found.error
        if found.pending is None:
            return 0
        self.pollers.add(threading.current_thread().name)
        # NCCL ends what is in progress within this very call, which two threads must not do at once.
        if not found.completing.acquire(blocking=False):
            self.crimes.append("two threads complete one call")
            return _IN_PROGRESS
        try:
            if found.pending is not None and not found.pending():
                return _IN_PROGRESS
            found.pending = None
        finally:
            found.completing.release()
        return found.error

    def comm_finalize(self, comm: Comm) -> None:
        self._called("comm_finalize")
        with self._alone(comm, "comm_finalize") as found:
            self._check_device(found, "comm_finalize")
            self._check_ready(found)
            found.pending = None if found.is_blocking else lambda: "comm_finalize" not in self.hanging

    def comm_destroy(self, comm: Comm) -> None:
        self._called("comm_destroy")
        with self._alone(comm, "comm_destroy") as found:
            self._check_device(found, "comm_destroy")
            self._check_ready(found)
            self._free(found)

    def comm_abort(self, comm: Comm) -> None:
        self._called("comm_abort")
        if "comm_abort" in self.hanging:
            self._late.wait(_PATIENCE_S)
        with self._alone(comm, "comm_abort") as found:
            self._check_device(found, "comm_abort")
            self._stop(found)
            self._free(found)

    def comm_revoke(self, comm: Comm, revoke_flags: int) -> None:
        self._called("comm_revoke", revoke_flags)
        self._stop(self._rank(comm, "comm_revoke"))

    def _stop(self, found: _Rank) -> None:
        with found.meeting.changed:
            found.is_aborted = True
            found.meeting.changed.notify_all()

    def _free(self, found: _Rank) -> None:
        found.is_freed = True
        if found.last is not None:
            fake_cuda.event_destroy(found.last[1])

    # Calls.

    def group_start(self) -> None:
        self._thread.depth = self._depth() + 1

    def _depth(self) -> int:
        depth: int = getattr(self._thread, "depth", 0)
        return depth

    def group_end(self) -> None:
        """Enqueue what the group holds: all of a communicator and a stream at once."""
        if not self._depth():
            raise NCCLError(_INVALID_USAGE)
        self._thread.depth -= 1
        if self._thread.depth:
            return
        calls, error = getattr(self._thread, "calls", []), getattr(self._thread, "error", 0)
        self._thread.calls, self._thread.error = [], 0
        self._called("group_end", len(calls))
        if error:
            raise NCCLError(error)
        streams: dict[tuple[int, int], tuple[Comm, list[_Call]]] = {}
        for comm, call, stream in calls:
            streams.setdefault((comm.handle, stream), (comm, []))[1].append(call)
        for (_, stream), (comm, together) in streams.items():
            with self._alone(comm, "group_end") as found:
                self._launch(found, together, stream)

    def _check_device(self, found: _Rank, name: str) -> None:
        if fake_cuda.get_device() != found.device:
            self.crimes.append(f"{name} on device {fake_cuda.get_device()}, which wakes that device up for nothing")

    def _check_ready(self, found: _Rank) -> None:
        if found.error:
            raise NCCLError(found.error)
        if found.pending is not None:
            raise NCCLError(_INVALID_ARGUMENT)  # the previous call is still in progress

    def _make(self, comm: Comm, call: _Call, stream: int) -> None:
        try:
            self._called(call.kind, call.count, call.type, call.op, call.peer, stream)
            found = self._rank(comm, call.kind)
            self._check_ready(found)
        except NCCLError as error:
            if self._depth():
                self._thread.error = error.status
            raise
        if self._depth():
            if not hasattr(self._thread, "calls"):
                self._thread.calls = []
            self._thread.calls.append((comm, call, stream))
            return
        with self._alone(comm, call.kind):
            if call.kind in self.hanging:
                found.wait(lambda: call.kind not in self.hanging)  # as with a full queue, until kernels end
            else:
                self._launch(found, [call], stream)

    def _launch(self, found: _Rank, calls: list[_Call], stream: int) -> None:
        """Enqueue a kernel once somebody has asked; the first one once that was for a while, as the ranks connect before."""
        if found.meeting.size == 1 or found.is_blocking:
            self._enqueue(found, calls, stream)
            return
        polls, is_first = itertools.count(), not found.is_connected
        found.is_connected = True

        def is_done() -> bool:
            if is_first and ("connect" in self.hanging or next(polls) < _SHORT):
                return False
            self._enqueue(found, calls, stream)
            return True

        found.pending = is_done

    def _enqueue(self, found: _Rank, calls: list[_Call], stream: int) -> None:
        """Launch as NCCL 2.27 and newer does for communicators that do not block: on another thread, with streams of its own by default.

        A communicator of one rank launches on the caller's thread, whatever the current device is there.
        """
        if found.meeting.size == 1:
            fake_cuda.enqueue(stream, lambda: found.run(calls))
            return

        def launch() -> None:
            fake_cuda.set_device(found.device)
            # Kernels of one communicator run in the order of their launches, on whichever streams.
            if found.last is not None and found.last[0] != stream and not fake_cuda.is_capturing(stream):
                fake_cuda.stream_wait_event(stream, found.last[1])
            fake_cuda.enqueue(stream, lambda: found.run(calls))
            if not fake_cuda.is_capturing(stream):
                event = fake_cuda.event_create() if found.last is None else found.last[1]
                fake_cuda.event_record(event, stream)
                found.last = stream, event

        self._launcher.submit(launch).result()

    def all_reduce(self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, comm: Comm, stream: int) -> None:
        self._make(comm, _Call("all_reduce", sendbuff, recvbuff, count, datatype, op), stream)

    def reduce(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, root: int, comm: Comm, stream: int
    ) -> None:
        self._make(comm, _Call("reduce", sendbuff, recvbuff, count, datatype, op, root), stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Comm, stream: int) -> None:
        self._make(comm, _Call("broadcast", sendbuff, recvbuff, count, datatype, peer=root), stream)

    def all_gather(self, sendbuff: int, recvbuff: int, sendcount: int, datatype: int, comm: Comm, stream: int) -> None:
        self._make(comm, _Call("all_gather", sendbuff, recvbuff, sendcount, datatype), stream)

    def reduce_scatter(
        self, sendbuff: int, recvbuff: int, recvcount: int, datatype: int, op: int, comm: Comm, stream: int
    ) -> None:
        self._make(comm, _Call("reduce_scatter", sendbuff, recvbuff, recvcount, datatype, op), stream)

    def send(self, sendbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
        self._make(comm, _Call("send", sendbuff, 0, count, datatype, peer=peer), stream)

    def recv(self, recvbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
        self._make(comm, _Call("recv", 0, recvbuff, count, datatype, peer=peer), stream)

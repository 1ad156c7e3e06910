"""A stand-in for ``nccl.bindings.nccl``: communicators of threads of one process, whose kernels run on the streams of `fake_cuda`.

It does as much as NCCL does, and no more: ranks that do not make the same call hang, until they abort; a communicator whose last call is in
progress refuses the next one; what uses one that was freed, or calls it from two threads at once, is a crime, and is kept in
`FakeNccl.crimes`. `FakeNccl.install` puts it into ``sys.modules``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.fake_gpu import fake_cuda
from support.fake_gpu.fake_communicator import PATIENCE_S, UNSET, Call, Meeting, RankSide
from support.fake_gpu.fake_nccl_extra import ExtraCalls, places_of

__all__ = ["FakeNccl"]

_IN_PROGRESS, _INVALID_ARGUMENT, _INVALID_USAGE, _REMOTE = 7, 4, 5, 6
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
        self.blocking = self.max_ctas = self.launch_order_implicit = UNSET
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


class FakeNccl(ExtraCalls):
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
        super().__init__()
        self.version = version
        self.crimes: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.pollers: set[str] = set()
        self.hanging: set[str] = set()
        self._lock = threading.Lock()
        self._meetings: dict[bytes, Meeting] = {}
        self._ids = itertools.count(1)
        self._handles = itertools.count(0x10)
        self._ranks: dict[int, RankSide] = {}
        self._thread = threading.local()
        self._refusals: dict[str, int] = {}
        self._late = threading.Event()
        self.non_blocking = 0
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
        for meeting in self._meetings.values():
            with meeting.changed:
                meeting.changed.notify_all()

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
            meeting = self._meetings.setdefault(bytes(comm_id), Meeting(nranks))
        return self._join(meeting, rank, found, "comm_init")

    def _join(self, meeting: Meeting, rank: int, config: Any, name: str) -> Comm:
        made = RankSide(meeting, rank, config)
        made.crimes = self.crimes
        with meeting.changed:
            assert rank not in meeting.members, "two ranks have one number"
            meeting.gpus.append(fake_cuda.uuid(made.device, is_whole=True))
            meeting.members.add(rank)
            meeting.changed.notify_all()
        if made.is_blocking:
            made.wait(lambda: self._late.is_set() or (name not in self.hanging and len(meeting.members) == meeting.size))
        else:
            self.non_blocking += 1
            made.pending = lambda: name not in self.hanging and len(meeting.members) == meeting.size
        # An instance of a GPU counts as the GPU: src/init.cc of 2.30.7 compares UUIDs that do not tell them apart.
        if len(set(meeting.gpus)) < len(meeting.gpus) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise NCCLError(_INVALID_USAGE)
        comm = Comm(next(self._handles))
        self._ranks[comm.handle] = made
        return comm

    def _rank(self, comm: Comm, name: str) -> RankSide:
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
    def _alone(self, comm: Comm, name: str) -> Iterator[RankSide]:
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
            self._check_ready(found, "comm_finalize")
            if found.is_revoked:
                raise NCCLError(_INVALID_ARGUMENT)
            self._wait_for_graphs(found)
            if found.is_blocking and "comm_finalize" in self.hanging:
                self._late.wait(PATIENCE_S)
            found.pending = None if found.is_blocking else lambda: "comm_finalize" not in self.hanging

    def comm_destroy(self, comm: Comm) -> None:
        self._called("comm_destroy")
        with self._alone(comm, "comm_destroy") as found:
            self._check_device(found, "comm_destroy")
            self._check_ready(found, "comm_destroy")
            self._wait_for_graphs(found)
            if found.is_revoked:
                self._check_others(found, "comm_destroy")
            self._free(found)

    def comm_abort(self, comm: Comm) -> None:
        self._called("comm_abort")
        if "comm_abort" in self.hanging:
            self._late.wait(PATIENCE_S)
        with self._alone(comm, "comm_abort") as found:
            self._check_device(found, "comm_abort")
            self._stop(found)
            self._wait_for_graphs(found)
            self._check_others(found, "comm_abort")
            self._free(found)

    def comm_revoke(self, comm: Comm, revoke_flags: int) -> None:
        """End what is under way; NCCL does so once, and frees nothing."""
        self._called("comm_revoke", revoke_flags)
        if "comm_revoke" in self.hanging:
            self._late.wait(PATIENCE_S)
        found = self._rank(comm, "comm_revoke")
        if found.is_revoked:
            raise NCCLError(_INVALID_ARGUMENT)
        found.is_revoked = True
        self._stop(found)

    def _wait_for_graphs(self, found: RankSide) -> None:
        """Wait until no graph holds calls of a communicator, however long that takes, as `localPersistentRefs` in NCCL's src/init.cc."""
        with found.meeting.changed:
            found.meeting.changed.wait_for(lambda: not found.graphs or self._late.is_set())

    def _check_others(self, found: RankSide, name: str) -> None:
        """Take note of memory that is freed while kernels of another rank may use it (github.com/NVIDIA/nccl/issues/863)."""
        for other in self._ranks.values():
            if other.meeting is found.meeting and not (other.is_aborted or other.is_freed):
                self.crimes.append(f"{name} of rank {found.rank} freed memory that rank {other.rank} uses")

    def _stop(self, found: RankSide) -> None:
        with found.meeting.changed:
            found.is_aborted = True
            found.meeting.changed.notify_all()

    def _free(self, found: RankSide) -> None:
        found.is_freed = True
        found.registered.clear()
        if found.last is not None:
            # A thread that waited for a graph comes here when its test is over, and the devices of that test are gone.
            fake_cuda.event_destroy(found.last[1], missing_ok=self._late.is_set())

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
        streams: dict[tuple[int, int], tuple[Comm, list[Call]]] = {}
        for comm, call, stream in calls:
            streams.setdefault((comm.handle, stream), (comm, []))[1].append(call)
        for (_, stream), (comm, together) in streams.items():
            with self._alone(comm, "group_end") as found:
                self._launch(found, together, stream)

    def _check_device(self, found: RankSide, name: str) -> None:
        if fake_cuda.get_device() != found.device:
            self.crimes.append(f"{name} on device {fake_cuda.get_device()}, which wakes that device up for nothing")

    def _check_ready(self, found: RankSide, name: str) -> None:
        if found.error:
            raise NCCLError(found.error)
        if found.is_revoked and name not in ("comm_destroy", "comm_finalize"):
            raise NCCLError(_INVALID_USAGE)
        if found.pending is not None:
            raise NCCLError(_INVALID_ARGUMENT)  # the previous call is still in progress

    def _make(self, comm: Comm, call: Call, stream: int) -> None:
        try:
            self._called(call.kind, call.count, call.type, call.op, call.peer, stream)
            found = self._rank(comm, call.kind)
            self._check_ready(found, call.kind)
            call.places, call.memory = places_of(self, found, call)
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

    def _launch(self, found: RankSide, calls: list[Call], stream: int) -> None:
        """Enqueue a kernel: at once if the communicator blocks, else once somebody has asked; the first one after a while, as the ranks connect before."""
        is_first, found.is_connected = not found.is_connected, True
        if found.is_blocking and is_first and not found.wait(lambda: "connect" not in self.hanging):
            raise NCCLError(_REMOTE)
        if found.meeting.size == 1 or found.is_blocking:
            self._enqueue(found, calls, stream)
            return
        polls = itertools.count()

        def is_done() -> bool:
            if is_first and ("connect" in self.hanging or next(polls) < _SHORT):
                return False
            self._enqueue(found, calls, stream)
            return True

        found.pending = is_done

    def _enqueue(self, found: RankSide, calls: list[Call], stream: int) -> None:
        """Launch on the caller's thread, or on another one if the communicator does not block, as NCCL 2.27 and newer.

        A communicator of one rank launches whatever the current device is.
        """

        def run() -> None:
            found.run(calls)

        if stream and fake_cuda.is_capturing(stream):
            found.graphs += 1
            weakref.finalize(run, found.forget_graph)
            self.keep(run, [pointer for call in calls for pointer in call.memory])
        if found.meeting.size == 1:
            fake_cuda.enqueue(stream, run)
            return

        def launch() -> None:
            before = fake_cuda.get_device()
            fake_cuda.set_device(found.device)
            try:
                # Kernels of one communicator run in the order of their launches, on whichever streams.
                if found.last is not None and found.last[0] != stream and not fake_cuda.is_capturing(stream):
                    fake_cuda.stream_wait_event(stream, found.last[1])
                fake_cuda.enqueue(stream, run)
                if not fake_cuda.is_capturing(stream):
                    event = fake_cuda.event_create() if found.last is None else found.last[1]
                    fake_cuda.event_record(event, stream)
                    found.last = stream, event
            finally:
                fake_cuda.set_device(before)

        if found.is_blocking:
            launch()
        else:
            self._launcher.submit(launch).result()

    def _move(self, kind: str, source: int, target: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
        self._make(comm, Call(kind, source, target, count, datatype, peer=root), stream)

    def all_reduce(self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, comm: Comm, stream: int) -> None:
        self._make(comm, Call("all_reduce", sendbuff, recvbuff, count, datatype, op), stream)

    def reduce(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, root: int, comm: Comm, stream: int
    ) -> None:
        self._make(comm, Call("reduce", sendbuff, recvbuff, count, datatype, op, root), stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Comm, stream: int) -> None:
        self._make(comm, Call("broadcast", sendbuff, recvbuff, count, datatype, peer=root), stream)

    def all_gather(self, sendbuff: int, recvbuff: int, sendcount: int, datatype: int, comm: Comm, stream: int) -> None:
        self._make(comm, Call("all_gather", sendbuff, recvbuff, sendcount, datatype), stream)

    def reduce_scatter(
        self, sendbuff: int, recvbuff: int, recvcount: int, datatype: int, op: int, comm: Comm, stream: int
    ) -> None:
        self._make(comm, Call("reduce_scatter", sendbuff, recvbuff, recvcount, datatype, op), stream)

    def send(self, sendbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
        self._make(comm, Call("send", sendbuff, 0, count, datatype, peer=peer), stream)

    def recv(self, recvbuff: int, count: int, datatype: int, peer: int, comm: Comm, stream: int) -> None:
        self._make(comm, Call("recv", 0, recvbuff, count, datatype, peer=peer), stream)

"""What `fake_nccl` has beyond the calls of every NCCL: the calls that came with 2.28, and registered memory.

NCCL compares nothing that has to do with registered memory, and what is wrong there is undefined; here it is a crime.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import Any, ClassVar

import numpy as np

from support.fake_gpu import fake_cuda

__all__ = ["MOVING", "ExtraCalls", "ExtraRank", "blocks_given", "moved", "places_of"]

MOVING = frozenset({"allto_all", "gather", "scatter"})
_SYMMETRIC_CALLS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "allto_all"})
_INVALID_ARGUMENT, _UNHANDLED_CUDA, _REMOTE = 4, 1, 6
_GRANULARITY = 4096
_MOVING_VERSION = 22803


def blocks_given(kind: str, rank: int, root: int, size: int) -> int:
    """Return how many blocks a rank brings to a call of `MOVING`."""
    return size if kind == "allto_all" or (kind == "scatter" and rank == root) else 0 if kind == "scatter" else 1


def moved(kind: str, data: list[Any], rank: int, root: int, count: int) -> Any:
    """Return what a rank gets by a call of `MOVING`; None where it gets nothing."""
    if kind == "gather":
        return np.concatenate(data) if rank == root else None
    mine = slice(rank * count, (rank + 1) * count)
    return data[root][mine] if kind == "scatter" else np.concatenate([part[mine] for part in data])


class Window:
    """What the binding gives for an ``ncclWindow_t``; empty until the call is done."""

    def __init__(self, handle: int = 0) -> None:
        self.handle = handle


class _Registered:
    """Memory that one rank has registered: where, and at which offset of the addresses that NCCL keeps for all ranks alike."""

    def __init__(self, pointer: int, size: int, offset: int) -> None:
        self.pointer = pointer
        self.size = size
        self.offset = offset


class ExtraRank:
    """What one rank has registered with a communicator."""

    def __init__(self) -> None:
        self.registered: dict[int, _Registered] = {}
        self.memory_handles: dict[int, int] = {}
        self.crimes: list[str] = []


def _first_fit(taken: list[_Registered], size: int) -> int:
    """Return the offset of new memory as NCCL does: the first gap, which each rank counts by itself."""
    offset = 0
    for each in sorted(taken, key=lambda other: other.offset):
        if offset + size <= each.offset:
            break
        offset = each.offset + -(-each.size // _GRANULARITY) * _GRANULARITY
    return offset


def places_of(nccl: ExtraCalls, rank: Any, call: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return where the memory of a call lies in what its rank has registered, and that memory; note what no rank may do with that."""
    found, used = [], []
    for pointer in (call.source, call.target):
        within = [each for each in rank.registered.values() if each.pointer <= pointer < each.pointer + each.size]
        for each in within:
            nccl.use(each.pointer, rank.device)
            used.append(each.pointer)
        found.append((within[0].offset, pointer - within[0].pointer) if within else None)
    if any(found) and call.kind not in _SYMMETRIC_CALLS:
        rank.crimes.append(f"{call.kind} of registered memory, while other ranks may give other memory")
    return tuple(found), tuple(used)


class ExtraCalls:
    """The functions of the binding. It has them with every NCCL, and says so when an old one lacks what is called.

    Attributes
    ----------
    has_symmetric_memory
        Whether windows can be made of memory: the GPUs reach each other.
    largest
        How many bytes `mem_alloc` gives at most.
    allocated
        What it has given, and `mem_free` has not got back.
    """

    NCCLError: Any
    version: int
    crimes: list[str]
    _ranks: dict[int, Any]
    has_symmetric_memory: bool = True
    largest: int = 1 << 40
    _homes: ClassVar[dict[int, weakref.ref[ExtraCalls]]] = {}
    """Whose each address is: a test that is over may give its memory back during the next one."""

    def __init__(self) -> None:
        self.allocated: dict[int, fake_cuda.Memory] = {}
        self._unmapped: dict[tuple[int, int], list[fake_cuda.Memory]] = {}
        self._captured: Counter[int] = Counter()
        self._used: dict[int, int] = {}
        self._handles_of_memory = itertools.count(0x5000)

    def _move(self, kind: str, source: int, target: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
        raise NotImplementedError

    def _local(self, name: str, comm: Any) -> Any:
        found = self._rank(comm, name)
        self._check_ready(found, name)
        return found

    def _rank(self, comm: Any, name: str) -> Any:
        raise NotImplementedError

    def _check_ready(self, found: Any, name: str) -> None:
        raise NotImplementedError

    def _called(self, name: str, *details: Any) -> None:
        raise NotImplementedError

    def _moving(
        self, kind: str, source: int, target: int, count: int, datatype: int, root: int, comm: Any, stream: int
    ) -> None:
        self._need(kind, _MOVING_VERSION)
        self._move(kind, source, target, count, datatype, root, comm, stream)

    def _need(self, name: str, version: int) -> None:
        if self.version < version:
            raise RuntimeError(f"function {name} is not found")

    def allto_all(self, sendbuff: int, recvbuff: int, count: int, datatype: int, comm: Any, stream: int) -> None:
        self._moving("allto_all", sendbuff, recvbuff, count, datatype, 0, comm, stream)

    def gather(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
        self._moving("gather", sendbuff, recvbuff, count, datatype, root, comm, stream)

    def scatter(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
        self._moving("scatter", sendbuff, recvbuff, count, datatype, root, comm, stream)

    # Registered memory.

    def mem_alloc(self, size: int) -> int:
        self._called("mem_alloc", size)
        self._need("mem_alloc", 21903)
        if size > self.largest:
            raise self.NCCLError(_UNHANDLED_CUDA)
        size = -(-size // _GRANULARITY) * _GRANULARITY
        # CUDA gives addresses out again as soon as they are free.
        free = self._unmapped.get((fake_cuda.get_device(), size))
        memory = free.pop() if free else fake_cuda.Memory(size, 0)
        memory.map()
        self.allocated[memory.ptr] = memory
        self._homes[memory.ptr] = weakref.ref(self)
        return memory.ptr

    def mem_free(self, ptr: int) -> None:
        self._called("mem_free")
        home = self._homes.pop(ptr, None)
        if home is not None and home() is not self:
            return
        if home is None:
            self.crimes.append("mem_free of memory that is none")
            raise self.NCCLError(_UNHANDLED_CUDA)
        memory = self.allocated.pop(ptr)
        if any(ptr in rank.registered for rank in self._ranks.values()):
            self.crimes.append("mem_free of memory that is registered")
        if self._used.pop(ptr, -1) == fake_cuda.synchronizations(memory.device_id):
            self.crimes.append("mem_free of memory that the device was not waited for since it was in use")
        if self._captured[ptr]:
            self.crimes.append("mem_free of memory that a graph uses")
        memory.unmap()
        self._unmapped.setdefault((memory.device_id, len(memory.bytes)), []).append(memory)

    def _put(self, rank: Any, pointer: int, size: int, *, is_window: bool) -> int:
        handle = next(self._handles_of_memory)
        offset = _first_fit([each for each in rank.registered.values() if each.offset >= 0], size) if is_window else -1
        rank.registered[pointer] = _Registered(pointer, size, offset)
        rank.memory_handles[handle] = pointer
        self.use(pointer, rank.device)
        return handle

    def use(self, pointer: int, device: int) -> None:
        """Note that a device has work with memory, from now on until somebody waits for the device."""
        self._used[pointer] = fake_cuda.synchronizations(device)

    def keep(self, kernel: Any, pointers: list[int]) -> None:
        """Note that a graph uses memory as long as a kernel of it is there."""
        self._captured.update(pointers)
        weakref.finalize(kernel, self._captured.subtract, pointers)

    def _take_back(self, rank: Any, handle: int) -> None:
        if handle not in rank.memory_handles:
            raise self.NCCLError(_INVALID_ARGUMENT)
        del rank.registered[rank.memory_handles.pop(handle)]

    def comm_register(self, comm: Any, buff: int, size: int) -> int:
        self._called("comm_register", size)
        self._need("comm_register", 21903)
        return self._put(self._local("comm_register", comm), buff, size, is_window=False)

    def comm_deregister(self, comm: Any, handle: int) -> None:
        self._called("comm_deregister")
        self._take_back(self._local("comm_deregister", comm), handle)

    def comm_window_register(self, comm: Any, buff: int, size: int, win_flags: int) -> Window:
        self._called("comm_window_register", size, win_flags)
        self._need("comm_window_register", 22703)
        rank, window = self._local("comm_window_register", comm), Window()
        if not self.has_symmetric_memory:
            return window
        turn, meeting = rank.number("windows"), rank.meeting
        with meeting.changed:
            came: set[int] = meeting.windows.setdefault(turn, set())
            came.add(rank.rank)
            meeting.changed.notify_all()

        def is_done() -> bool:
            if len(came) < meeting.size:
                return False
            window.handle = self._put(rank, buff, size, is_window=True)
            return True

        if rank.is_blocking:
            if not rank.wait(lambda: len(came) == meeting.size):
                raise self.NCCLError(_REMOTE)
            is_done()
        else:
            rank.pending = is_done
        return window

    def comm_window_deregister(self, comm: Any, win: Window) -> None:
        self._called("comm_window_deregister")
        self._take_back(self._local("comm_window_deregister", comm), win.handle)

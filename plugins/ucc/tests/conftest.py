"""Worlds over a libucc of Python, whose ranks are threads that meet as processes do."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.worlds import free_port, on_threads

import oneaccord as oa
from oneaccord.api import Group
from oneaccord_ucc import backend as backend_module
from oneaccord_ucc import finding, team

World = Callable[..., list[Any]]

_DTYPES = "int8 int16 int32 int64 - uint8 uint16 uint32 uint64 - - float32 float64".split()
_OPS = {
    0: np.add,
    1: np.multiply,
    2: np.maximum,
    3: np.minimum,
    7: np.bitwise_and,
    8: np.bitwise_or,
    9: np.bitwise_xor,
}
_ALL_GATHER, _ALL_REDUCE, _ALL_TO_ALL, _BROADCAST, _REDUCE, _REDUCE_SCATTER = (1 << bit for bit in (0, 2, 3, 6, 11, 12))


def _array(buffer: Any) -> Any:
    """Return the memory of a buffer of ``ucc_coll_args_t``."""
    dtype = np.dtype(_DTYPES[buffer.datatype >> 3])
    if not buffer.buffer:
        return np.empty(0, dtype)
    return np.frombuffer((ctypes.c_byte * (buffer.count * dtype.itemsize)).from_address(buffer.buffer), dtype)


class FakeUcc:
    """Teams of threads: as much as the backend sees of `oneaccord_ucc.library.Ucc`.

    Attributes
    ----------
    status
        What becomes of a collective: ``status(rank)`` when all have posted it. Where it is not well, nothing is computed.
    on_progress
        Called with the rank whose UCC works.
    last
        The requests of the last collective that all have posted.
    counts
        How often each function was called.
    ending
        What `team_destroy` waits for.
    """

    path, version, words = "/fake/libucc.so.1", (1, 99, 0), "1.99.0"
    OK, IN_PROGRESS, REFUSED = 0, 1, -2

    def __init__(self) -> None:
        self.status: Callable[[int], int] = lambda rank: self.OK
        self.on_progress: Callable[[int], None] = lambda rank: None
        self.counts: dict[str, int] = {}
        self.ending = threading.Event()
        self.ending.set()
        self._lock = threading.RLock()
        self._numbers = itertools.count(16, 16)
        self._ranks: dict[int, Any] = {}
        self._calls: dict[int, dict[int, Any]] = {}
        self.last: list[Any] = []
        self._requests: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("_"):
            raise AttributeError(name)
        action = getattr(self, f"_{name}", lambda *args: 0)

        def function(*args: Any) -> int:
            with self._lock:
                self.counts[name] = self.counts.get(name, 0) + 1
            return action(*args)

        return function

    def why(self, status: int) -> str:
        return f"status {status}"

    def _context_create(self, lib: object, params: Any, config: object, context: Any) -> int:
        about = params._obj.oob
        context._obj.value = number = next(self._numbers)
        self._ranks[number] = SimpleNamespace(oob=about, rank=about.oob_ep, size=about.n_oob_eps, posted=0)
        # As long as more than one card.
        return self._meet(about, bytes([about.oob_ep]) * 40_000)

    def _meet(self, oob: Any, mine: bytes) -> int:
        everyones, request = ctypes.create_string_buffer(len(mine) * oob.n_oob_eps), ctypes.c_void_p(1)
        status = oob.allgather(mine, ctypes.cast(everyones, ctypes.c_void_p), len(mine), None, ctypes.byref(request))
        if status == self.OK:
            assert oob.req_test(request) == oob.req_free(request) == self.OK
            assert everyones.raw == b"".join(bytes([rank]) * len(mine) for rank in range(oob.n_oob_eps))
        return status

    def _team_create_post(self, contexts: Any, count: int, params: Any, team: Any) -> int:
        assert (count, params._obj.ep) == (1, self._ranks[contexts._obj.value].rank)
        team._obj.value = contexts._obj.value
        return self.OK

    def _collective_init(self, arguments: Any, request: Any, team: Any) -> int:
        status = ctypes.c_int32(self.IN_PROGRESS)
        request._obj.value = ctypes.addressof(status)
        given = type(arguments._obj).from_buffer_copy(arguments._obj)
        self._requests[request._obj.value] = SimpleNamespace(me=self._ranks[team.value], given=given, status=status)
        return self.OK

    def _collective_post(self, request: Any) -> int:
        mine = self._requests[request.value]
        with self._lock:
            call = self._calls.setdefault(mine.me.posted, {})
            mine.me.posted += 1
            call[mine.me.rank] = mine
            if len(call) == mine.me.size:
                self.last = [call[rank] for rank in range(mine.me.size)]
                statuses = [self.status(rank) for rank in range(mine.me.size)]
                if statuses == [self.OK] * mine.me.size:
                    self.end()
                for each, status in zip(self.last, statuses, strict=True):
                    each.status.value = status
        return self.OK

    def end(self) -> None:
        """Let the last collective end well on all ranks."""
        self._compute([each.given for each in self.last])
        for each in self.last:
            each.status.value = self.OK

    def _compute(self, given: list[Any]) -> None:
        first, size = given[0], len(given)
        assert {(each.coll_type, each.op, each.root) for each in given} == {(first.coll_type, first.op, first.root)}
        sources = [_array(each.dst if each.flags else each.src).copy() for each in given]
        whole = np.concatenate(sources)
        if first.coll_type in (_ALL_REDUCE, _REDUCE, _REDUCE_SCATTER):
            total = sources[0]
            for source in sources[1:]:
                total = _OPS[first.op](total, source)
        for rank, each in enumerate(given):
            match first.coll_type:
                case kind if kind == _REDUCE and rank != first.root:
                    continue
                case kind if kind in (_REDUCE, _ALL_REDUCE):
                    result = total
                case kind if kind == _REDUCE_SCATTER:
                    result = np.split(total, size)[rank]
                case kind if kind == _ALL_GATHER:
                    result = whole
                case kind if kind == _ALL_TO_ALL:
                    result = np.concatenate([np.split(source, size)[rank] for source in sources])
                case kind if kind == _BROADCAST:
                    result = sources[first.root]
                case kind:
                    raise AssertionError(kind)
            _array(each.src if first.coll_type == _BROADCAST else each.dst)[...] = result

    def _collective_finalize(self, request: Any) -> int:
        assert self._requests.pop(request.value).status.value != self.IN_PROGRESS
        return self.OK

    def _context_progress(self, context: Any) -> int:
        self.on_progress(self._ranks[context.value].rank)
        return 0

    def _team_destroy(self, team: Any) -> int:
        self.ending.wait(60)
        return self.OK

    def _context_destroy(self, context: Any) -> int:
        # UCC asks for a last meeting here; nobody may wait for it.
        assert self._meet(self._ranks[context.value].oob, b"x") != self.OK
        return self.OK


@pytest.fixture
def ucc(monkeypatch: pytest.MonkeyPatch) -> FakeUcc:
    """The library of all ranks of a test."""
    fake = FakeUcc()
    monkeypatch.setattr(backend_module, "load", lambda: fake)
    monkeypatch.setattr(finding, "find", lambda: fake.path)
    monkeypatch.setattr(team, "_abandoned", [])
    return fake


@pytest.fixture
def world(ucc: FakeUcc) -> World:
    """Run ``program(group)`` on ranks that are threads and meet at an address; return what each returned or raised."""

    def run(
        program: Callable[[Group], Any],
        size: int = 3,
        *,
        messages: Callable[[int], str] = lambda rank: "tcp",
    ) -> list[Any]:
        address = f"127.0.0.1:{free_port()}"

        def body(rank: int) -> Any:
            config = {"backend": "ucc", "rendezvous": {"address": address}, "backends": {"ucc": {"messages": messages(rank)}}}
            with oa.init(config=config, rank=rank, world_size=size, timeout_s=20) as group:
                return program(group)

        return on_threads(body, size)

    return run

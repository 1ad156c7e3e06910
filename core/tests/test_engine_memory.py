"""What the engine keeps from one run to the next: it saves the making, keeps nobody's array alive, and has bounds."""

from __future__ import annotations

import gc
import mmap
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.engine_tools import ready

from oneaccord.arrays.dtypes import Reduction, resolve_op
from oneaccord.calls.engine import Executable
from oneaccord.calls.engine.scratch import KEPT_BYTES, Pool
from oneaccord.calls.engine.waiting import Waiter
from oneaccord.contract.backend import LinkLost, Transfer, Transport
from oneaccord.contract.deadline import Deadline
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step

IN, OUT, SCRATCH = (Ref(buffer, 0) for buffer in (Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH))
FLOAT = np.dtype(np.float64)
SUM, MAX = (resolve_op(op, FLOAT) for op in ("sum", "max"))
LONG = 1 << 14
"""Elements of a message that goes from and to the arrays themselves."""


class Moving(Transfer):
    """A message that a test may hold back."""

    def __init__(self, payload: memoryview) -> None:
        self.payload, self.done, self.moved = payload, False, 0


class Transfers(Transport):
    """Has made its transfers beforehand, so that what a run allocates is the engine's alone; with ``waits``, all must be waited for."""

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._transfers: dict[tuple[int, bool], Moving] = {}

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        self._transfers = {(peer, is_send): Moving(memoryview(b"")) for peer in peers for is_send in (False, True)}

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        return self._start(peer, True)

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        return self._start(peer, False)

    def _start(self, peer: int, is_send: bool) -> Transfer:
        transfer = self._transfers[peer, is_send]
        transfer.done = not self._waits
        return transfer

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        for transfer in transfers:
            transfer.done = True


class Bytes(Transport):
    """Moves nothing, at once."""

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        pass

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        transfer = Moving(payload)
        transfer.done = True
        return transfer

    recv = send

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        raise AssertionError


class Filling(Transport):
    """Fills what is received at once, and calls ``then`` when it is waited for."""

    def __init__(self, value: float, then: Callable[[], object] = lambda: None) -> None:
        self._value, self._then = value, then
        self.waiting: list[Moving] = []

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        pass

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        transfer = Moving(payload)
        transfer.done = True
        return transfer

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        np.frombuffer(payload, np.float64)[:] = self._value * peer
        self.waiting.append(Moving(payload))
        return self.waiting[-1]

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        self._then()
        for transfer in transfers:
            transfer.done = True


def made(
    transport: Transport,
    *steps: Step,
    elements: int = 4,
    collective: Collective = Collective.ALL_REDUCE,
    scratch: int = 0,
    chunks: int = 1,
    reduction: Reduction = SUM,
    dtype: np.dtype[Any] = FLOAT,
) -> Executable:
    """Return what rank 0 of 4 does with steps on chunks of ``elements`` elements."""
    schedule = Schedule(collective, "handmade", 0, 4, 0, chunks, chunks, (IN,) * scratch, steps)
    return ready(transport, schedule, range(0, elements * chunks + 1, elements), dtype, reduction)


def run(executable: Executable, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    executable.run(source, target, 0, lambda: Waiter(Deadline(5), lambda peers: None))


def chain(rounds: int) -> list[Step]:
    """Return steps of every kind, one after the other."""
    steps: list[Step] = [Copy(OUT, IN)]
    for _ in range(rounds):
        last = len(steps) - 1
        steps += [
            Send(1, OUT, (last,)),
            Recv(2, SCRATCH, (last,)),
            RecvReduce(3, OUT, OUT, after=(last + 1, last + 2)),
            Reduce(OUT, OUT, SCRATCH, (last + 3,)),
            Copy(SCRATCH, OUT, (last + 4,)),
        ]
    return steps


@pytest.mark.long  # it measures memory, of which other threads take some as well
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_run_on_memory_that_was_used_before_allocates_nothing_for_each_step_or_piece(waits: bool, in_place: bool) -> None:
    def peak(steps: list[Step], *, elements: int = 4, runs: int = 3) -> int:
        executable = made(Transfers(waits=waits), *steps, elements=elements, scratch=elements < 100, reduction=MAX)
        target = np.zeros(elements)
        source = target if in_place else np.zeros(elements)
        waiter = Waiter(Deadline(60), lambda peers: None)

        def go(times: int) -> None:
            for _ in range(times):
                executable.run(source, target, 1 << 40, lambda: waiter)

        def measured() -> int:
            gc.collect()
            tracemalloc.start()
            try:
                go(1)
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                go(runs)
                return tracemalloc.get_traced_memory()[1] - before
            finally:
                tracemalloc.stop()

        go(2)
        # Whatever other threads of this process allocate meanwhile comes on top.
        return min(measured() for _ in range(3))

    # What a run needs in any case is less than one byte for each of the steps that are added here, and four for each piece.
    alone = peak(chain(1))
    assert peak(chain(400)) - alone < 400
    long: list[Step] = [Send(1, IN), RecvReduce(2, OUT, IN, after=(0,))]
    assert peak(long, elements=100 * 32768) - peak(long, elements=3 * 32768) < 400
    # The interpreter itself keeps some lists for later, so that this is more than nothing.
    assert peak(chain(1), runs=1000) - alone < 8000, "something is kept from every run"


@pytest.mark.parametrize("elements", [4, LONG])
def test_an_array_is_not_kept_alive(elements: int) -> None:
    executable = made(Transfers(waits=True), *chain(2), scratch=1, elements=elements)
    source, target = np.ones(elements), np.zeros(elements)
    with np.errstate(all="ignore"):  # these transfers bring nothing, so that what is added was never set
        run(executable, source, target)
    target.resize(2 * elements)  # NumPy refuses that for an array that somebody else has a view of
    watch = weakref.ref(source), weakref.ref(target)
    del source, target
    assert [one() for one in watch] == [None, None]


@pytest.mark.parametrize("elements", [4, LONG])
def test_memory_that_was_mapped_can_be_unmapped_after_a_run(elements: int) -> None:
    mapped = mmap.mmap(-1, LONG * 8)
    source = np.frombuffer(mapped, np.float64, elements)
    run(made(Transfers(waits=False), *chain(1), scratch=1, elements=elements), source, source)
    del source
    mapped.close()


def test_after_a_failure_an_array_lives_as_long_as_the_transport_may_write_to_it() -> None:
    def fail() -> None:
        raise LinkLost(2, "broken")

    transport = Filling(1.0, fail)
    target = np.zeros(LONG)
    with pytest.raises(LinkLost):
        run(made(transport, Recv(2, OUT), collective=Collective.BROADCAST, elements=LONG), np.zeros(LONG), target)
    watch = weakref.ref(target)
    del target
    gc.collect()
    assert watch() is not None
    transport.waiting[0].payload[:8] = bytes(8)
    transport.waiting.clear()
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("step", [Recv(1, SCRATCH), RecvReduce(1, OUT, IN)], ids=["received", "reduced"])
def test_after_a_failure_scratch_memory_that_the_transport_may_write_to_is_not_used_again(step: Step) -> None:
    def fail() -> None:
        raise LinkLost(1, "broken")

    broken = Filling(1.0, fail)
    with pytest.raises(LinkLost):
        run(made(broken, step, scratch=1, elements=LONG), np.zeros(LONG), np.zeros(LONG))

    def write_late() -> None:
        broken.waiting[0].payload[:] = bytes(LONG * 8)

    target = np.zeros(LONG)
    steps = [Recv(1, SCRATCH), Copy(OUT, SCRATCH, (0,)), RecvReduce(2, OUT, OUT, after=(1,))]
    run(made(Filling(7.0, write_late), *steps, scratch=1, elements=LONG), np.zeros(LONG), target)
    assert set(target.tolist()) == {21.0}


def test_another_array_at_the_same_address_is_another_array() -> None:
    memory = np.zeros(8)
    executable = made(Filling(3.0), RecvReduce(2, OUT, IN))
    for number in range(3):
        source, target = memory[:4], memory[4:]
        source[:] = number
        run(executable, source, target)
        assert memory.tolist() == [number] * 4 + [number + 6.0] * 4


@pytest.mark.parametrize("elements", [4, LONG])
def test_input_is_given_to_the_transport_so_that_it_cannot_write_there(elements: int) -> None:
    class Watching(Filling):
        def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
            assert payload.readonly
            return super().send(peer, header, payload)

    run(made(Watching(1.0), Send(1, IN), elements=elements), np.zeros(elements), np.zeros(elements))


def test_any_number_of_arrays_in_turn() -> None:
    executable = made(Filling(1.0), RecvReduce(1, OUT, OUT))
    arrays = [np.full(4, float(number)) for number in range(100)]
    for _ in range(3):
        for array in arrays:
            run(executable, array, array)
    assert [array.tolist() for array in arrays] == [[number + 3.0] * 4 for number in range(100)]


def test_read_only_input_and_dtypes_without_a_buffer_protocol() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        for elements in (4, 4 * LONG):
            source, target = np.ones(elements).astype(dtype), np.zeros(elements, dtype)
            source.flags.writeable = False
            steps = [Send(1, IN), Recv(1, OUT), Reduce(OUT, IN, IN, (1,)), Send(1, OUT, (2,))]
            run(made(Bytes(), *steps, elements=elements, dtype=dtype, reduction=resolve_op("sum", dtype)), source, target)
            assert (target == dtype.type(2)).all()


def test_two_executables_of_one_program_may_run_at_once() -> None:
    steps = [Recv(1, SCRATCH), RecvReduce(2, OUT, IN), Reduce(OUT, OUT, SCRATCH, (0, 1))]
    for elements in (4, LONG):
        source, inner, outer = np.ones(elements), np.zeros(elements), np.zeros(elements)
        within = made(Filling(100.0), *steps, scratch=1, elements=elements)
        run(made(Filling(1.0, lambda: run(within, source, inner)), *steps, scratch=1, elements=elements), source, outer)  # noqa: B023
        assert (set(inner.tolist()), set(outer.tolist())) == ({301.0}, {4.0})


def test_receives_that_reduce_share_the_memory_of_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(1 << 30)
    monkeypatch.setattr("oneaccord.calls.engine.adapter.shared_pool", pool)
    elements = 1 << 20
    steps: list[Step] = [RecvReduce(peer, Ref(Buffer.OUTPUT, peer), Ref(Buffer.INPUT, peer)) for peer in (1, 2, 3)]
    source, target = np.arange(4.0 * elements), np.zeros(4 * elements)
    executable = made(Filling(100.0), *steps, chunks=4, elements=elements)
    assert pool.kept_bytes == 0
    run(executable, source, target)
    assert [set(part.tolist()) for part in (target - source).reshape(4, -1)[1:]] == [{100.0}, {200.0}, {300.0}]
    assert pool.kept_bytes == 1 << 19


def test_scratch_memory_is_given_out_again_and_kept_up_to_a_limit() -> None:
    pool = Pool(3 << 16)
    first = pool.take(40_000)
    assert first.nbytes == 1 << 16
    assert first.ctypes.data % 64 == 0
    assert pool.take(40_000) is not first
    pool.give(first)
    assert pool.take(65_536) is first
    others = [pool.take(50_000) for _ in range(5)]
    for block in (first, *others):
        pool.give(block)
        assert pool.kept_bytes <= 3 << 16
    assert [pool.take(50_000) for _ in range(3)] == others[:-4:-1]
    assert pool.kept_bytes == 0
    fresh = pool.take(1 << 16)
    assert not any(fresh is block for block in (first, *others))
    too_large = pool.take((3 << 16) + 1)
    pool.give(too_large)
    assert pool.kept_bytes == 0
    assert pool.take(1).nbytes == 4096
    assert KEPT_BYTES < 1 << 28

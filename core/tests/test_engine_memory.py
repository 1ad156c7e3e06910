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

from manyhands.arrays.dtypes import Reduction, resolve_op
from manyhands.calls.engine import KEPT_BYTES, KEPT_RUNS, Engine, Plan, compile_plan
from manyhands.calls.engine.memory import Pool
from manyhands.calls.engine.plan import Place
from manyhands.calls.engine.running import Run
from manyhands.contract.backend import LinkLost, Transfer, Transport
from manyhands.contract.deadline import Deadline
from manyhands.control.signatures import CallSignature
from manyhands.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step

IN, OUT, SCRATCH = (Ref(buffer, 0) for buffer in (Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH))
SUM, MAX = (resolve_op(op, np.dtype(np.float64)) for op in ("sum", "max"))


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


def compiled(
    *steps: Step,
    elements: int = 4,
    collective: Collective = Collective.ALL_REDUCE,
    scratch: int = 0,
    chunks: int = 1,
    reduction: Reduction = SUM,
) -> Plan:
    """Return the plan of rank 0 of 4 with steps on chunks of ``elements`` float64."""
    made = Schedule(collective, "handmade", 0, 4, 0, chunks, chunks, (IN,) * scratch, steps)
    offsets = range(0, elements * chunks + 1, elements)
    return compile_plan(made, CallSignature(collective.value), 0, offsets, offsets, 8, reduction)


def run(transport: Transport, plan: Plan, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    Engine(transport).run(plan, source, target, 0, Deadline(5), lambda peers: None)


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


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_run_on_memory_that_was_used_before_allocates_nothing_for_each_step_or_piece(waits: bool, in_place: bool) -> None:
    def peak(steps: list[Step], *, elements: int = 4, runs: int = 3) -> int:
        engine = Engine(Transfers(waits=waits))
        plan = compiled(*steps, elements=elements, scratch=elements < 100, reduction=MAX)
        target = np.zeros(elements)
        source = target if in_place else np.zeros(elements)
        deadline = Deadline(60)

        def go(times: int) -> None:
            for _ in range(times):
                engine.run(plan, source, target, 1 << 40, deadline, lambda peers: None)

        go(2)
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

    # What a run needs in any case is less than one byte for each of the steps that are added here, and four for each piece.
    alone = peak(chain(1))
    assert peak(chain(400)) - alone < 400
    assert peak([Send(1, IN), RecvReduce(2, OUT, IN, after=(0,))], elements=100 * 32768) - alone < 400
    # The interpreter itself keeps some lists for later, so that this is more than nothing.
    assert peak(chain(1), runs=1000) - alone < 8000, "something is kept from every run"


def test_an_array_is_not_kept_alive() -> None:
    plan = compiled(*chain(2), scratch=1)
    source, target = np.ones(4), np.zeros(4)
    engine = Engine(Transfers(waits=True))
    engine.run(plan, source, target, 0, Deadline(5), lambda peers: None)
    target.resize(8)  # NumPy refuses that for an array that somebody else has a view of
    watch = weakref.ref(source), weakref.ref(target)
    del source, target
    assert [one() for one in watch] == [None, None]


def test_memory_that_was_mapped_can_be_unmapped_after_a_run() -> None:
    mapped = mmap.mmap(-1, 4096)
    source = np.frombuffer(mapped, np.float64, 4)
    plan = compiled(*chain(1), scratch=1)
    run(Transfers(waits=False), plan, source, source)
    del source
    mapped.close()


def test_after_a_failure_an_array_lives_as_long_as_the_transport_may_write_to_it() -> None:
    def fail() -> None:
        raise LinkLost(2, "broken")

    transport = Filling(1.0, fail)
    target = np.zeros(4)
    with pytest.raises(LinkLost):
        run(transport, compiled(Recv(2, OUT), collective=Collective.BROADCAST), np.zeros(4), target)
    watch = weakref.ref(target)
    del target
    gc.collect()
    assert watch() is not None
    transport.waiting[0].payload[:8] = bytes(8)
    transport.waiting.clear()
    gc.collect()
    assert watch() is None


def test_after_a_failure_scratch_memory_that_the_transport_may_write_to_is_not_used_again() -> None:
    def fail() -> None:
        raise LinkLost(1, "broken")

    broken = Filling(1.0, fail)
    with pytest.raises(LinkLost):
        run(broken, compiled(Recv(1, SCRATCH), scratch=1, collective=Collective.BROADCAST), np.zeros(4), np.zeros(4))

    def write_late() -> None:
        broken.waiting[0].payload[:] = bytes(32)

    target = np.zeros(4)
    plan = compiled(Recv(1, SCRATCH), Copy(OUT, SCRATCH, (0,)), scratch=1, collective=Collective.BROADCAST)
    run(Filling(7.0, write_late), plan, np.zeros(4), target)
    assert target.tolist() == [7.0] * 4


def test_another_array_at_the_same_address_is_another_array() -> None:
    memory = np.zeros(8)
    plan = compiled(RecvReduce(2, OUT, IN))
    engine = Engine(Filling(3.0))
    for number in range(3):
        source, target = memory[:4], memory[4:]
        source[:] = number
        engine.run(plan, source, target, number, Deadline(5), lambda peers: None)
        assert memory.tolist() == [number] * 4 + [number + 6.0] * 4
    # The same bytes as other numbers.
    plan = compiled(Reduce(OUT, IN, IN))
    numbers = memory.view(np.int64)
    for _ in range(2):
        memory[:] = 1.5
        engine.run(plan, memory[:4], memory[4:], 0, Deadline(5), lambda peers: None)
        assert memory[4:].tolist() == [3.0] * 4
        numbers[:] = -21  # as a float it is no number
        engine.run(plan, numbers[:4], numbers[4:], 0, Deadline(5), lambda peers: None)
        assert numbers[4:].tolist() == [-42] * 4


def test_input_is_given_to_the_transport_so_that_it_cannot_write_there() -> None:
    class Watching(Filling):
        def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
            assert payload.readonly
            return super().send(peer, header, payload)

    run(Watching(1.0), compiled(Send(1, IN)), np.zeros(4), np.zeros(4))


def test_a_plan_keeps_the_runs_that_were_used_last() -> None:
    plan = compiled(Send(1, IN))
    places: list[Place] = [(number, 0, 0, 0, 0) for number in range(KEPT_RUNS + 1)]
    runs = [Run(plan) for _ in places]
    assert plan.take_run(places[0]) is None
    for place, one in zip(places[:-1], runs, strict=False):
        plan.keep_run(place, one)
    taken = plan.take_run(places[0])
    assert taken is runs[0]
    assert plan.take_run(places[0]) is None, "whoever took it has it alone"
    plan.keep_run(places[0], runs[0])
    # All places are taken now, so that a new one gets the run that was unused for longest.
    assert plan.take_run(places[-1]) is runs[1]
    assert plan.take_run(places[1]) is None
    plan.keep_run(places[-1], runs[1])
    plan.keep_run(places[1], runs[-1])
    assert plan.take_run(places[-1]) is runs[1]
    assert plan.take_run(places[1]) is None, "there was no room for one more"


@pytest.mark.parametrize("count", [KEPT_RUNS, KEPT_RUNS + 1, 3 * KEPT_RUNS])
def test_any_number_of_arrays_in_turn(count: int) -> None:
    plan, engine = compiled(RecvReduce(1, OUT, OUT)), Engine(Filling(1.0))
    arrays = [np.full(4, float(number)) for number in range(count)]
    for _ in range(3):
        for array in arrays:
            engine.run(plan, array, array, 0, Deadline(5), lambda peers: None)
    assert [array.tolist() for array in arrays] == [[number + 3.0] * 4 for number in range(count)]


def test_read_only_input_and_dtypes_without_a_buffer_protocol() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        source, target = np.arange(4).astype(dtype), np.zeros(4, dtype)
        source.flags.writeable = False
        made = Schedule(Collective.ALL_REDUCE, "handmade", 0, 4, 0, 1, 1, (), (Reduce(OUT, IN, IN),))
        plan = compile_plan(made, CallSignature("all_reduce"), 0, (0, 4), (0, 4), 2, resolve_op("sum", dtype))
        run(Filling(0), plan, source, target)
        assert target.tolist() == [0, 2, 4, 6]


def test_a_plan_that_two_engines_run_at_once_is_right_on_both() -> None:
    plan = compiled(Recv(1, SCRATCH), RecvReduce(2, OUT, IN), Reduce(OUT, OUT, SCRATCH, (0, 1)), scratch=1)
    source, inner, outer = np.ones(4), np.zeros(4), np.zeros(4)

    def meanwhile() -> None:
        run(Filling(100.0), plan, source, inner)

    run(Filling(1.0, meanwhile), plan, source, outer)
    assert (inner.tolist(), outer.tolist()) == ([301.0] * 4, [4.0] * 4)


def test_receives_that_reduce_and_may_be_on_their_way_at_once_have_memory_of_their_own() -> None:
    steps: list[Step] = [RecvReduce(peer, Ref(Buffer.OUTPUT, peer), Ref(Buffer.INPUT, peer)) for peer in (1, 2, 3)]
    source, target = np.arange(16.0), np.zeros(16)
    plan = compiled(*steps, chunks=4)
    run(Filling(100.0), plan, source, target)
    assert (target - source)[4:].tolist() == [100.0] * 4 + [200.0] * 4 + [300.0] * 4


def test_receives_that_reduce_one_after_the_other_share_memory() -> None:
    def in_turn(peers: int) -> Plan:
        steps = [RecvReduce(peer, OUT, OUT, after=(peer - 1,)) for peer in range(1, peers + 1)]
        made = Schedule(Collective.ALL_REDUCE, "handmade", 0, peers + 1, 0, 1, 1, (), (Copy(OUT, IN), *steps))
        return compile_plan(made, CallSignature("all_reduce"), 0, (0, 1000), (0, 1000), 8, SUM)

    assert in_turn(1).work_bytes == in_turn(9).work_bytes
    # Those from one peer take turns by themselves.
    first, second, third = (Ref(Buffer.OUTPUT, chunk) for chunk in range(3))
    from_one = [RecvReduce(1, first, first), RecvReduce(1, second, second)]
    alone, with_another = (compiled(*from_one, *more, chunks=3) for more in ([], [RecvReduce(2, third, third)]))
    assert with_another.work_bytes == 2 * alone.work_bytes
    target = np.zeros(1000)
    run(Filling(1.0), in_turn(9), np.ones(1000), target)
    assert target.tolist() == [46.0] * 1000


def test_a_long_message_does_not_make_a_plan_keep_its_views_in_many_places() -> None:
    short, long = compiled(Send(1, IN)), compiled(Send(1, IN), elements=1 << 24)
    assert (short.kept, long.kept) == (KEPT_RUNS, 4096 // (1 << 24 >> 15))
    assert compiled(Send(1, IN), elements=1 << 28).kept == 1


def test_scratch_memory_is_given_out_again_and_kept_up_to_a_limit() -> None:
    pool = Pool(3 << 16)
    first = pool.take(40_000)
    assert first.nbytes == 1 << 16
    assert first.memory.nbytes == first.nbytes
    assert pool.take(40_000) is not first
    pool.give(first)
    assert pool.take(65_536) is first
    others = [pool.take(50_000) for _ in range(5)]
    for block in (first, *others):
        pool.give(block)
        assert pool.kept_bytes <= 3 << 16
    assert [pool.take(50_000) for _ in range(3)] == others[:-4:-1]
    assert pool.kept_bytes == 0
    assert pool.take(1 << 16) not in [first, *others]
    too_large = pool.take((3 << 16) + 1)
    pool.give(too_large)
    assert pool.kept_bytes == 0
    assert pool.take(1).nbytes == 4096
    assert KEPT_BYTES < 1 << 28

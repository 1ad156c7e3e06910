"""The engine over a transport that a test plays: which messages it sends, in what pieces, and what it makes of what comes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine_tools import compiled, ready

from oneaccord.arrays.dtypes import Reduction, resolve_op
from oneaccord.calls.engine import peers_of
from oneaccord.calls.engine.program import (
    COPY,
    LONG_LEFT,
    LONG_RIGHT,
    LONG_SEND,
    RECV,
    RECV_LEFT,
    RECV_RIGHT,
    REDUCE,
    SEND,
    WAIT,
)
from oneaccord.calls.engine.waiting import Overdue, Waiter
from oneaccord.contract.backend import HEADER_BYTES, HeaderMismatch, LinkLost, Transfer, Transport
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import CallSignature, parse_header
from oneaccord.errors import InternalError
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step

IN, OUT, SCRATCH = (Ref(buffer, 0) for buffer in (Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH))
SIGNATURE = CallSignature("all_reduce", dtype=12, op="sum", op_code=1)
PIECE, REDUCE_PIECE = 1 << 20, 1 << 18


class Played(Transfer):
    def __init__(self, peer: int, is_send: bool, header: bytes, payload: memoryview) -> None:
        self.peer, self.is_send, self.header, self.payload = peer, is_send, header, payload
        self.done, self.moved = False, 0


class PlayedTransport(Transport):
    """Takes what is sent, and gives what the test has laid ready; holds core to its side of the contract.

    With an ``order``, nothing is done at once, and `wait` finishes one transfer of its choice.
    """

    def __init__(self, incoming: dict[int, Sequence[bytes]] | None = None, order: random.Random | None = None) -> None:
        self.sent: list[tuple[int, bytes, bytes]] = []
        self.received: list[tuple[int, bytes, int]] = []
        self.connected: list[int] = []
        self._incoming = {peer: list(payloads) for peer, payloads in (incoming or {}).items()}
        self._order = order
        self._busy: dict[tuple[int, bool], Played] = {}

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        self.connected += peers

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        return self._start(Played(peer, True, header, payload))

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        assert not payload.readonly, "a transport writes what it receives"
        return self._start(Played(peer, False, header, payload))

    def _start(self, transfer: Played) -> Transfer:
        assert transfer.peer in self.connected
        assert len(transfer.header) == HEADER_BYTES
        assert (transfer.payload.ndim, transfer.payload.format) == (1, "B")
        assert (transfer.peer, transfer.is_send) not in self._busy, "one at a time in each direction"
        if self._order is None:
            self._finish(transfer)
        else:
            self._busy[transfer.peer, transfer.is_send] = transfer
        return transfer

    def _finish(self, transfer: Played) -> None:
        if transfer.is_send:
            self.sent.append((transfer.peer, transfer.header, bytes(transfer.payload)))
        else:
            payload = self._incoming[transfer.peer].pop(0)
            assert len(payload) == len(transfer.payload)
            transfer.payload[:] = payload
            self.received.append((transfer.peer, transfer.header, len(payload)))
        transfer.done = True

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        assert self._order is not None
        assert set(map(id, transfers)) == set(map(id, self._busy.values()))
        key = self._order.choice(sorted(self._busy))
        self._finish(self._busy.pop(key))

    def close(self) -> None:
        pass


def schedule(
    *steps: Step, collective: Collective = Collective.ALL_REDUCE, chunks: int = 1, scratch: tuple[Ref, ...] = ()
) -> Schedule:
    return Schedule(collective, "played", 0, 3, 0, chunks, chunks, scratch, steps)


def run(
    transport: Transport,
    made: Schedule,
    offsets: Sequence[int],
    source: np.ndarray,
    target: np.ndarray,
    reduction: Reduction | None = None,
    *,
    sequence: int = 0,
    channel: int = 0,
    ranks: Sequence[int] | None = None,
    waiter: Waiter | None = None,
) -> None:
    executable = ready(transport, made, offsets, source.dtype, reduction, SIGNATURE, channel=channel, ranks=ranks)
    executable.run(source, target, sequence, lambda: waiter or Waiter(Deadline(5), lambda peers: None))


SUBTRACT = Reduction("difference", 255, np.subtract, is_mean=False)  # shows which operand came first


@pytest.mark.parametrize("count", [0, 1, 32767, 32768, 32769, 100_000])
def test_a_message_that_is_reduced_travels_in_pieces_of_256_kib(count):
    source, theirs = np.arange(count) * 1.0, np.arange(count) * 2.0 + 5
    step = REDUCE_PIECE // 8
    parts = [theirs[start : start + step].tobytes() for start in range(0, count, step)] or [b""]
    transport = PlayedTransport({1: parts})
    target = np.full(count, np.nan)
    made = schedule(Send(1, IN), RecvReduce(1, OUT, IN))
    run(transport, made, (0, count), source, target, resolve_op("sum", source.dtype), sequence=41, channel=6)
    np.testing.assert_array_equal(target, source + theirs)
    assert b"".join(payload for _, _, payload in transport.sent) == source.tobytes()
    assert [len(payload) for _, _, payload in transport.sent] == [len(part) for part in parts]
    for sender, messages in ((0, [(h, len(p)) for _, h, p in transport.sent]), (1, [(h, n) for _, h, n in transport.received])):
        offset = 0
        for packed, nbytes in messages:
            header = parse_header(packed)
            assert header is not None
            assert (header.operation, header.digest, header.channel) == ("all_reduce", SIGNATURE.digest, 6)
            assert (header.sender, header.sequence, header.index, header.nbytes) == (sender, 41, 0, nbytes)
            assert int.from_bytes(packed[56:], "little") == offset, "a piece says where in its message it stands"
            offset += nbytes


@pytest.mark.parametrize(
    ("count", "sizes"), [(0, [0]), (131_072, [PIECE]), (131_073, [PIECE, 8]), (300_000, [PIECE, PIECE, 302_848])]
)
def test_a_message_that_is_moved_travels_in_pieces_of_1_mib(count, sizes):
    source = np.arange(count) * 1.0
    transport = PlayedTransport()
    target = np.zeros(count)
    run(transport, schedule(Send(2, IN), Copy(OUT, IN), collective=Collective.BROADCAST), (0, count), source, target)
    assert [(peer, len(payload)) for peer, _, payload in transport.sent] == [(2, size) for size in sizes]
    assert b"".join(payload for _, _, payload in transport.sent) == source.tobytes()
    np.testing.assert_array_equal(target, source)


def test_an_element_larger_than_a_piece_is_one_piece():
    transport = PlayedTransport()
    run(transport, schedule(Send(1, IN)), (0, 2), np.zeros(2, "V524288"), np.zeros(0, "V524288"))
    assert len(transport.sent) == 2


@pytest.mark.parametrize("incoming_first", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_operands_are_in_the_order_of_the_step_across_pieces(incoming_first, in_place):
    count, step = 70_000, REDUCE_PIECE // 8
    source, theirs = np.random.default_rng(0).random(count), np.random.default_rng(1).random(count)
    expected = theirs - source if incoming_first else source - theirs
    transport = PlayedTransport({1: [theirs[start : start + step].tobytes() for start in range(0, count, step)]})
    target = source if in_place else np.empty(count)
    run(transport, schedule(RecvReduce(1, OUT, IN, incoming_first)), (0, count), source, target, SUBTRACT)
    np.testing.assert_array_equal(target, expected)


def test_local_steps_and_scratch():
    made = schedule(
        Copy(SCRATCH, Ref(Buffer.INPUT, 1)),
        Reduce(Ref(Buffer.OUTPUT, 0), SCRATCH, Ref(Buffer.INPUT, 0), after=(0,)),
        Reduce(Ref(Buffer.OUTPUT, 1), Ref(Buffer.INPUT, 0), SCRATCH, after=(0,)),
        chunks=2,
        scratch=(Ref(Buffer.INPUT, 1),),
    )
    source, target = np.array([1.0, 2, 30, 40]), np.zeros(4)
    run(PlayedTransport(), made, (0, 2, 4), source, target, SUBTRACT)
    assert target.tolist() == [29, 38, -29, -38]


def test_messages_of_one_direction_keep_their_order_although_a_later_one_is_ready_first():
    """The k-th send meets the k-th receive, so that the second send waits for the first, which waits for a receive."""
    made = schedule(
        Recv(2, Ref(Buffer.OUTPUT, 0)),
        Send(1, Ref(Buffer.OUTPUT, 0), after=(0,)),
        Send(1, Ref(Buffer.INPUT, 1)),
        collective=Collective.BROADCAST,
        chunks=2,
    )
    for seed in range(20):
        transport = PlayedTransport({2: [np.array([7.0]).tobytes()]}, random.Random(seed))
        run(transport, made, (0, 1, 2), np.array([1.0, 2.0]), np.zeros(2))
        assert [np.frombuffer(payload)[0] for _, _, payload in transport.sent] == [7.0, 2.0]


def test_a_message_starts_once_although_the_one_before_it_is_done_at_once():
    class Second(PlayedTransport):
        def _start(self, transfer: Played) -> Transfer:
            self._order = random.Random(0) if self.sent else None
            return super()._start(transfer)

    made = schedule(Send(1, Ref(Buffer.INPUT, 0)), Send(1, Ref(Buffer.INPUT, 1)), chunks=2)
    transport = Second()
    run(transport, made, (0, 1, 2), np.array([1.0, 2.0]), np.zeros(2))
    assert [np.frombuffer(payload)[0] for _, _, payload in transport.sent] == [1.0, 2.0]


@given(seed=st.integers(0, 10**9), count=st.integers(0, 100_000))
def test_whatever_order_transfers_finish_in(seed, count):
    made = schedule(
        Send(1, IN),
        RecvReduce(1, OUT, IN),
        Recv(2, SCRATCH),
        Reduce(OUT, OUT, SCRATCH, after=(1, 2)),
        Send(2, OUT, after=(3,)),
        scratch=(Ref(Buffer.INPUT, 0),),
    )
    source, first, second = (np.arange(count) * factor for factor in (1.0, 3.0, 5.0))
    step = REDUCE_PIECE // 8
    cuts = range(0, count, step) or [0]
    incoming = {peer: [theirs[start : start + step].tobytes() for start in cuts] for peer, theirs in ((1, first), (2, second))}
    transport = PlayedTransport(incoming, random.Random(seed))
    target = np.empty(count)
    run(transport, made, (0, count), source, target, resolve_op("sum", source.dtype))
    sent: dict[int, bytes] = defaultdict(bytes)
    for peer, _, payload in transport.sent:
        sent[peer] += payload
    assert (sent[1], sent[2]) == (source.tobytes(), target.tobytes())
    np.testing.assert_array_equal(target, 9.0 * np.arange(count))


def test_messages_without_content_need_no_memory_and_read_only_input_is_never_written():
    source = np.arange(3.0)
    source.flags.writeable = False
    transport = PlayedTransport({1: [b""], 2: [source.tobytes()]})
    target = np.zeros(3)
    made = schedule(Send(1, None), Recv(1, None), RecvReduce(2, OUT, IN))
    run(transport, made, (0, 3), source, target, resolve_op("sum", source.dtype))
    assert [(peer, payload) for peer, _, payload in transport.sent] == [(1, b"")]
    assert target.tolist() == [0, 2, 4]


def test_many_programs_on_other_memory_each_time():
    made = schedule(Recv(1, SCRATCH), Copy(OUT, SCRATCH, after=(0,)), scratch=(IN,), collective=Collective.BROADCAST)
    transport = PlayedTransport({1: [np.full(count, number).tobytes() for number in range(4) for count in (3, 1000, 2)]})
    executables = {count: ready(transport, made, (0, count), np.dtype(np.int64)) for count in (3, 1000, 2)}
    for number in range(4):
        for count, executable in executables.items():
            target = np.zeros(count, np.int64)
            executable.run(np.zeros(count, np.int64), target, number, lambda: Waiter(Deadline(5), None))
            assert (target == number).all()


def test_a_schedule_that_cannot_move_is_a_bug_and_said_to_be_one():
    made = schedule(Copy(OUT, IN, after=(1,)), Copy(OUT, IN, after=(0,)))
    with pytest.raises(InternalError, match="cannot run: a step of rank"):
        run(PlayedTransport(), made, (0, 1), np.zeros(1), np.zeros(1))


def test_offsets_that_do_not_fit_the_schedule_are_a_bug_and_said_to_be_one():
    with pytest.raises(InternalError, match="played needs other numbers of chunks"):
        compiled(schedule(Send(1, IN)), (0, 1, 2))


def test_what_a_transport_finds_reaches_the_caller():
    for error in (LinkLost(1, "broken"), HeaderMismatch(1, bytes(64))):

        class Broken(PlayedTransport):
            def wait(self, transfers: Sequence[Transfer], deadline: Deadline, error: Exception = error) -> None:
                raise error

        with pytest.raises(type(error)) as caught:
            run(Broken({1: []}, random.Random(0)), schedule(Recv(1, OUT)), (0, 1), np.zeros(1), np.zeros(1))
        assert caught.value is error


@pytest.mark.parametrize(
    ("steps", "awaited"),
    [((Recv(2, OUT), Send(1, IN)), [2]), ((Send(1, IN), Send(2, IN)), [1, 2]), ((Recv(2, OUT), Recv(1, OUT)), [2])],
    ids=["receives before sends", "sends", "the first of several receives"],
)
def test_a_deadline_names_those_who_are_waited_for_and_stalls_are_told_before(steps, awaited):
    class Silent(PlayedTransport):
        def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
            # A clock of its own: the deadline is over as soon as somebody waits for it.
            deadline.at = 0.0
            raise TimeoutError

    told: list[list[int]] = []
    waiter = Waiter(Deadline(0.6), lambda peers: told.append(sorted(peers)))
    with pytest.raises(Overdue) as caught:
        run(Silent(order=random.Random(0)), schedule(*steps), (0, 1), np.zeros(1), np.zeros(1), waiter=waiter)
    assert sorted(caught.value.peers) == awaited
    assert told
    assert all(peers == awaited for peers in told)


def test_what_the_transport_sees_counts_ranks_of_the_world():
    """The schedule is that of rank 1 in a group of three, whose ranks are 7, 2 and 5 in the world."""
    made = Schedule(
        Collective.ALL_REDUCE, "played", 1, 3, 0, 1, 1, (), (Send(0, IN), RecvReduce(2, OUT, IN), Send(2, OUT, after=(1,)))
    )
    reduction, ranks = resolve_op("sum", np.dtype(float)), (7, 2, 5)
    transport = PlayedTransport({5: [np.array([30.0]).tobytes()]})
    target = np.zeros(1)
    run(transport, made, (0, 1), np.array([4.0]), target, reduction, channel=4, ranks=ranks)
    assert target.tolist() == [34.0]
    assert peers_of(made, ranks) == {5, 7}
    assert transport.connected == [5, 7]
    assert [(peer, np.frombuffer(payload)[0]) for peer, _, payload in transport.sent] == [(7, 4.0), (5, 34.0)]
    headers = [parse_header(packed) for _, packed, _ in (*transport.sent, *transport.received)]
    assert [(header.sender, header.index) for header in headers if header] == [(2, 0), (2, 0), (5, 0)]

    class Silent(PlayedTransport):
        def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
            deadline.at = 0.0
            raise TimeoutError

    waiter = Waiter(Deadline(0.05), lambda peers: None)
    with pytest.raises(Overdue) as caught:
        run(Silent(order=random.Random(0)), made, (0, 1), np.zeros(1), np.zeros(1), reduction, ranks=ranks, waiter=waiter)
    assert caught.value.peers == [5]


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3), (0, 1, 1), (0, 1, 2, 2)])
def test_ranks_that_are_not_those_of_the_group_are_a_bug_and_said_to_be_one(ranks):
    with pytest.raises(InternalError, match="played is for 3 ranks"):
        compiled(schedule(Send(1, IN)), (0, 1), ranks=ranks)


def relay() -> Schedule:
    """Return rank 0's part of an all_to_all in which it passes on a block from rank 2 to rank 1."""
    steps = (
        Recv(2, SCRATCH),
        Send(1, SCRATCH, after=(0,)),
        Send(1, Ref(Buffer.INPUT, 1)),
        Recv(2, Ref(Buffer.OUTPUT, 0, 2)),
        Copy(Ref(Buffer.OUTPUT, 2), SCRATCH, after=(0,)),
    )
    return Schedule(Collective.ALL_TO_ALL, "relay", 0, 3, 0, 3, 3, (Ref(Buffer.INPUT, 0),), steps, even=True)


@pytest.mark.parametrize("count", [0, 1, 5, 200_000])
def test_blocks_of_other_ranks_travel_through_scratch_where_all_are_of_one_size(count):
    source, theirs = np.arange(3 * count), -np.arange(3 * count)
    offsets = (0, count, 2 * count, 3 * count)

    def pieces(data: np.ndarray) -> list[bytes]:
        return [data[start : start + PIECE // 8].tobytes() for start in range(0, len(data), PIECE // 8)] or [b""]

    transport = PlayedTransport({2: [*pieces(theirs[:count]), *pieces(theirs[count:])]})
    target = np.full(3 * count, 7)
    run(transport, relay(), offsets, source, target)
    sent = np.frombuffer(b"".join(payload for _, _, payload in transport.sent), np.int64)
    assert sent.tolist() == [*theirs[:count].tolist(), *source[count : 2 * count].tolist()]
    assert target.tolist() == [*theirs[count:].tolist(), *theirs[:count].tolist()]


def test_blocks_of_other_sizes_do_not_fit_a_schedule_that_wants_even_ones():
    for offsets in (((0, 1, 2, 4), (0, 1, 2, 3)), ((0, 1, 2, 3), (0, 2, 4, 6)), ((0, 1, 3, 4), (0, 1, 3, 4))):
        with pytest.raises(InternalError, match="relay is for blocks of one size"):
            compiled(relay(), *offsets)


def test_a_run_leaves_an_executable_as_it_was():
    made = schedule(
        Send(1, IN),
        RecvReduce(2, OUT, IN),
        Send(1, OUT, after=(1,)),
        Copy(SCRATCH, OUT, after=(1,)),
        RecvReduce(2, OUT, SCRATCH, after=(2, 3)),
        Send(1, OUT, after=(4,)),
        scratch=(IN,),
    )
    for seed in range(10):
        transport = PlayedTransport({2: [np.array([1.0, 2.0]).tobytes()] * 12}, random.Random(seed))
        source, target = np.array([10.0, 20.0]), np.zeros(2)
        executable = ready(transport, made, (0, 2), source.dtype, SUBTRACT)
        for sequence in range(6):
            executable.run(source, target, sequence, lambda: Waiter(Deadline(5), None))
            assert target.tolist() == [8.0, 16.0]
        for peer, messages in ((1, transport.sent), (2, transport.received)):
            headers = [parse_header(packed) for _, packed, _ in messages]
            each = len(messages) // 6
            assert [(h.sequence, h.index) for h in headers if h] == [(s, i) for s in range(6) for i in range(each)], peer


def test_a_program_is_a_list_of_plain_steps() -> None:
    """As an interpreter would read it: what stands in the table of `oneaccord.calls.engine.program`."""
    made = schedule(
        Send(1, IN),
        Recv(1, SCRATCH),
        Reduce(OUT, SCRATCH, IN, after=(1,)),
        RecvReduce(2, OUT, OUT, after=(2,)),
        Copy(SCRATCH, OUT, after=(3,)),
        Send(2, OUT, after=(3,)),
        Recv(1, None, after=(0,)),
        scratch=(IN,),
    )
    program = compiled(made, (0, 3), reduction=SUBTRACT, slot_bytes=24, channel=6, shape=(3, 1))
    assert {type(field) for step in program.steps for field in step} == {int, bytes}
    assert [(step.kind, step.peer, step.nbytes, step[5:]) for step in program.steps] == [
        (SEND, 1, 24, (0, 0, 0)),
        (RECV_LEFT, 1, 24, (0, 1, 0)),  # what came is reduced where it lies
        (RECV_RIGHT, 2, 24, (1, 1, 0)),
        (SEND, 2, 24, (1, 0, 0)),
        (COPY, -1, 0, (1, 2, 0)),
        (RECV, 1, 0, (0, 0, 0)),
    ]
    assert (program.regions, program.shape, program.work_bytes) == (((2, 0, 3),), (3, 1), 24)
    for step in program.steps:
        if step.peer >= 0:
            header = parse_header(step.head + (41).to_bytes(8, "little") + step.tail)
            assert header is not None
            sender = 0 if step.kind == SEND else step.peer
            assert (header.sender, header.sequence, header.channel, header.nbytes) == (sender, 41, 6, step.nbytes)
    long = compiled(made, (0, 3), reduction=SUBTRACT, slot_bytes=23, shape=(3, 1))
    assert [(step.kind, step.peer, step.first) for step in long.steps] == [
        (LONG_SEND, 1, 0),
        (LONG_LEFT, 1, 0),
        (LONG_RIGHT, 2, 1),
        (LONG_SEND, 2, 1),
        (COPY, -1, 1),
        (WAIT, 1, 1),  # what comes after a long send waits for its end
        (RECV, 1, 0),
    ]
    flat = compiled(made, (0, 3), reduction=SUBTRACT)
    assert (flat.shape, flat.regions) == (None, ((2, 0, 3), (0, 0, 3), (1, 0, 3)))


@pytest.mark.parametrize(("collective", "piece"), [(Collective.ALL_REDUCE, REDUCE_PIECE), (Collective.BROADCAST, PIECE)])
def test_what_would_be_cut_is_a_long_message_in_the_largest_mailbox(collective: Collective, piece: int) -> None:
    """Who has the larger slots cannot be seen at the other end: whether a message is cut depends on the call alone."""
    for count, kind in ((piece // 8, SEND), (piece // 8 + 1, LONG_SEND)):
        program = compiled(schedule(Send(1, IN), collective=collective), (0, count), slot_bytes=1 << 30)
        assert ([step.kind for step in program.steps], program.piece_bytes) == ([kind], piece)
    whole = compiled(schedule(Send(1, IN), collective=collective), (0, piece // 8 + 1), slot_bytes=1 << 30, streams=True)
    assert ([step.kind for step in whole.steps], whole.piece_bytes) == ([SEND], 0)


@pytest.mark.parametrize("streams", [False, True])
def test_pieces_of_structured_elements_are_whole_elements(streams: bool) -> None:
    dtype = np.dtype([("value", "<f8"), ("where", "<i4")])
    count, step = 50_000, REDUCE_PIECE // 12
    source, theirs = np.zeros(count, dtype), np.zeros(count, dtype)
    source["where"], theirs["where"] = np.arange(count), np.arange(count)[::-1]

    def larger(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        out[...] = np.where(left["where"] >= right["where"], left, right)

    transport = PlayedTransport({1: [theirs[start : start + step].tobytes() for start in range(0, count, step)]})
    transport.streams = streams
    target = np.zeros(count, dtype)
    run(
        transport, schedule(RecvReduce(1, OUT, IN)), (0, count), source, target, Reduction("larger", 254, larger, is_mean=False)
    )
    assert (target["where"] == np.maximum(source["where"], theirs["where"])).all()


def test_the_next_piece_is_on_its_way_while_one_is_reduced() -> None:
    log: list[str] = []

    class Logging(PlayedTransport):
        def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
            log.append("receive")
            return super().recv(peer, header, payload)

    def add(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        log.append("reduce")
        np.add(left, right, out=out)

    for order in (None, random.Random(0)):
        log.clear()
        step = REDUCE_PIECE // 8
        transport = Logging({1: [np.full(step, float(number)).tobytes() for number in range(4)]}, order)
        target = np.zeros(4 * step)
        made = schedule(RecvReduce(1, OUT, IN))
        run(transport, made, (0, 4 * step), np.ones(4 * step), target, Reduction("add", 254, add, is_mean=False))
        assert log == ["receive", "receive", "reduce", "receive", "reduce", "receive", "reduce", "reduce"]
        assert (target.reshape(4, -1) == np.arange(1.0, 5.0)[:, None]).all()


def test_what_comes_is_kept_where_a_later_step_reads_it_again() -> None:
    first, second = Ref(Buffer.OUTPUT, 0), Ref(Buffer.OUTPUT, 1)
    made = schedule(
        Recv(1, SCRATCH), Reduce(first, SCRATCH, IN, after=(0,)), Copy(second, SCRATCH, after=(1,)), chunks=2, scratch=(IN,)
    )
    target = np.zeros(2)
    run(PlayedTransport({1: [np.array([9.0]).tobytes()]}), made, (0, 1, 2), np.array([2.0, 0.0]), target, SUBTRACT)
    assert target.tolist() == [7.0, 9.0]
    assert [step.kind for step in compiled(made, (0, 1, 2), slot_bytes=8).steps] == [RECV, REDUCE, COPY]


def test_a_deadline_ends_a_message_of_many_pieces_although_each_of_them_moves() -> None:
    class Slow(PlayedTransport):
        def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
            super().wait(transfers, deadline)
            deadline.at = 0.0

    transport = Slow(order=random.Random(0))
    with pytest.raises(Overdue) as caught:
        run(
            transport,
            schedule(Send(1, IN)),
            (0, 1 << 18),
            np.zeros(1 << 18),
            np.zeros(1 << 18),
            waiter=Waiter(Deadline(5), None),
        )
    assert (caught.value.peers, len(transport.sent)) == ([1], 1)

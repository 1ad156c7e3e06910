"""Right schedules with something changed: what the verifier lets pass is right in every run, and what it calls wrong goes wrong.

The runs here know nothing of the verifier: a second opinion on the rules of `oneaccord.schedule.steps`. Steps take time, element
by element, and whatever the rules allow to happen at once is mixed at random.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES, Contract
from oneaccord.schedule.proof.verify import OrderError, ScheduleDeadlockError, ScheduleError, WrongResultError, verify
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step

Value = Any
"""``(rank, piece, number)`` for an element of the input, ``("op", left, right)``, None for what nobody has written."""

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH


class Stuck(Exception):
    """No step can go on, and not all have finished."""


class Rank:
    """One rank's memory: for each chunk the places of its elements, which in place two chunks may share."""

    def __init__(self, schedule: Schedule, contract: Contract, sizes: dict[Any, int], *, in_place: bool) -> None:
        self.schedule = schedule
        rank = schedule.rank
        pieces = {INPUT: contract.input_pieces(rank), OUTPUT: contract.output_pieces(rank)}
        pieces[SCRATCH] = tuple(
            pieces[run.buffer][run.chunk + offset] for run in schedule.scratch for offset in range(run.count)
        )
        aliases = contract.aliases(rank) if in_place else {}
        self.values: list[Value] = []
        self.places: dict[Buffer, list[list[int]]] = {}
        for buffer in (OUTPUT, INPUT, SCRATCH):
            self.places[buffer] = []
            for chunk, piece in enumerate(pieces[buffer]):
                if buffer is INPUT and chunk in aliases:
                    self.places[buffer].append(self.places[OUTPUT][aliases[chunk]])
                    continue
                size = sizes[contract.extent(piece)]
                self.places[buffer].append(list(range(len(self.values), len(self.values) + size)))
                self.values += [None] * size
        if contract.holds_input(rank):
            for places, piece in zip(self.places[INPUT], pieces[INPUT], strict=True):
                for number, place in enumerate(places):
                    self.values[place] = (rank, piece, number)

    def at(self, ref: Ref | None) -> list[int]:
        """Return the places of a reference."""
        if ref is None:
            return []
        return [place for places in self.places[ref.buffer][ref.chunk : ref.chunk + ref.count] for place in places]


def combined(left: Value, right: Value) -> Value:
    return None if left is None or right is None else ("op", left, right)


class World:
    """All ranks, and what each has done."""

    def __init__(
        self, schedules: Sequence[Schedule], sizes: dict[Any, int], in_place: Sequence[bool], draw: random.Random, eager: float
    ) -> None:
        contract = Contract.of(schedules[0])
        self.ranks = [Rank(one, contract, sizes, in_place=in_place[one.rank]) for one in schedules]
        self.draw = draw
        self.eager = eager
        self.done: list[set[int]] = [set() for _ in schedules]
        self.started: list[set[int]] = [set() for _ in schedules]
        # For each pair of ranks their sends and receives, in order, and what was sent before its receive had started.
        self.sends: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.receives: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.wire: dict[tuple[int, int], list[list[Value]]] = defaultdict(list)
        self.posted: set[tuple[int, int]] = set()
        for one in schedules:
            for index, step in enumerate(one.steps):
                if isinstance(step, Send):
                    self.sends[one.rank, step.peer].append(index)
                    if draw.random() < eager:
                        self.posted.add((one.rank, index))
                elif isinstance(step, Recv | RecvReduce):
                    self.receives[step.peer, one.rank].append(index)
        self.waiting = [[index for index, step in enumerate(one.steps) if isinstance(step, Copy | Reduce)] for one in schedules]

    def run(self, ranks: Sequence[int] | None = None) -> None:
        """Run all steps, or those of some ranks until nothing goes on."""
        chosen = set(range(len(self.ranks))) if ranks is None else set(ranks)
        active: list[Iterator[None]] = []
        while True:
            starts = list(self._starts(chosen))
            if not starts and not active:
                break
            number = self.draw.randrange(len(starts) + len(active))
            if number < len(starts):
                active.append(starts[number])
            # Some steps go on for a while, and some wait for long.
            one = active[-1 if number < len(starts) else number - len(starts)]
            for _ in range(self.draw.choice((1, 1, 2, 3, 8))):
                if next(one, StopIteration) is StopIteration:
                    active.remove(one)
                    break
        if ranks is None and not all(map(self.finished, chosen)):
            raise Stuck

    def finished(self, rank: int) -> bool:
        return len(self.done[rank]) == len(self.ranks[rank].schedule.steps)

    def _free(self, rank: int, index: int) -> bool:
        return index not in self.started[rank] and self.done[rank].issuperset(self.ranks[rank].schedule.steps[index].after)

    def _head(self, rank: int, queue: list[int]) -> int | None:
        """Return the first step of a queue that has not finished, if it may start now."""
        while queue and queue[0] in self.done[rank]:
            del queue[0]
        return queue[0] if queue and self._free(rank, queue[0]) else None

    def _starts(self, chosen: set[int]) -> Iterator[Iterator[None]]:
        """Yield the steps that may start now; nothing of them happens before they are asked to go on."""
        for rank in chosen:
            self.waiting[rank] = [index for index in self.waiting[rank] if index not in self.started[rank]]
            for index in self.waiting[rank]:
                if self._free(rank, index):
                    yield self._local(rank, index)
        for (source, target), queue in self.sends.items():
            send = self._head(source, queue) if source in chosen else None
            receive = self._head(target, self.receives[source, target]) if target in chosen else None
            if receive is not None and self.wire[source, target]:
                yield self._take(source, target, receive)
            elif send is not None and (source, send) in self.posted:
                yield self._post(source, send, target)
            elif send is not None and receive is not None:
                yield self._meet(source, send, target, receive)

    def _local(self, rank: int, index: int) -> Iterator[None]:
        mine, step = self.ranks[rank], self.ranks[rank].schedule.steps[index]
        self.started[rank].add(index)
        yield
        assert isinstance(step, Copy | Reduce)
        targets = mine.at(step.target)
        first, second = (mine.at(step.source),) * 2 if isinstance(step, Copy) else (mine.at(step.left), mine.at(step.right))
        assert len(targets) == len(first) == len(second)
        if not (isinstance(step, Copy) and first == targets):
            for number in self.draw.sample(range(len(targets)), len(targets)):
                left, right = mine.values[first[number]], mine.values[second[number]]
                yield
                mine.values[targets[number]] = left if isinstance(step, Copy) else combined(left, right)
                yield
        self.done[rank].add(index)

    def _read(self, rank: int, index: int, found: list[Value]) -> Iterator[None]:
        """Read what a send sends, bit by bit."""
        step = self.ranks[rank].schedule.steps[index]
        assert isinstance(step, Send)
        for place in self.ranks[rank].at(step.source):
            found.append(self.ranks[rank].values[place])
            yield

    def _write(self, rank: int, index: int, came: list[Value]) -> Iterator[None]:
        mine, step = self.ranks[rank], self.ranks[rank].schedule.steps[index]
        assert isinstance(step, Recv | RecvReduce)
        targets = mine.at(step.target)
        assert len(targets) == len(came)
        operands = mine.at(step.operand) if isinstance(step, RecvReduce) else targets
        for target, operand, value in zip(targets, operands, came, strict=True):
            held = mine.values[operand]
            yield
            if isinstance(step, RecvReduce):
                mine.values[target] = combined(value, held) if step.incoming_first else combined(held, value)
            else:
                mine.values[target] = value
            yield
        self.done[rank].add(index)

    def _meet(self, source: int, send: int, target: int, receive: int) -> Iterator[None]:
        self.started[source].add(send)
        self.started[target].add(receive)
        came: list[Value] = []
        yield from self._read(source, send, came)
        writing = self._write(target, receive, came)
        for _ in range(self.draw.randrange(4)):
            next(writing, None)
            yield
        self.done[source].add(send)
        for _ in writing:
            yield

    def _post(self, source: int, send: int, target: int) -> Iterator[None]:
        self.started[source].add(send)
        came: list[Value] = []
        yield from self._read(source, send, came)
        self.wire[source, target].append(came)
        self.done[source].add(send)

    def _take(self, source: int, target: int, receive: int) -> Iterator[None]:
        self.started[target].add(receive)
        yield
        yield from self._write(target, receive, self.wire[source, target].pop(0))


def outcome(
    schedules: Sequence[Schedule], draw: random.Random, in_place: Sequence[bool], eager: float
) -> dict[tuple[int, int], list[Value]]:
    """Return what each output chunk holds after one run, each of whose elements keeps its number out of the way."""
    contract = Contract.of(schedules[0])
    pieces = [
        piece for rank in range(len(schedules)) for piece in (*contract.input_pieces(rank), *contract.output_pieces(rank))
    ]
    sizes = {extent: draw.choice((1, 1, 2)) for extent in sorted({contract.extent(piece) for piece in pieces})}
    world = World(schedules, sizes, in_place, draw, eager)
    world.run()
    return {
        (rank, chunk): [mine.values[place] for place in places]
        for rank, mine in enumerate(world.ranks)
        if contract.holds_output(rank)
        for chunk, places in enumerate(mine.places[OUTPUT])
    }


def leaves(value: Value) -> Iterator[Value]:
    if value is not None and value[0] == "op":
        yield from leaves(value[1])
        yield from leaves(value[2])
    else:
        yield value


def shape(value: Value) -> Value:
    """Return an expression over ranks alone."""
    return value and (("op", shape(value[1]), shape(value[2])) if value[0] == "op" else value[0])


def is_right(schedules: Sequence[Schedule], outcome: dict[tuple[int, int], list[Value]]) -> bool:
    """Tell whether every output element holds what the collective promises."""
    contract = Contract.of(schedules[0])
    for (rank, chunk), values in outcome.items():
        piece = contract.output_pieces(rank)[chunk]
        for number, value in enumerate(values):
            expected = [(other, piece, number) for other in contract.contributors(piece, rank)]
            is_prefix = contract.promise.behind is not None  # which is combined in the order of ranks
            if (is_prefix and list(leaves(value)) != expected) or Counter(leaves(value)) != Counter(expected):
                return False
    return True


def shapes(schedules: Sequence[Schedule], outcome: dict[tuple[int, int], list[Value]]) -> dict[Any, set[Value]]:
    """Return the expressions of each result; of an all_reduce, those of a chunk on all ranks together."""
    alike = schedules[0].collective is Collective.ALL_REDUCE
    found: dict[Any, set[Value]] = defaultdict(set)
    for (rank, chunk), values in outcome.items():
        found[None if alike else rank, chunk] |= {shape(value) for value in values}
    return found


def somebody_passes_early(schedules: Sequence[Schedule], draw: random.Random) -> bool:
    """Tell whether a rank can leave a barrier while another has not come, where every message leaves at once."""
    for absent in range(len(schedules)):
        world = World(schedules, {}, [False] * len(schedules), draw, 1.0)
        others = [rank for rank in range(len(schedules)) if rank != absent]
        world.run(others)
        if any(world.finished(rank) for rank in others):
            return True
    return False


def in_place_or_not(size: int, draw: random.Random) -> list[list[bool]]:
    """Return who calls in place: nobody, everybody, and some."""
    return [[False] * size, [True] * size, *([draw.random() < 0.5 for _ in range(size)] for _ in range(2))]


def confirm_right(schedules: Sequence[Schedule], draw: random.Random) -> None:
    seen: dict[Any, set[Value]] = defaultdict(set)
    for in_place in in_place_or_not(len(schedules), draw):
        for eager in (0.0, 0.4):
            got = outcome(schedules, draw, in_place, eager)
            assert is_right(schedules, got), (in_place, got)
            for key, found in shapes(schedules, got).items():
                seen[key] |= found
    assert all(len(found) <= 1 for found in seen.values()), "the bits of a result differ from rank to rank or run to run"
    if schedules[0].collective is Collective.BARRIER:
        assert not somebody_passes_early(schedules, draw)


def confirm_wrong(schedules: Sequence[Schedule], error: ScheduleError, draw: random.Random) -> None:
    """Check that what the verifier found can be seen; an overlap or undefined read may happen to do no harm."""
    size = len(schedules)
    if isinstance(error, ScheduleDeadlockError):
        with pytest.raises(Stuck):
            outcome(schedules, draw, [False] * size, 0.0)
    elif isinstance(error, WrongResultError) and schedules[0].collective is Collective.BARRIER:
        assert somebody_passes_early(schedules, draw)
    elif isinstance(error, WrongResultError):
        assert not all(is_right(schedules, outcome(schedules, draw, [same] * size, 0.0)) for same in (False, True))
    elif isinstance(error, OrderError):
        seen: dict[Any, set[Value]] = defaultdict(set)
        right = True
        for in_place in (*in_place_or_not(size, draw), *([rank == one for rank in range(size)] for one in range(size))):
            got = outcome(schedules, draw, in_place, 0.0)
            right = right and is_right(schedules, got)
            for key, found in shapes(schedules, got).items():
                seen[key] |= found
        # What depends on being in place need not do so in the end.
        assert not right or any(len(found) > 1 for found in seen.values()) or "in place" in str(error)


# Mutations


def without(steps: Sequence[Step], index: int) -> tuple[Step, ...]:
    """Return steps without one of them; those that waited for it wait for what it waited for."""
    gone = steps[index].after

    def moved(after: tuple[int, ...]) -> tuple[int, ...]:
        kept = [number for old in after for number in (gone if old == index else (old,))]
        return tuple(dict.fromkeys(number - (number > index) for number in kept))

    return tuple(replace(step, after=moved(step.after)) for number, step in enumerate(steps) if number != index)


def without_message(schedules: Sequence[Schedule], rank: int, index: int) -> list[Schedule]:
    """Return schedules without a send and its receive."""
    send = schedules[rank].steps[index]
    assert isinstance(send, Send)
    number = sum(isinstance(step, Send) and step.peer == send.peer for step in schedules[rank].steps[:index])
    made = list(schedules)
    made[rank] = replace(made[rank], steps=without(made[rank].steps, index))
    if send.peer < len(made) and send.peer != rank:
        steps = made[send.peer].steps
        receives = [at for at, step in enumerate(steps) if isinstance(step, Recv | RecvReduce) and step.peer == rank]
        if number < len(receives):
            made[send.peer] = replace(made[send.peer], steps=without(steps, receives[number]))
    return made


def reordered(steps: Sequence[Step], order: Sequence[int]) -> tuple[Step, ...]:
    """Return steps in another order of the list; each still comes after the same steps."""
    place = {old: new for new, old in enumerate(order)}
    return tuple(replace(steps[old], after=tuple(place[number] for number in steps[old].after)) for old in order)


def refs_of(step: Step) -> list[str]:
    return [name for name in ("source", "target", "operand", "left", "right") if isinstance(getattr(step, name, None), Ref)]


def changed_ref(draw: random.Random, schedule: Schedule, ref: Ref) -> Ref:
    """Return another reference; most often one that the schedule uses elsewhere."""
    kind = draw.randrange(8)
    if kind > 3:
        used: list[Ref] = [getattr(step, name) for step in schedule.steps for name in refs_of(step)]
        return draw.choice(used)
    if kind == 0:
        return replace(ref, chunk=ref.chunk + draw.choice((-2, -1, 1, 2)))
    if kind == 1:
        return replace(ref, count=max(0, ref.count + draw.choice((-1, 1))))
    if kind == 2:
        return replace(ref, buffer=draw.choice(list(Buffer)))
    return Ref(draw.choice(list(Buffer)), draw.randrange(4), ref.count)


def changed_step(draw: random.Random, schedule: Schedule, index: int) -> Step:
    step, size = schedule.steps[index], schedule.size
    kind = draw.randrange(9)
    names = refs_of(step)
    if kind == 0 and not isinstance(step, Copy | Reduce):
        return replace(step, peer=(step.peer + draw.randrange(1, size + 1)) % (size + 1))
    if kind == 5 and isinstance(step, Reduce):
        return replace(step, left=step.right, right=step.left)
    if kind == 1 and isinstance(step, RecvReduce):
        return replace(step, incoming_first=not step.incoming_first)
    if kind == 2 and step.after:
        return replace(step, after=tuple(number for number in step.after if number != draw.choice(step.after)))
    if kind == 3 and index:
        return replace(step, after=tuple(sorted({*step.after, draw.randrange(index)})))
    if kind == 6:
        match step:
            case RecvReduce(peer, target, _, _, after):
                return Recv(peer, target, after)
            case Recv(peer, Ref() as target, after):
                return RecvReduce(peer, target, target, draw.random() < 0.5, after)
            case Reduce(target, left, right, after):
                others: list[Step] = [Copy(target, left, after), Copy(target, right, after), Reduce(target, right, left, after)]
                return draw.choice(others)
            case Copy(target, source, after):
                return Reduce(target, source, target, after)
            case Send() | Recv():
                return Send(step.peer, None, step.after)
    if names:
        name = draw.choice(names)
        changed: dict[str, Any] = {name: changed_ref(draw, schedule, getattr(step, name))}
        return replace(step, **changed)
    return replace(step, after=())


def mutant(draw: random.Random, schedules: Sequence[Schedule]) -> list[Schedule]:
    """Return schedules with one thing changed."""
    rank = draw.randrange(len(schedules))
    schedule = schedules[rank]
    steps = list(schedule.steps)
    kind = draw.randrange(16)
    if not steps or kind == 0:
        change: dict[str, Any] = draw.choice(
            [
                {"root": schedule.root + draw.choice((-1, 1))},
                {"input_chunks": schedule.input_chunks + draw.choice((-1, 1))},
                {"output_chunks": schedule.output_chunks + draw.choice((-1, 1))},
                {"even": not schedule.even},
                {"scratch": schedule.scratch[1:]},
                {"scratch": (*schedule.scratch, Ref(INPUT, 0))},
                {"scratch": schedule.scratch[::-1]},
                {"rank": (rank + 1) % len(schedules)},
                {"collective": draw.choice(list(Collective))},
            ]
        )
        if draw.random() < 0.5 and "rank" not in change:
            return [replace(one, **change) for one in schedules]
        return [replace(one, **change) if one is schedule else one for one in schedules]
    index = draw.randrange(len(steps))
    other = draw.randrange(len(steps))
    if kind <= 2:
        made: tuple[Step, ...] = without(steps, index)
    elif kind == 3:
        order = list(range(len(steps)))
        order[index], order[other] = order[other], order[index]
        made = reordered(steps, order)
    elif kind == 4:
        order = list(range(len(steps)))
        order.insert(other, order.pop(index))
        made = reordered(steps, order)
    elif kind == 5:
        steps[index], steps[other] = steps[other], steps[index]
        made = tuple(steps)
    elif kind == 6:
        made = (*steps, replace(steps[index], after=tuple(sorted({*steps[index].after, other, len(steps) - 1}))))
    elif kind == 7:
        # Both ends of a message are lost, so that its absence alone is the fault.
        peers = [number for number, step in enumerate(steps) if isinstance(step, Send)]
        if peers:
            return without_message(schedules, rank, draw.choice(peers))
        made = without(steps, index)
    elif kind == 8:
        made = tuple(
            replace(step, after=tuple(range(number))) if number == index else step for number, step in enumerate(steps)
        )
    else:
        steps[index] = changed_step(draw, schedule, index)
        made = tuple(steps)
    return [replace(one, steps=made) if one is schedule else one for one in schedules]


def made_by(algorithm: Algorithm, draw: random.Random) -> list[Schedule]:
    size, segments = draw.choice((2, 3, 3, 4, 4, 5)), draw.choice((1, 1, 1, 2))
    per_host = draw.choice([count for count in range(1, size + 1) if size % count == 0])
    promise = PROMISES[algorithm.collective]
    root = draw.randrange(size) if promise.input_on_root or promise.output_on_root else 0
    return [algorithm.schedule(rank, size, root, segments, per_host) for rank in range(size)]


@pytest.mark.parametrize("algorithm", BUILTIN, ids=[f"{one.collective.value}-{one.name}" for one in BUILTIN])
@settings(max_examples=settings().max_examples // 3)
@given(seed=st.integers(0, 2**63), changes=st.sampled_from([0, 1, 1, 1, 1, 2, 3]))
def test_what_the_verifier_lets_pass_is_right_in_every_run_and_what_it_calls_wrong_goes_wrong(
    algorithm: Algorithm, seed: int, changes: int
) -> None:
    draw = random.Random(seed)
    schedules: list[Schedule] = made_by(algorithm, draw)
    for _ in range(changes):
        schedules = mutant(draw, schedules)
    try:
        verify(schedules)
    except ScheduleError as error:
        event(type(error).__name__)
        assert changes
        confirm_wrong(schedules, error, draw)
    else:
        event("right")
        confirm_right(schedules, draw)


IN, OUT, TMP, MORE = Ref(INPUT, 0), Ref(OUTPUT, 0), Ref(SCRATCH, 0), Ref(SCRATCH, 1)


def handmade(
    collective: Collective, *steps: tuple[Step, ...], chunks: tuple[int, int] = (1, 1), even: bool = False
) -> list[Schedule]:
    """Return small schedules, with a little scratch memory to go wrong in."""
    scratch = () if collective is Collective.BARRIER else (OUT, OUT)
    return [
        Schedule(collective, "handmade", rank, len(steps), 0, *chunks, scratch, mine, even) for rank, mine in enumerate(steps)
    ]


def exchange(peer: int) -> tuple[Step, ...]:
    left, right = (IN, TMP) if peer else (TMP, IN)
    return (Send(peer, IN), Recv(peer, TMP), Reduce(OUT, left, right, (0, 1)))


def changed_roles(peer: int) -> tuple[Step, ...]:
    """Right if all ranks call in place or none does, and wrong otherwise."""
    left, right = (IN, MORE) if peer else (MORE, IN)
    first = (Send(peer, IN), Recv(peer, TMP), Copy(OUT, TMP, (0, 1)))
    return (*first, Send(peer, IN, (2,)), Recv(peer, MORE), Reduce(OUT, left, right, (2, 3, 4)))


TOKEN = (
    (Send(1, None), Recv(2, None), Send(1, None, (1,))),
    (Recv(0, None), Send(2, None, (0,)), Recv(0, None), Send(2, None, (2,))),
    (Recv(1, None), Send(0, None, (0,)), Recv(1, None)),
)
TINY: dict[str, list[Schedule]] = {
    "exchange": handmade(Collective.ALL_REDUCE, exchange(1), exchange(0)),
    "changed roles": handmade(Collective.ALL_REDUCE, changed_roles(1), changed_roles(0)),
    "reduce": handmade(
        Collective.REDUCE,
        (Copy(OUT, IN), RecvReduce(1, OUT, OUT, after=(0,)), RecvReduce(2, OUT, OUT, after=(1,))),
        (Send(0, IN),),
        (Copy(TMP, IN), Send(0, TMP, (0,))),
    ),
    "token": handmade(Collective.BARRIER, *TOKEN, chunks=(0, 0)),
    "gather": handmade(
        Collective.ALL_GATHER,
        (Copy(OUT, IN), Send(1, IN), Recv(1, Ref(OUTPUT, 1))),
        (Copy(Ref(OUTPUT, 1), IN), Send(0, IN), Recv(0, OUT)),
        chunks=(1, 2),
        even=True,
    ),
    "reduce_scatter": handmade(
        Collective.REDUCE_SCATTER,
        (Send(1, Ref(INPUT, 1)), RecvReduce(1, OUT, IN)),
        (Send(0, IN), RecvReduce(0, OUT, Ref(INPUT, 1), incoming_first=True)),
        chunks=(2, 1),
        even=True,
    ),
    "scatter": handmade(Collective.SCATTER, (Copy(OUT, IN), Send(1, Ref(INPUT, 1))), (Recv(0, OUT),), chunks=(2, 1), even=True),
    "all_to_all": handmade(
        Collective.ALL_TO_ALL,
        (Copy(OUT, IN), Send(1, Ref(INPUT, 1)), Recv(1, Ref(OUTPUT, 1))),
        (Copy(Ref(OUTPUT, 1), Ref(INPUT, 1)), Send(0, IN), Recv(0, OUT)),
        chunks=(2, 2),
        even=True,
    ),
}


@pytest.mark.parametrize("name", list(TINY))
@given(seed=st.integers(0, 2**63), changes=st.integers(0, 5))
def test_tiny_schedules_with_much_changed_are_judged_as_their_runs_show(name: str, seed: int, changes: int) -> None:
    draw = random.Random(seed)
    schedules = TINY[name]
    for _ in range(changes):
        schedules = mutant(draw, schedules)
    try:
        verify(schedules)
    except ScheduleError as error:
        event(type(error).__name__)
        confirm_wrong(schedules, error, draw)
    else:
        event("right")
        confirm_right(schedules, draw)

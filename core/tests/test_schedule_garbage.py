"""Whatever is given to the verifier, it finds words for it: no other error than its own, and no end of time or memory."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oneaccord.schedule.algorithms import bruck, doubling, ring, tree
from oneaccord.schedule.proof.plain import MAX_CHUNKS, MAX_STEPS
from oneaccord.schedule.proof.verify import MalformedScheduleError, ScheduleError, WrongResultError, verify
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH
IN, OUT, TMP = Ref(INPUT, 0), Ref(OUTPUT, 0), Ref(SCRATCH, 0)


def world(*steps: tuple[Step, ...], chunks: int = 1) -> list[Schedule]:
    """Return an all_reduce with these steps of each rank."""
    size = len(steps)
    return [
        Schedule(Collective.ALL_REDUCE, "handmade", rank, size, 0, chunks, chunks, (), mine) for rank, mine in enumerate(steps)
    ]


def refused(schedules: Any, words: str) -> None:
    with pytest.raises(MalformedScheduleError, match=words):
        verify(schedules)


class Liar(int):
    """An int that is never twice the same."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = int.__hash__


class Unspeakable:
    """Something that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


GARBAGE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 10**18, -(10**18), 10**30, -(10**5000), 1.0, float("nan"), "0", b"0", (), (0,), [0], (0, 0), (-1,),
    (True,), (1.5,), ("0",), {}, object(), Liar(0), Unspeakable(), np.int64(0), np.arange(3), Ref, IN, OUT, TMP, Ref(INPUT, 0, 0), Ref(INPUT, 0, -1),
    Ref(INPUT, -1), Ref(INPUT, 5), Ref(INPUT, 0, 10**9), Ref(INPUT, 10**30), Ref(INPUT, 0, 10**5000), Ref("input", 0), Ref(INPUT, True), Ref(INPUT, 0.0),  # type: ignore[arg-type]
    Ref(Unspeakable(), 0),  # type: ignore[arg-type]
    Send, Send(1, IN), Copy(OUT, IN), (Send(1, IN),) * 3, Collective.REDUCE,
    Collective.BARRIER, "all_reduce", INPUT, iter(()), lambda: None, (Unspeakable(),), (IN,), (TMP,), (None,),
]  # fmt: skip


def scrambled(data: st.DataObject, thing: Any) -> Any:
    """Return schedules, or a part of one, with something inside replaced by anything."""
    if data.draw(st.booleans()) and data.draw(st.booleans()):
        return GARBAGE[data.draw(st.integers(0, len(GARBAGE) - 1))]
    if isinstance(thing, list | tuple) and thing:
        index = data.draw(st.integers(0, len(thing) - 1))
        changed = [*thing[:index], scrambled(data, thing[index]), *thing[index + 1 :]]
        return type(thing)(changed)
    if isinstance(thing, Schedule | Send | Recv | RecvReduce | Reduce | Copy | Ref):
        name = data.draw(st.sampled_from([field.name for field in fields(thing)]))
        return replace(thing, **{name: scrambled(data, getattr(thing, name))})
    return GARBAGE[data.draw(st.integers(0, len(GARBAGE) - 1))]


@settings(max_examples=4 * settings().max_examples)
@given(data=st.data())
def test_whatever_is_given_the_verifier_finds_words(data: st.DataObject) -> None:
    made: Any = data.draw(
        st.sampled_from(
            [
                [doubling.all_reduce(rank, 3) for rank in range(3)],
                [tree.gather(rank, 3, 1) for rank in range(3)],
                [ring.reduce_scatter(rank, 2) for rank in range(2)],
                [bruck.all_to_all(rank, 3) for rank in range(3)],
                [doubling.barrier(rank, 2) for rank in range(2)],
            ]
        )
    )
    for _ in range(data.draw(st.integers(1, 3))):
        made = scrambled(data, made)
    words, report = None, None
    try:
        report = verify(made)
    except ScheduleError as error:
        words = str(error)
    assert (report is None) == (words is not None)
    assert words is None or 10 < len(words) < 2000


@pytest.mark.parametrize(
    "given", [None, 3, "ab", {}, {0: 1}, range(3), iter(()), (None,), [[]], Unspeakable()], ids=lambda one: type(one).__name__
)
def test_what_is_no_list_of_schedules_is_refused(given: Any) -> None:
    refused(given, "expected a (list of schedules|Schedule)")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": False}, "rank 0: its rank is False; expected an int"),
        ({"rank": 0.0}, "rank 0: its rank is 0.0; expected an int"),
        ({"size": np.int64(1)}, "rank 0: its size is .*1.*; expected an int"),
        ({"root": None}, "rank 0: its root is None; expected an int"),
        ({"input_chunks": 10**30}, "rank 0: its input_chunks is 10{30}; expected an int"),
        ({"output_chunks": 10**5000}, "rank 0: its output_chunks is some int; expected an int"),
        ({"input_chunks": 10**12, "output_chunks": 10**12}, f"more than {MAX_CHUNKS} chunks"),
        ({"input_chunks": -(10**12)}, f"more than {MAX_CHUNKS} chunks"),
        ({"input_chunks": -1, "output_chunks": -1}, "-1 input chunks"),
        ({"collective": "all_reduce"}, "its collective is 'all_reduce'; expected a Collective"),
        ({"algorithm": 7}, "its algorithm is 7; expected a str"),
        ({"even": 1}, "its even is 1; expected a bool"),
        ({"steps": []}, r"its steps is \[\]; expected a tuple"),
        ({"scratch": [IN]}, "its scratch is .*; expected a tuple"),
        ({"scratch": (IN, 3)}, "its scratch run 1 is 3; expected a Ref"),
        ({"scratch": (IN, Ref(INPUT, 0, MAX_CHUNKS))}, f"more than {MAX_CHUNKS} chunks"),
        ({"steps": (Copy(OUT, IN),) * (MAX_STEPS + 1)}, f"it has {MAX_STEPS + 1} steps, and more than {MAX_STEPS} are too many"),
        ({"steps": (Unspeakable(),)}, "rank 0, step 0: it is some Unspeakable; expected a Send"),
        ({"steps": (Send(True, IN),)}, "rank 0, step 0: its peer is True; expected an int"),
        ({"steps": (Send(1, (INPUT, 0)),)}, "rank 0, step 0: its source is .*; expected a Ref of a Buffer and two ints, or None"),  # type: ignore[arg-type]
        ({"steps": (Copy(OUT, IN), Recv(1, Ref("output", 0)))}, "rank 0, step 1: its target is Ref"),  # type: ignore[arg-type]
        ({"steps": (RecvReduce(1, OUT, IN, 1),)}, "rank 0, step 0: its incoming_first is 1; expected a bool"),  # type: ignore[arg-type]
        ({"steps": (RecvReduce(1, OUT, None),)}, "rank 0, step 0: its operand is None"),  # type: ignore[arg-type]
        ({"steps": (Reduce(OUT, IN, 3),)}, "rank 0, step 0: its right is 3"),  # type: ignore[arg-type]
        ({"steps": (Copy(OUT, IN, [0]),)}, r"rank 0, step 0: its after is \[0\]; expected a tuple of ints"),  # type: ignore[arg-type]
        ({"steps": (Copy(OUT, IN), Copy(OUT, IN, (False,)))}, r"rank 0, step 1: its after is \(False,\)"),
        ({"steps": (Copy(OUT, Ref(INPUT, 0, 10**9)),)}, f"more than {MAX_CHUNKS} chunks"),
        ({"steps": (Copy(OUT, Ref(INPUT, 2.0)),)}, "rank 0, step 0: its source is Ref"),  # type: ignore[arg-type]
        ({"steps": (Copy("x" * 500, IN),)}, r"rank 0, step 0: its target is 'x{76}\.\.\.; expected"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_schedule_that_is_no_plain_data_is_refused(change: dict[str, Any], words: str) -> None:
    (right,) = world((Copy(OUT, IN),))
    assert verify([right]).steps >= 0
    with pytest.raises(MalformedScheduleError, match=words) as found:
        verify([replace(right, **change)])
    assert found.value.rank == 0
    if "step " in words:
        assert found.value.step == int(words.split("step ", maxsplit=1)[1].split(":", maxsplit=1)[0])


def test_a_subclass_is_not_what_it_seems() -> None:
    class Moody(Send, frozen=True):
        pass

    schedules = world((Copy(OUT, IN), Moody(1, IN)), (Recv(0, OUT),))
    refused(schedules, "rank 0, step 1: it is .*Moody.*; expected a Send, Recv, RecvReduce, Reduce or Copy")


def test_an_expression_deeper_than_pythons_stack_is_told_in_words() -> None:
    chain: tuple[Step, ...] = (Copy(OUT, IN), *(Reduce(OUT, OUT, IN, (number,)) for number in range(1500)))
    with pytest.raises(WrongResultError, match="of rank 0 1501 times"):
        verify(world(chain))
    doubled: tuple[Step, ...] = (Copy(OUT, IN), *(Reduce(OUT, OUT, OUT, (number,)) for number in range(1500)))
    with pytest.raises(WrongResultError, match="of rank 0 over a million times"):
        verify(world(doubled))


def test_all_of_a_world_of_many_chunks_counts() -> None:
    chunks = MAX_CHUNKS // 8
    step = Copy(Ref(OUTPUT, 0, chunks), Ref(INPUT, 0, chunks))
    schedules = world(*((step,),) * 3, chunks=chunks)
    refused(schedules, f"rank 2: with this schedule, there are more than {MAX_CHUNKS} chunks")

"""Random programs of messages with tags: the same results with the compiled executor and without it, and as MPI's rules say.

One rank's messages alone come to the other, so that these rules leave no choice: each receive, in the order in which they begin, has the first
message that it fits and that no earlier one has.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import must, on_threads

import oneaccord as oa
from oneaccord.api import Group, ThreadWorld
from oneaccord.common.native import native

SIZES = (0, 8, 8, 8, 8, 8, 1240, 1248, 1256, 5000, 65_528, 65_536, 65_544, 600_000)
"""Bytes: less and more than goes into an opening, into a slot, and is sent before its receive is known."""


class Message(NamedTuple):
    """One that a rank sends to the other: how, with which tag, of how many bytes; ``is_object`` instead of an array."""

    how: str
    tag: int
    nbytes: int
    is_object: bool


class Taken(NamedTuple):
    """One that a rank receives: how, from any rank or the other, with any tag or that of the message, into how much more memory than it needs."""

    how: str
    is_from_any: bool
    is_of_any: bool
    spare: int | None


RARELY = st.sampled_from([False, False, False, True])
MESSAGES = st.builds(
    Message, st.sampled_from(["send", "send_async", "buffered", "sync"]), st.integers(0, 3), st.sampled_from(SIZES), RARELY
)
TAKEN = st.builds(
    Taken, st.sampled_from(["recv", "recv_async", "probe", "iprobe", "take"]), RARELY, RARELY, st.sampled_from([None, 0, 24])
)
PLAN = st.lists(st.tuples(MESSAGES, TAKEN, st.integers(0, 1 << 16)), max_size=24)
"""The messages of one rank in order; and in the order in which the other receives, how, and which of the messages left it looks for."""


class Step(NamedTuple):
    """A receive, and the place of the message that it has by MPI's rules."""

    taken: Taken
    tag: Any
    is_object: bool
    place: int


def matched(messages: list[Message], receives: list[tuple[Taken, int]]) -> list[Step]:
    """Return what each receive has: the plain model."""
    left = list(range(len(messages)))
    steps = []
    for taken, choice in receives:
        wanted = messages[left[choice % len(left)]]
        tag: Any = oa.ANY_TAG if taken.is_of_any else wanted.tag
        place = next(each for each in left if taken.is_of_any or messages[each].tag == wanted.tag)
        left.remove(place)
        steps.append(Step(taken, tag, messages[place].is_object, place))
    return steps


def content(rank: int, place: int, message: Message) -> Any:
    values = np.arange(message.nbytes // 8, dtype=np.int64) * (rank + 2) + place
    return {"rank": rank, "place": place, "values": values.tolist()} if message.is_object else values


def exchange(group: Group, own: list[Message], steps: list[Step], theirs: list[Message], *, receives_first: bool) -> list[Any]:
    """Send all messages and make all receives; return what came, with its sender, its tag and its size."""
    other, works = 1 - group.rank, []
    begun: dict[int, Any] = {}

    def receive(step: Step, *, later: bool) -> Any:
        source = oa.ANY if step.taken.is_from_any else other
        nbytes = theirs[step.place].nbytes
        out = None if step.taken.spare is None or step.is_object else np.zeros((nbytes + step.taken.spare) // 8, np.int64)
        if later:
            return (
                group.recv_object_async(source, tag=step.tag)
                if step.is_object
                else group.recv_async(source, tag=step.tag, out=out)
            )
        status = oa.Status()
        if step.taken.how == "take":
            pending = group.take(source, step.tag)
            status = pending.status
            value: Any = pending.recv_object() if step.is_object else pending.recv(out=out)
        else:
            seen = group.probe(source, step.tag) if step.taken.how == "probe" else None
            while step.taken.how == "iprobe" and seen is None:
                seen = group.iprobe(source, step.tag)
                time.sleep(0)
            value = (
                group.recv_object(source, tag=step.tag, status=status)
                if step.is_object
                else group.recv(source, tag=step.tag, out=out, status=status)
            )
            assert seen is None or (seen.source, seen.tag, seen.nbytes) == (status.source, status.tag, status.nbytes)
        return told(value, status)

    def told(value: Any, status: oa.Status) -> Any:
        what = value if isinstance(value, dict) else value.ravel()[: status.count].tolist()
        return what, status.source, status.tag, None if isinstance(value, dict) else status.nbytes

    # Receives that begin before all others: these alone may begin before the messages are sent.
    early = 0
    while receives_first and early < len(steps) and steps[early].taken.how == "recv_async":
        begun[early] = receive(steps[early], later=True)
        early += 1
    for place, message in enumerate(own):
        value, tag = content(group.rank, place, message), message.tag
        later = message.how in ("send_async", "sync") or message.nbytes > 60_000  # what waits for its receive
        mode: Any = {"sync": "sync", "buffered": "buffered"}.get(message.how, "standard")
        if later:
            send: Any = group.send_object_async if message.is_object else group.send_async
            works.append(send(value, other, tag=tag, mode="sync" if mode == "sync" else "standard"))
        else:
            (group.send_object if message.is_object else group.send)(value, other, tag=tag, mode=mode)
    for index, step in enumerate(steps[early:], start=early):
        begun[index] = receive(step, later=step.taken.how == "recv_async")
    oa.wait_all(works)
    found = []
    for index in range(len(steps)):
        each = begun[index]
        if isinstance(each, oa.Work):
            value = each.wait()
            assert each.status is not None
            each = told(value, each.status)
        found.append(each)
    assert group.iprobe() is None
    return found


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@given(
    plans=st.tuples(PLAN, PLAN),
    first=st.booleans(),
    wild=st.booleans(),
    forms=st.sampled_from([(True, True), (False, False), (True, False)]),
)
@settings(deadline=None)
def test_random_programs_receive_what_the_rules_of_mpi_say(
    backend: str, plans: tuple[list[Any], list[Any]], first: bool, wild: bool, forms: tuple[bool, bool]
) -> None:
    if native() is None:
        forms = (False, False)
    messages = [[message for message, _, _ in plan] for plan in plans]
    # Half of the receives begin before the messages are sent, so that these meet receives that wait; without wildcards, C lets them meet.
    receives = [
        [
            (
                Taken(
                    "recv_async" if first and index <= len(plan) // 2 else taken.how,
                    taken.is_from_any and wild,
                    taken.is_of_any and wild,
                    taken.spare,
                ),
                choice,
            )
            for index, (_, taken, choice) in enumerate(plan)
        ]
        for plan in plans
    ]
    steps = [matched(sent, each) for sent, each in zip(messages, receives, strict=True)]
    world = ThreadWorld(2, backend)

    def body(rank: int) -> list[Any]:
        with world.rank(rank), oa.init(config={"native": forms[rank]}, timeout_s=20) as group:
            return exchange(group, messages[rank], steps[1 - rank], messages[1 - rank], receives_first=first)

    found = must(on_threads(body, 2))
    for rank in (0, 1):
        sender = 1 - rank
        for came, step in zip(found[rank], steps[sender], strict=True):
            message = messages[sender][step.place]
            value = content(sender, step.place, message)
            expected = (
                (value, sender, message.tag, None)
                if message.is_object
                else (value.tolist(), sender, message.tag, message.nbytes)
            )
            assert came == expected

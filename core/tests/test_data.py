"""Structs that are dataclasses to those who use them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, fields, is_dataclass, replace

import pytest

from oneaccord.api import Algorithm, Buffer, Collective, Recv, Ref, Schedule, Send

REF = Ref(Buffer.INPUT, 2)
SEND = Send(1, REF, (0,))
SCHEDULE = Schedule(Collective.ALL_REDUCE, "mine", 0, 2, 0, 1, 1, (), (SEND,))


@pytest.mark.parametrize("thing", [REF, SEND, SCHEDULE], ids=lambda thing: type(thing).__name__)
def test_a_struct_is_data(thing):
    for twin in (pickle.loads(pickle.dumps(thing)), copy.deepcopy(thing), replace(thing), type(thing)(**vars_of(thing))):
        assert twin == thing
        assert hash(twin) == hash(thing)
        assert repr(twin) == repr(thing)
    with pytest.raises(AttributeError):
        setattr(thing, fields(thing)[0].name, None)
    with pytest.raises(TypeError):
        type(thing)(anything=1)


def test_what_dataclasses_do_with_steps():
    assert is_dataclass(SEND)
    assert [field.name for field in fields(Send)] == ["peer", "source", "after"]
    assert replace(SEND, peer=3) == Send(3, REF, (0,))
    assert asdict(SEND) == {"peer": 1, "source": {"buffer": Buffer.INPUT, "chunk": 2, "count": 1}, "after": (0,)}
    assert repr(REF) == "Ref(buffer=<Buffer.INPUT: 'input'>, chunk=2, count=1)"
    assert Send(1, REF) != Recv(1, REF)
    match SEND:
        case Send(peer, Ref(buffer, chunk), after):
            assert (peer, buffer, chunk, after) == (1, Buffer.INPUT, 2, (0,))
        case _:
            pytest.fail("a step has no positional pattern")


def test_algorithms_are_told_apart_by_what_they_are():
    def build(*_: int) -> Schedule:
        return SCHEDULE

    mine = Algorithm("mine", Collective.ALL_REDUCE, build, "mine")
    assert mine == Algorithm("mine", Collective.ALL_REDUCE, build, "mine")
    assert mine != replace(mine, canonical=True)
    assert mine.schedule(0, 2) is SCHEDULE


def vars_of(thing):
    return {field.name: getattr(thing, field.name) for field in fields(thing)}

"""Whatever bytes come, each decoder gives what they mean or its typed error, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.membership_tools import Job, progress, recv

from oneaccord.calls.messages.point_to_point import OPENING_BYTES, TAG_BYTES, DescriptionMismatch, Incoming, Kinds
from oneaccord.calls.request import ARRAY
from oneaccord.config.select import read_table
from oneaccord.config.sources import read_environment, read_file
from oneaccord.contract import header as wire
from oneaccord.contract.backend import HEADER_BYTES, Damaged
from oneaccord.contract.cards import read_cards, write_card
from oneaccord.control import protocol as messages
from oneaccord.control.protocol import (
    Cards,
    Checkpoint,
    Disbanded,
    Exchange,
    GiveUp,
    Join,
    Leave,
    LeaveGroup,
    Question,
    Report,
    Shrink,
    Shrunk,
    Verdict,
    Welcome,
    decode_from_rank,
    decode_from_store,
    encode,
    ranks_in,
)
from oneaccord.errors import ConfigError, OutOfMemoryError, UsageError
from oneaccord.group.packing import Unpacker, pack
from oneaccord.job import error_file
from oneaccord.schedule.simulation.network import Network

NESTED = 100_000
HOSTILE = [
    b"",
    b"\xff",
    b"\x92" * NESTED,  # arrays in arrays
    b"\x81\xa4type" * NESTED,
    b"\x82\xa4type\xa6Report\xa4kind\xa2\xff\xfe",  # text that is no UTF-8
    b"\x81\xa4type\xa2\xc3\x28",
    b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
    b"\xc6\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xd7\xff" + b"\xff" * 8,  # a time that never was
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"[" * NESTED,
    b'{"a":' * NESTED,
    b"9" * 5000,
    b'"\xff"',
]
FROM_RANKS: list[Any] = [
    Join(1, 3, "tcp", "", "1", "little", "host", 1, place=messages.Whereabouts("host", 1, 2, "boot")),
    Exchange("split #1", b"card", [0, 1, 2]),
    recv(2),
    Report("mismatch", "text", 1, "barrier", 0, 3, [0, 1, 2]),
    messages.Testimony(1, True, "barrier() #1", 2),
    Leave(progress()),
    LeaveGroup(1, [0, 1], progress()),
    Checkpoint("calls", 64, b"digest", [0, 1, 2]),
    Shrink("127.0.0.1", 1234),
    GiveUp(1.5),
    messages.JobReformed([0, 2]),
    messages.Agree("agree #0", 3, [0, 1, 2]),
    messages.Standby("127.0.0.1", 1234),
    messages.Orphaned("it ended"),
    messages.Agreed(Verdict("lost", "rank 1 was lost", 1)),
]
FROM_STORE: list[Any] = [
    Welcome(b"key", [0, 0, 2], [messages.Whereabouts("host", 1, 2, "boot"), None, messages.Whereabouts("host", 0, 3, "")]),
    Cards("split #1", [b"a", b"b"], 3),
    Disbanded(1),
    Question(1, 0, 3),
    Verdict("lost", "rank 1 was lost", 1),
    Shrunk([0, 2], "127.0.0.1", 1234),
    messages.Agreement("agree #0", 3, Verdict("deadline", "rank 1 did not come", 1)),
    messages.Prepare(0),
    messages.Successor(1, "127.0.0.1", 1234),
    messages.Decided(Verdict("lost", "rank 1 was lost", 1)),
    messages.Gone(2, "it ended"),
]


@st.composite
def damaged(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """Bytes of any kind, or those of a message of which some were changed, lost or added."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=200) | st.sampled_from(HOSTILE))
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


def outcome(call: Callable[[], Any], *allowed: type[Exception]) -> Any:
    """Return what a call returns, or which of the allowed errors it raises."""
    try:
        return call()
    except allowed as error:
        return error


def with_hostile(function: Any) -> Any:
    """Try every hostile text, whatever else is tried."""
    for data in HOSTILE:
        function = example(data)(function)
    return function


@with_hostile
@given(damaged([encode(message) for message in FROM_RANKS]))
def test_what_a_rank_sends_the_store(data: bytes) -> None:
    message = decode_from_rank(data)
    if message is not None and not isinstance(message, Join):
        job = Job()
        job.store.handle(1, message)
        job.pass_time(10)
        outside = [rank for rank in ranks_in(message) if not 0 <= rank < 3]
        if outside:
            verdict = job.the_verdict()
            assert (verdict.kind, verdict.peer) == ("protocol", 1)


@pytest.mark.parametrize(
    "message",
    [
        Report("mismatch", "text", 1, "barrier", 0, 3, [0, 7]),
        Report("deadline", "text", 7, "barrier", 0, 3),
        Report("lost", "text", -1),
        Exchange("a", b"", [1, 3]),
        LeaveGroup(1, [1, 99], progress()),
        Checkpoint("calls", 1, b"", [-1]),
        Leave(messages.Progress({}, {0: {3: 1}}, {})),
    ],
)
def test_a_frame_of_a_rank_that_names_a_rank_outside_of_the_world_ends_the_job(message: Any) -> None:
    job = Job()
    job.store.handle(1, message)
    verdict = job.the_verdict()
    assert (verdict.kind, verdict.peer) == ("protocol", 1)
    assert "in a world of 3" in verdict.text


@with_hostile
@given(damaged([encode(message) for message in FROM_STORE]))
def test_what_the_store_sends_a_rank(data: bytes) -> None:
    message = decode_from_store(data)
    assert message is None or isinstance(list(ranks_in(message)), list)


@dataclasses.dataclass
class Card:
    name: str
    pid: int
    capability: tuple[int, int] = (0, 0)


@with_hostile
@given(damaged([write_card(Card("host", 3)), write_card([[1, "a"]]), write_card({"a": b"b"})]))
def test_cards(data: bytes) -> None:
    kinds: list[Any] = [Card, list[tuple[int, str]], dict[str, bytes], tuple[int | None, int]]
    for kind in kinds:
        found = outcome(lambda: read_cards([data], kind), Damaged)  # noqa: B023 - called at once
        if isinstance(found, Damaged):
            assert found.peer == 0
        else:
            msgspec.convert(msgspec.to_builtins(found[0]), kind)


@with_hostile
@given(
    damaged(
        [
            bytes(pack({"a": [1, 2.0, "x", b"y", None]}, "send_object")),
            bytes(pack([np.arange(3.0)], "send_object")),
            bytes(pack(np.zeros(2, [("x", "f4"), ("y", "i8", (2,))]), "send_object")),
        ]
    )
)
def test_objects(data: bytes) -> None:
    kinds: list[Any] = [None, dict[str, int], Card, set[int]]
    for kind in kinds:
        unpacker: Unpacker[Any] = Unpacker(kind, "recv_object")
        found = outcome(lambda: unpacker.unpack(data, 1), UsageError)  # noqa: B023 - called at once
        assert not isinstance(found, UsageError) or found.peer == 1


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_headers(data: bytes) -> None:
    for each in (data, b"OAC1" + data[4:], b"OAC1" + bytes([data[4] % len(wire.OPERATIONS)]) + data[5:]):
        header = wire.parse_header(each)
        assert header is None or header.describe()


@st.composite
def descriptions(draw: st.DrawFn) -> bytes:
    """What stands in front of an array, or something like it."""
    dtype = draw(st.sampled_from([np.dtype("f8"), np.dtype("i1"), np.dtype([("x", "f4"), ("y", "i8", (2,))])]))
    data = bytearray(wire.pack_description(dtype, tuple(draw(st.lists(st.integers(0, 3), max_size=4)))))
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, 48))
        new = draw(st.binary(min_size=1, max_size=8))
        data[at : at + len(new)] = new
    return bytes(data)


@given(
    descriptions() | st.binary(min_size=wire.DESCRIPTION_BYTES, max_size=wire.DESCRIPTION_BYTES), st.sampled_from([None, (3,)])
)
def test_arrays_in_front_of_messages(description: bytes, shape: tuple[int, ...] | None) -> None:
    opening = memoryview(bytearray((bytes(TAG_BYTES) + description).ljust(OPENING_BYTES, b"\0")))
    incoming = Incoming(1, 0, 0, None if shape is None else np.zeros(shape), ARRAY, Kinds())
    found = outcome(lambda: incoming.opened(opening), DescriptionMismatch, Damaged, OutOfMemoryError)
    if isinstance(found, DescriptionMismatch | Damaged):
        assert found.peer == 1
    elif not isinstance(found, OutOfMemoryError):
        assert incoming.array is not None
        assert not incoming.array.dtype.hasobject


RECORD = {"rank": 1, "type": "ValueError", "message": "m", "traceback": "t", "time": 1.5, "secondary": False}


@with_hostile
@given(damaged([json.dumps(RECORD).encode(), json.dumps({**RECORD, "time": "soon"}).encode()]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_in_which_ranks_tell_how_they_ended(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "error"
    path.write_bytes(data)
    record = error_file.read(path)
    assert record is None or (type(record.rank), type(record.message), type(record.secondary)) == (int, str, bool)


@with_hostile
@example(b"x = " + b"9" * 5000)
@example(b"x = " + b"[" * NESTED)
@example(b"x = " + b"{a = " * NESTED)
@given(damaged([b'backend = "tcp"\n[backends.tcp]\nhost = "a"\n', b"[[kill]]\nrank = 1\n"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_of_toml(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "oneaccord.toml"
    path.write_bytes(data)
    readers: list[Any] = [read_file, read_table, Network.load]
    for read in readers:
        outcome(lambda: read(path), ConfigError)  # noqa: B023 - called at once


@example("[" * NESTED)
@example('{"a":' * NESTED)
@example("[" + "9" * 5000 + "]")
@given(st.text())
def test_variables(text: str) -> None:
    leaves, problems = read_environment(
        {"ONEACCORD_TIMEOUT_S": text, "ONEACCORD_BACKENDS__TCP__HOST": text}, ["timeout_s"], ["backends"]
    )
    assert leaves
    assert not problems

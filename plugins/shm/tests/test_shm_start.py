"""What the config may say, and how ranks find out together whether they can share memory."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from typing import Any

import pytest
from support.transport_tools import held
from support.worlds import must

import oneaccord as oa
from oneaccord.api import CannotOpenError
from oneaccord.config import load
from oneaccord_shm import meeting
from oneaccord_shm.plugin import oneaccord_register_backends
from oneaccord_shm.segment import Geometry, Segment, least_segment_bytes


@pytest.mark.parametrize(
    "table",
    [
        *({"segment_bytes": 0}, {"segment_bytes": 1 << 41}, {"heap_bytes": 0}, {"heap_bytes": 1 << 47}),
        *({"spin_us": -1}, {"spin_us": 10_001}, {"slots": 3}),
    ],
    ids=str,
)
def test_values_have_bounds_and_unknown_keys_are_refused(table: dict[str, int]) -> None:
    resolved = load({"backends": {"shm": table}}, environ={})
    with pytest.raises(oa.ConfigError, match=f"backends.shm.{next(iter(table))} = "):
        resolved.backend_config("shm")


def test_too_little_memory_for_so_many_ranks_is_refused_with_what_is_needed(outcomes: Any) -> None:
    first = outcomes(8, segment_bytes=1 << 16)[0]
    assert isinstance(first, oa.ConfigError)
    assert (first.key, first.value) == ("backends.shm.segment_bytes", 1 << 16)
    needed = least_segment_bytes(8)
    assert f"at least {needed}" in str(first)
    must(outcomes(8, segment_bytes=needed))


def test_rings_fit_into_their_share() -> None:
    for world_size, more in itertools.product([2, 3, 64, 1000], [0, 64 << 20, 1 << 30]):
        share = least_segment_bytes(world_size) + more
        geometry = Geometry.of(world_size, share)
        assert (world_size - 1) * geometry.ring_bytes <= share
        assert geometry.slot_bytes >= 512
        assert geometry.slot_bytes % 64 == 0


def test_ranks_with_different_sizes_take_the_smallest(monkeypatch: pytest.MonkeyPatch, outcomes: Any) -> None:
    original = meeting.write_card
    numbers = itertools.count(1)

    def write(card: Any) -> bytes:
        if isinstance(card, meeting.Card):
            object.__setattr__(card, "segment_bytes", next(numbers) << 20)
        return original(card)

    monkeypatch.setattr(meeting, "write_card", write)
    made = outcomes()
    assert made[0]._geometry == made[1]._geometry == Geometry.of(2, 1 << 20)


def told(results: list[Any]) -> str:
    """Return the one error that all ranks raise."""
    assert {type(result) for result in results} == {oa.BackendUnavailableError}, results
    texts = {str(result) for result in results}
    assert len(texts) == 1
    text = texts.pop()
    assert 'backend = "tcp"' in text
    return text


def differing(values: dict[int, str]) -> Any:
    """Return a function that gives each calling thread the value of the next rank."""
    given: dict[int, str] = {}
    numbers = itertools.count()
    lock = threading.Lock()

    def value() -> str:
        with lock:
            ident = threading.get_ident()
            if ident not in given:
                given[ident] = values[next(numbers)]
            return given[ident]

    return value


def test_ranks_on_several_hosts_are_told_where_they_are(monkeypatch: pytest.MonkeyPatch, outcomes: Any) -> None:
    monkeypatch.setattr(meeting, "boot_id", differing({0: "one", 1: "other", 2: "other"}))
    text = told(outcomes(3))
    assert "the ranks are on 2 hosts" in text
    assert "ranks " in text


def test_ranks_in_several_containers_are_told(monkeypatch: pytest.MonkeyPatch, outcomes: Any) -> None:
    monkeypatch.setattr(meeting, "_namespace", differing({0: "pid:[1]", 1: "pid:[2]"}))
    assert "the ranks are in 2 PID namespaces" in told(outcomes(2))


def test_memory_that_cannot_be_opened_is_told_by_all(monkeypatch: pytest.MonkeyPatch, outcomes: Any) -> None:
    def refuse(*_: Any) -> Segment:
        raise CannotOpenError("process 7 belongs to another user")

    before, _ = held("oneaccord-shm")
    monkeypatch.setattr(Segment, "open", refuse)
    text = told(outcomes(2))
    assert "rank 0 (process" in text
    assert "cannot open the memory of rank 1: process 7 belongs to another user" in text
    assert held("oneaccord-shm")[0] == before


def test_memory_that_cannot_be_made_is_told_by_all(monkeypatch: pytest.MonkeyPatch, outcomes: Any) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    text = told(outcomes(2))
    assert "rank 0 cannot make any (files of this process are limited to" in text
    assert "remove the limit (ulimit -f unlimited)" in text


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="a file of /dev/shm has no seals")
def test_who_has_opened_the_memory_cannot_make_it_smaller() -> None:
    segment = Segment.create(b"a" * 32, 1 << 16)
    other = Segment.open(os.getpid(), segment.fd, b"a" * 32, 1 << 16)
    try:
        before = os.fstat(segment.fd).st_size
        with pytest.raises(PermissionError):
            os.ftruncate(other.fd, 4096)
        assert os.fstat(segment.fd).st_size == before
    finally:
        other.close()
        segment.close()


def test_what_another_process_has_open_is_not_touched() -> None:
    reading, writing = os.pipe()
    segment = Segment.create(b"a" * 32, 1 << 16)
    try:
        with pytest.raises(CannotOpenError, match="is the number of another process"):
            Segment.open(os.getpid(), reading, b"a" * 32, 1 << 16)
        with pytest.raises(CannotOpenError, match="is the number of another process"):
            Segment.open(os.getpid(), segment.fd, b"b" * 32, 1 << 16)
        with pytest.raises(CannotOpenError, match="no process"):
            Segment.open(os.getpid(), 1 << 20, b"a" * 32, 1 << 16)
        Segment.open(os.getpid(), segment.fd, b"a" * 32, 1 << 16).close()
    finally:
        segment.close()
        os.close(reading)
        os.close(writing)


def test_memory_has_no_name_and_is_its_users_alone(monkeypatch: pytest.MonkeyPatch, outcomes: Any) -> None:
    """So nothing is left of it when its processes have ended, however they did."""
    for has_memfd in (True, False):
        if not has_memfd:
            monkeypatch.delattr(os, "memfd_create")
        for backend in must(outcomes()):
            about = os.fstat(backend._segments[backend.rank].fd)
            assert (about.st_nlink, about.st_mode & 0o777) == (0, 0o600)


def test_the_probe_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = oneaccord_register_backends().probe
    assert probe() is None
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "it needs Linux, but this is darwin" in (probe() or "")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "maxsize", (1 << 31) - 1)
        assert "64-bit" in (probe() or "")
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "exists", lambda path: False)
        assert "/proc is not mounted" in (probe() or "")
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        patch.setattr(os, "access", lambda *_: False)
        assert "no memfd_create" in (probe() or "")

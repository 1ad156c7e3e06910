"""The key-value store and the seals that bridges to other libraries use: all ranks agree, waits end, and nobody else has a part."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import pytest
from support.worlds import free_port, on_threads, thread_world

import oneaccord as oa
from oneaccord.api import Group, KeyValueStore, Sealer
from oneaccord.control.keyvalue import MAX_VALUE_BYTES
from oneaccord.job.job import Job


def processes(body: Callable[[Group], Any], world_size: int = 2) -> list[Any]:
    """Call ``body`` on ranks that meet as processes do; return what each returned or raised."""
    config = {"backend": "tcp", "rendezvous": {"address": f"127.0.0.1:{free_port()}"}}

    def rank(number: int) -> Any:
        with oa.init(config=config, rank=number, world_size=world_size, timeout_s=20) as group:
            return body(group)

    return on_threads(rank, world_size)


def test_all_ranks_see_the_same_values() -> None:
    def body(group: Group) -> list[object]:
        store, rank = KeyValueStore(group), group.rank
        if rank == 2:
            store.set("a", b"of 2")
        found: list[object] = [store.get("a"), store.check(["a"]), store.check(["a", "b"])]
        group.barrier()
        store.add("n", 10**rank)
        store.append("w", b"x")
        won = store.compare_set("first", b"", b"%d" % rank)
        group.barrier()
        found += [store.add("n", 0), store.get("w"), won == store.get("first"), store.compare_set("no", b"old", b"new")]
        group.barrier()
        deleted = sum(group.all_gather_object(store.delete("a")))
        return [*found, deleted, store.count()]

    expected = [b"of 2", True, False, 111, b"xxx", True, b"old", 1, 3]
    assert processes(body, 3) == [expected] * 3


def test_two_stores_share_nothing() -> None:
    def body(group: Group) -> object:
        stores = [KeyValueStore(group), KeyValueStore(group)]
        if group.rank == 1:
            stores[1].set("a", b"1")
        group.barrier()
        return [store.check(["a"]) for store in stores]

    assert processes(body) == [[False, True]] * 2


def test_a_key_that_nobody_sets_is_named_and_the_store_stays_usable() -> None:
    def body(group: Group) -> object:
        store = KeyValueStore(group)
        with pytest.raises(oa.DeadlineError, match=r"no rank set 'a', 'b' in the key-value store within 0\.05 s"):
            store.wait(["a", "b"], timeout_s=0.05)
        group.barrier()
        store.set("a", b"")
        store.set("b", b"")
        store.wait(["a", "b"])
        return group.all_gather_object(group.rank)

    assert processes(body) == [[0, 1]] * 2


def test_what_cannot_be_kept_is_refused_and_changes_nothing() -> None:
    def body(group: Group) -> object:
        store = KeyValueStore(group)
        with pytest.raises(oa.UsageError, match=f"at most {MAX_VALUE_BYTES}"):
            store.set("a", bytes(MAX_VALUE_BYTES + 1))
        group.barrier()
        if group.rank == 1:
            store.set("a", bytes(MAX_VALUE_BYTES))
            with pytest.raises(oa.UsageError, match="would be longer"):
                store.append("a", b"x")
            store.set("word", b"x")
            with pytest.raises(oa.UsageError, match="no number"):
                store.add("word", 1)
        group.barrier()
        return len(store.get("a")), store.get("word")

    assert processes(body) == [(MAX_VALUE_BYTES, b"x")] * 2


def test_whoever_waits_hears_of_a_failure() -> None:
    def body(group: Group) -> object:
        store = KeyValueStore(group)
        if group.rank == 2:
            store.set("ready", b"")
            raise ValueError("planted")
        store.get("never")
        return None

    first, second, planted = processes(body, 3)
    assert isinstance(planted, ValueError)
    for error in (first, second):
        assert isinstance(error, oa.AbortedError)
        assert "planted" in str(error)


def test_a_closed_group_has_no_store() -> None:
    def body(group: Group) -> object:
        store = KeyValueStore(group)
        group.close()
        with pytest.raises(oa.ClosedError):
            store.set("a", b"")
        with pytest.raises(oa.ClosedError):
            KeyValueStore(group)
        return True

    assert processes(body) == [True] * 2


def test_a_rank_alone_has_one_and_threads_of_a_world_have_none() -> None:
    with oa.init(rank=0, world_size=1) as group:
        store = KeyValueStore(group)
        store.set("a", b"1")
        assert (store.get("a"), store.add("a", 1)) == (b"1", 2)

    def refused(group: Group) -> object:
        with pytest.raises(oa.UnsupportedError, match="let them share a dict"):
            KeyValueStore(group)
        return group.all_gather_object(group.rank)

    assert thread_world(refused, 2, "simulated") == [[0, 1]] * 2


def test_strangers_neither_read_nor_write_nor_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEACCORD_SECRET", "of this test")
    addresses: list[tuple[str, int]] = []
    listen = Job.listen

    def told(job: Any, host: str, accept: Any, whom: str) -> Any:
        address = listen(job, host, accept, whom)
        if "key-value" in whom:
            addresses.append(address)
        return address

    monkeypatch.setattr(Job, "listen", told)

    def body(group: Group) -> object:
        store = KeyValueStore(group)
        if group.rank == 1:
            ((host, port),) = addresses
            assert host == "127.0.0.1"
            with socket.create_connection((host, port), 10) as stranger, contextlib.suppress(ConnectionError):
                stranger.sendall(b"\x00" * 4096)
                while stranger.recv(4096):  # what comes is at most a refusal, and then the end
                    pass
        group.barrier()
        return store.count()

    assert processes(body) == [0, 0]


def test_a_seal_fits_what_a_rank_of_the_group_has_sealed_for_a_purpose() -> None:
    def body(group: Group) -> object:
        part = group.split(0)
        assert part is not None
        data = b"of rank 0"
        seals = [Sealer(group, "words").of(data), Sealer(group, "others").of(data), Sealer(part, "words").of(data)]
        theirs = group.all_gather_object(seals)
        assert theirs == [seals] * 2
        assert len(set(seals)) == 3
        Sealer(group, "words").check(data, seals[0])
        group.barrier()
        if group.rank == 1:
            Sealer(group, "words").check(data, seals[1])
        group.barrier()
        return None

    for error in processes(body):
        assert isinstance(error, oa.ProtocolError)
        assert "rank 1 received words that no rank of this job has sealed" in str(error)

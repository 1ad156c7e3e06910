"""Leaving a group: twice, with calls in progress, by an error; and the state of a group afterwards."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import Any

import numpy as np

import oneaccord as oa
from oneaccord.api import Group
from oneaccord_conformance import patience
from oneaccord_conformance.ranks import ending, join
from oneaccord_conformance.registry import check
from oneaccord_conformance.worlds import WorldMaker

_A_MOMENT_S = 0.1


def _twice(group: Group) -> list[Any]:
    group.all_reduce(np.ones(3))
    backend = group.backend()
    group.close()
    group.close()
    began = time.monotonic()
    if backend is not None:  # both may come once more
        backend.close()
        backend.abort()
        backend.close()
    took_s = time.monotonic() - began
    calls = [
        lambda: group.all_reduce(np.ones(3)),
        lambda: group.all_reduce_async(np.ones(3)).wait(),
        lambda: group.send(np.ones(3), 1 - group.rank),
        group.barrier,
        lambda: group.split(0),
    ]
    return [took_s, *(ending(call) for call in calls)]


@check(chapter="close")
def check_twice_and_used_afterwards(worlds: WorldMaker) -> None:
    """A group, and its backend, may be closed twice; a later call is a ClosedError."""
    for rank, outcome in enumerate(worlds.attempt(_twice, 2)):
        assert not outcome.errors, f"rank {rank} {outcome}"
        took_s, *ended = outcome.value
        assert worlds.lacks("clock") or took_s < patience.AT_ONCE_S, (
            f"rank {rank}: Backend.close, abort and close blocked for {took_s:.1f} s, when all was closed already"
        )
        for each in ended:
            assert each["errors"][:1] in (["ClosedError"], ("ClosedError",)), (
                f"rank {rank}, after close: {each['errors'][:1]}: {each['text']}"
            )


def _in_flight(group: Group) -> list[list[float]]:
    size = group.world_size
    works = [group.all_reduce_async(np.full(20_000, float(number))) for number in range(10)]
    sent = group.send_async(np.full(9, group.rank), (group.rank + 1) % size)
    received = group.recv_async((group.rank - 1) % size)
    group.close()
    sent.wait()
    return [[float(work.wait()[-1]) for work in works], [float(received.wait()[0])]]


@check(chapter="close")
def check_calls_in_flight(worlds: WorldMaker) -> None:
    """Close waits for the calls in flight, and they end well."""
    for rank, outcome in enumerate(worlds.attempt(_in_flight, 3)):
        assert not outcome.errors, f"rank {rank} {outcome}"
        assert outcome.value == [[3.0 * number for number in range(10)], [(rank - 1) % 3]], f"rank {rank}: {outcome.value}"


def _under_a_call(group: Group) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    if group.rank == 0:
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(lambda: found.append(ending(lambda: group.recv(1))),),  # no rank sends it
            daemon=True,
        )
        thread.start()
        ended = ending(lambda: group.close(timeout_s=0.5))
        thread.join(patience.TIMEOUT_S)
        assert not thread.is_alive(), "recv in another thread did not end with the group"
        return found[0] if found else ended
    return ending(lambda: group.close(timeout_s=patience.TIMEOUT_S))


@check(chapter="close", needs="cpu clock")
def check_under_a_call(worlds: WorldMaker) -> None:
    """A call of another thread that waits in vain ends with the group."""
    first, other = worlds.attempt(_under_a_call, 2)
    assert not first.errors, f"rank 0 {first}"
    assert first.value["errors"], f"recv without a send returned {first.value['value']!r}"
    assert "CommError" in first.value["errors"], f"recv ended with {first.value['errors'][0]}: {first.value['text']}"
    assert not other.errors, f"rank 1 {other}"


def _calls(group: Group, name: str, peer: int) -> Any:
    long = np.ones(1 << 19)
    return {
        "all_reduce": lambda: group.all_reduce(np.ones(4)),
        "a long all_reduce": lambda: group.all_reduce(long),
        "barrier": group.barrier,
        "recv": lambda: group.recv(peer),
        "a long send": lambda: group.send(np.ones(1 << 22), peer),
        "all_reduce_async": lambda: group.all_reduce_async(long).wait(),
    }[name]


def _leaves(group: Group, name: str, how: str) -> dict[str, Any]:
    if group.rank == 1:
        group.barrier()
        oa.sleep(_A_MOMENT_S)  # for the others to be blocked by then
        if how == "error":
            raise RuntimeError("its program failed")
        return ending(lambda: group.close(timeout_s=patience.TIMEOUT_S))

    def call() -> None:
        group.barrier()  # it may be over on rank 1, and not yet here
        _calls(group, name, 1)()

    first = ending(call)
    return first if first["errors"] else ending(group.barrier)


def _check_left(worlds: WorldMaker, how: str, kinds: tuple[str, ...], words: str) -> None:
    names = ["all_reduce", "recv", "a long all_reduce", "barrier", "a long send", "all_reduce_async"]
    names = names if worlds.has_threads and not worlds.quick else names[: 2 if worlds.has_threads else 1]
    each = [{"name": name, "how": how} for name in names]
    for name, outcomes in zip(names, worlds.attempts(_leaves, each, 3, timeout_s=patience.LONG_S), strict=True):
        for rank in (0, 2):
            what, outcome = f"rank 1 {words}, and rank {rank} is in {name}: it", outcomes[rank]
            assert not outcome.errors, f"{what} {outcome}"
            found = outcome.value
            assert any(kind in found["errors"] for kind in kinds), (
                f"{what} got {found['errors'][:1] or 'no error'}: {found['text']}"
            )
            assert found["peer"] == 1, f"{what} got an error about rank {found['peer']}: {found['text']}"
            assert worlds.lacks("clock") or found["took_s"] < patience.PROMPT_S, (
                f"{what} learned of it after {found['took_s']:.1f} s"
            )


@check(chapter="close")
def check_error_of_a_rank(worlds: WorldMaker) -> None:
    """If the program of a rank fails, every waiting rank wakes, and learns which."""
    _check_left(worlds, "error", ("AbortedError",), "ends with an error")


@check(chapter="close")
def check_rank_that_leaves(worlds: WorldMaker) -> None:
    """If a rank closes the group, calls of the others that need it end, and say which."""
    _check_left(
        worlds, "close", ("PeerLostError", "AbortedError", "DeadlockError", "CollectiveMismatchError"), "closes the group"
    )


def _again(group: Group, times: int) -> None:
    group.close()
    for number in range(times):
        with join() as own:
            assert own.all_reduce(np.full(3, number)).tolist() == [number * own.world_size] * 3


@check(chapter="close")
def check_another_group(worlds: WorldMaker) -> None:
    """A group that was closed makes way for another one of the same ranks."""
    for rank, outcome in enumerate(worlds.attempt(_again, 3, times=5)):
        assert not outcome.errors, f"rank {rank} {outcome}"


def _ends(group: Group) -> None:
    group.all_reduce(np.ones(3))


@check(chapter="close", needs="cpu processes")
def check_processes_end(worlds: WorldMaker) -> None:
    """Processes whose group was closed end by themselves, with exit code 0."""
    with worlds.processes(_ends, 2) as job:
        outcomes = job.outcomes(patience.TIMEOUT_S)
        assert all(each is not None and not each.errors for each in outcomes), [str(each) for each in outcomes]
        fault = job.end(patience.TIMEOUT_S)
        assert not fault, fault

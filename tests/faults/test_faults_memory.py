"""What happens where there is no memory: before anything moves the group stays usable, and in the middle nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.fault_tools import Nursery
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group
from oneaccord.calls.host import fast as shortcuts

HUGE = np.broadcast_to(np.float64(1), 2**44)  # eight bytes of memory; a copy would take 128 TiB


def coalesced(group: Group) -> None:
    with group.coalesce() as batch:
        batch.all_reduce(HUGE)


CALLS: dict[str, Callable[[Group], object]] = {
    "all_reduce": lambda group: group.all_reduce(HUGE),
    "all_reduce_async": lambda group: group.all_reduce_async(HUGE),
    "reduce": lambda group: group.reduce(HUGE),
    "broadcast": lambda group: group.broadcast(HUGE, 1),
    "all_gather": lambda group: group.all_gather(HUGE),
    "all_gather of more than an address can count": lambda group: group.all_gather(np.broadcast_to(np.float64(1), 2**59)),
    "gather": lambda group: group.gather(HUGE),
    "scatter": lambda group: group.scatter(HUGE, group.rank),
    "reduce_scatter": lambda group: group.reduce_scatter(HUGE),
    "all_to_all": lambda group: group.all_to_all(HUGE),
    "send": lambda group: group.send(HUGE, 1 - group.rank),
    "sendrecv": lambda group: group.sendrecv(HUGE, 1 - group.rank, 1 - group.rank),
    "empty": lambda group: group.empty(2**44),
    "coalesce": coalesced,
    "all_gather_object": lambda group: group.all_gather_object([HUGE]),
    "send_object": lambda group: group.send_object({"x": HUGE}, 1 - group.rank),
}


@pytest.mark.parametrize("name", CALLS)
def test_without_memory_a_call_is_refused_in_words_and_the_group_stays_usable(world, name):
    def program(group: Group) -> float:
        with pytest.raises(oa.OutOfMemoryError, match=r"no memory|backends\.shm\.heap_bytes") as caught:
            CALLS[name](group)
        assert isinstance(caught.value, MemoryError)
        return float(group.all_reduce(np.ones(3))[0])

    assert world(program, 2) == [2.0, 2.0]


def test_a_short_call_without_memory_for_its_result_goes_the_long_way_which_says_so(monkeypatch):
    empty, refused = np.empty, []

    def no_memory(shape: object, dtype: object) -> object:
        if shape != (5,):
            return empty(shape, dtype)  # type: ignore[call-overload]
        refused.append(shape)
        raise MemoryError

    def program(group: Group) -> float:
        for _ in range(3):
            group.all_reduce(np.ones(5))
        group.barrier()
        monkeypatch.setattr(shortcuts, "_empty", no_memory)
        return float(group.all_reduce(np.ones(5))[0])

    assert must(thread_world(program, 2, "tcp", config={"native": False})) == [2.0, 2.0]
    assert refused


@pytest.mark.parametrize(
    "call",
    [
        "group.recv(0) if rank else group.send(np.zeros(32 << 20), 1)",
        "group.broadcast_object(None if rank else bytes(128 << 20))",
        "group.scatter(None if rank else np.zeros((2, 32 << 20)))",
        "group.all_to_all(np.zeros((32 << 20, 1)) if rank == 0 else np.zeros((0, 1)), send_counts=[0, 32 << 20] if rank == 0 else [0, 0])",
    ],
    ids=["recv", "object", "scatter", "all_to_all"],
)
def test_a_rank_without_memory_in_the_middle_of_a_call_is_told_of_on_the_others(nursery: Nursery, call: str) -> None:
    program = f"""
        import resource
        group = oa.init(timeout_s=30)
        group.broadcast_object([1, 2]); group.sendrecv(np.ones(3), 1 - rank, 1 - rank); group.all_to_all(np.ones(2), send_counts=[1, 1])
        if rank == 1:
            pages = int(open("/proc/self/statm").read().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (128 << 20),) * 2)
        error = attempt(lambda: {call})
        tell("kinds", is_memory=isinstance(error, MemoryError), is_ours=isinstance(error, oa.OneAccordError))
        attempt(group.barrier)
    """
    with nursery.ranks(program, 2) as ranks:
        ranks.start().wait()
        kinds = {fact["rank"]: fact for fact in ranks.await_facts("kinds")}
        first: dict[int, dict[str, object]] = {}
        for fact in ranks.facts:
            if fact["what"] == "raised":
                first.setdefault(fact["rank"], fact)
    assert (first[1]["type"], kinds[1]["is_memory"], kinds[1]["is_ours"]) == ("OutOfMemoryError", True, True), first
    assert (first[0]["type"], first[0]["about"]) == ("AbortedError", 1)
    assert "memory" in str(first[0]["text"])

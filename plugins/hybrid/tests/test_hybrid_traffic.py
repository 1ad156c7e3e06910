"""Which part carries what, counted; and what is left of the parts afterwards."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.transport_tools import held
from support.waiting import PATIENCE_S, until
from support.worlds import must, stories, thread_world

import oneaccord as oa
from oneaccord.api import Backend, Bootstrap, Deadline, DeviceChannel

Counting = Callable[[str], str]


def run(program: Callable[[oa.Group], Any], size: int, routes: dict[str, str], **config: Any) -> list[Any]:
    tables = {"hybrid": {"routes": routes}}
    return thread_world(program, size, "hybrid", config={"backend": "hybrid", "backends": tables, **config})


def test_by_place_messages_between_hosts_alone_go_between_hosts(counting: Counting, counter: Any) -> None:
    routes = {"intra": counting("near"), "inter": counting("far")}

    def neighbours(group: oa.Group) -> list[int]:
        host = group.rank // 2 * 2
        with group.split(host) as near:
            found = [near.all_gather(np.array([group.rank])).tolist()]
        group.sendrecv(np.ones(3), group.rank ^ 1, group.rank ^ 1)
        return found[0]

    assert must(run(neighbours, 4, routes, ranks_per_host=2)) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert (set(counter.sent), counter.worlds) == ({"near"}, {"near": {2}, "far": {4}})
    counter.sent.clear()

    def across(group: oa.Group) -> list[int]:
        with group.split(group.rank % 2) as far:
            found = [far.all_gather(np.array([group.rank])).tolist()]
        group.sendrecv(np.ones(3), group.rank ^ 2, group.rank ^ 2)
        return found[0]

    assert must(run(across, 4, routes, ranks_per_host=2)) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert set(counter.sent) == {"far"}


def test_by_place_a_large_all_reduce_is_hierarchical_and_spares_the_way_between_hosts(counting: Counting, counter: Any) -> None:
    nbytes = 1 << 20
    carriers = []

    def program(group: oa.Group) -> None:
        assert (group.all_reduce(np.full(nbytes // 8, group.rank + 1.0)) == 36).all()
        carriers.append({prepared.carrier for prepared in group._paths.host.plans.made.values()})

    must(run(program, 8, {"intra": counting("near"), "inter": counting("far")}, ranks_per_host=4))
    assert carriers == [{"hierarchical"}] * 8
    # Each rank halves and doubles on its host, and its share of the vector alone crosses over, to one rank and in halves.
    assert counter.sent == {"near": 8 * 2 * 2, "far": 8 * 2}
    assert counter.nbytes["far"] == 2 * nbytes


@pytest.mark.parametrize("barrier", ["intra", "inter"])
def test_by_place_barriers_go_by_the_part_that_is_named_for_them(counting: Counting, counter: Any, barrier: str) -> None:
    routes = {"intra": counting("intra"), "inter": counting("inter")}
    routes["barrier"] = routes[barrier]

    def program(group: oa.Group) -> int:
        for _ in range(5):  # from the second on it is a shortcut, where there is one
            group.barrier()
        return int(group.all_reduce(group.rank))

    assert must(run(program, 4, routes, ranks_per_host=2)) == [6] * 4
    del counter.sent[barrier]
    # What is left is the all_reduce: one message of each rank to a neighbour, and one across.
    assert counter.sent == {"intra" if barrier == "inter" else "inter": 4}


def test_barriers_and_messages_have_routes_of_their_own(counting: Counting, counter: Any) -> None:
    routes = {"cpu": counting("cpu"), "barrier": counting("barrier"), "p2p": counting("p2p")}

    def program(group: oa.Group) -> int:
        counts = []
        exchange = partial(group.sendrecv, 1.0, 1 - group.rank, 1 - group.rank)
        for call in (partial(group.all_reduce, 1.0), group.barrier, exchange, partial(group.broadcast, 1.0, 0), group.barrier):
            before = dict(counter.sent)
            call()
            together.wait(PATIENCE_S)
            counts.append({name for name in counter.sent if counter.sent[name] != before.get(name, 0)})
            together.wait(PATIENCE_S)
        return counts

    together = threading.Barrier(2)
    found = must(run(program, 2, routes))
    for each in range(5):
        assert found[0][each] | found[1][each] == {["cpu", "barrier", "p2p", "cpu", "barrier"][each]}


def test_a_barrier_that_others_do_not_make_is_found_although_it_goes_another_way() -> None:
    def program(group: oa.Group) -> None:
        if group.rank == 0:
            group.barrier()
        else:
            group.all_reduce(np.ones(3))

    for outcome in run(program, 3, {"cpu": "tcp", "barrier": "shm"}):
        assert isinstance(outcome, oa.CollectiveMismatchError), outcome


def test_barriers_take_their_shortcut_by_their_own_transport() -> None:
    def program(group: oa.Group) -> tuple[bool, int]:
        total = 0
        for _ in range(5):
            group.barrier()
            total += int(group.all_reduce(np.array([1]))[0])
        shortcuts = group._fast.values()
        return len({id(each._run.__self__._transport) for each in shortcuts}) == 2, total

    routes = {"intra": "shm", "inter": "tcp", "barrier": "shm"}
    assert must(run(program, 4, routes, ranks_per_host=2)) == [(True, 20)] * 4


@pytest.mark.parametrize("place", [True, False])
def test_a_group_that_is_closed_gives_back_all_its_ways(counting: Counting, counter: Any, *, place: bool) -> None:
    routes = {"intra": counting("near"), "inter": counting("far")} if place else {"cpu": counting("cpu")}

    def program(group: oa.Group) -> None:
        group.barrier()
        group.sendrecv(1.0, group.rank ^ 1, group.rank ^ 1)
        for _ in range(3):
            with group.split(0) as part:
                part.barrier()
                part.all_reduce(1.0)
                part.sendrecv(1.0, group.rank ^ 1, group.rank ^ 1)
        until(lambda: set(counter.open.values()) == {8, 4})  # the word that all have closed it may still be on its way
        together.wait(PATIENCE_S)

    together = threading.Barrier(4)
    must(run(program, 4, {**routes, "barrier": counting("barrier")}, ranks_per_host=2))
    # Of the group of all, on each rank: one for its collectives, one for its messages; and one for its barriers.
    assert counter.open == {**dict.fromkeys(("near", "far") if place else ("cpu",), 8), "barrier": 4}


def test_a_mismatch_on_another_host_names_ranks_of_the_world() -> None:
    def program(group: oa.Group) -> None:
        with group.split(group.rank // 2) as near:
            near.barrier()
            if group.rank == 3:
                near.all_reduce(np.ones(5))
            elif group.rank == 2:
                near.all_reduce(np.ones(7))
            group.barrier()

    outcomes = run(program, 4, {"intra": "shm", "inter": "tcp"}, ranks_per_host=2)
    for outcome in outcomes:
        assert isinstance(outcome, oa.CollectiveMismatchError)
        assert outcome.peer in (2, 3)
        told = stories(str(outcome))
        assert ("float64[7]" in told[2], "float64[5]" in told[3]) == (True, True), told


def test_a_world_of_one_makes_what_serves_gpus_alone(register: Callable[..., str], counting: Counting, counter: Any) -> None:
    gpu, cpu = register(lambda bootstrap: Silent(), devices=("cuda",)), counting("cpu")
    with oa.init("hybrid", config={"backends": {"hybrid": {"routes": {"cpu": cpu, "cuda": gpu}}}}) as group:
        group.barrier()
        assert (int(group.all_reduce(5)), len(group.empty(7))) == (5, 7)
        assert isinstance(group.backend(gpu), Silent)
        assert group.backend(cpu) is None
    assert counter.worlds == {}


class Silent(Backend):
    """A backend that has nothing to do."""

    memory = frozenset({"cuda"})

    def open_transport(self, channel: int) -> Any:
        raise AssertionError

    def open_device(self, channel: int, meeting: Any) -> Any:
        methods = dict.fromkeys(DeviceChannel.__abstractmethods__, lambda self: None)
        return type("SilentChannel", (DeviceChannel,), {"device": 0, "stream": 0, "library": "none", **methods})()

    def abort(self) -> None:
        pass

    close = abort


def descriptors() -> set[str]:
    """Return what this process has open, each of which has a number of its own."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            found.add(f"{entry.readlink()} {entry.stat(follow_symlinks=True).st_ino}")
    return {each for each in found if each.startswith(("socket:", "/memfd:oneaccord"))}


class Left:
    """What is left of the worlds that this object has seen begin."""

    def __init__(self) -> None:
        gc.collect()
        self._maps = held("oneaccord-shm")[1]
        self._descriptors, self._threads = descriptors(), set(threading.enumerate())

    def nothing(self) -> bool:
        """Return whether it is nothing."""
        gc.collect()
        threads = [each for each in set(threading.enumerate()) - self._threads if each.name.startswith("oneaccord")]
        return held("oneaccord-shm")[1] <= self._maps and not threads and not descriptors() - self._descriptors


@pytest.mark.parametrize("failing", [(0, 1, 2, 3), (2,)])
def test_when_the_last_part_does_not_start_nothing_is_left_of_the_others(
    register: Callable[..., str], failing: tuple[int, ...]
) -> None:
    def create(bootstrap: Bootstrap) -> Any:
        bootstrap.exchange("all here", b"")
        if bootstrap.rank in failing:
            raise oa.UnsupportedError(f"no such thing on rank {bootstrap.rank}")
        bootstrap.exchange("all well", b"")
        raise AssertionError

    gpu = register(create, devices=("cuda",))
    routes = {"intra": "shm", "inter": "tcp", "cuda": gpu}
    run(print, 1, routes)
    left = Left()
    outcomes = run(print, 4, routes, ranks_per_host=2)
    for rank in failing:
        assert str(outcomes[rank]) == f"no such thing on rank {rank}"
        assert type(outcomes[rank]) is oa.UnsupportedError
    for rank in set(range(4)).difference(failing):
        assert isinstance(outcomes[rank], oa.AbortedError)
    del outcomes
    until(left.nothing)


def test_nothing_is_left_of_a_job_that_ended_well() -> None:
    def program(group: oa.Group) -> None:
        with group.split(group.rank % 2) as part:
            part.all_reduce(np.ones(100_000))
        group.sendrecv(np.ones(100_000), group.rank ^ 1, group.rank ^ 1)
        group.barrier()

    routes = {"intra": "shm", "inter": "tcp", "barrier": "tcp"}
    must(run(program, 4, routes, ranks_per_host=2))
    left = Left()
    must(run(program, 4, routes, ranks_per_host=2))
    until(left.nothing)


def test_parts_that_trade_cards_under_one_name_do_not_get_each_other_s(register: Callable[..., str]) -> None:
    cards: dict[tuple[str, int], list[bytes]] = {}

    def creator(word: str) -> Any:
        def create(bootstrap: Bootstrap) -> Any:
            mine = f"{word} of {bootstrap.rank}".encode()
            cards[word, bootstrap.rank] = bootstrap.exchange("cards", mine)
            return Silent()

        return create

    names = [register(creator(word)) for word in ("a", "b")]
    run(print, 2, {"cpu": names[0], "p2p": names[1]})
    assert cards == {(word, rank): [f"{word} of {each}".encode() for each in range(2)] for word in "ab" for rank in range(2)}


def test_ranks_of_one_host_trade_cards_among_themselves(register: Callable[..., str]) -> None:
    cards: list[list[bytes]] = []

    def near(bootstrap: Bootstrap) -> Any:
        mine = f"{bootstrap.rank} of {bootstrap.world_size} on {bootstrap.hosts}"
        cards.append(bootstrap.exchange("cards", mine.encode()))
        return Silent()

    run(print, 5, {"intra": register(near), "inter": "tcp"}, ranks_per_host=2)
    pairs = [[b"0 of 2 on (%d, %d)" % (host, host), b"1 of 2 on (%d, %d)" % (host, host)] for host in (0, 1)]
    assert sorted(cards) == sorted([*pairs, *pairs, [b"0 of 1 on (2,)"]])


def test_who_is_missed_in_an_exchange_of_a_part_is_told_with_the_part_s_name(register: Callable[..., str]) -> None:
    def create(bootstrap: Bootstrap) -> Any:
        if bootstrap.rank == 1:
            gone.wait(PATIENCE_S)
            raise AssertionError
        bootstrap.deadline = Deadline(0.1)  # once both have met
        try:
            return bootstrap.exchange("cards", b"")
        finally:
            gone.set()

    gone = threading.Event()
    name = register(create)
    outcome = run(print, 2, {"cpu": name})[0]
    assert isinstance(outcome, oa.DeadlineError)
    assert f"{name}, cards" in str(outcome)


def test_a_part_of_some_ranks_that_does_not_start_says_whom_it_means(register: Callable[..., str]) -> None:
    def create(bootstrap: Bootstrap) -> Any:
        raise oa.UnsupportedError(f"rank {bootstrap.rank} cannot")

    near = register(create)
    outcomes = run(print, 4, {"intra": near, "inter": "tcp"}, ranks_per_host=2)
    assert [str(outcome) for outcome in outcomes] == ["rank 0 cannot", "rank 1 cannot"] * 2
    assert outcomes[3].__notes__ == [f"{near!r} numbers from 0 the ranks that it is for: 2, 3"]

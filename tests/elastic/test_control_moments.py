"""Whichever ranks die or stop, and at whichever moment: those that are left know the same first cause, and go on together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from support.control_worlds import Network, network_of

from oneaccord.control.protocol import Leave, Progress

STORE, SUCCESSOR = 0, 1
_MOMENTS = 16
"""How many things happen between two deaths, at most: fewer than one death needs to be dealt with."""


def ready(network: Network) -> None:
    """Let all ranks meet, and the store's successor hear of all, as they have when `init` returns."""
    network.begin()
    network.run(lambda: any(process.knows_all for process in network.processes))


def let_happen(network: Network, steps: int) -> None:
    """Let so many things happen."""
    until = network.steps + steps
    network.run(lambda: network.steps >= until)


def check(network: Network, lost: set[int]) -> None:
    """Check that those that are left know one first cause, which names a rank that was lost, and go on together."""
    left = [process for process in network.processes if process.rank not in lost]
    told = {process.rank: process.verdict for process in left}
    assert len(set(map(str, told.values()))) == 1, told
    verdict = told[left[0].rank]
    assert verdict is not None
    assert verdict.kind == "lost"
    assert verdict.peer in lost
    first = left[0].rank
    expected = ([process.rank for process in left], f"host{first}", 1000 + first, None)
    for process in left:
        answer = process.answer
        assert answer is not None, process.rank
        assert (answer.ranks, answer.host, answer.port, answer.problem) == expected


_SHARES = 4
in_shares = pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.long) for share in range(1, _SHARES))])


def cases(share: int, *choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return a part of all cases, in which those of each kind are as frequent as in all of them."""
    every = list(itertools.product(*choices))
    random.Random(0).shuffle(every)
    return every[share::_SHARES]


@in_shares
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_death_at_any_moment_is_told_alike_and_the_others_go_on(
    size: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for victim, seed, before in cases(share, range(size), range(20), range(0, _MOMENTS, 3)):
        with network_of(size, seed, monkeypatch) as network:
            ready(network)
            let_happen(network, before)
            network.processes[victim].die()
            for process in network.processes:  # whose connections for data end as well
                if process.rank != victim and network.choice.random() < 0.5:
                    let_happen(network, network.choice.randrange(6))
                    process.report(victim)
            network.run()
            check(network, {victim})


def let_die(network: Network, victims: Sequence[int], between: int) -> None:
    """Let some ranks die, with so many things between two deaths, and go on until nothing happens any more."""
    ready(network)
    for victim in victims:
        network.processes[victim].die()
        let_happen(network, between)
    network.run()


@in_shares
@pytest.mark.parametrize("size", [3, 4, 5])
def test_two_deaths_at_any_moments_are_survived(size: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store and its successor are as likely to be those as any two."""
    for victims, seed, between in cases(share, itertools.permutations(range(size), 2), range(4), range(0, 40, 4)):
        with network_of(size, seed, monkeypatch) as network:
            let_die(network, victims, between)
            check(network, {*victims})


@in_shares
def test_three_deaths_at_once_are_survived(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for victims, seed, between in cases(share, itertools.permutations(range(4), 3), range(2), (0, 1, 3, 9)):
        with network_of(5, seed, monkeypatch) as network:
            let_die(network, victims, between)
            check(network, {*victims})


@in_shares
@pytest.mark.parametrize(("size", "per_host"), [(3, 1), (4, 1), (4, 2), (5, 1), (5, 2)])
def test_of_other_hosts_nobody_knows_who_has_died_and_the_larger_part_goes_on(
    size: int, per_host: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for victims, seed, between in cases(share, itertools.permutations(range(size), 2), range(2), range(0, 40, 8)):
        with network_of(size, seed, monkeypatch, per_host) as network:
            let_die(network, victims, between)
            left = [process for process in network.processes if process.is_alive]
            if len(left) > len(victims):
                check(network, {*victims})
            else:  # all of them, or none
                assert all(process.answer is not None for process in left)
                assert len({process.goes_on for process in left}) == 1
                assert {process.verdict.peer for process in left if process.verdict} <= {*victims}


@pytest.mark.parametrize("per_host", [2, 4, 6])
@pytest.mark.parametrize("hosts", [1, 2])
def test_whole_hosts_may_die_with_the_store_and_its_successor(
    hosts: int, per_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with network_of(5 * per_host, 0, monkeypatch, per_host) as network:
        ready(network)
        victims = {*range(hosts * per_host), per_host}  # the successor is the first rank of the second host
        for rank in victims:
            network.processes[rank].die()
        network.run()
        left = [process for process in network.processes if process.is_alive]
        assert all(process.goes_on for process in left)
        assert {process.verdict.peer for process in left if process.verdict} == {0}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_that_leave_hear_of_it_in_few_messages(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10):
        with network_of(size, seed, monkeypatch) as network:
            ready(network)
            network.run()
            before = network.steps
            for process in network.processes:
                process.control._post(Leave(Progress({}, {}, {})))
            let_happen(network, 1000)
            assert network.steps - before < 1000  # the standby passes it on, also to itself
            assert all(process.control._farewell for process in network.processes)


@in_shares
@pytest.mark.parametrize("size", [3, 4])
def test_a_store_that_was_stopped_changes_nothing_when_it_goes_on(
    size: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, before, after in cases(share, range(20), range(0, _MOMENTS, 3), (0, 3, 20, 1000)):
        with network_of(size, seed, monkeypatch) as network:
            ready(network)
            let_happen(network, before)
            network.processes[STORE].is_stopped = True
            for process in network.processes[1:]:
                process.report(STORE)
            let_happen(network, after)
            network.processes[STORE].is_stopped = False
            network.run()
            told = {str(process.verdict) for process in network.processes}
            assert len(told) == 1, told
            going_on = {str(process.answer) for process in network.processes if process.goes_on}
            assert len(going_on) <= 1, going_on


@in_shares
@pytest.mark.parametrize("size", [3, 4])
def test_a_successor_that_was_stopped_as_the_store_died_leads_to_no_second_group(
    size: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, before, after in cases(share, range(10), range(0, _MOMENTS, 5), (0, 3, 20, 1000)):
        with network_of(size, seed, monkeypatch) as network:
            ready(network)
            let_happen(network, before)
            network.processes[SUCCESSOR].is_stopped = True
            network.processes[STORE].die()
            let_happen(network, after)
            network.processes[SUCCESSOR].is_stopped = False
            network.run()
            assert all(process.verdict is not None and process.verdict.peer == STORE for process in network.processes[1:])
            going_on = {str(process.answer) for process in network.processes if process.goes_on}
            assert len(going_on) <= 1, going_on

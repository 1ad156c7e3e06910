"""The virtual clock: what takes time, how much exactly, and what takes none on the clock of the computer."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord.api import NETWORKS, Group, Jitter, Network, NetworkLevel

US, GB = 1e-6, 1e9
TEXTBOOK = (1 * US, 10 * GB)
LAPTOP = (20 * US, 4 * GB)
OPENING = 272
"""A message of the program begins with what describes its array, and the first kilobyte of that."""


# Computing and sleeping.


def test_a_run_in_which_nothing_takes_time_takes_none():
    run = simulated.run(lambda group: group.all_reduce(np.ones(100_000)), 4)
    assert run.duration_s == 0.0
    assert {(call.start_s, call.end_s) for call in run.trace.calls} == {(0.0, 0.0)}


@given(pieces=st.lists(st.tuples(st.sampled_from(["compute", "sleep"]), st.floats(0, 1e9)), max_size=8))
@settings(max_examples=30)
def test_a_rank_takes_the_sum_of_what_it_computes_and_sleeps(pieces):
    def program(group: Group) -> None:
        for what, seconds in pieces:
            group.compute(seconds) if what == "compute" else oa.sleep(seconds)

    expected = 0.0
    for _, seconds in pieces:
        expected += seconds
    assert simulated.run(program, 2).duration_s == expected


def test_ranks_compute_at_the_same_time_and_all_wait_for_the_last():
    def program(group: Group) -> None:
        group.compute(1.0 + group.rank)
        group.barrier()

    trace = simulated.run(program, 4).trace
    assert trace.duration_s == 4.0
    barriers = [trace.calls_of(rank, "barrier")[0] for rank in range(4)]
    assert [call.start_s for call in barriers] == [1.0, 2.0, 3.0, 4.0]
    assert [call.end_s for call in barriers] == [4.0] * 4


def test_a_straggler_computes_for_longer_and_sleeps_as_long_as_all():
    def program(group: Group) -> None:
        group.compute(1.0)
        oa.sleep(0.25)
        group.barrier()

    run = simulated.run(program, 3, faults=simulated.Slow(rank=1, factor=4.0))
    assert [run.trace.calls_of(rank, "barrier")[0].start_s for rank in range(3)] == [1.25, 4.25, 1.25]
    assert run.duration_s == 4.25


def test_work_goes_on_while_its_rank_computes():
    """The transfer takes 11 us; what is computed meanwhile hides it."""

    def program(group: Group) -> None:
        work = group.all_reduce_async(np.ones(11_000), out=None)
        group.compute(20 * US)
        work.wait()

    run = simulated.run(program, 2, network="textbook")
    assert run.duration_s == 20 * US


@pytest.mark.parametrize("seconds", [-1, -1e-300, math.nan, math.inf, "1", None, 1j])
def test_seconds_that_are_none_are_refused(seconds):
    def program(group: Group) -> None:
        for call in (group.compute, oa.sleep):
            with pytest.raises(oa.UsageError, match="finite number of at least 0"):
                call(seconds)

    run = simulated.run(program, 2)
    assert run.duration_s == 0.0
    with pytest.raises(oa.UsageError, match="finite number of at least 0"):
        oa.sleep(seconds)


@pytest.mark.parametrize("seconds", [0, 0.0, np.float64(0.5), 2, 1e12])
def test_seconds_may_be_any_number_that_a_clock_can_add(seconds):
    def program(group: Group) -> None:
        group.compute(seconds)
        oa.sleep(seconds)

    assert simulated.run(program, 2).duration_s == 2 * seconds


def test_outside_of_a_world_sleep_really_sleeps_and_nothing_is_computed():
    started = time.monotonic()
    oa.sleep(0.01)
    assert time.monotonic() - started >= 0.01
    with oa.init() as group:
        group.compute(1e6)
        group.mark("no trace")


# Messages.


def transfer(nbytes: int, wire: tuple[float, float]) -> float:
    """Latency plus bytes over bandwidth."""
    return wire[0] + nbytes / wire[1]


def sends(nbytes: int):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.zeros(nbytes, np.uint8), 1)
        elif group.rank == 1:
            group.recv(0)

    return program


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1024])
def test_a_short_message_takes_its_latency_and_the_time_of_its_bytes(nbytes):
    run = simulated.run(sends(nbytes), 2, network="textbook")
    assert [(each.sent_s, each.arrived_s) for each in run.trace.messages] == [(0.0, transfer(OPENING + 1024, TEXTBOOK))]
    assert run.duration_s == transfer(OPENING + 1024, TEXTBOOK)


@pytest.mark.parametrize("nbytes", [1025, 100_000, 12_345_678])
def test_the_rest_of_a_long_message_follows_when_its_beginning_has_come(nbytes):
    run = simulated.run(sends(nbytes), 2, network="textbook")
    first, rest = run.trace.messages
    assert (first.nbytes, rest.nbytes) == (OPENING + 1024, nbytes - 1024)
    assert first.arrived_s == rest.sent_s == transfer(OPENING + 1024, TEXTBOOK)
    assert rest.arrived_s == run.duration_s == pytest.approx(rest.sent_s + transfer(nbytes - 1024, TEXTBOOK), rel=1e-12)


def test_a_message_waits_for_its_receiver_unless_it_leaves_at_once():
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(1.0, 1)
        else:
            group.compute(1.0)
            group.recv(0)

    late = simulated.run(program, 2, network="textbook")
    assert late.trace.messages[0].sent_s == 1.0
    assert late.trace.calls_of(0, "send")[0].end_s == late.duration_s == pytest.approx(1.0 + transfer(OPENING + 1024, TEXTBOOK))
    eager = simulated.run(program, 2, network="textbook", config={"backends": {"simulated": {"eager_bytes": 4096}}})
    assert eager.trace.messages[0].sent_s == 0.0
    assert eager.trace.calls_of(0, "send")[0].end_s == 0.0
    assert eager.trace.calls_of(1, "recv")[0].end_s == eager.duration_s == 1.0


def test_two_messages_of_one_rank_leave_its_port_one_after_the_other():
    """A port is busy for the gap, which is the latency here, and the bytes."""

    def program(group: Group) -> None:
        if group.rank == 0:
            for work in [group.send_async(np.zeros(1000), dest) for dest in (1, 2)]:
                work.wait()
        else:
            group.recv(0)

    arrived = sorted(
        each.arrived_s for each in simulated.run(program, 3, network="textbook").trace.messages if each.nbytes > 2000
    )
    other = simulated.run(program, 3, network="textbook", seed=1)
    assert sorted(each.arrived_s for each in other.trace.messages if each.nbytes > 2000) == arrived
    one = transfer(OPENING + 1024, TEXTBOOK)
    rest = transfer(8000 - 1024, TEXTBOOK)
    # The port: opening to one, opening to the other, and then the rest to each.
    assert arrived == pytest.approx([2 * one + rest, 2 * one + 2 * rest])


def test_messages_of_pairs_that_share_a_bus_are_later_than_alone():
    """Each wire carries 4 GB/s, and the bus that all share 12 GB/s, one message after the other."""
    rest = 58_976

    def program(group: Group) -> None:
        if group.rank < 2 * pairs:
            group.sendrecv(np.zeros(1024 + rest, np.uint8), group.rank ^ 1, group.rank ^ 1)

    flight = transfer(rest, LAPTOP)
    wait = (rest - (OPENING + 1024)) / (12 * GB)  # the beginnings met on the bus as well, so that the rests come a little apart
    for pairs in (1, 4, 8):
        messages = simulated.run(program, 16, network="laptop").trace.messages
        took = sorted(each.arrived_s - each.sent_s for each in messages if each.nbytes == rest)
        assert took == pytest.approx([flight + before * wait for before in range(2 * pairs)])


def test_messages_of_two_ranks_of_a_host_share_its_card_in_a_fat_tree():
    """By hand, in a tree whose links have no gap: ranks 0 and 1 send 1 MB to another host, over one card of 10 GB/s."""
    level = NetworkLevel(latency_s=1 * US, bandwidth_bytes_per_s=10 * GB, gap_s=0)
    network = Network(
        topology="fat_tree", ranks_per_host=2, host=level, nic=level, spine=level, hosts_per_leaf=2, oversubscription=1
    )
    count = 1_000_000

    def program(group: Group) -> None:
        if group.rank < senders:
            group.send(np.zeros(count, np.uint8), group.rank + 2)
        elif 2 <= group.rank < 2 + senders:
            group.recv(group.rank - 2)

    beginning, rest = (OPENING + 1024) / (10 * GB), (count - 1024) / (10 * GB)
    two_links = 2 * US  # into the leaf switch, and out of it
    senders = 1
    assert simulated.run(program, 4, network=network).duration_s == pytest.approx(2 * two_links + beginning + rest)
    senders = 2  # the second rest waits while the card is busy with the first
    assert simulated.run(program, 4, network=network).duration_s == pytest.approx(2 * two_links + beginning + 2 * rest)


def test_messages_between_two_ranks_keep_their_order_whatever_delays_them():
    jitter = NETWORKS["textbook"].model_copy(update={"jitter": Jitter(distribution="exponential", mean_s=1e-3)})

    def program(group: Group) -> list[int]:
        if group.rank == 0:
            for work in [group.send_async(number, 1) for number in range(30)]:
                work.wait()
            return []
        return [group.recv(0).item() for _ in range(30)]

    for seed in range(5):
        run = simulated.run(program, 2, seed, jitter, config={"backends": {"simulated": {"eager_bytes": 4096}}})
        assert run.results[1] == list(range(30))
        arrivals = [each.arrived_s for each in run.trace.messages if (each.source, each.dest) == (0, 1)]
        assert arrivals == sorted(arrivals)


# Deadlines.


def test_long_waits_take_no_time_on_the_computers_clock():
    def program(group: Group) -> None:
        if group.rank == 0:
            oa.sleep(1e6)
            group.send(1, 1)
        else:
            group.recv(0, timeout_s=1.5e6)

    assert simulated.run(program, 2).duration_s == 1e6


@pytest.mark.parametrize("timeout_s", [1e-3, 60.0, 1e6])
def test_a_deadline_passes_exactly_when_it_should(timeout_s):
    def program(group: Group) -> None:
        group.barrier()
        oa.sleep(3.0)
        if group.rank == 1:
            oa.sleep(2 * timeout_s)
        group.recv(1 - group.rank, timeout_s=timeout_s)

    run = simulated.run(program, 2, check=False)
    assert {type(error) for error in run.errors.values()} == {oa.DeadlineError}
    assert f"recv from rank 1 #1 did not finish within {timeout_s:g} s" in str(run.cause)
    late = run.trace.calls_of(0, "recv")[0]
    assert (late.start_s, late.end_s, late.error) == (3.0, 3.0 + timeout_s, "DeadlineError")


def test_what_comes_at_the_last_moment_is_in_time():
    def program(group: Group) -> Any:
        if group.rank == 1:
            oa.sleep(5.0)
            return group.send(7, 0)
        return group.recv(1, timeout_s=5.0).item()

    outcomes = {str(simulated.run(program, 2, seed, check=False).errors) for seed in range(20)}
    assert len(outcomes) == 1


def test_the_default_deadline_is_that_of_the_group():
    def program(group: Group) -> None:
        if group.rank:
            oa.sleep(100.0)
        else:
            group.recv(1)

    for limits, expected in ({"timeout_s": 2.5}, 2.5), ({"config": {"timeout_s": 7.0}}, 7.0), ({}, 60.0):
        run = simulated.run(program, 2, check=False, **limits)
        call = run.trace.calls_of(0, "recv")[0]
        assert (call.error, call.end_s) == ("DeadlineError", expected)


def test_waiting_for_work_may_end_early_and_go_on():
    def program(group: Group) -> None:
        if group.rank == 0:
            oa.sleep(1.0)
            group.send(1, 1)
            return
        work = group.recv_async(0)
        for _ in range(2):
            with pytest.raises(oa.DeadlineError, match=r"was not done within 0\.4 s of waiting; the call continues"):
                work.wait(timeout_s=0.4)
            group.mark("gave up")
        assert work.wait(timeout_s=0.4) == 1
        group.mark("done")

    run = simulated.run(program, 2)
    assert [mark.time_s for mark in run.trace.marks_of(1)][:3] == [0.4, 0.8, 1.0]


def test_leaving_takes_as_long_as_it_is_given():
    """A group that is closed waits for the others, so that all can leave together."""

    def program(group: Group) -> None:
        if group.rank == 0:
            group.close(timeout_s=2.0)
        else:
            oa.sleep(10.0)

    run = simulated.run(program, 2)
    assert [mark.time_s for mark in run.trace.marks_of(0) if mark.kind == "ended"] == [2.0]
    assert run.duration_s == 10.0


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf, "1"])
def test_deadlines_that_are_none_are_refused(timeout_s):
    def program(group: Group) -> None:
        with pytest.raises(oa.UsageError, match="timeout_s must be a positive, finite number"):
            group.barrier(timeout_s=timeout_s)
        work = group.barrier_async()
        with pytest.raises(oa.UsageError, match="timeout_s must be a positive, finite number"):
            work.wait(timeout_s)
        work.wait()

    simulated.run(program, 2)


# Work.


@pytest.mark.parametrize("network", [None, "textbook", "fat-tree"])
@pytest.mark.parametrize("size", [2, 5])
def test_ranks_may_ask_again_and_again_whether_work_is_done(size, network):
    def program(group: Group) -> float:
        total = 0.0
        for number in range(3):
            work = group.all_reduce_async(np.full(2000, number + group.rank))
            asked = 0
            while not work.done():
                asked += 1
                assert asked < 10_000
            total += work.wait()[0]
        return float(total)

    assert simulated.run(program, size, network=network).results == [3.0 * (size - 1) * size / 2 + 3 * size] * size


def test_who_asks_lets_the_clock_go_on_to_what_happens_next():
    def program(group: Group) -> None:
        if group.rank == 0:
            oa.sleep(5.0)
            group.send(1, 1)
            return
        work = group.recv_async(0)
        while not work.done():
            pass
        group.mark("seen")

    assert simulated.run(program, 2).trace.marks_of(1)[0].time_s == 5.0


def test_work_fails_at_its_deadline_for_those_who_ask():
    def program(group: Group) -> None:
        if group.rank == 0:
            oa.sleep(1e3)
            return
        work = group.recv_async(0, timeout_s=60.0)
        while not work.done():
            pass
        assert isinstance(work.exception(), oa.DeadlineError)
        group.mark("seen")

    run = simulated.run(program, 2, check=False)
    assert run.trace.marks_of(1)[0].time_s == 60.0


def test_ranks_that_ask_for_what_never_comes_are_in_a_deadlock():
    def program(group: Group) -> None:
        work = group.recv_async(1 - group.rank)
        while not work.done():
            pass
        work.wait()

    with pytest.raises(oa.DeadlockError, match="rank 0 waits for rank 1, which waits for rank 0"):
        simulated.run(program, 2)


def test_an_event_loop_awaits_several_works_while_the_clock_goes_on():
    def program(group: Group) -> list[float]:
        async def doubled(number: int) -> float:
            work = group.all_reduce_async(np.full(1000, number))
            return 2 * float((await work)[0])

        async def main() -> list[float]:
            if group.rank == 1:
                oa.sleep(2.0)
            found = await asyncio.gather(*(doubled(number) for number in range(4)), other())
            return found[:-1]

        async def other() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        return asyncio.run(main())

    run = simulated.run(program, 3, network="textbook")
    assert run.results == [[0.0, 6.0, 12.0, 18.0]] * 3
    assert 2.0 < run.duration_s < 2.001


def test_an_event_loop_meets_the_error_of_a_work():
    def program(group: Group) -> None:
        async def main() -> None:
            await group.recv_async(1, timeout_s=3.0)

        if group.rank == 1:
            oa.sleep(10.0)
            return
        with pytest.raises(oa.DeadlineError, match="did not finish within 3 s"):
            asyncio.run(main())
        group.mark("met")

    run = simulated.run(program, 2, check=False)
    assert run.trace.marks_of(0)[0].time_s == 3.0


def test_an_event_loop_waits_for_several_works_while_the_clock_goes_on():
    def program(group: Group) -> list[Any]:
        async def main() -> list[Any]:
            works = [group.recv_async(rank) for rank in range(1, 4)]
            first, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            group.mark("any")
            every, _ = await asyncio.wait(works)
            group.mark("every")
            return [sorted(int(work.wait()) for work in done) for done in (first, every)]

        if group.rank:
            oa.sleep(4.0 - group.rank)
            group.send(group.rank, 0)
            return []
        return asyncio.run(main())

    runs = [simulated.run(program, 4) for _ in range(3)]
    assert runs[0].results[0] == [[3], [1, 2, 3]]
    assert [mark.time_s for mark in runs[0].trace.marks_of(0)[:2]] == [1.0, 3.0]
    assert runs[0].trace_json() == runs[1].trace_json() == runs[2].trace_json()


def test_an_event_loop_that_waits_for_several_works_learns_that_they_never_end():
    def program(group: Group) -> None:
        async def main() -> None:
            works = [group.recv_async(1 - group.rank), group.recv_async(1 - group.rank)]
            done, _ = await asyncio.wait(works)
            assert done == {*works}
            works[0].wait()

        asyncio.run(main())

    with pytest.raises(oa.DeadlockError, match="rank 0 waits for rank 1, which waits for rank 0"):
        simulated.run(program, 2)


@pytest.mark.parametrize("seed", range(3))
def test_works_are_completed_in_an_order_that_follows_from_the_seed(seed: int):
    def program(group: Group) -> list[int]:
        if group.rank:
            group.send(group.rank, 0)
            return []
        works = [group.recv_async(rank) for rank in range(1, 8)]
        first = oa.wait_any(works)
        return [first, *(int(work.wait()) for work in oa.as_completed(works)), *(int(each) for each in oa.wait_all(works))]

    runs = [simulated.run(program, 8, seed=seed).results[0] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    assert sorted(runs[0][1:8]) == runs[0][8:] == list(range(1, 8))


def test_who_waits_for_any_work_goes_on_when_it_ends_or_when_its_time_is_up():
    def program(group: Group) -> list[float]:
        if group.rank:
            oa.sleep(float(group.rank))
            group.send(group.rank, 0)
            return []
        works = [group.recv_async(rank) for rank in (3, 2)]
        with pytest.raises(oa.DeadlineError, match="none of 2 calls was done within 1 s"):
            oa.wait_any(works, timeout_s=1.0)
        group.mark("late")
        assert oa.wait_any(works, timeout_s=60.0) == 1
        group.mark("any")
        assert [work.wait().item() for work in oa.as_completed(works)] == [2, 3]
        group.mark("every")
        return [group.recv(1).item()]

    run = simulated.run(program, 4)
    assert [mark.time_s for mark in run.trace.marks_of(0)[:3]] == [1.0, 2.0, 3.0]


def test_callbacks_come_when_work_ends_on_the_virtual_clock():
    def program(group: Group) -> None:
        if group.rank == 0:
            oa.sleep(1.5)
        work = group.barrier_async()
        work.add_done_callback(lambda _: group.mark("called back"))
        oa.sleep(4.0)
        work.wait()

    run = simulated.run(program, 2)
    assert [run.trace.marks_of(rank)[0].time_s for rank in range(2)] == [1.5, 1.5]
    assert [run.trace.marks_of(rank)[0].label for rank in range(2)] == ["called back"] * 2

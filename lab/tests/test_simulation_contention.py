"""What messages do to each other, in cases small enough to be worked out by hand."""

from __future__ import annotations

import math

import pytest

from oneaccord.errors import ConfigError
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.errors import ScheduleDeadlockError, UnmatchedMessageError
from oneaccord.schedule.simulation import PRESETS, Level, Network
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step
from oneaccord_lab.simulation import simulate

N = 1000
WHOLE = Ref(Buffer.OUTPUT, 0)

# One byte takes a second over any link inside a host; all else is chosen per test.
HOST = Level(latency_s=5, bandwidth_bytes_per_s=1)


def tree(ranks_per_host: int = 2, hosts_per_leaf: int = 4, oversubscription: int = 1, gap_s: float = 0) -> Network:
    return Network(
        topology="fat_tree",
        ranks_per_host=ranks_per_host,
        host=HOST,
        nic=Level(latency_s=10, bandwidth_bytes_per_s=2, gap_s=gap_s),
        spine=Level(latency_s=3, bandwidth_bytes_per_s=4, gap_s=0),
        hosts_per_leaf=hosts_per_leaf,
        oversubscription=oversubscription,
    )


def torus(*dimensions: int, ranks_per_host: int = 1) -> Network:
    return Network(
        topology="torus",
        ranks_per_host=ranks_per_host,
        host=HOST,
        link=Level(latency_s=10, bandwidth_bytes_per_s=1, gap_s=0),
        dimensions=dimensions,
    )


WIRES = Network(topology="wires", wire=Level(latency_s=10, bandwidth_bytes_per_s=1), reduction_bytes_per_s=4)


def time(network: Network, size: int, **steps: list[Step]) -> float:
    """Return the time of steps of ranks ``r0``, ``r1``, ...; every chunk has N bytes."""
    return simulate(algorithm(size, **steps), size, N, network).time_s


def algorithm(size: int, **steps: list[Step]) -> Algorithm:
    def build(rank: int, size: int, root: int, segments: int) -> Schedule:
        return Schedule(Collective.ALL_REDUCE, "by_hand", rank, size, 0, 1, 1, (), tuple(steps.get(f"r{rank}", ())))

    return Algorithm("by_hand", Collective.ALL_REDUCE, build, "")


def flows(*pairs: tuple[int, int]) -> dict[str, list[Step]]:
    """Return independent messages of N bytes, all of which may start at once."""
    steps: dict[str, list[Step]] = {}
    for source, target in pairs:
        steps.setdefault(f"r{source}", []).append(Send(target, WHOLE))
        steps.setdefault(f"r{target}", []).append(Recv(source, WHOLE))
    return steps


def test_one_message_takes_latency_and_bytes_of_its_slowest_link() -> None:
    assert time(tree(), 4, **flows((0, 1))) == 5 + N  # inside a host
    assert time(tree(), 4, **flows((0, 2))) == 2 * 10 + N / 2  # host, leaf, host
    assert time(tree(hosts_per_leaf=1), 4, **flows((0, 2))) == 2 * 10 + 2 * 3 + N / 2  # and over a spine
    assert time(torus(1, 1, 4), 4, **flows((0, 2))) == 2 * 10 + N


def test_two_flows_through_one_network_card_take_twice_as_long() -> None:
    alone, both = time(tree(), 4, **flows((0, 2))), time(tree(), 4, **flows((0, 2), (1, 3)))
    assert alone == 20 + N / 2
    assert both == 20 + 2 * N / 2


def test_flows_of_other_hosts_and_other_directions_do_not_disturb() -> None:
    assert time(tree(), 8, **flows((0, 2), (4, 6))) == 20 + N / 2
    assert time(tree(), 4, **flows((0, 2), (3, 1))) == 20 + N / 2


def test_a_gap_keeps_the_link_and_the_ports_busy_longer() -> None:
    # Two ranks of one host: the card is busy for its gap and the bytes. One rank: its port is busy for both gaps of the way.
    assert time(tree(gap_s=7), 4, **flows((0, 2), (1, 3))) == (7 + N / 2) + 20 + N / 2
    assert time(tree(gap_s=7), 6, **flows((0, 2), (0, 4))) == (2 * 7 + N / 2) + 20 + N / 2


def test_without_a_gap_of_its_own_a_message_keeps_its_ports_busy_until_it_ends() -> None:
    assert time(WIRES, 3, **flows((0, 1), (0, 2))) == 2 * (10 + N)
    assert time(WIRES, 3, **flows((0, 2), (1, 2))) == 2 * (10 + N)
    assert time(WIRES, 2, **flows((0, 1), (1, 0))) == 10 + N  # sending and receiving at once


def test_with_a_small_gap_messages_of_one_pair_follow_each_other_in_flight() -> None:
    network = Network(topology="wires", wire=Level(latency_s=10, bandwidth_bytes_per_s=1, gap_s=1))
    assert time(network, 2, **flows((0, 1), (0, 1), (0, 1))) == 3 * N + 2 * 1 + 10


def test_flows_to_one_spine_share_it_and_flows_to_two_do_not() -> None:
    # Leaves of two hosts with one rank each, two spines; the spine is chosen by where a message goes. Twice as slow as the cards.
    network = tree(ranks_per_host=1, hosts_per_leaf=2).model_copy(
        update={"spine": Level(latency_s=3, bandwidth_bytes_per_s=1, gap_s=0)}
    )
    assert time(network, 6, **flows((0, 2), (1, 3))) == 26 + N
    assert time(network, 6, **flows((0, 2), (1, 4))) == 26 + 2 * N


def test_oversubscription_leaves_fewer_spines() -> None:
    network = tree(ranks_per_host=1, hosts_per_leaf=2, oversubscription=2).model_copy(
        update={"spine": Level(latency_s=3, bandwidth_bytes_per_s=1, gap_s=0)}
    )
    assert time(network, 4, **flows((0, 2), (1, 3))) == 26 + 2 * N


def test_neighbours_in_a_torus_do_not_contend() -> None:
    everyone = [(rank, (rank + 1) % 4) for rank in range(4)]
    assert time(torus(1, 1, 4), 4, **flows(*everyone)) == 10 + N
    assert time(torus(1, 1, 4), 4, **flows(*everyone, *[(b, a) for a, b in everyone])) == 2 * N + 10


def test_flows_over_one_link_of_a_torus_take_turns() -> None:
    # 0 to 2 and 1 to 2 share the link from 1 to 2, and the port of 2; both have passed one queue when they meet.
    assert time(torus(1, 1, 5), 5, **flows((0, 2), (1, 3))) == N + 20 + N
    assert time(torus(1, 1, 5), 5, **flows((0, 2), (3, 1))) == 20 + N


def test_a_torus_goes_the_shorter_way_and_along_x_first() -> None:
    assert time(torus(1, 1, 5), 5, **flows((0, 4))) == 10 + N
    assert time(torus(2, 2, 3), 12, **flows((0, 11))) == 3 * 10 + N
    # From (0,0,0) to (1,1,0) the way goes over (1,0,0), and not over (0,1,0).
    assert time(torus(5, 5, 1), 25, **flows((0, 6), (1, 11))) == N + 20 + N
    assert time(torus(5, 5, 1), 25, **flows((0, 6), (5, 7))) == 20 + N
    # Half way around it goes forward: from 0 over 1 and 2 to 3.
    assert time(torus(1, 1, 6), 6, **flows((0, 3), (1, 2))) == N + 30 + N
    assert time(torus(1, 1, 6), 6, **flows((0, 3), (5, 4))) == 30 + N


def test_ranks_of_one_host_share_its_links_in_a_torus() -> None:
    assert time(torus(1, 1, 2, ranks_per_host=2), 4, **flows((0, 2), (1, 3))) == N + 10 + N


def test_all_messages_share_a_bus() -> None:
    network = Network(topology="bus", host=HOST, bus=Level(latency_s=0, bandwidth_bytes_per_s=2))
    assert time(network, 2, **flows((0, 1))) == 5 + N
    assert time(network, 6, **flows((0, 1), (2, 3), (4, 5))) == 2 * N / 2 + 5 + N


def test_who_comes_first_goes_first_whatever_the_rank() -> None:
    # Rank 3 waits for a message from its own host (5 + N) before it sends; until then the card has sent what rank 2 has.
    steps: dict[str, list[Step]] = {
        "r0": [Recv(2, WHOLE)],
        "r1": [Recv(3, WHOLE)],
        "r2": [Send(3, WHOLE), Send(0, WHOLE, (0,))],
        "r3": [Recv(2, WHOLE), Send(1, WHOLE)],
    }
    # Rank 3 has a send that waits for nothing: it is first at the card. The other one comes at 5 + N, when the card is free.
    assert time(tree(), 4, **steps) == 5 + N + 20 + N / 2


def test_a_message_waits_for_what_its_receive_waits_for() -> None:
    steps: dict[str, list[Step]] = {
        "r0": [Send(1, WHOLE)],
        "r1": [Recv(2, WHOLE), Recv(0, WHOLE, (0,))],
        "r2": [Send(1, WHOLE)],
    }
    assert time(WIRES, 3, **steps) == 2 * (10 + N)


def test_a_rank_reduces_one_thing_at_a_time() -> None:
    reduce = [RecvReduce(1, WHOLE, WHOLE), RecvReduce(2, WHOLE, WHOLE)]
    fast = WIRES.model_copy(update={"reduction_bytes_per_s": 4})
    slow = WIRES.model_copy(update={"reduction_bytes_per_s": 0.5})
    senders: dict[str, list[Step]] = {"r1": [Send(0, WHOLE)], "r2": [Send(0, WHOLE)]}
    # The first is reduced while the second comes, if that is fast enough.
    assert time(fast, 3, r0=list(reduce), **senders) == 2 * (10 + N) + N / 4
    assert time(slow, 3, r0=list(reduce), **senders) == 10 + N + 2 * (2 * N)


def test_what_can_start_at_once_goes_by_step_and_then_by_rank() -> None:
    # Both ranks of the second host want the card at once. That of rank 3 is its first step, and so it goes first.
    steps: dict[str, list[Step]] = {
        "r0": [Recv(2, WHOLE), Recv(1, WHOLE)],
        "r1": [Recv(3, WHOLE), Send(0, WHOLE, (0,))],
        "r2": [Recv(3, WHOLE), Send(0, WHOLE)],
        "r3": [Send(1, WHOLE), Send(2, WHOLE)],
    }
    # The port of rank 0 is busy from N / 2 to N with what comes from rank 2.
    assert time(tree(), 4, **steps) == N + 5 + N
    two = Ref(Buffer.OUTPUT, 0, 2)
    reductions: dict[str, list[Step]] = {
        "r0": [Reduce(two, two, two), Reduce(WHOLE, WHOLE, WHOLE), Send(1, WHOLE, (0,))],
        "r1": [Recv(0, WHOLE)],
    }
    assert time(WIRES, 2, **reductions) == 2 * N / 4 + 10 + N


def test_copies_are_free_and_hand_on_what_they_wait_for() -> None:
    steps: dict[str, list[Step]] = {
        "r0": [Send(1, WHOLE)],
        "r1": [
            Recv(0, WHOLE),
            Copy(WHOLE, Ref(Buffer.INPUT, 0), (0,)),
            Reduce(WHOLE, WHOLE, WHOLE, (1,)),
            Send(2, WHOLE, (2,)),
        ],
        "r2": [Recv(1, WHOLE)],
    }
    assert time(WIRES, 3, **steps) == 10 + N + N / 4 + 10 + N


def test_schedules_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(UnmatchedMessageError, match="rank 0 has 1 sends to rank 1, and rank 1 has 0 receives"):
        time(WIRES, 2, r0=[Send(1, WHOLE)])
    with pytest.raises(ScheduleDeadlockError, match="wait for each other forever"):
        time(WIRES, 2, r0=[Recv(1, WHOLE), Send(1, WHOLE, (0,))], r1=[Recv(0, WHOLE), Send(0, WHOLE, (0,))])


def test_dimensions_that_are_not_the_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match="are 12 hosts, and 10 ranks, 1 on each host, need 10"):
        time(torus(2, 2, 3), 10, **flows((0, 1)))


@pytest.mark.parametrize("network", PRESETS.values(), ids=PRESETS)
def test_the_same_call_gives_the_same_bits(network: Network) -> None:
    for each in BUILTIN:
        if each.by_host and each.collective is not Collective.BROADCAST and network.topology == "bus":
            continue
        first, second = (simulate(each, 24, 12345, network) for _ in range(2))
        assert first == second


@pytest.mark.parametrize("network", PRESETS.values(), ids=PRESETS)
def test_more_bytes_never_take_less_time_in_a_ring(network: Network) -> None:
    ring = next(each for each in BUILTIN if each.name == "ring")
    times = [simulate(ring, 24, nbytes, network).time_s for nbytes in (0, 1, 1000, 10**5, 10**7)]
    assert times == sorted(times)
    assert all(math.isfinite(each) for each in times)

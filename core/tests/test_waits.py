"""Who waits for whom: which waits can never end, told from what ranks report of themselves."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.rendezvous.messages import Progress, Stalled
from manyhands.rendezvous.waits import circle, still_owed, unread

COLLECTIVES, MESSAGES = 0, 1
"""The channels of a group."""


def progress(calls: int = 0, sent: dict[int, int] | None = None, received: dict[int, int] | None = None) -> Progress:
    """Say how far a rank has come: collectives begun, messages begun to each peer, messages begun from each."""
    return Progress({COLLECTIVES: calls}, {MESSAGES: sent or {}}, {MESSAGES: received or {}})


def barrier(
    sequence: int = 0, *, sent: dict[int, int] | None = None, received: dict[int, int] | None = None, alone: bool = True
) -> Stalled:
    return Stalled(COLLECTIVES, sequence, "barrier", b"digest", [], [], progress(sequence + 1, sent, received), alone)


def talk(
    messages: list[tuple[int, bool, int]],
    *,
    calls: int = 0,
    sent: dict[int, int] | None = None,
    received: dict[int, int] | None = None,
    alone: bool = True,
) -> Stalled:
    """Return the report of a rank in which ``messages``, as (peer, is a send, number), have not come to their end."""
    sent, received = dict(sent or {}), dict(received or {})
    for peer, is_send, number in messages:
        begun = sent if is_send else received
        begun[peer] = max(begun.get(peer, 0), number + 1)
    awaiting = sorted({peer for peer, _, _ in messages})
    return Stalled(MESSAGES, 1, "talk", b"", awaiting, messages, progress(calls, sent, received), alone)


def recv(source: int, number: int = 0, **more: object) -> Stalled:
    return talk([(source, False, number)], **more)  # type: ignore[arg-type]


def send(dest: int, number: int = 0, **more: object) -> Stalled:
    return talk([(dest, True, number)], **more)  # type: ignore[arg-type]


def circles(stalls: dict[int, Stalled], world_size: int) -> list[set[int]]:
    """Return the circle through each rank."""
    return [set(circle(stalls, rank, world_size)) for rank in range(world_size)]


@pytest.mark.parametrize(("calls", "owed"), [(0, True), (4, True), (5, False), (9, False)])
def test_a_collective_is_owed_until_it_is_begun(calls: int, owed: bool) -> None:
    assert still_owed(barrier(4), 0, 1, progress(calls)) is owed


def test_collectives_of_another_channel_do_not_count() -> None:
    assert still_owed(barrier(4), 0, 1, Progress({2: 9}, {}, {}))


@pytest.mark.parametrize(("begun", "owed"), [({}, True), ({0: 2}, True), ({0: 3}, False), ({2: 3}, True)])
def test_a_message_is_owed_until_its_other_half_is_begun(begun: dict[int, int], owed: bool) -> None:
    assert still_owed(recv(1, 2), 0, 1, progress(sent=begun)) is owed
    assert still_owed(recv(1, 2), 0, 1, progress(received=begun, sent={0: 3})) is False
    assert still_owed(send(1, 2), 0, 1, progress(received=begun)) is owed
    assert still_owed(send(1, 2), 0, 1, progress(sent=begun, received={0: 3})) is False


def test_only_the_messages_with_that_peer_count() -> None:
    both = talk([(1, True, 0), (2, False, 0)])
    assert still_owed(both, 0, 1, progress())
    assert not still_owed(both, 0, 1, progress(received={0: 1}))
    assert still_owed(both, 0, 2, progress(received={0: 1}))
    assert not still_owed(both, 0, 3, progress())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_of_recvs_is_found_from_each_of_its_ranks(size: int) -> None:
    stalls = {rank: recv((rank + 1) % size) for rank in range(size)}
    assert circles(stalls, size) == [set(range(size))] * size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_circle_is_told_in_the_order_of_waiting(size: int) -> None:
    stalls = {rank: recv((rank + 1) % size) for rank in range(size)}
    for start in range(size):
        assert circle(stalls, start, size) == [(start + step) % size for step in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_that_one_rank_has_not_reported_is_none(size: int) -> None:
    for silent in range(size):
        stalls = {rank: recv((rank + 1) % size) for rank in range(size) if rank != silent}
        assert circles(stalls, size) == [set()] * size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_with_a_rank_that_another_thread_may_rescue_is_none(size: int) -> None:
    for busy in range(size):
        stalls = {rank: recv((rank + 1) % size, alone=rank != busy) for rank in range(size)}
        assert circles(stalls, size) == [set()] * size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_in_which_one_rank_has_sent_already_is_none(size: int) -> None:
    """The message is on its way: the report of the rank that waits for it is old."""
    for sender in range(size):
        before = (sender - 1) % size
        stalls = {rank: recv((rank + 1) % size, sent={before: 1} if rank == sender else None) for rank in range(size)}
        assert circles(stalls, size) == [set()] * size


def test_two_ranks_that_both_send_wait_for_each_other() -> None:
    assert circles({0: send(1), 1: send(0)}, 2) == [{0, 1}] * 2


def test_a_send_and_the_recv_of_it_do_not_wait_for_each_other() -> None:
    """A message that moves slowly is no circle, whichever half is looked at."""
    assert circles({0: send(1, 4), 1: recv(0, 4)}, 2) == [set()] * 2


def test_a_send_and_the_recv_of_an_earlier_message_do_not_wait_for_each_other() -> None:
    assert circles({0: send(1, 4), 1: recv(0, 3)}, 2) == [set()] * 2


def test_a_barrier_against_a_recv_is_a_circle() -> None:
    assert circles({0: barrier(), 1: recv(0)}, 2) == [{0, 1}] * 2


def test_only_the_ranks_of_the_circle_are_told() -> None:
    stalls = {0: barrier(), 1: recv(2), 2: barrier()}
    assert circles(stalls, 3) == [set(), {1, 2}, {1, 2}]


def test_a_rank_that_has_entered_the_collective_is_not_waited_for() -> None:
    assert circles({0: barrier(4), 1: recv(0, calls=5)}, 2) == [set()] * 2
    assert circles({0: barrier(4), 1: recv(0, calls=4)}, 2) == [{0, 1}] * 2


def test_a_barrier_after_the_send_is_no_circle() -> None:
    assert circles({0: barrier(sent={1: 1}), 1: recv(0)}, 2) == [set()] * 2


def test_ranks_in_different_collectives_wait_for_the_later_ones_only() -> None:
    assert circles({0: barrier(4), 1: barrier(5)}, 2) == [set()] * 2


def test_a_sendrecv_waits_only_for_what_has_not_come() -> None:
    exchange = {"sent": {1: 1}, "received": {1: 1}}
    only_the_receive = talk([(1, False, 0)], **exchange)  # type: ignore[arg-type]
    only_the_send = talk([(1, True, 0)], **exchange)  # type: ignore[arg-type]
    # Rank 1 has received once, and now waits for a second array without having sent one.
    waits_again = recv(0, 1)
    assert circles({0: only_the_receive, 1: waits_again}, 2) == [{0, 1}] * 2
    assert circles({0: only_the_send, 1: waits_again}, 2) == [set()] * 2


def test_a_sendrecv_may_stand_in_a_circle_by_either_direction() -> None:
    through = talk([(1, True, 0), (2, False, 0)])
    assert circles({0: through, 1: recv(0, 1), 2: recv(0)}, 3) == [{0, 2}, set(), {0, 2}]
    assert circles({0: through, 1: send(0), 2: recv(0)}, 3) == [{0, 1}, {0, 1}, {0, 2}]


def test_a_report_from_before_the_others_went_on_proves_nothing() -> None:
    """Rank 1 reported that it waits for rank 0's first message; rank 0 has sent it since, and waits for the answer."""
    old = recv(0)
    assert circles({0: recv(1, sent={1: 1}), 1: old}, 2) == [set()] * 2


def test_a_rank_outside_the_circle_that_waits_for_it_is_not_in_it() -> None:
    stalls = {0: recv(1), 1: recv(2), 2: recv(1)}
    assert circles(stalls, 3) == [set(), {1, 2}, {1, 2}]


def test_a_rank_that_waits_for_nobody_there_is_in_no_circle() -> None:
    assert circle({}, 0, 2) == []
    assert circle({0: recv(1)}, 0, 2) == []
    assert circle({1: recv(0)}, 0, 2) == []


@given(st.data())
def test_each_circle_is_one(data: st.DataObject) -> None:
    """Each rank of a circle is alone, has reported, and is owed something by the next; each rank of a graph with one is found."""
    size = data.draw(st.integers(2, 6))
    ranks = st.integers(0, size - 1)
    stalls: dict[int, Stalled] = {}
    for rank in data.draw(st.sets(ranks)):
        others = ranks.filter(lambda other, rank=rank: other != rank)
        alone = data.draw(st.booleans() | st.just(True))
        begun = data.draw(st.dictionaries(others, st.integers(0, 2)))
        if data.draw(st.booleans()):
            stalls[rank] = barrier(data.draw(st.integers(0, 1)), sent=begun, alone=alone)
        else:
            messages = data.draw(st.lists(st.tuples(others, st.booleans(), st.integers(0, 1)), max_size=2))
            stalls[rank] = talk(messages, calls=data.draw(st.integers(0, 2)), sent=begun, alone=alone)

    def waits(rank: int, peer: int) -> bool:
        stalled = stalls[rank]
        listed = stalled.is_collective or peer in stalled.awaiting
        return listed and peer in stalls and still_owed(stalled, rank, peer, stalls[peer].progress)

    def reaches(start: int) -> bool:
        """Tell whether a walk along waits leads back to ``start``."""
        usable = {rank for rank in stalls if stalls[rank].alone}
        seen: set[int] = set()
        edge = {start} & usable
        while edge:
            edge = {peer for rank in edge for peer in usable if peer != rank and waits(rank, peer)} - seen
            seen |= edge
        return start in seen

    for start in range(size):
        found = circle(stalls, start, size)
        assert bool(found) == reaches(start)
        assert len(set(found)) == len(found)
        for rank, peer in pairs(found):
            assert stalls[rank].alone
            assert waits(rank, peer)


def pairs(found: list[int]) -> Iterable[tuple[int, int]]:
    return zip(found, found[1:] + found[:1], strict=True)


def test_messages_that_were_all_received_are_no_problem() -> None:
    left = {0: progress(sent={1: 2}, received={1: 1}), 1: progress(sent={0: 1}, received={0: 2})}
    assert unread(left) == ""


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0), (2, 0)])
def test_messages_that_nobody_received_are_told(sender: int, receiver: int) -> None:
    left = {rank: progress() for rank in range(3)}
    left[sender] = progress(sent={receiver: 2})
    left[receiver] = progress(received={sender: 1})
    assert unread(left).startswith(f"rank {sender} sent 2 array(s) to rank {receiver}, which received 1 and closed its group")

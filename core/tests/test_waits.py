"""Who waits for whom: which waits can never end, told from what ranks report of themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oneaccord.contract.header import POST_CHANNEL
from oneaccord.control.protocol import Progress, Stalled, Wait
from oneaccord.control.protocol import Testimony as Answer  # pytest takes what begins with Test for a test
from oneaccord.control.waits import behind_whom, circle, still_owed, unread

COLLECTIVES, MESSAGES = 0, 1
"""The channels of a group."""


def progress(calls: int = 0, sent: dict[int, int] | None = None, received: dict[int, int] | None = None) -> Progress:
    """Say how far a rank has come: collectives begun, messages begun to each peer, messages begun from each."""
    return Progress({COLLECTIVES: calls}, {MESSAGES: sent or {}}, {MESSAGES: received or {}})


def barrier(
    sequence: int = 0,
    *,
    size: int = 3,
    sent: dict[int, int] | None = None,
    received: dict[int, int] | None = None,
    quiet: bool = True,
) -> Stalled:
    wait = Wait(COLLECTIVES, sequence, "barrier", b"digest", [], [], list(range(size)))
    return Stalled(wait, [wait], progress(sequence + 1, sent, received), quiet)


def talk(
    messages: list[tuple[int, bool, int]],
    *,
    calls: int = 0,
    sent: dict[int, int] | None = None,
    received: dict[int, int] | None = None,
    quiet: bool = True,
) -> Stalled:
    """Return the report of a rank in which ``messages``, as (peer, is a send, number), have not come to their end."""
    sent, received = dict(sent or {}), dict(received or {})
    for peer, is_send, number in messages:
        begun = sent if is_send else received
        begun[peer] = max(begun.get(peer, 0), number + 1)
    awaiting = sorted({peer for peer, _, _ in messages})
    wait = Wait(MESSAGES, 1, "talk", b"", awaiting, messages, [])
    return Stalled(wait, [wait], progress(calls, sent, received), quiet)


def recv(source: int, number: int = 0, **more: object) -> Stalled:
    return talk([(source, False, number)], **more)  # type: ignore[arg-type]


def send(dest: int, number: int = 0, **more: object) -> Stalled:
    return talk([(dest, True, number)], **more)  # type: ignore[arg-type]


def both(one: Stalled, other: Stalled) -> Stalled:
    """Return the report of a rank that is in two calls, each in a thread of its own."""

    def most(first: dict[int, int], second: dict[int, int]) -> dict[int, int]:
        return {key: max(first.get(key, 0), second.get(key, 0)) for key in first | second}

    mine, theirs = one.progress, other.progress
    begun = progress(
        most(mine.calls, theirs.calls)[COLLECTIVES],
        most(mine.sends[MESSAGES], theirs.sends[MESSAGES]),
        most(mine.receives[MESSAGES], theirs.receives[MESSAGES]),
    )
    return Stalled(one.wait, [*one.waits, *other.waits], begun, one.quiet and other.quiet)


def circles(stalls: dict[int, Stalled], world_size: int) -> list[set[int]]:
    """Return the circle that each rank leads to."""
    return [set(circle(stalls, rank)) for rank in range(world_size)]


@pytest.mark.parametrize(("calls", "owed"), [(0, True), (4, True), (5, False), (9, False)])
def test_a_collective_is_owed_until_it_is_begun(calls: int, owed: bool) -> None:
    assert still_owed(barrier(4).wait, 0, 1, progress(calls)) is owed


def test_collectives_of_another_channel_do_not_count() -> None:
    assert still_owed(barrier(4).wait, 0, 1, Progress({2: 9}, {}, {}))


@pytest.mark.parametrize(("begun", "owed"), [({}, True), ({0: 2}, True), ({0: 3}, False), ({2: 3}, True)])
def test_a_message_is_owed_until_its_other_half_is_begun(begun: dict[int, int], owed: bool) -> None:
    assert still_owed(recv(1, 2).wait, 0, 1, progress(sent=begun)) is owed
    assert still_owed(recv(1, 2).wait, 0, 1, progress(received=begun, sent={0: 3})) is False
    assert still_owed(send(1, 2).wait, 0, 1, progress(received=begun)) is owed
    assert still_owed(send(1, 2).wait, 0, 1, progress(sent=begun, received={0: 3})) is False


def test_only_the_messages_with_that_peer_count() -> None:
    wait = talk([(1, True, 0), (2, False, 0)]).wait
    assert still_owed(wait, 0, 1, progress())
    assert not still_owed(wait, 0, 1, progress(received={0: 1}))
    assert still_owed(wait, 0, 2, progress(received={0: 1}))
    assert not still_owed(wait, 0, 3, progress())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_of_recvs_is_found_from_each_of_its_ranks(size: int) -> None:
    stalls = {rank: recv((rank + 1) % size) for rank in range(size)}
    assert circles(stalls, size) == [set(range(size))] * size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_circle_is_told_in_the_order_of_waiting(size: int) -> None:
    stalls = {rank: recv((rank + 1) % size) for rank in range(size)}
    for start in range(size):
        assert circle(stalls, start) == [(start + step) % size for step in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_that_one_rank_has_not_reported_is_none(size: int) -> None:
    for silent in range(size):
        stalls = {rank: recv((rank + 1) % size) for rank in range(size) if rank != silent}
        assert circles(stalls, size) == [set()] * size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_with_a_rank_that_another_thread_may_rescue_is_none(size: int) -> None:
    for busy in range(size):
        stalls = {rank: recv((rank + 1) % size, quiet=rank != busy) for rank in range(size)}
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
    """Also where the rank that is asked about waits for them from outside."""
    stalls = {0: barrier(), 1: recv(2), 2: barrier()}
    assert circles(stalls, 3) == [{1, 2}] * 3


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
    assert circles({0: through, 1: recv(0, 1), 2: recv(0)}, 3) == [{0, 2}] * 3
    assert all(found in ({0, 1}, {0, 2}) for found in circles({0: through, 1: send(0), 2: recv(0)}, 3))


def test_a_report_from_before_the_others_went_on_proves_nothing() -> None:
    """Rank 1 reported that it waits for rank 0's first message; rank 0 has sent it since, and waits for the answer."""
    old = recv(0)
    assert circles({0: recv(1, sent={1: 1}), 1: old}, 2) == [set()] * 2


def test_a_rank_outside_the_circle_that_waits_for_it_leads_to_it_and_is_not_in_it() -> None:
    stalls = {0: recv(1), 1: recv(2), 2: recv(1)}
    assert circles(stalls, 3) == [{1, 2}] * 3


def test_a_rank_that_waits_for_nobody_there_is_in_no_circle() -> None:
    assert circle({}, 0) == []
    assert circle({0: recv(1)}, 0) == []
    assert circle({1: recv(0)}, 0) == []


def test_a_rank_that_waits_for_itself_is_in_no_circle() -> None:
    assert circle({0: recv(0)}, 0) == []


def test_a_rank_is_stuck_only_where_each_of_its_calls_is() -> None:
    """Rank 0 waits for rank 1 in two threads; rank 1 has sent what one of them waits for, which may go on to rescue the other."""
    stuck, rescued = send(1), recv(1)
    assert circles({0: stuck, 1: send(0, 1)}, 2) == [{0, 1}] * 2
    assert circles({0: rescued, 1: send(0, 1)}, 2) == [set()] * 2
    assert circles({0: both(stuck, rescued), 1: send(0, 1)}, 2) == [set()] * 2
    assert circles({0: both(rescued, stuck), 1: send(0, 1)}, 2) == [set()] * 2


def test_a_call_that_waits_for_a_rank_outside_keeps_the_others_from_a_verdict() -> None:
    inside, outside = recv(1), recv(2)
    assert circles({0: inside, 1: recv(0)}, 3) == [{0, 1}, {0, 1}, set()]
    assert circles({0: both(inside, outside), 1: recv(0)}, 3) == [set()] * 3
    assert all(circles({0: both(inside, outside), 1: recv(0), 2: recv(0)}, 3))


def test_a_barrier_of_some_ranks_needs_its_members_alone() -> None:
    """Rank 2 has begun no barrier of ranks 0 and 1, and need not."""
    pair = barrier(size=2)
    assert circles({0: pair, 2: recv(0)}, 3) == [set()] * 3
    assert circles({0: barrier(size=3), 2: recv(0)}, 3) == [{0, 2}, set(), {0, 2}]


def test_what_counts_as_owed_may_be_said_by_another_rule() -> None:
    def never(wait: Wait, rank: int, peer: int, progress: Progress) -> bool:
        return False

    assert circle({0: recv(1), 1: recv(0)}, 0, never) == []


def test_a_meeting_waits_for_all_its_members() -> None:
    """Whom it awaits says less than who belongs to it: the exchange itself knows who came."""

    def absent(wait: Wait, rank: int, peer: int, progress: Progress) -> bool:
        return peer == 2 if wait.meeting else still_owed(wait, rank, peer, progress)

    wait = Wait(COLLECTIVES, -1, "split", b"", [], [], [0, 1, 2], "split")
    meeting = Stalled(wait, [wait], progress(), True)
    assert circle({0: meeting, 1: recv(0)}, 0, absent) == []
    assert circle({0: meeting, 2: recv(0)}, 0, absent) == [0, 2]


@st.composite
def reports(draw: st.DrawFn) -> dict[int, Stalled]:
    """Draw what some of up to five ranks report, be it possible or not."""
    size = draw(st.integers(2, 5))
    ranks = st.integers(0, size - 1)
    stalls: dict[int, Stalled] = {}
    for rank in draw(st.sets(ranks)):
        others = ranks.filter(lambda other, rank=rank: other != rank)
        quiet = draw(st.booleans() | st.just(True))
        begun = draw(st.dictionaries(others, st.integers(0, 2)))
        waits: list[Wait] = []
        for _ in range(draw(st.integers(0, 2))):
            if draw(st.booleans()):
                waits += barrier(draw(st.integers(0, 1)), size=size).waits
            else:
                waits += talk(draw(st.lists(st.tuples(others, st.booleans(), st.integers(0, 1)), max_size=2))).waits
        if waits:
            stalls[rank] = Stalled(waits[0], waits, progress(draw(st.integers(0, 2)), begun, begun), quiet)
    return stalls


@given(reports())
def test_a_circle_is_found_where_ranks_need_each_other_and_nowhere_else(stalls: dict[int, Stalled]) -> None:
    """Compared with all sets of ranks: each wait of a member of such a set needs another member."""

    def waits(wait: Wait, rank: int, peer: int) -> bool:
        listed = peer in (wait.members if wait.is_collective else wait.awaiting)
        return listed and peer != rank and still_owed(wait, rank, peer, stalls[peer].progress)

    def closed(ranks: set[int]) -> bool:
        return all(
            stalls[rank].quiet and all(any(waits(wait, rank, peer) for peer in ranks) for wait in stalls[rank].waits)
            for rank in ranks
        )

    chosen = [set(ranks) for count in range(len(stalls) + 1) for ranks in itertools.combinations(stalls, count)]
    stuck = set[int]().union(*filter(closed, chosen))
    for start in range(5):
        found = circle(stalls, start)
        assert bool(found) == (start in stuck)
        assert len(set(found)) == len(found)
        for rank, peer in pairs(found):
            assert {rank, peer} <= stuck
            assert any(waits(wait, rank, peer) for wait in stalls[rank].waits)


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


# A simulation of whole programs: ranks with one or two threads that send, receive and meet in barriers of several groups.

GROUPS = ((0, 1, 2), (0, 1), (2, 1))
Op = tuple[str, int, int]
"""``(what, peer, group)``: "send", "recv" or "barrier", in which the peer says nothing."""
Thread = tuple[int, int]
"""``(rank, place)``"""


class Program:
    """A program in the middle: each thread is before a call, in the queue for its turn, in a call, or at its end.

    A send ends once its receive has begun, a receive once its send has, and a barrier once all members have begun theirs.
    """

    def __init__(self, threads: dict[Thread, tuple[Op, ...]]) -> None:
        self.threads = threads
        self.done = dict.fromkeys(threads, 0)
        self.running: dict[Thread, int] = {}
        self.queues: dict[tuple[int, Op], tuple[Thread, ...]] = {}
        self.begun: dict[tuple[int, Op], int] = {}

    def copy(self) -> Program:
        other = Program(self.threads)
        for name in ("done", "running", "queues", "begun"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def state(self) -> tuple[object, ...]:
        queues = tuple(sorted((lane, queue) for lane, queue in self.queues.items() if queue))
        return tuple(self.done.values()), tuple(sorted(self.running.items())), queues

    def op(self, thread: Thread) -> Op | None:
        """Return the call that a thread is in, or before."""
        program = self.threads[thread]
        return program[self.done[thread]] if self.done[thread] < len(program) else None

    def queued(self) -> set[Thread]:
        """Return the threads that wait for their turn, which others of their rank have."""
        return {thread for queue in self.queues.values() for thread in queue[1:]}

    def can_step(self, thread: Thread) -> bool:
        op = self.op(thread)
        if op is None or thread in self.queued():
            return False
        if thread not in self.running:
            return True
        return not any(self.owed(thread[0], op, self.running[thread], peer) for peer in range(3))

    def owed(self, rank: int, op: Op, number: int, peer: int) -> bool:
        """Tell whether a call waits for a rank."""
        what, other, group = op
        if what == "barrier":
            return peer in GROUPS[group] and self.begun.get((peer, op), 0) <= number
        twin = ("recv" if what == "send" else "send", rank, group)
        return peer == other and self.begun.get((peer, twin), 0) <= number

    def step(self, thread: Thread) -> None:
        """Let a thread go on: come to its turn, begin its call, or end it."""
        op = self.op(thread)
        assert op is not None
        lane = (thread[0], op)
        queue = self.queues.get(lane, ())
        if thread in self.running:
            del self.running[thread]
            self.done[thread] += 1
            self.queues[lane] = queue[1:]
        elif thread not in queue:
            self.queues[lane] = (*queue, thread)
        else:
            self.running[thread] = self.begun.get(lane, 0)
            self.begun[lane] = self.running[thread] + 1

    def wait(self, thread: Thread) -> Wait:
        op = self.op(thread)
        assert op is not None
        what, peer, group = op
        number, members = self.running[thread], list(GROUPS[group])
        if what == "barrier":
            return Wait(2 * group, number, what, b"digest", [], [], members)
        return Wait(2 * group + 1, 1, what, b"", [peer], [(peer, what == "send", number)], members)

    def report(self, thread: Thread, stalled: set[Thread]) -> Stalled:
        """Return what a rank reports of a thread's call, where the calls in ``stalled`` have been reported before."""
        rank = thread[0]
        known = [other for other in self.running if other[0] == rank and other in stalled]
        quiet = all(
            other in known or other in self.queued() or self.op(other) is None for other in self.threads if other[0] == rank
        )
        return Stalled(self.wait(thread), [self.wait(other) for other in known], self.progress(rank), quiet)

    def progress(self, rank: int) -> Progress:
        begun = Progress({}, {}, {})
        for (who, (what, peer, group)), count in self.begun.items():
            if who == rank and what == "barrier":
                begun.calls[2 * group] = count
            elif who == rank:
                (begun.sends if what == "send" else begun.receives).setdefault(2 * group + 1, {})[peer] = count
        return begun

    def may_end(self, ranks: set[int]) -> bool:
        """Try all that may happen: tell whether a call that one of ``ranks`` is in now may come to its end."""
        started = {thread: self.done[thread] for thread in self.running if thread[0] in ranks}
        seen, edge = {self.state()}, [self]
        while edge:
            now = edge.pop()
            if any(now.done[thread] > done for thread, done in started.items()):
                return True
            for thread in self.threads:
                if now.can_step(thread):
                    following = now.copy()
                    following.step(thread)
                    if following.state() not in seen:
                        seen.add(following.state())
                        edge.append(following)
        return False


@st.composite
def programs(draw: st.DrawFn) -> Program:
    def op(rank: int) -> st.SearchStrategy[Op]:
        groups = [group for group, members in enumerate(GROUPS) if rank in members]
        talks = [(what, peer, group) for what in ("send", "recv") for group in groups for peer in GROUPS[group] if peer != rank]
        return st.sampled_from([*talks, *(("barrier", -1, group) for group in groups)])

    threads = {}
    for rank in range(3):
        for place in range(draw(st.integers(1, 2))):
            threads[rank, place] = tuple(draw(st.lists(op(rank), max_size=4 - place)))
    return Program(threads)


@settings(max_examples=3 * settings().max_examples)
@given(programs(), st.data())
def test_who_is_accused_can_never_go_on_and_who_never_can_is_accused(program: Program, data: st.DataObject) -> None:
    """Threads go on, and report their calls, in any order; at last nothing moves, and each call is reported once more."""
    stalls: dict[int, Stalled] = {}
    stalled: set[Thread] = set()

    def report(thread: Thread) -> bool:
        """Tell whether a circle is found."""
        stalled.add(thread)
        stalls[thread[0]] = program.report(thread, stalled)
        found = set(circle(stalls, thread[0]))
        assert not found or not program.may_end(found)
        return bool(found)

    while moving := [thread for thread in program.threads if program.can_step(thread)]:
        thread, reports = data.draw(st.sampled_from(moving)), data.draw(st.booleans())
        program.step(thread)
        stalled &= set(program.running)
        if reports and program.running and report(data.draw(st.sampled_from(sorted(program.running)))):
            return
    found = [report(thread) for _ in range(2) for thread in sorted(program.running)]
    ended = {rank for rank in range(3) if all(program.op(thread) is None for thread in program.threads if thread[0] == rank)}
    abandoned = any(
        program.owed(rank, op, number, peer)
        for (rank, place), number in program.running.items()
        if (op := program.op((rank, place))) is not None
        for peer in ended
    )
    # Who waits for a rank that has ended is told by another rule.
    assert abandoned or not program.running or any(found)


def answers(*stalls: Stalled | None) -> dict[int, Answer]:
    """Return what ranks say of themselves; None is one that has made no call yet."""
    return {
        rank: Answer(1, entered=False, text="") if stall is None else Answer(1, True, "", 0, stall.waits, stall.progress)
        for rank, stall in enumerate(stalls)
    }


@pytest.mark.parametrize(("reporter", "first"), [(0, 1), (0, 2), (1, 0), (1, 2)])
def test_who_is_late_in_a_ring_is_named_though_the_message_of_another_rank_still_moves(reporter: int, first: int) -> None:
    ring = answers(talk([(1, True, 0), (2, False, 0)]), talk([(2, True, 0), (0, False, 0)]), None)
    assert behind_whom(reporter, first, ring, []) == 2


def test_nobody_is_named_where_what_was_waited_for_has_come() -> None:
    assert behind_whom(0, 1, answers(recv(1), send(0)), []) is None


def test_circle_in_one_call_compares_each_rank_a_bounded_number_of_times() -> None:
    compared = dict[int, int]()
    for size in (64, 128):
        stalls = {rank: barrier(size=size) for rank in range(size)}
        stalls[size - 1] = recv(0)  # has begun no barrier: all others wait for it
        asked: list[int] = []

        def owes(wait: Wait, rank: int, peer: int, of_peer: Progress, asked: list[int] = asked) -> bool:
            asked.append(peer)
            return still_owed(wait, rank, peer, of_peer)

        assert set(circle(stalls, 1, owes)) == {0, size - 1}
        compared[size] = len(asked)
    assert compared[128] < 2.5 * compared[64]


def test_circle_ends_at_a_rank_that_may_continue_without_asking_for_others() -> None:
    size, asked = 64, list[int]()
    stalls = {rank: barrier(size=size) for rank in range(size)}

    def owes(wait: Wait, rank: int, peer: int, of_peer: Progress) -> bool:
        asked.append(peer)
        return still_owed(wait, rank, peer, of_peer)

    assert circle(stalls, 5, owes) == []
    assert len(asked) <= size


def any_of(
    peers: list[int], *, sent: dict[int, int] | None = None, received: dict[int, int] | None = None, quiet: bool = True
) -> Stalled:
    """Return the report of a rank that waits for a message with a tag from any of some ranks."""
    counts = received or {}
    wait = Wait(
        POST_CHANNEL,
        1,
        "recv from any rank",
        b"",
        peers,
        [(peer, False, counts.get(peer, 0)) for peer in peers],
        [],
        is_any=True,
        taken={peer: (sent or {}).get(peer, 0) for peer in peers},
    )
    return Stalled(wait, [wait], Progress({}, {POST_CHANNEL: sent or {}}, {POST_CHANNEL: counts}), quiet)


def test_circle_of_wildcards_needs_every_sender_to_be_stuck() -> None:
    stalls = {0: any_of([1, 2]), 1: any_of([0, 2]), 2: any_of([0, 1])}
    assert set(circle(stalls, 0)) <= {0, 1, 2}
    assert circle(stalls, 0)
    assert circle({0: stalls[0], 1: stalls[1]}, 0) == []
    assert circle({**stalls, 2: any_of([0, 1], quiet=False)}, 0) == []


def test_circle_of_wildcards_counts_those_that_have_left() -> None:
    stalls = {0: any_of([1, 2]), 1: any_of([0, 2])}
    assert circle(stalls, 0, left=lambda _: {2: Progress({}, {}, {})})
    assert circle(stalls, 0, left=lambda _: {2: Progress({}, {POST_CHANNEL: {0: 1}}, {})}) == []


def test_circle_waits_for_answers_that_are_on_their_way() -> None:
    asked = {0: any_of([1], sent={1: 1}), 1: any_of([0], received={0: 0})}
    assert circle(asked, 0) == []  # rank 1 has not taken what rank 0 sent: it may answer
    assert circle({0: any_of([1], sent={1: 1}), 1: any_of([0], received={0: 1})}, 0)
    assert circle({0: any_of([1], sent={1: 1}), 1: recv(0)}, 0)  # rank 1 answers nothing in a call without tags


def test_circle_does_not_wait_for_answers_of_ranks_that_have_never_talked() -> None:
    ring = {rank: any_of([(rank + 1) % 3], sent={(rank + 1) % 3: 1}) for rank in range(3)}
    assert set(circle(ring, 0)) == {0, 1, 2}


def test_a_rank_whose_own_threads_alone_could_end_its_wait_is_a_circle() -> None:
    wait = Wait(POST_CHANNEL, 1, "recv from rank 0", b"", [], [], [0, 1], is_own=True)
    alone = Stalled(wait, [wait], Progress({}, {}, {}), True)
    assert circle({0: alone, 1: recv(0)}, 0) == [0]
    assert circle({0: alone, 1: recv(0)}, 1) == [0]
    assert circle({0: Stalled(wait, [wait], alone.progress, False)}, 0) == []

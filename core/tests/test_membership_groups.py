"""What the store decides about groups of some of the ranks: how they meet, what they are called, and how they end."""

from __future__ import annotations

import pytest
from support.membership_tools import Job, alone, progress, recv, stalled, talked

from oneaccord.control.protocol import (
    Cards,
    Checkpoint,
    Disbanded,
    Exchange,
    Farewell,
    FromRank,
    Leave,
    LeaveGroup,
    Progress,
    Question,
    Report,
    Stalled,
    Wait,
)

ALL = [0, 1, 2]


def card(rank: int) -> bytes:
    return b"card %d" % rank


def test_cards_are_traded_when_all_are_there() -> None:
    job = Job()
    for rank in (1, 2):
        job.store.handle(rank, Exchange("tcp", card(rank), ALL))
    assert job.sent == {0: [], 1: [], 2: []}
    job.store.handle(0, Exchange("tcp", card(0), ALL))
    cards = Cards("tcp", [card(0), card(1), card(2)], 1)
    assert job.sent == {rank: [cards] for rank in range(3)}
    job.store.handle(0, Exchange("tcp", b"again", ALL))
    assert job.sent[0] == [cards]


@pytest.mark.parametrize("members", [[0, 2], [2, 0]])
def test_cards_are_traded_among_the_members_in_their_order(members: list[int]) -> None:
    job = Job()
    for rank in (0, 2):
        assert job.sent == {0: [], 1: [], 2: []}
        job.store.handle(rank, Exchange("pair", card(rank), members))
    cards = Cards("pair", [card(rank) for rank in members], 1)
    assert job.sent == {0: [cards], 1: [], 2: [cards]}


def test_exchanges_of_different_names_do_not_mix() -> None:
    job = Job()
    job.store.handle(0, Exchange("one", b"0 of one", [0, 1]))
    job.store.handle(1, Exchange("other", b"1 of other", [0, 1]))
    assert job.sent[0] == []
    job.store.handle(0, Exchange("other", b"0 of other", [0, 1]))
    assert job.sent[0] == job.sent[1] == [Cards("other", [b"0 of other", b"1 of other"], 1)]


def test_each_exchange_gets_as_many_numbers_as_members_and_none_twice() -> None:
    job = Job()
    numbers: list[int] = []
    for name, members in [("a", [0, 1, 2]), ("b", [1]), ("c", [2, 0]), ("a", [0, 1, 2])]:
        for rank in members:
            job.store.handle(rank, Exchange(name, b"", members))
        told = job.sent[members[0]][-1]
        assert isinstance(told, Cards)
        numbers += range(told.number, told.number + len(members))
    assert len(numbers) == len(set(numbers)) == 9
    assert 0 not in numbers  # the number of the group of all ranks


@pytest.mark.parametrize("leaves_first", [True, False])
def test_an_exchange_with_a_member_that_has_left_is_a_mismatch(leaves_first: bool) -> None:
    job = Job()
    events: list[tuple[int, FromRank]] = [(2, Leave(progress())), (0, Exchange("split #1", b"", ALL))]
    for rank, message in events if leaves_first else reversed(events):
        assert job.store.verdict is None
        job.store.handle(rank, message)
    for rank, text in [(0, "split #1"), (1, "in no call"), (2, "closing")]:
        job.answer(rank, text, entered=rank == 0)
    verdict = job.the_verdict()
    assert (verdict.kind, verdict.peer) == ("mismatch", 2)
    assert verdict.text.startswith("rank 2 has closed its group, and rank 0 ")
    assert " in split #1: every rank must make the same calls" in verdict.text
    assert verdict.text.splitlines()[1:] == ["  rank 0: split #1", "  rank 1: in no call", "  rank 2: closing"]


def test_an_exchange_of_others_does_not_need_who_has_left() -> None:
    job = Job()
    job.store.handle(0, Exchange("pair", card(0), [0, 1]))
    job.store.handle(2, Leave(progress()))
    job.store.handle(1, Exchange("pair", card(1), [0, 1]))
    assert job.store.verdict is None
    assert job.sent[0] == [Cards("pair", [card(0), card(1)], 1)]


def test_who_has_left_may_have_given_its_card() -> None:
    """It gave up in the middle, which is told by what it raised; that others still come is no mismatch."""
    job = Job()
    job.store.handle(0, Exchange("split #1", b"", ALL))
    job.store.handle(0, Leave(progress()))
    job.store.handle(1, Exchange("split #1", b"", ALL))
    assert job.store.verdict is None


def meeting(name: str, members: list[int], rank: int) -> Stalled:
    """Return the report of a rank that waits in an exchange."""
    return alone(Wait(0, -1, name, b"", [member for member in members if member != rank], [], members, name), progress())


def test_an_exchange_against_a_recv_is_a_circle() -> None:
    job = Job()
    job.store.handle(0, Exchange("split #1", b"", ALL))
    job.store.handle(0, meeting("split #1", ALL, 0))
    job.store.handle(1, recv(0))
    for rank in range(3):
        job.answer(rank, f"in call {rank}")
    assert job.the_verdict().text.startswith("ranks 0-1 wait for each other, and none can continue")


def test_an_exchange_does_not_wait_for_who_has_given_its_card() -> None:
    job = Job()
    for rank in (0, 1):
        job.store.handle(rank, Exchange("split #1", b"", ALL))
    job.store.handle(0, meeting("split #1", ALL, 0))
    job.store.handle(1, recv(0))
    assert job.sent == {0: [], 1: [], 2: []}


def test_the_report_of_an_exchange_that_has_ended_proves_nothing() -> None:
    job = Job()
    job.store.handle(0, Exchange("pair", b"", [0, 1]))
    job.store.handle(0, meeting("pair", [0, 1], 0))
    job.store.handle(1, Exchange("pair", b"", [0, 1]))
    job.store.handle(1, recv(0))
    assert job.store.verdict is None
    assert not [message for message in job.sent[0] if isinstance(message, Question)]


def agreeing(digest: bytes, rank: int) -> Stalled:
    """Return the report of a rank that waits until all ranks have agreed on call #3."""
    others = [member for member in ALL if member != rank]
    return alone(Wait(0, 3, "all_reduce", digest, others, [], ALL, "all_reduce #3"), progress(3))


@pytest.mark.parametrize("late", [[], [0], [0, 1]], ids=str)
def test_a_report_of_an_ended_exchange_says_nothing_of_the_next_one(late: list[int]) -> None:
    """A call that all ranks agree on and then refuse has no number of its own: the next exchange has its name and its place."""
    job = Job()
    for rank in ALL:
        for earlier in (0, 1) if rank == 2 else ():
            if earlier not in late:
                job.store.handle(earlier, agreeing(b"refused", earlier))
        job.store.handle(rank, Exchange("all_reduce #3", b"refused", ALL))
    job.forget()
    for rank in (2, 1):
        if rank in late:
            job.store.handle(rank, agreeing(b"refused", rank))
        job.store.handle(rank, Exchange("all_reduce #3", b"next", ALL))
        job.store.handle(rank, agreeing(b"next", rank))
        for each in late:
            if each < rank:
                job.store.handle(each, agreeing(b"refused", each))
    assert job.sent == {0: [], 1: [], 2: []}
    job.store.handle(0, Exchange("all_reduce #3", b"other", ALL))
    assert [type(heard[-1]) for heard in job.sent.values()] == [Cards] * 3


def leave_group(job: Job, rank: int, members: list[int], progress: Progress | None = None) -> None:
    job.store.handle(rank, LeaveGroup(7, members, progress or Progress({}, {}, {})))


def test_members_are_told_when_all_of_them_have_left_a_group() -> None:
    job = Job()
    leave_group(job, 2, [2, 0])
    assert job.sent == {0: [], 1: [], 2: []}
    leave_group(job, 0, [2, 0])
    assert job.sent == {0: [Disbanded(7)], 1: [], 2: [Disbanded(7)]}


def test_groups_are_left_each_by_itself() -> None:
    job = Job()
    for group, rank in [(7, 0), (8, 1)]:
        job.store.handle(rank, LeaveGroup(group, [0, 1], Progress({}, {}, {})))
    assert job.sent == {0: [], 1: [], 2: []}
    job.store.handle(1, LeaveGroup(7, [0, 1], Progress({}, {}, {})))
    assert job.sent == {0: [Disbanded(7)], 1: [Disbanded(7)], 2: []}


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_a_message_of_a_group_that_was_never_received_is_told_to_all_when_its_members_have_left(order: tuple[int, ...]) -> None:
    job = Job()
    counts = {0: Progress({}, {15: {2: 3}}, {}), 2: Progress({}, {}, {15: {0: 2}})}
    for rank in order:
        assert job.store.verdict is None
        leave_group(job, rank, [0, 2], counts[rank])
    assert job.the_verdict().kind == "mismatch"
    assert "rank 0 sent 3 array(s) to rank 2, which received 2" in job.the_verdict().text
    assert not [message for message in job.sent[0] if isinstance(message, Disbanded)]


def test_messages_of_a_group_that_were_all_received_are_no_obstacle() -> None:
    job = Job()
    leave_group(job, 0, [0, 2], Progress({}, {15: {2: 3}}, {15: {2: 1}}))
    leave_group(job, 2, [0, 2], Progress({}, {15: {0: 1}}, {15: {0: 3}}))
    assert job.sent == {0: [Disbanded(7)], 1: [], 2: [Disbanded(7)]}


def test_a_group_that_was_left_by_some_is_no_obstacle_to_the_farewell() -> None:
    job = Job()
    leave_group(job, 0, [0, 2], Progress({}, {15: {2: 3}}, {}))
    counts = {0: Progress({}, {15: {2: 3}}, {}), 1: progress(), 2: Progress({}, {}, {15: {0: 3}})}
    for rank in range(3):
        job.store.handle(rank, Leave(counts[rank]))
    assert job.sent == {rank: [Farewell()] for rank in range(3)}


def in_group(sequence: int = 0) -> Stalled:
    """Return the report of a rank that waits in a barrier of group 7, of ranks 0 and 1."""
    return alone(Wait(14, sequence, "barrier", b"digest", [1], [], [0, 1]), Progress({14: sequence + 1}, {}, {}))


def test_a_wait_in_a_group_that_all_have_left_since_is_over() -> None:
    """Its members have forgotten how far they came there, and nobody may be accused of that."""
    job = Job()
    job.store.handle(0, in_group())
    for rank in (0, 1):
        leave_group(job, rank, [0, 1], Progress({14: 1}, {}, {}))
    for rank in range(3):
        job.store.handle(rank, Leave(Progress({}, {}, {})))
    assert job.sent == {0: [Disbanded(7), Farewell()], 1: [Disbanded(7), Farewell()], 2: [Farewell()]}


def test_a_report_of_a_wait_in_a_group_that_all_have_left_since_is_no_part_of_a_circle() -> None:
    """Rank 0 waited for rank 1 in a barrier of the group. Both have left it, and rank 1 waits for a message of rank 0."""
    job = Job()
    job.store.handle(0, in_group())
    for rank in (0, 1):
        leave_group(job, rank, [0, 1])
    job.store.handle(1, recv(0))
    assert not [message for message in job.sent[0] if isinstance(message, Question)]


def test_a_late_report_that_names_a_wait_in_a_disbanded_group_is_no_part_of_a_circle() -> None:
    """Another thread of rank 0 was about to report when the group ended."""
    job = Job()
    for rank in (0, 1):
        leave_group(job, rank, [0, 1])
    waits = [recv(1).wait, in_group().wait]
    job.store.handle(0, Stalled(waits[0], waits, talked({}, {1: 1}), True))
    job.store.handle(1, recv(0))
    assert not [message for message in job.sent[0] if isinstance(message, Question)]


def test_leaving_a_group_is_not_leaving_the_job() -> None:
    job = Job()
    leave_group(job, 0, [0, 1])
    job.store.handle(1, stalled(0, b"one", awaiting=[0]))
    job.store.handle(1, Exchange("split #1", b"", ALL))
    assert job.store.verdict is None
    job.store.lost(0, "reset")
    assert job.the_verdict(but=(0,)).kind == "lost"


def test_who_has_gone_is_told_nothing_of_a_group() -> None:
    job = Job()
    leave_group(job, 0, [0, 1])
    job.store.handle(0, Leave(progress()))
    job.store.lost(0, "closed")
    leave_group(job, 1, [0, 1])
    assert job.sent == {0: [], 1: [Disbanded(7)], 2: []}


def test_an_inquest_about_a_group_asks_its_members_alone() -> None:
    job = Job(4)
    job.store.handle(1, Report("mismatch", "different:", 3, "barrier", 14, 2, [3, 1]))
    assert job.sent == {0: [], 1: [Question(1, 14, 2)], 2: [], 3: [Question(1, 14, 2)]}
    job.answer(1, "barrier() #2 of group 7")
    assert job.store.verdict is None
    job.answer(3, "all_reduce() #2 of group 7")
    assert job.the_verdict().text == ("different:\n  rank 1: barrier() #2 of group 7\n  rank 3: all_reduce() #2 of group 7")


def test_an_inquest_about_a_group_names_its_silent_members_alone() -> None:
    job = Job(4)
    job.store.handle(1, Report("deadline", "barrier #2 did not finish", 3, "barrier", 14, 2, [1, 3]))
    job.answer(1, "barrier() #2 of group 7")
    job.pass_time(1)
    assert job.the_verdict().peer == 3
    assert job.the_verdict().text == (
        "barrier #2 did not finish: rank 3 did not answer\n  rank 1: barrier() #2 of group 7\n"
        "  rank 3: no answer: stopped, cut off, or busy\n"
        "  if they only need more time: timeout_s= of the call or of init(), or ONEACCORD_TIMEOUT_S;\n"
        "  in programs of torch.distributed, timeout= of init_process_group()"
    )


def test_two_members_that_wait_in_one_place_with_different_calls_are_asked_and_nobody_else() -> None:
    job = Job()
    job.store.handle(0, in_group())
    wait = Wait(14, 0, "all_reduce", b"another", [0], [], [0, 1])
    job.store.handle(1, alone(wait, Progress({14: 1}, {}, {})))
    assert job.sent == {0: [Question(1, 14, 0)], 1: [Question(1, 14, 0)], 2: []}


def test_who_leaves_waited_for_in_a_group_by_others_than_its_members_is_no_concern() -> None:
    job = Job()
    job.store.handle(0, in_group())
    job.store.handle(2, Leave(progress()))
    assert job.store.verdict is None
    job.store.handle(1, Leave(progress()))
    assert job.the_verdict().peer == 1


def test_a_rank_that_leaves_the_job_before_the_others_have_left_its_group_has_still_sent_what_they_received() -> None:
    """Who is told that a group is disbanded no longer says how far it came there."""
    job = Job(2)
    sent, received = Progress({}, {15: {1: 1}}, {}), Progress({}, {}, {15: {0: 1}})
    job.store.handle(0, LeaveGroup(7, [0, 1], sent))
    job.store.handle(0, Leave(Progress({}, {15: {1: 1}}, {})))
    job.store.handle(1, LeaveGroup(7, [0, 1], received))
    job.store.handle(1, Leave(Progress({}, {}, {})))
    assert job.sent == {0: [Disbanded(7), Farewell()], 1: [Disbanded(7), Farewell()]}


@pytest.mark.parametrize("leaves_first", [True, False])
def test_who_waits_in_a_group_for_a_member_that_has_left_it_waits_in_vain(leaves_first: bool) -> None:
    """Rank 1 has closed the group without the barrier that rank 0 waits in."""
    job = Job(2)
    if not leaves_first:
        job.store.handle(0, in_group())
    job.store.handle(1, LeaveGroup(7, [0, 1], Progress({}, {}, {})))
    if leaves_first:
        job.store.handle(0, in_group())
    assert job.store.verdict is not None
    assert (job.store.verdict.kind, job.store.verdict.peer) == ("mismatch", 1)
    assert "rank 1 has closed its group, and rank 0 waits for it in" in job.store.verdict.text


# What ranks have called on devices.


def test_ranks_that_have_called_the_same_on_their_devices_hear_nothing_of_it() -> None:
    job = Job()
    for count, digest in [(64, b"one"), (128, b"two")]:
        for rank in (2, 0, 1):
            job.store.handle(rank, Checkpoint("calls of group 0", count, digest, ALL))
    assert job.store.verdict is None
    assert all(not heard for heard in job.verdicts())


def test_ranks_that_have_called_something_else_on_their_devices_are_told_so() -> None:
    job = Job()
    job.store.handle(2, Checkpoint("calls of group 7", 64, b"one", ALL))
    job.store.handle(2, Checkpoint("calls of group 7", 128, b"two", ALL))
    job.store.handle(0, Checkpoint("calls of group 7", 64, b"one", ALL))
    job.store.handle(0, Checkpoint("calls of group 7", 128, b"other", ALL))
    for rank in ALL:
        job.answer(rank, f"in call {rank}", entered=False)
    verdict = job.the_verdict()
    assert (verdict.kind, verdict.peer) == ("mismatch", 2)
    assert verdict.text.startswith("ranks 0 and 2 did not do the same on their GPUs: the first 128 calls of group 7 differ")
    assert verdict.text.splitlines()[1:] == ["  rank 0: in call 0", "  rank 1: in call 1", "  rank 2: in call 2"]

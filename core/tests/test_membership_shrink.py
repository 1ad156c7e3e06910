"""The store's part in shrinking a group: who is left, who is waited for, and what is said when they cannot go on."""

from __future__ import annotations

import pytest
from support.membership_tools import Job

from oneaccord.control.protocol import (
    Agree,
    Agreement,
    GiveUp,
    Gone,
    JobReformed,
    Leave,
    Progress,
    Report,
    Shrink,
    Shrunk,
    Verdict,
)

NOTHING = Progress({}, {}, {})


def answers(job: Job) -> dict[int, list[Shrunk]]:
    """Return what each rank was told of those that are left."""
    return {rank: heard for rank in job.sent if (heard := [each for each in job.sent[rank] if isinstance(each, Shrunk)])}


def test_the_survivors_are_told_once_all_of_them_have_asked() -> None:
    job = Job(4)
    job.store.lost(2, "gone")
    job.store.handle(0, Shrink("host", 4711))
    job.store.handle(3, Shrink("host", 0))
    assert answers(job) == {}
    job.store.handle(1, Shrink("host", 0))
    assert answers(job) == {rank: [Shrunk([0, 1, 3], "host", 4711)] for rank in (0, 1, 3)}


def test_a_death_meanwhile_shortens_the_list_and_ends_the_wait() -> None:
    job = Job(4)
    job.store.lost(2, "gone")
    job.store.handle(1, Shrink("host", 0))
    job.store.handle(0, Shrink("host", 4711))
    job.store.lost(1, "gone after it had asked")
    assert answers(job) == {}
    job.store.lost(3, "gone before it asked")
    assert answers(job) == {0: [Shrunk([0], "host", 4711)]}


def test_nobody_goes_on_beside_those_that_are_in_the_next_job_and_all_are_told() -> None:
    job = Job(4)
    job.store.lost(0, "gone")
    job.store.handle(3, Shrink("host", 0))
    job.store.handle(1, JobReformed([1]))
    job.store.lost(1, "it has given the old job back")
    job.store.handle(2, Shrink("host", 0))
    assert [rank for rank in (1, 2, 3) if JobReformed([1]) in job.sent[rank]] == [1, 2, 3]
    (told,), (other,) = answers(job)[2], answers(job)[3]
    assert told == other
    assert told.problem is not None
    assert (told.problem.kind, told.problem.peer, told.ranks) == ("lost", 1, [])
    assert told.problem.text == "rank 1 continued without ranks 2-3, which must not continue beside it"


def test_who_has_left_is_not_waited_for() -> None:
    job = Job(3)
    job.store.handle(0, Shrink("host", 4711))
    job.store.handle(2, Shrink("host", 0))
    job.store.fail(Verdict("failed", "it failed"))
    assert answers(job) == {}
    job.store.handle(1, Leave(NOTHING))
    assert answers(job) == {rank: [Shrunk([0, 2], "host", 4711)] for rank in (0, 2)}


def test_no_list_without_a_verdict_which_a_rank_that_asks_brings_about() -> None:
    job = Job(2)
    job.store.handle(0, Shrink("host", 4711))
    job.store.handle(1, Shrink("host", 0))
    assert answers(job) == {}
    job.pass_time(0.5)
    assert "asked the others to continue" in job.the_verdict().text
    assert answers(job) == {rank: [Shrunk([0, 1], "host", 4711)] for rank in (0, 1)}


def test_without_rank_0_the_first_of_those_left_waits_for_the_others() -> None:
    job = Job(3)
    job.store.handle(2, Shrink("host", 2))
    job.store.lost(0, "gone")
    job.store.handle(1, Shrink("host", 1))
    assert answers(job) == {rank: [Shrunk([1, 2], "host", 1)] for rank in (1, 2)}


@pytest.mark.parametrize(
    ("vanished", "has_taken_over", "goes_on"), [(1, False, True), (2, False, True), (2, True, False), (3, False, False)]
)
def test_of_two_parts_that_cannot_see_each_other_only_the_larger_one_goes_on(
    vanished: int, has_taken_over: bool, goes_on: bool
) -> None:
    job = Job(5)
    gone = dict.fromkeys(range(1, 1 + vanished), ("timed out", True)) | {0: ("its process has ended", False)}
    if has_taken_over:
        job.store.take_over(0, job.store.members, {}, gone, None)
    else:
        for rank, (reason, is_silent) in gone.items():
            job.store.lost(rank, reason, is_silent)
    left = list(range(1 + vanished, 5))
    for rank in left:
        job.store.handle(rank, Shrink("host", rank))
    told = [message for message in job.sent[4] if isinstance(message, Shrunk)]
    assert [message.ranks for message in told] == [left if goes_on else []]
    if not goes_on:
        assert told[0].problem is not None
        assert told[0].problem.peer == 1


def test_where_all_end_after_some_had_asked_nobody_is_told() -> None:
    job = Job(3)
    job.store.handle(2, Shrink("host", 2))
    for rank in (2, 0, 1):
        job.store.lost(rank, "gone")
    assert answers(job) == {}


def test_who_has_not_asked_in_time_is_named_to_all_who_have() -> None:
    job = Job(5)
    job.store.lost(4, "gone")
    job.store.handle(0, Shrink("host", 4711))
    job.store.handle(2, Shrink("host", 0))
    job.store.handle(2, GiveUp(3.0))
    told = answers(job)
    assert sorted(told) == [0, 2]
    for (answer,) in told.values():
        assert answer.problem is not None
        assert (answer.problem.kind, answer.problem.peer) == ("deadline", 1)
        assert answer.problem.text.startswith("the group did not shrink within 3 s: ranks 1, 3 did not call shrink()")
    job.forget()
    job.store.handle(2, Shrink("host", 2))
    job.store.handle(0, GiveUp(3.0))  # it had been told already, and rank 2 has asked again
    assert answers(job) == {}
    for rank in (1, 3, 0):  # they may ask again, and then nobody is missing
        job.store.handle(rank, Shrink("host", rank))
    assert answers(job) == {rank: [Shrunk([0, 1, 2, 3], "host", 0)] for rank in range(4)}


def test_who_has_asked_again_has_given_up_nothing() -> None:
    job = Job(3)
    job.store.fail(Verdict("failed", "it failed"))
    job.store.handle(0, Shrink("host", 4711, attempt=2))
    job.store.handle(0, GiveUp(1.0, attempt=1))
    job.store.handle(1, Agree("agree #0", 1, [0, 1, 2], attempt=1))
    job.store.handle(1, GiveUp(1.0, "agree #0"))
    assert (answers(job), agreements(job, 1)) == ({}, [])


def test_those_that_are_left_can_ask_again() -> None:
    job = Job(3)
    job.store.handle(1, Report("aborted", "enough", 1))
    for rank in range(3):
        job.store.handle(rank, Shrink("host", 1 if rank == 0 else 0))
    job.forget()
    job.store.handle(0, Shrink("host", 2))
    job.store.handle(1, Shrink("host", 0))
    job.store.lost(2, "gone meanwhile")
    assert answers(job) == {rank: [Shrunk([0, 1], "host", 2)] for rank in (0, 1)}


def test_a_rank_that_will_not_come_ends_the_meeting_unless_it_has_come() -> None:
    job = Job(3, joined=False)
    job.join(0)
    job.join(1)
    job.store.will_not_come(1, "it ended")
    assert job.verdicts() == [[], [], []]
    job.store.will_not_come(2, "it ended")
    verdict = job.the_verdict(but=(2,))
    assert (verdict.kind, verdict.peer) == ("lost", 2)
    assert verdict.text == "rank 2 was lost before the ranks had met: it ended"


def agreements(job: Job, rank: int) -> list[Agreement]:
    return [message for message in job.sent[rank] if isinstance(message, Agreement)]


def test_what_a_store_has_told_one_rank_of_an_agreement_holds_where_another_one_takes_over() -> None:
    job = Job(4)
    job.store.take_over(0, job.store.members, {}, {0: ("it ended", False)}, None)
    job.store.handle(2, Agree("agree #0", 3, [0, 1, 2, 3]))
    job.store.handle(3, Agree("agree #0", 2, [0, 1, 2, 3], is_told=True))  # with the flag of rank 0, which none else knows
    job.store.handle(2, Agree("agree #0", 3, [0, 1, 2, 3]))
    assert agreements(job, 2) == []
    job.store.handle(1, Agree("agree #0", 1, [0, 1, 2, 3]))  # another flag than before: it had given up, and asked again
    assert [agreements(job, rank) for rank in (1, 2, 3)] == [[Agreement("agree #0", 2)]] * 3


def test_of_two_parts_that_cannot_see_each_other_only_one_agrees() -> None:
    job = Job(4)
    for rank in (2, 3):
        job.store.handle(rank, Agree("agree #0", rank, [0, 1, 2, 3]))
    job.store.take_over(0, job.store.members, {}, {0: ("silent", True)}, None)
    assert agreements(job, 2) == []
    job.store.lost(1, "silent", vanished=True)
    (told,) = agreements(job, 2)
    assert told == agreements(job, 3)[0]
    assert told.problem is not None
    assert "must not continue beside them" in told.problem.text
    assert told.problem.operation == "agree"


def test_who_gives_up_an_agreement_that_has_been_told_says_nothing_of_a_shrink() -> None:
    job = Job(2)
    job.store.handle(0, Shrink("host", 1))
    job.store.handle(0, GiveUp(1.0, "agree #0"))
    assert answers(job) == {}


def test_who_has_not_come_yet_is_not_told_of_those_that_end() -> None:
    job = Job(4, joined=False)
    for rank in (0, 1, 2):
        job.join(rank)
    job.sent.pop(3)  # to which nothing could be sent
    job.store.lost(2, "it ended")
    job.store.lost(1, "it ended, too")
    assert [message for message in job.sent[0] if isinstance(message, Gone)] == [Gone(2, "it ended"), Gone(1, "it ended, too")]

"""The store and the rank that goes on in its place agree on one first cause."""

from __future__ import annotations

from support.membership_tools import Job, progress

from oneaccord.control.membership import Membership
from oneaccord.control.protocol import (
    Agree,
    Agreed,
    Decided,
    FromStore,
    Gone,
    Leave,
    Prepare,
    Report,
    Standby,
    Successor,
    Verdict,
)
from oneaccord.control.protocol import Testimony as Answer  # pytest takes what begins with Test for a test


def with_successor(hosts: str = "aaa") -> tuple[Job, Membership]:
    """Return a job whose store has a successor, rank 1 or the first on another host."""
    job = Job(len(hosts), joined=False)
    job.store = Membership(len(hosts), b"key", job._send, job._later, store=0)
    for rank, host in enumerate(hosts):
        job.join(rank, host=host)
    return job, job.store


def heard(job: Job, kind: type[FromStore]) -> dict[int, list[FromStore]]:
    """Return what of a kind each rank was told."""
    found = {rank: [message for message in told if isinstance(message, kind)] for rank, told in job.sent.items()}
    return {rank: told for rank, told in found.items() if told}


def test_one_rank_prepares_on_another_host_where_there_is_one_and_all_are_told_where() -> None:
    assert heard(with_successor("aaa")[0], Prepare) == {1: [Prepare(0)]}
    job, store = with_successor("aabb")
    assert heard(job, Prepare) == {2: [Prepare(0)]}
    store.handle(2, Standby("host", 7))
    assert heard(job, Successor) == {rank: [Successor(2, "host", 7)] for rank in range(4)}


def test_the_successor_knows_the_first_cause_before_anybody_else() -> None:
    job, store = with_successor()
    store.handle(1, Standby("host", 7))
    store.lost(2, "it ended")
    assert heard(job, Verdict) == {}
    ((told,),) = heard(job, Decided).values()
    assert isinstance(told, Decided)
    assert list(heard(job, Decided)) == [1]
    store.handle(1, Agreed(told.verdict))
    assert heard(job, Verdict) == {rank: [told.verdict] for rank in (0, 1)}


def test_what_the_successor_has_found_before_holds() -> None:
    job, store = with_successor()
    store.handle(1, Standby("host", 7))
    store.handle(0, Report("aborted", "the store's", 0))
    other = Verdict("lost", "the successor's", 0)
    store.handle(1, Agreed(other))
    store.handle(1, Agreed(Verdict("lost", "too late", 2)))
    job.pass_time(1.0)
    assert heard(job, Verdict) == {rank: [other] for rank in range(3)}


def test_a_successor_that_is_silent_or_gone_is_not_waited_for() -> None:
    for ends in (False, True):
        job, store = with_successor()
        store.handle(1, Standby("host", 7))
        store.lost(2, "it ended")
        if ends:
            store.lost(1, "it ended")
        else:
            job.pass_time(0.3)
        assert {rank for rank in heard(job, Verdict) if rank != 1} == {0}


def test_who_ends_is_told_to_those_left() -> None:
    job, store = with_successor("aaaa")
    store.lost(2, "it ended")
    store.lost(3, "it ended, too")
    told = [Gone(2, "it ended"), Gone(3, "it ended, too")]
    assert heard(job, Gone) == {0: told, 1: told, 3: told[:1]}


def test_a_successor_that_has_left_is_ready_until_its_process_ends() -> None:
    job, store = with_successor("aaaa")
    store.handle(1, Standby("host", 7))
    store.handle(1, Leave(progress()))
    assert heard(job, Prepare) == {1: [Prepare(0)]}
    store.lost(3, "it ended")
    assert list(heard(job, Decided)) == [1]
    store.lost(1, "it waited long enough")
    assert heard(job, Prepare) == {1: [Prepare(0)], 2: [Prepare(0, [1, 3])]}


def test_when_the_successor_ends_another_one_prepares_although_the_job_has_failed() -> None:
    job, store = with_successor("aaaa")
    store.lost(1, "it ended before it was ready")
    assert heard(job, Prepare) == {1: [Prepare(0)], 2: [Prepare(0, [1])]}
    store.handle(2, Standby("host", 8))
    assert heard(job, Successor) == {rank: [Successor(2, "host", 8)] for rank in (0, 2, 3)}
    store.lost(2, "it does not answer", vanished=True)
    assert heard(job, Prepare)[3] == [Prepare(0, [1])]  # which may live


def test_who_takes_over_appoints_the_next_and_tells_it_the_first_cause() -> None:
    _, store = with_successor("aaaa")
    first = Job(4, joined=False)
    first.store = Membership(4, b"", first._send, first._later, store=1)
    first.store.take_over(0, store.members, {}, {0: ("it ended", False)}, None)
    assert heard(first, Prepare) == {2: [Prepare(1, [0])]}
    first.store.handle(2, Standby("host", 8))
    verdict = first.store.verdict
    assert verdict is not None
    assert verdict.peer == 0
    assert heard(first, Decided) == {2: [Decided(verdict)]}


def test_who_takes_over_tells_of_the_store_also_those_that_know_of_an_earlier_failure() -> None:
    """They may have been told to go on with it, and it did not live to tell its successor of that failure."""
    _, store = with_successor("aaaa")
    first = Job(4, joined=False)
    first.store = Membership(4, b"", first._send, first._later, store=1)
    first.store.take_over(0, store.members, {}, {0: ("it ended", False), 3: ("it ended, too", False)}, None)
    assert heard(first, Gone) == {
        2: [Gone(0, "it ended"), Gone(3, "it ended, too")],
        1: [Gone(0, "it ended"), Gone(3, "it ended, too")],
    } | {3: [Gone(0, "it ended")]}


def test_of_members_that_wait_for_a_store_that_is_stopped_the_store_is_named() -> None:
    _, store = with_successor("aaaa")
    first = Job(4, joined=False)
    first.store = Membership(4, b"", first._send, first._later, store=1)
    first.store.take_over(0, store.members, {}, {}, None)
    first.store.handle(2, Report("deadline", "not all ranks came to split within 1 s", None, "split", 4, 3, [2, 3]))
    for rank in (2, 3):
        first.store.handle(rank, Answer(1, True, "in split #3", 4, [], progress()))
    first.pass_time(1.0)
    verdict = first.store.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.peer) == ("deadline", 0)
    assert "rank 0 did not answer" in verdict.text


def test_standby_that_loses_the_last_member_of_a_vote_continues() -> None:
    _, store = with_successor("aaa")
    first = Job(3, joined=False)
    first.store = Membership(3, b"", first._send, first._later, store=1)
    first.store.take_over(0, store.members, {}, {0: ("it ended", False)}, None)
    first.store.handle(2, Agree("a vote", 1, [1, 2]))
    for rank in (2, 1):
        first.store.lost(rank, "it ended")
    assert first.store.finished

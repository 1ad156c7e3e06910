"""The store's part in letting newcomers in: for whom those that are left wait, who goes on, and what happens when one of them ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.membership_tools import Job, progress

from oneaccord.control.joiners import Roster
from oneaccord.control.membership import Membership
from oneaccord.control.protocol import FromStore, GiveUp, Gone, Join, Leave, Report, Shrink, Shrunk


class Joiners:
    """Joiners without sockets."""

    is_here = True

    def __init__(self, running: int, fewest: int = 1, most: int = 4) -> None:
        self.roster: Callable[[], Roster] = lambda: Roster(running, fewest, most)
        self.sent: dict[int, list[FromStore]] = {}
        self.is_open = False
        self.admit: Callable[[Join], int | FromStore]
        self.hear: Callable[[int, Any], None]
        self.lose: Callable[[int, str], None]

    def open(self, admit: Any, hear: Any, lose: Any) -> None:
        self.is_open, self.admit, self.hear, self.lose = True, admit, hear, lose

    def send(self, number: int, message: FromStore) -> None:
        self.sent.setdefault(number, []).append(message)

    def close(self, keep: Callable[[int], bool]) -> None:
        self.is_open, self.kept = False, keep

    def come(self, **changes: Any) -> int | FromStore:
        """Let a newcomer come and ask; return its number, or what is said against it."""
        facts: dict[str, Any] = {
            "backend": "tcp",
            "choices": "",
            "version": "1",
            "byteorder": "little",
            "host": "host0",
            "pid": 7,
        }
        number = self.admit(Join(-1, 4, **{**facts, **changes}))
        if isinstance(number, int):
            self.hear(number, Shrink("host", 100 + number, 10.0))
        return number


def failed(joiners: Joiners, victim: int = 3) -> Job:
    """Return a job of four ranks that has lost one, the others of which have asked to go on."""
    job = Job(4, joined=False)
    job.store = Membership(4, b"key", job._send, job._later, joiners=joiners)  # type: ignore[arg-type]
    for rank in range(4):
        job.join(rank)
    job.store.lost(victim, "it ended")
    for rank in range(4):
        if rank != victim:
            job.store.handle(rank, Shrink("host", rank + 1, 10.0))
    return job


def shrunk(messages: list[FromStore]) -> list[Shrunk]:
    return [message for message in messages if isinstance(message, Shrunk)]


def test_those_that_are_left_go_on_with_the_newcomer_that_the_launcher_has_started() -> None:
    joiners = Joiners(running=4)
    job = failed(joiners)
    assert joiners.is_open
    job.pass_time(0.01)
    assert shrunk(job.sent[0]) == []
    assert joiners.come() == 4
    assert [shrunk(job.sent[rank]) for rank in (0, 1, 2)] == [[Shrunk([0, 1, 2, 4], "host", 1)]] * 3
    assert joiners.sent == {4: [Shrunk([0, 1, 2, 4], "host", 1, None, 4)]}
    assert joiners.kept(4)


def test_where_the_launcher_starts_none_they_go_on_at_once() -> None:
    job = failed(Joiners(running=3))
    assert shrunk(job.sent[0]) == [Shrunk([0, 1, 2], "host", 1)]


def test_they_go_on_as_soon_as_the_launcher_says_that_nobody_comes() -> None:
    joiners = Joiners(running=4)
    job = failed(joiners)
    joiners.roster = lambda: Roster(3, 1, 4)
    job.pass_time(0.01)
    assert shrunk(job.sent[0]) == [Shrunk([0, 1, 2], "host", 1)]


def test_they_do_not_wait_longer_than_their_patience() -> None:
    job = failed(Joiners(running=4))
    for _ in range(999):
        job.pass_time(0.01)
    assert shrunk(job.sent[0]) == []
    for _ in range(2):
        job.pass_time(0.01)
    assert shrunk(job.sent[0]) == [Shrunk([0, 1, 2], "host", 1)]


def test_no_more_go_on_than_there_may_be() -> None:
    joiners = Joiners(running=9, most=4)
    job = Job(4, joined=False)
    job.store = Membership(4, b"key", job._send, job._later, joiners=joiners)  # type: ignore[arg-type]
    for rank in range(4):
        job.join(rank)
    job.store.handle(0, Report("aborted", "enough", 0))
    job.store.handle(0, Shrink("host", 1, 10.0))
    assert (joiners.come(), joiners.come()) == (4, 5)
    for rank in (1, 2):
        job.store.handle(rank, Shrink("host", 1, 10.0))
    job.store.lost(3, "it ended")
    assert shrunk(job.sent[0]) == [Shrunk([0, 1, 2, 4], "host", 1)]
    assert list(joiners.sent) == [4]
    assert not joiners.kept(5)


def test_with_fewer_than_there_must_be_nobody_goes_on() -> None:
    job = failed(Joiners(running=3, fewest=4))
    (answer,) = shrunk(job.sent[1])
    assert answer.problem is not None
    assert (answer.problem.kind, answer.problem.peer) == ("lost", 3)
    assert answer.problem.text.startswith("3 ranks are left, and the job needs 4 or more to continue")


def test_a_newcomer_that_ends_meanwhile_is_told_to_all_and_the_next_one_has_another_number() -> None:
    joiners = Joiners(running=4)
    job = failed(joiners)
    joiners.come()
    job.forget()
    joiners.lose(4, "it ended")
    assert [[message for message in job.sent[rank] if isinstance(message, Gone)] for rank in range(3)] == [
        [Gone(4, "it ended")]
    ] * 3
    for rank in range(3):
        job.store.handle(rank, Shrink("host", rank + 1, 10.0))
    assert joiners.come() == 5
    assert shrunk(job.sent[2]) == [Shrunk([0, 1, 2, 5], "host", 1)]


def test_a_newcomer_that_was_told_to_go_on_must_ask_again_like_the_others() -> None:
    joiners = Joiners(running=4)
    job = failed(joiners)
    joiners.come()
    job.forget()
    joiners.sent.clear()
    job.store.lost(1, "it ended while they came together")
    assert joiners.sent == {4: [Gone(1, "it ended while they came together")]}
    for rank in (0, 2):
        job.store.handle(rank, Shrink("host", rank + 1, 10.0))
    assert joiners.come() == 5
    assert shrunk(job.sent[0]) == []  # for 4 has not asked yet
    joiners.hear(4, Shrink("host", 9, 10.0))
    assert shrunk(job.sent[0]) == [Shrunk([0, 2, 4, 5], "host", 1)]


def test_a_newcomer_that_was_told_to_go_on_and_does_not_ask_again_is_what_the_others_have_waited_for() -> None:
    joiners = Joiners(running=4)
    job = failed(joiners)
    joiners.come()
    job.forget()
    for missing, who in (([2], "rank 2 and a new rank"), ([], "a new rank")):
        for rank in {0, 1, 2} - {*missing}:
            job.store.handle(rank, Shrink("host", rank + 1, 10.0))
        job.store.handle(0, GiveUp(10.0))
        for rank in {0, 1, 2} - {*missing}:
            (answer,) = shrunk(job.sent[rank])
            assert answer.problem is not None
            assert (answer.problem.kind, answer.problem.peer) == ("deadline", missing[0] if missing else None)
            assert f"within 10 s: {who} did not call shrink()" in answer.problem.text
        job.forget()


def test_a_newcomer_that_has_waited_for_so_long_hears_for_whom() -> None:
    joiners = Joiners(running=4)
    job = failed(joiners)
    joiners.come()
    job.forget()
    joiners.sent.clear()
    job.store.handle(0, Shrink("host", 1, 10.0))
    joiners.hear(4, Shrink("host", 9, 10.0))
    joiners.hear(4, GiveUp(10.0))
    for heard in (job.sent[0], joiners.sent[4]):
        (answer,) = shrunk(heard)
        assert answer.problem is not None
        assert "within 10 s: ranks 1-2 did not call shrink()" in answer.problem.text


def test_who_waits_and_ends_is_forgotten() -> None:
    joiners = Joiners(running=5, most=5)
    job = failed(joiners)
    joiners.come()
    joiners.lose(4, "it ended")
    assert [message for message in job.sent[0] if isinstance(message, Gone)] == [Gone(3, "it ended")]
    assert (joiners.come(), joiners.come()) == (5, 6)
    assert shrunk(job.sent[0]) == [Shrunk([0, 1, 2, 5, 6], "host", 1)]
    joiners.lose(5, "it ended")
    assert joiners.sent[6][1:] == [Gone(5, "it ended")]


@pytest.mark.parametrize("what", ["backend", "choices", "version", "byteorder"])
def test_who_does_not_fit_is_told_why(what: str) -> None:
    joiners = Joiners(running=4)
    failed(joiners)
    answer = joiners.come(**{what: "other"})
    assert isinstance(answer, Shrunk)
    assert answer.problem is not None
    assert answer.problem.kind == "rendezvous"
    assert f"rank 0 has {what}" in answer.problem.text
    assert "a new rank has 'other'" in answer.problem.text


def test_who_has_said_goodbye_is_not_waited_for() -> None:
    joiners = Joiners(running=4)
    job = Job(4, joined=False)
    job.store = Membership(4, b"key", job._send, job._later, joiners=joiners)  # type: ignore[arg-type]
    for rank in range(4):
        job.join(rank)
    job.store.handle(3, Leave(progress()))  # and its process goes on
    job.store.handle(0, Report("aborted", "enough", 0))
    for rank in range(3):
        job.store.handle(rank, Shrink("host", rank + 1, 10.0))
    assert shrunk(job.sent[0]) == [Shrunk([0, 1, 2], "host", 1)]


def test_the_words_of_who_was_not_let_in_are_nothing() -> None:
    joiners = Joiners(running=4)
    job = failed(joiners)
    joiners.hear(99, Shrink("host", 1, 10.0))
    joiners.hear(99, GiveUp(1.0))
    assert shrunk(job.sent[0]) == []

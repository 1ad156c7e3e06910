"""What the store decides: who is in the job, what ended it, and that all ranks learn the same. Time and messages are the test's."""

from __future__ import annotations

from typing import Any

import pytest
from support.membership_tools import Job, progress, recv, stalled, talked

from oneaccord.common.ranks import show_ranks
from oneaccord.control import protocol as messages
from oneaccord.control.protocol import ANOTHER_CALL, Farewell, Join, Leave, Question, Report, Stalled, Verdict, Welcome
from oneaccord.control.verdicts import KINDS, error_from
from oneaccord.errors import AbortedError, CollectiveMismatchError, CommError, DeadlineError, PeerLostError


def test_ranks_are_welcome_once_all_have_come() -> None:
    job = Job(joined=False)
    for rank in (2, 0):
        assert job.join(rank) is None
    assert job.store.missing() == [1]
    assert not job.store.complete
    assert job.sent == {0: [], 1: [], 2: []}
    job.join(1)
    assert job.store.missing() == []
    assert job.store.complete
    assert job.sent == {rank: [Welcome(b"key", [0, 1, 2], [None] * 3)] for rank in range(3)}


@pytest.mark.parametrize(
    ("names", "hosts"), [("aaa", [0, 0, 0]), ("aab", [0, 0, 2]), ("bab", [0, 1, 0]), ("cba", [0, 1, 2]), ("baa", [0, 1, 1])]
)
def test_hosts_are_told_as_numbers_that_ranks_of_one_host_share(names: str, hosts: list[int]) -> None:
    job = Job(joined=False)
    for rank in (2, 0, 1):
        job.join(rank, host=names[rank])
    assert job.sent == {rank: [Welcome(b"key", hosts, [None] * 3)] for rank in range(3)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 4}, "rank 1 (process 101 on host1) was started for 4 ranks, and rank 0 for 3"),
        ({"rank": 0}, "two processes claim to be rank 0: 100 on host0, 101 on host1"),
        ({"backend": "shm"}, "rank 0 has backend 'tcp', and rank 1 has 'shm'"),
        ({"choices": "all_reduce=ring"}, "rank 0 has choices '', and rank 1 has 'all_reduce=ring'"),
        ({"version": "2"}, "rank 0 has version '1', and rank 1 has '2'"),
        ({"byteorder": "big"}, "rank 0 has byteorder 'little', and rank 1 has 'big'"),
    ],
)
def test_a_rank_that_does_not_fit_ends_the_meeting(changes: dict[str, Any], words: str) -> None:
    job = Job(joined=False)
    job.join(0)
    verdict = job.join(1, **changes)
    assert verdict is not None
    assert verdict.kind == "rendezvous"
    assert verdict.text.startswith(words)
    assert job.sent[0] == [verdict]
    assert job.join(2) == verdict  # whoever comes later learns it, too


@pytest.mark.parametrize("changes", [{"rank": 3}, {"rank": -1}, {"rank": 7, "world_size": 8}])
def test_a_rank_beyond_the_world_is_refused_alone(changes: dict[str, Any]) -> None:
    job = Job(joined=False)
    job.join(0)
    refused = job.join(1, **changes)
    who = f"rank {changes['rank']} (process 101 on host1) is not in a world of 3"
    assert refused is not None
    assert (refused.kind, refused.peer) == ("rendezvous", None)  # a number that the process itself would not take for a rank
    assert refused.text.startswith(who)
    assert (len(job.sent[0]), job.join(1), job.join(2)) == (0, None, None)
    assert [type(each) for each in job.sent[0]] == [Welcome]


def test_who_was_refused_is_named_when_the_ranks_do_not_meet_in_time() -> None:
    job = Job(joined=False)
    job.join(0)
    job.join(5)
    job.store.late(1.0)
    text = job.the_verdict(but=(1, 2)).text
    assert text.startswith(
        "the ranks did not meet within 1 s: ranks 1-2 of 3 did not come. Refused: rank 5 (process 105 on host5)"
    )


def test_a_connection_that_ends_is_a_lost_rank() -> None:
    job = Job()
    job.store.lost(1, "reset")
    verdict = job.the_verdict(but=(1,))
    assert (verdict.kind, verdict.peer) == ("lost", 1)
    assert verdict.text == "rank 1 was lost: its process 101 on host1 died, or was cut off (reset)"
    assert job.sent[1] == []


def test_a_rank_may_be_lost_while_the_others_still_come() -> None:
    job = Job(joined=False)
    job.join(0)
    job.join(1)
    job.store.lost(1, "reset")
    assert "rank 1 was lost while the ranks were meeting" in job.verdicts()[0][0].text


def test_all_are_told_when_all_have_left() -> None:
    job = Job()
    for rank in (2, 0):
        job.store.handle(rank, Leave(progress()))
    assert job.sent == {0: [], 1: [], 2: []}
    assert not job.store.finished
    job.store.handle(1, Leave(progress()))
    assert job.sent == {rank: [Farewell()] for rank in range(3)}
    assert job.store.finished
    job.store.lost(1, "closed")
    assert job.store.verdict is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_message_that_was_never_received_is_told_to_all_when_all_have_left(order: tuple[int, ...]) -> None:
    job = Job()
    left = {0: talked({1: 2}, {}), 1: talked({}, {0: 1}), 2: progress()}
    for rank in order:
        assert job.store.verdict is None
        job.store.handle(rank, Leave(left[rank]))
    verdict = job.the_verdict()
    assert verdict.kind == "mismatch"
    assert "rank 0 sent 2 array(s) to rank 1, which received 1" in verdict.text
    assert [message for heard in job.sent.values() for message in heard if isinstance(message, Farewell)] == []


def test_messages_that_were_all_received_are_no_obstacle_to_the_farewell() -> None:
    job = Job()
    job.store.handle(0, Leave(talked({1: 2, 2: 0}, {1: 1})))
    job.store.handle(1, Leave(talked({0: 1}, {0: 2})))
    job.store.handle(2, Leave(talked({}, {0: 0})))
    assert job.sent == {rank: [Farewell()] for rank in range(3)}


def test_ranks_that_wait_in_a_circle_are_a_deadlock_told_with_what_each_did() -> None:
    job = Job()
    for rank in range(3):
        assert job.sent[rank] == []
        job.store.handle(rank, recv((rank + 1) % 3))
    for rank in range(3):
        job.answer(rank, f"in call {rank}", entered=False)
    verdict = job.the_verdict()
    assert verdict.kind == "deadlock"
    assert verdict.text.startswith("ranks 0-2 wait for each other, and none can continue")
    assert verdict.text.endswith("\n  rank 0: in call 0\n  rank 1: in call 1\n  rank 2: in call 2")


def test_a_circle_that_another_thread_may_break_is_waited_out() -> None:
    job = Job()
    for rank in range(2):
        job.store.handle(rank, recv(1 - rank, quiet=rank == 1))
    job.pass_time(10)
    assert job.sent == {0: [], 1: [], 2: []}


def test_a_rank_with_another_call_that_may_yet_end_is_waited_out() -> None:
    job = Job()
    waits = [recv(1).wait, recv(2).wait]
    job.store.handle(0, Stalled(waits[0], waits, talked({}, {1: 1, 2: 1}), True))
    job.store.handle(1, recv(0))
    assert job.sent == {0: [], 1: [], 2: []}
    job.store.handle(2, recv(1))
    assert [len(heard) for heard in job.sent.values()] == [1, 1, 1]


def test_who_leaves_and_goes_is_not_lost() -> None:
    job = Job()
    job.store.handle(1, Leave(progress()))
    job.store.lost(1, "closed")
    assert job.store.verdict is None
    job.store.handle(0, Leave(progress()))
    job.store.handle(2, Leave(progress()))
    assert job.sent == {0: [Farewell()], 1: [], 2: [Farewell()]}


def test_the_first_cause_wins() -> None:
    job = Job()
    job.store.lost(1, "reset")
    job.store.lost(2, "reset as well")
    job.store.handle(0, Report("aborted", "rank 0 gave up", 0))
    job.store.handle(0, Report("mismatch", "different calls"))
    job.store.fail(Verdict("internal", "a bug"))
    job.pass_time(10)
    assert job.the_verdict(but=(1, 2)).peer == 1
    assert [message for message in job.sent[0] if isinstance(message, Question)] == []


def test_an_abort_is_decided_at_once() -> None:
    job = Job()
    job.store.handle(1, Report("aborted", "rank 1 ended with ValueError: no", peer=1))
    verdict = job.the_verdict()
    assert (verdict.kind, verdict.text, verdict.peer) == ("aborted", "rank 1 ended with ValueError: no", 1)


def test_a_broken_data_connection_waits_for_the_control_connection_to_say_more() -> None:
    job = Job()
    job.store.handle(0, Report("lost", "the connection to rank 2 broke", peer=2, operation="barrier", sequence=3))
    assert job.store.verdict is None
    job.store.lost(2, "closed")
    job.pass_time(10)
    assert "its process 102 on host2 died" in job.the_verdict(but=(2,)).text


def test_a_broken_data_connection_counts_when_nothing_else_happens() -> None:
    job = Job()
    job.store.handle(0, Report("lost", "the connection to rank 2 broke", peer=2, operation="barrier", sequence=3))
    job.pass_time(1)
    verdict = job.the_verdict()
    assert (verdict.kind, verdict.peer, verdict.operation, verdict.sequence) == ("lost", 2, "barrier", 3)


def test_a_mismatch_is_told_with_what_each_rank_did() -> None:
    job = Job(5)
    job.store.handle(3, Report("mismatch", "the ranks did not make the same call:", 0, "all_reduce", 0, 7))
    assert all(heard == [Question(1, 0, 7)] for heard in job.sent.values())
    for rank, text in enumerate(["barrier() #7", "all_reduce() #7", "all_reduce() #7", "barrier() #7", "all_reduce() #7"]):
        assert job.store.verdict is None
        job.answer(rank, text)
    verdict = job.the_verdict()
    assert verdict.text == (
        "the ranks did not make the same call:\n  ranks 0, 3: barrier() #7\n  ranks 1-2, 4: all_reduce() #7"
    )
    assert (verdict.kind, verdict.peer, verdict.operation, verdict.sequence) == ("mismatch", 0, "all_reduce", 7)


def test_a_reporter_that_saw_only_that_its_peer_differs_gets_the_words_of_that_peer() -> None:
    job = Job()
    job.store.handle(0, Report("mismatch", f"rank 0 is in barrier() #7, and rank 2 is in {ANOTHER_CALL}:", 2, "barrier", 0, 7))
    for rank, text in enumerate(["barrier() #7", "barrier() #7", "gather() #7"]):
        job.answer(rank, text)
    assert job.the_verdict().text.splitlines()[0] == "rank 0 is in barrier() #7, and rank 2 is in gather() #7:"


def test_two_that_wait_in_different_calls_are_told_in_the_first_line_who_is_in_which() -> None:
    job = Job(2)
    for rank, digest in enumerate([b"a", b"b"]):
        job.store.handle(rank, stalled(7, digest, members=(0, 1)))
    for rank, text in enumerate(["barrier() #7", "gather() #7"]):
        job.answer(rank, text)
    first = job.the_verdict().text.splitlines()[0]
    assert "rank 1 is in gather() #7, and rank 0 in barrier() #7" in first


def test_mismatch_whose_reporter_is_silent_names_the_call_of_its_peer() -> None:
    job = Job(2)
    for rank, digest in enumerate([b"a", b"b"]):
        job.store.handle(rank, stalled(7, digest, members=(0, 1)))
    job.answer(0, "barrier() #7")
    job.pass_time(0.5)
    first = job.the_verdict().text.splitlines()[0]
    assert "rank 1 is in another call, and rank 0 in barrier() #7" in first


def test_who_gave_up_since_rank_0_did_not_answer_is_not_lost() -> None:
    job = Job()
    job.store.handle(1, Report("lost", "the connection to rank 2 broke", peer=2))
    job.store.handle(2, Report("deadline", "barrier #1 did not finish", 0, "barrier", 0, 1))
    job.store.handle(2, Report("silent", "rank 0 does not answer", 0, "barrier", 0, 1))
    job.store.lost(2, "closed")
    verdict = job.the_verdict()
    assert (KINDS[verdict.kind], verdict.peer, verdict.text) == (DeadlineError, 0, "rank 0 does not answer")


def test_a_rank_that_does_not_answer_is_named_when_the_time_is_up() -> None:
    job = Job()
    job.store.handle(0, Report("deadline", "barrier #1 did not finish", 1, "barrier", 0, 1))
    job.answer(0, "barrier() #1")
    job.answer(1, "barrier() #1")
    assert job.store.verdict is None
    job.pass_time(0.5)
    verdict = job.the_verdict()
    assert verdict.text == (
        "barrier #1 did not finish: rank 2 did not answer\n  ranks 0-1: barrier() #1\n  rank 2: no answer: stopped, cut off, or busy"
        "\n  if they only need more time: timeout_s= of the call or of init(), or ONEACCORD_TIMEOUT_S;\n"
        "  in programs of torch.distributed, timeout= of init_process_group()"
    )
    assert verdict.peer == 2


def test_a_missed_deadline_is_about_the_rank_that_was_not_there() -> None:
    job = Job()
    job.store.handle(0, Report("deadline", "barrier #1 did not finish", 1, "barrier", 0, 1))
    job.answer(2, "in no call", entered=False)
    job.answer(1, "barrier() #1")
    job.answer(0, "barrier() #1")
    assert job.the_verdict().peer == 2


def test_a_missed_deadline_between_two_ranks_is_about_the_one_that_was_waited_for() -> None:
    job = Job()
    job.store.handle(0, Report("deadline", "recv from rank 1 did not finish", 1, "recv from rank 1", 1, None))
    for rank in (2, 0, 1):
        job.answer(rank, "in some call", entered=False)
    assert job.the_verdict().peer == 1


@pytest.mark.parametrize("sent_meanwhile", [{0: 1}, {}], ids=["its message is on the way", "each waits for the other"])
def test_a_missed_deadline_names_nobody_where_who_was_late_cannot_be_told(sent_meanwhile: dict[int, int]) -> None:
    job = Job()
    job.store.handle(0, Report("deadline", "recv from rank 1 did not finish", 1, "recv from rank 1", 1, None))
    waiting = {0: recv(1), 1: recv(0)}
    if sent_meanwhile:  # what it waited for has come, so that it waits no more
        del waiting[1]
    for rank in (2, 1, 0):
        question = next(message for message in job.sent[rank] if isinstance(message, Question))
        waits = waiting[rank].waits if rank in waiting else []
        come = talked(sent_meanwhile if rank == 1 else {}, {1 - rank: 1} if rank in waiting else {})
        job.store.handle(rank, messages.Testimony(question.inquest, False, "in a call", 0, waits, come))
    verdict = job.the_verdict()
    assert (verdict.peer, "waits for" in verdict.text) == (None, False)


def test_an_inquest_does_not_wait_for_a_rank_that_has_gone() -> None:
    job = Job()
    job.store.handle(2, Leave(progress(1)))
    job.store.lost(2, "closed")
    job.store.handle(0, Report("mismatch", "different:", 1, "barrier", 0, 0))
    job.answer(0, "barrier() #0")
    job.answer(1, "all_reduce() #0")
    assert job.the_verdict(but=(2,)).text.startswith("different:\n  rank 0: barrier() #0\n  rank 1: all_reduce() #0")


def test_a_death_during_an_inquest_is_the_cause() -> None:
    job = Job()
    job.store.handle(0, Report("mismatch", "different:", 1, "barrier", 0, 0))
    job.store.lost(2, "reset")
    assert (job.the_verdict(but=(2,)).kind, job.the_verdict(but=(2,)).peer) == ("lost", 2)
    job.pass_time(10)
    assert job.the_verdict(but=(2,)).kind == "lost"


def test_answers_to_another_question_do_not_count() -> None:
    job = Job(2)
    job.store.handle(0, messages.Testimony(1, True, "too early"))
    job.store.handle(0, Report("mismatch", "different:", 1, "barrier", 0, 0))
    job.store.handle(0, messages.Testimony(99, True, "elsewhere"))
    job.answer(0, "barrier() #0")
    job.answer(1, "all_reduce() #0")
    assert "elsewhere" not in job.the_verdict().text
    assert "too early" not in job.the_verdict().text


def test_several_reports_of_one_mismatch_make_one_inquest() -> None:
    job = Job()
    for rank in range(3):
        job.store.handle(rank, Report("mismatch", f"rank {rank} says:", 0, "barrier", 0, 0))
    assert all(len(heard) == 1 for heard in job.sent.values())
    for rank in range(3):
        job.answer(rank, f"call {rank}")
    assert job.the_verdict().text.startswith("rank 0 says:")


def test_two_ranks_that_wait_in_one_place_with_different_calls_are_a_mismatch() -> None:
    job = Job()
    job.store.handle(0, stalled(4, b"one"))
    job.store.handle(1, stalled(4, b"one"))
    assert job.sent == {0: [], 1: [], 2: []}
    job.store.handle(2, stalled(4, b"two", operation="all_reduce"))
    for rank in range(3):
        job.answer(rank, f"call of {rank}")
    verdict = job.the_verdict()
    assert verdict.kind == "mismatch"
    assert "rank 2: call of 2" in verdict.text


def test_a_verdict_names_each_rank_however_many_there_are() -> None:
    job = Job(16, joined=False)
    for rank in range(0, 16, 2):
        job.join(rank)
    job.store.late(1.0)
    verdict = next(verdict for told in job.verdicts() for verdict in told)
    assert "ranks 1, 3, 5, 7, 9, 11, 13, 15 of 16 did not come" in verdict.text


def test_ranks_that_wait_in_different_places_may_still_meet() -> None:
    job = Job()
    job.store.handle(0, stalled(4, b"one"))
    job.store.handle(1, stalled(5, b"two"))
    job.pass_time(10)
    assert job.store.verdict is None


@pytest.mark.parametrize("leaves_first", [True, False])
def test_who_waits_for_a_rank_that_has_left_waits_in_vain(leaves_first: bool) -> None:
    job = Job()
    events = [(2, Leave(progress(3))), (0, stalled(3, b"one", operation="all_reduce", awaiting=[2]))]
    for rank, message in events if leaves_first else reversed(events):
        assert job.store.verdict is None
        job.store.handle(rank, message)  # type: ignore[arg-type]
    verdict = job.the_verdict()
    assert (verdict.kind, verdict.peer, verdict.operation, verdict.sequence) == ("mismatch", 2, "all_reduce", 3)
    assert verdict.text.startswith("rank 2 has closed its group, and rank 0 waits for it in all_reduce #3")
    assert "tag" not in verdict.text


@pytest.mark.parametrize(
    ("operation", "rule"),
    [
        ("recv from rank 2", "a receive without a tag takes only messages without one"),
        ("recv from any rank, tag 3", "a receive with a tag takes only messages with a tag"),
    ],
)
def test_a_receive_left_alone_tells_of_tags(operation: str, rule: str) -> None:
    job = Job()
    job.store.handle(2, Leave(progress(3)))
    job.store.handle(0, stalled(3, b"one", operation=operation, awaiting=[2]))
    assert job.the_verdict().text.endswith(rule)


def test_a_rank_that_has_left_after_its_part_is_not_waited_for_in_vain() -> None:
    job = Job()
    job.store.handle(2, Leave(progress(4)))
    job.store.handle(0, stalled(3, b"one", awaiting=[2]))
    assert job.store.verdict is None


def test_a_rank_that_joins_twice_breaks_the_protocol() -> None:
    job = Job()
    job.store.handle(1, Join(1, 3, "tcp", "", "1", "little", "host1", 101))
    assert (job.the_verdict().kind, job.the_verdict().peer) == ("protocol", 1)


def test_after_a_failure_nobody_is_told_that_all_went_well() -> None:
    """A rank that hears of the failure and of the farewell at once must not take the one for the other."""
    job = Job()
    job.store.handle(0, Leave(progress()))
    job.store.handle(1, Leave(progress()))
    job.store.lost(2, "killed")
    job.store.lost(1, "closed")
    assert [message for message in job.sent[0] if isinstance(message, Farewell)] == []
    assert job.the_verdict(but=(2,)).peer == 2


@pytest.mark.parametrize(
    ("kind", "error"),
    [("lost", PeerLostError), ("mismatch", CollectiveMismatchError), ("deadline", DeadlineError), ("aborted", AbortedError)],
)
def test_a_verdict_becomes_an_error(kind: str, error: type[Exception]) -> None:
    raised = error_from(Verdict(kind, "what happened", 2, "barrier", 7), 1)
    assert type(raised) is error is KINDS[kind]
    assert (str(raised), raised.rank, raised.peer, raised.operation, raised.sequence) == ("what happened", 1, 2, "barrier", 7)


def test_a_verdict_of_a_kind_that_is_not_known_is_an_error_all_the_same() -> None:
    assert type(error_from(Verdict("news", "from a later version"), 0)) is CommError


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([0, 2], "ranks 0, 2"), ([5, 0, 1, 2, 7, 8], "ranks 0-2, 5, 7-8")],
)
def test_ranks_are_shown_as_runs(ranks: list[int], words: str) -> None:
    assert show_ranks(ranks) == words


def test_a_rank_that_is_named_twice_is_shown_once() -> None:
    assert show_ranks([0, 0]) == "rank 0"


class _Counted(dict[int, int]):
    """The calls of a rank, which count how often the store looks them up."""

    looks = 0

    def get(self, key: int, default: Any = None) -> Any:
        _Counted.looks += 1
        return super().get(key, default)


def test_each_goodbye_is_compared_once_with_each_wait() -> None:
    size, _Counted.looks = 24, 0
    job = Job(size)
    for rank in range(size):
        job.store.handle(rank, stalled(0, b"digest", members=tuple(range(size))))
    for rank in range(size):
        job.store.handle(rank, Leave(messages.Progress(_Counted({0: 1}), {}, {})))
    assert [type(each) for each in job.sent[0]] == [Farewell]
    assert _Counted.looks <= size * size


def test_message_that_names_many_ranks_is_checked_by_few_numbers() -> None:
    everyone = list(range(1000))
    report = stalled(0, b"digest", awaiting=everyone, members=tuple(everyone))
    assert len(list(messages.ranks_in(report))) < 20
    for stranger in (-1, 1000):
        report = stalled(0, b"digest", members=(5, stranger, 7))
        assert stranger in messages.ranks_in(report)

"""A rank's connections to the store and to its standby: what it does when the store is lost."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.membership_tools import Job
from support.waiting import PATIENCE_S, until

from oneaccord.contract.deadline import Deadline
from oneaccord.contract.seal import Seal
from oneaccord.control.client_states import Action, Event, State
from oneaccord.control.connection import make_join
from oneaccord.control.failover import Failover
from oneaccord.control.protocol import (
    Agree,
    Agreement,
    FromRank,
    FromStore,
    GiveUp,
    Gone,
    JobReformed,
    Join,
    Orphaned,
    Shrink,
    Shrunk,
    Successor,
    Verdict,
    Welcome,
    Whereabouts,
    decode_from_rank,
    encode,
)
from oneaccord.control.remote import SocketControl
from oneaccord.errors import DeadlineError, PeerLostError
from oneaccord.net.credentials import Credentials
from oneaccord.net.frames import FrameConnection
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.network import Listener
from oneaccord.net.proven import ProvenSocket

SECRET = Credentials(b"secret")


class Other:
    """The store, or its standby: what it hears, and what it says."""

    def __init__(self, loop: Loop, sock: ProvenSocket) -> None:
        self.heard: queue.Queue[FromRank | None] = queue.Queue()
        self.connection = FrameConnection(
            loop, sock, lambda frame: self.heard.put(decode_from_rank(frame)), lambda _: None, 1 << 16, Liveness()
        )

    def say(self, message: FromStore) -> None:
        self.connection.send(encode(message))


class Stage:
    """Rank 2 of 3, and its store."""

    def __init__(self) -> None:
        self.loop = Loop("test", lambda error: pytest.fail(str(error)))
        accepted: queue.Queue[ProvenSocket] = queue.Queue()
        listening = socket.create_server(("127.0.0.1", 0))
        self.listener = Listener(self.loop, listening, SECRET, lambda sock, _: accepted.put(sock))
        join = make_join(2, 3, "tcp", "")
        self.control = SocketControl(self.loop, join, listening.getsockname(), SECRET, Deadline(PATIENCE_S), Liveness())
        self.store = Other(self.loop, accepted.get(timeout=PATIENCE_S))
        assert isinstance(self.store.heard.get(timeout=PATIENCE_S), Join)

    def meet_successor(self) -> Other:
        ours, its = socket.socketpair()
        for end in (ours, its):
            end.setblocking(False)
        up, down = bytes(32), b"down".ljust(32)
        self.control.follow(ProvenSocket.over(ours, (Seal(up), Seal(down))), 1)
        return Other(self.loop, ProvenSocket.over(its, (Seal(down), Seal(up))))

    def close(self) -> None:
        self.control.close()
        self.listener.close()
        self.store.connection.close()
        self.loop.stop()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name in ("timing.COMING_S", "timing.ORPHAN_S", "timing.MISSING_S"):  # no time runs out but where a test says so
        monkeypatch.setattr(f"oneaccord.control.{name}", 60.0)
    made = Stage()
    yield made
    made.close()


def test_orphan_that_reaches_the_standby_asks_it(stage: Stage) -> None:
    stage.store.say(Successor(1, "host", 7))
    stage.store.connection.close()
    until(lambda: stage.control._state is State.ORPHANED)
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=PATIENCE_S), Join)
    assert isinstance(successor.heard.get(timeout=PATIENCE_S), Orphaned)
    assert not stage.control.failed
    first = Verdict("lost", "rank 0 was lost", 0)
    successor.say(first)
    until(lambda: stage.control.failed)
    assert stage.control.verdict == first
    successor.connection.close()


@pytest.mark.parametrize("is_told", [False, True])
def test_orphan_that_reaches_no_standby_is_cut_off(stage: Stage, monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    monkeypatch.setattr("oneaccord.control.timing.COMING_S", 0.05)
    if is_told:
        stage.store.say(Successor(1, "host", 7))
    stage.store.connection.close()
    until(lambda: stage.control.failed)
    assert stage.control.verdict is not None
    assert stage.control.verdict.peer == 0
    assert stage.control.cut


class Asking(threading.Thread):
    """A thread that calls shrink()."""

    def __init__(self, control: SocketControl, timeout_s: float) -> None:
        super().__init__(daemon=True)
        self.told: Shrunk | Exception | None = None
        self._control, self._timeout_s = control, timeout_s
        self.start()

    def run(self) -> None:
        try:
            self.told = self._control.recovery.shrink(("host", 1), Deadline(self._timeout_s))
        except Exception as error:
            self.told = error


def test_shrink_late_answer_does_not_end_the_next_attempt(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneaccord.control.timing.MISSING_S", 0.05)
    job = Job(3)  # what the store decides, once it is no longer stopped
    job.store.fail(Verdict("aborted", "enough"))
    job.forget()
    first = Asking(stage.control, 0.05)
    first.join(PATIENCE_S)
    assert isinstance(first.told, DeadlineError)
    assert "does not answer" in str(first.told)
    second = Asking(stage.control, PATIENCE_S)
    heard = [stage.store.heard.get(timeout=PATIENCE_S) for _ in range(3)]
    assert [type(message) for message in heard] == [Shrink, GiveUp, Shrink]
    for message in heard:
        assert message is not None
        job.store.handle(2, message)
    for rank in (0, 1):
        job.store.handle(rank, Shrink("other", rank))
    answers = [message for message in job.sent[2] if isinstance(message, Shrunk)]
    assert [answer.ranks for answer in answers] == [[], [0, 1, 2]]
    for answer in answers:
        stage.store.say(answer)
    second.join(PATIENCE_S)
    assert second.told == answers[1]


@pytest.mark.parametrize("have_come", [False, True])
def test_agree_given_up_ends_as_for_the_others(stage: Stage, monkeypatch: pytest.MonkeyPatch, have_come: bool) -> None:
    monkeypatch.setattr("oneaccord.control.timing.MISSING_S", 0.05)
    job = Job(3)  # what the store decides, once it is no longer stopped
    members = [0, 1, 2]
    for rank in (0, 1) if have_come else (0,):
        job.store.handle(rank, Agree("agree #0", 2, members))
    with pytest.raises(DeadlineError, match="does not answer"):
        stage.control.recovery.agree(0, "agree #0", 3, members, Deadline(0.05))
    heard = [stage.store.heard.get(timeout=PATIENCE_S) for _ in range(2)]
    again: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(
        target=lambda: again.put(stage.control.recovery.agree(0, "agree #0", 7, members, Deadline(PATIENCE_S))), daemon=True
    )
    if not have_come:  # the answer meets the second attempt
        thread.start()
        heard.append(stage.store.heard.get(timeout=PATIENCE_S))
    for message in heard:
        assert message is not None
        job.store.handle(2, message)
    if not have_come:
        for rank in (0, 1):
            job.store.handle(rank, Agree("agree #0", 2, members))
    answers = [message for message in job.sent[2] if isinstance(message, Agreement)]
    for number, answer in enumerate(answers):
        stage.store.say(answer)
        if not have_come and not number:  # which is of the first attempt, and does not end the second
            stage.store.say(Gone(1, "what comes next"))
            until(lambda: 1 in stage.control.gone)
            assert "agree #0" not in stage.control.recovery._agreed
    if have_come:
        stage.store.say(Verdict("aborted", "enough"))
        until(lambda: stage.control.failed)
        thread.start()
    assert again.get(timeout=PATIENCE_S) == 2
    assert [answer.problem is None for answer in answers] == [True] if have_come else [False, True]
    thread.join(PATIENCE_S)


def test_shrink_answered_is_not_repeated_to_the_standby(stage: Stage) -> None:
    asking = Asking(stage.control, PATIENCE_S)
    assert isinstance(stage.store.heard.get(timeout=PATIENCE_S), Shrink)
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=PATIENCE_S), Join)
    answer = stage.control.recovery.take

    def answered(message: Shrunk) -> None:  # and the store ends before the thread that waits runs again
        with stage.control._changed:
            answer(message)
            stage.control._turn_to_successor()

    stage.control.recovery.take = answered  # type: ignore[method-assign, assignment]
    stage.store.say(Shrunk([1, 2], "host", 1, attempt=1))
    asking.join(PATIENCE_S)
    assert isinstance(asking.told, Shrunk)
    successor.say(Gone(0, "it ended"))
    until(lambda: bool(stage.control.gone))
    stage.control._post(Orphaned("what comes next"))
    assert isinstance(successor.heard.get(timeout=PATIENCE_S), Orphaned)
    successor.connection.close()


def test_shrink_timeout_is_repeated_to_the_standby(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneaccord.control.timing.COMING_S", 0.05)
    job = Job(3)  # what the next store decides
    job.store.fail(Verdict("aborted", "enough"))
    job.store.lost(0, "it ended")
    asking = Asking(stage.control, 0.05)
    assert isinstance(stage.store.heard.get(timeout=PATIENCE_S), Shrink)
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=PATIENCE_S), Join)
    assert isinstance(stage.store.heard.get(timeout=PATIENCE_S), GiveUp)
    stage.store.connection.close()
    heard = [successor.heard.get(timeout=PATIENCE_S) for _ in range(3)]
    assert [type(message) for message in heard] == [Shrink, Orphaned, GiveUp]
    for message in (heard[0], heard[2]):
        assert message is not None
        job.store.handle(2, message)
    successor.say(next(message for message in job.sent[2] if isinstance(message, Shrunk)))
    asking.join(PATIENCE_S)
    assert isinstance(asking.told, DeadlineError)
    assert asking.told.peer == 1
    successor.connection.close()


def test_shrink_names_a_later_store_that_is_silent(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneaccord.control.timing.MISSING_S", 0.05)
    successor = stage.meet_successor()
    successor.say(Verdict("lost", "rank 0 was lost", 0))
    until(lambda: stage.control.failed)
    asking = Asking(stage.control, 0.05)
    asking.join(PATIENCE_S)
    assert isinstance(asking.told, DeadlineError)
    assert "the store with rank 1 does not answer" in str(asking.told)
    assert asking.told.peer == 1
    successor.connection.close()


def test_shrink_cut_off_names_the_rank_that_was_lost_last(
    stage: Stage,
) -> None:
    successor = stage.meet_successor()
    successor.say(Verdict("deadline", "rank 0 does not answer", 0))  # from then on it has the store
    until(lambda: stage.control.failed)
    successor.connection.close()
    asking = Asking(stage.control, PATIENCE_S)
    asking.join(PATIENCE_S)
    assert isinstance(asking.told, PeerLostError)
    assert asking.told.peer == 1


def test_standby_reached_as_the_store_ends_is_asked(stage: Stage) -> None:
    stage.store.say(Successor(1, "host", 7))
    until(lambda: stage.control._named is not None)
    looked: queue.Queue[None] = queue.Queue()
    stage.control.on_orphaned(lambda: looked.put(None))
    reached: queue.Queue[Other] = queue.Queue()
    is_reaching = threading.Event()
    move = stage.control._move

    def reaching() -> None:
        is_reaching.set()
        reached.put(stage.meet_successor())

    def moving(event: Event) -> Action:
        if event is Event.LOST_WITH_STANDBY_NAMED:  # another thread reaches it now
            threading.Thread(target=reaching, daemon=True).start()
            assert is_reaching.wait(PATIENCE_S)
            time.sleep(0.02)  # it may wait for this one, which nobody can see
        return move(event)

    stage.control._move = moving  # type: ignore[method-assign]
    stage.store.connection.close()
    successor = reached.get(timeout=PATIENCE_S)
    assert isinstance(successor.heard.get(timeout=PATIENCE_S), Join)
    assert isinstance(successor.heard.get(timeout=PATIENCE_S), Orphaned)
    assert looked.empty()
    assert stage.control.searching is None
    successor.connection.close()


def test_search_without_a_place_to_listen_gives_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneaccord.control.failover._LOOKING_S", 0.1)
    standby = Failover(stage.loop, stage.control, SECRET, Liveness(), None)
    stage.store.say(Welcome(b"key", [0] * 3, [None] * 3))
    stage.control.welcome(Deadline(PATIENCE_S))
    assert stage.control._place is not None
    stage.control._place.close()
    stage.control.gone[1] = "it ended"
    asking = Asking(stage.control, PATIENCE_S)
    stage.store.connection.close()
    asking.join(PATIENCE_S)
    assert isinstance(asking.told, PeerLostError)
    standby.end()


def test_agree_answer_is_told_to_the_standby(stage: Stage) -> None:
    agreed: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(
        target=lambda: agreed.put(stage.control.recovery.agree(0, "agree #0", 3, [0, 1, 2], Deadline(PATIENCE_S))), daemon=True
    )
    thread.start()
    assert isinstance(stage.store.heard.get(timeout=PATIENCE_S), Agree)
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=PATIENCE_S), Join)
    answer = stage.control.recovery.take

    def answered(message: Agreement) -> None:  # and the store ends before the thread that waits runs again
        with stage.control._changed:
            answer(message)
            stage.control._turn_to_successor()

    stage.control.recovery.take = answered  # type: ignore[method-assign, assignment]
    stage.store.say(Agreement("agree #0", 0))  # with the flag of rank 0, which none else knows
    assert agreed.get(timeout=PATIENCE_S) == 0
    assert successor.heard.get(timeout=PATIENCE_S) == Agree("agree #0", 0, [0, 1, 2], is_told=True)
    thread.join(PATIENCE_S)
    successor.connection.close()


def test_went_on_tells_the_store_and_the_standby(stage: Stage) -> None:
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=PATIENCE_S), Join)
    stage.control.report_reformed()
    assert stage.store.heard.get(timeout=PATIENCE_S) == successor.heard.get(timeout=PATIENCE_S) == JobReformed([2])
    successor.connection.close()


def test_job_reformed_is_passed_on_to_the_standby(stage: Stage) -> None:
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=PATIENCE_S), Join)
    successor.say(JobReformed([1]))  # which does not mean that it is the store now
    until(lambda: bool(stage.control.recovery.reformed))
    assert Asking(stage.control, PATIENCE_S).is_alive()
    assert isinstance(stage.store.heard.get(timeout=PATIENCE_S), Shrink)
    stage.store.connection.close()
    heard = [successor.heard.get(timeout=PATIENCE_S) for _ in range(3)]
    assert heard[0] == JobReformed([1])
    assert [type(message) for message in heard[1:]] == [Shrink, Orphaned]
    successor.connection.close()
    until(lambda: stage.control.failed)
    assert stage.control.cut  # and it looks for nobody


def test_newcomers_of_a_lost_store_are_forgotten(stage: Stage) -> None:
    stage.store.say(Verdict("lost", "rank 1 was lost", 1))
    stage.store.say(Gone(1, "it ended"))
    stage.store.say(Gone(3, "a new rank ended"))
    successor = stage.meet_successor()
    until(lambda: len(stage.control.gone) == 2)
    stage.store.connection.close()
    successor.say(Gone(0, "it ended"))
    until(lambda: 0 in stage.control.gone)
    told: dict[int, str] = {}
    stage.control.on_gone(told.__setitem__)
    assert told == {0: "it ended", 1: "it ended"}  # the next store gives out the number 3 anew
    successor.connection.close()


@pytest.mark.parametrize("places", [[None] * 3, [None, Whereabouts("127.0.0.1", 1, 1, ""), None]])
def test_search_that_finds_no_survivor_gives_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, places: list[Whereabouts | None]
) -> None:
    monkeypatch.setattr("oneaccord.control.failover._LOOKING_S", 0.1)
    standby = Failover(stage.loop, stage.control, SECRET, Liveness(), None)
    stage.store.say(Welcome(b"key", [0, 0, 0], places))
    stage.control.welcome(Deadline(PATIENCE_S))
    stage.store.connection.close()
    with stage.control._changed:
        assert stage.control._changed.wait_for(lambda: stage.control.cut, PATIENCE_S)
    standby.end()

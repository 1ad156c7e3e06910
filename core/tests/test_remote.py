"""A rank's connections to the store and to its successor: what it does where the store ends."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from membership_tools import Job

from manyhands.contract.deadline import Deadline
from manyhands.contract.seal import Seal
from manyhands.control.connection import make_join
from manyhands.control.credentials import Credentials
from manyhands.control.frames import FrameConnection
from manyhands.control.liveness import Liveness
from manyhands.control.loop import Loop
from manyhands.control.network import Listener
from manyhands.control.protocol import (
    Agree,
    Agreement,
    FromRank,
    FromStore,
    GiveUp,
    Gone,
    Join,
    Orphaned,
    Shrink,
    Shrunk,
    Successor,
    Verdict,
    Welcome,
    WentOn,
    Whereabouts,
    decode_from_rank,
    encode,
)
from manyhands.control.proven import ProvenSocket
from manyhands.control.remote import SocketControl
from manyhands.errors import DeadlineError, PeerLostError
from manyhands.job.standby import Standby

SECRET = Credentials(b"secret")


class Other:
    """The store, or its successor: what it hears, and what it says."""

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
        self.control = SocketControl(self.loop, join, listening.getsockname(), SECRET, Deadline(10), Liveness())
        self.store = Other(self.loop, accepted.get(timeout=10))
        assert isinstance(self.store.heard.get(timeout=10), Join)

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
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


def until_lost(control: SocketControl) -> None:
    """Wait until the job has failed."""
    since = time.monotonic()
    while not control.failed and time.monotonic() - since < 10:
        time.sleep(0.001)


def test_a_rank_that_is_on_its_way_to_the_successor_asks_it_as_soon_as_it_is_there(stage: Stage) -> None:
    stage.store.say(Successor(1, "host", 7))
    stage.store.connection.close()
    while stage.control._orphaned is None:
        time.sleep(0.001)
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=10), Join)
    assert isinstance(successor.heard.get(timeout=10), Orphaned)
    assert not stage.control.failed
    first = Verdict("lost", "rank 0 was lost", 0)
    successor.say(first)
    until_lost(stage.control)
    assert stage.control.verdict == first
    successor.connection.close()


@pytest.mark.parametrize("is_told", [False, True])
def test_a_successor_that_is_not_reached_soon_is_given_up(stage: Stage, monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    monkeypatch.setattr("manyhands.control.remote.COMING_S", 0.05)
    if is_told:
        stage.store.say(Successor(1, "host", 7))
    stage.store.connection.close()
    until_lost(stage.control)
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


def test_an_answer_that_comes_late_does_not_end_the_next_attempt(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.control.recovery._STORE_S", 0.05)
    job = Job(3)  # what the store decides, once it is no longer stopped
    job.store.fail(Verdict("aborted", "enough"))
    job.forget()
    first = Asking(stage.control, 0.05)
    first.join(10)
    assert isinstance(first.told, DeadlineError)
    assert "does not answer" in str(first.told)
    second = Asking(stage.control, 10.0)
    heard = [stage.store.heard.get(timeout=10) for _ in range(3)]
    assert [type(message) for message in heard] == [Shrink, GiveUp, Shrink]
    for message in heard:
        assert message is not None
        job.store.handle(2, message)
    for rank in (0, 1):
        job.store.handle(rank, Shrink("other", rank))
    answers = [message for message in job.told[2] if isinstance(message, Shrunk)]
    assert [answer.ranks for answer in answers] == [[], [0, 1, 2]]
    for answer in answers:
        stage.store.say(answer)
    second.join(10)
    assert second.told == answers[1]


@pytest.mark.parametrize("have_come", [False, True])
def test_an_agreement_that_a_rank_has_given_up_ends_for_it_as_for_the_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, have_come: bool
) -> None:
    monkeypatch.setattr("manyhands.control.recovery._STORE_S", 0.05)
    job = Job(3)  # what the store decides, once it is no longer stopped
    members = [0, 1, 2]
    for rank in (0, 1) if have_come else (0,):
        job.store.handle(rank, Agree("agree #0", 2, members))
    with pytest.raises(DeadlineError, match="does not answer"):
        stage.control.recovery.agree(0, "agree #0", 3, members, Deadline(0.05))
    heard = [stage.store.heard.get(timeout=10) for _ in range(2)]
    again: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(
        target=lambda: again.put(stage.control.recovery.agree(0, "agree #0", 7, members, Deadline(10))), daemon=True
    )
    if not have_come:  # the answer meets the second attempt
        thread.start()
        heard.append(stage.store.heard.get(timeout=10))
    for message in heard:
        assert message is not None
        job.store.handle(2, message)
    if not have_come:
        for rank in (0, 1):
            job.store.handle(rank, Agree("agree #0", 2, members))
    answers = [message for message in job.told[2] if isinstance(message, Agreement)]
    for answer in answers:
        stage.store.say(answer)
        if not have_come:
            thread.join(0.2)  # which ends by the last alone
    if have_come:
        stage.store.say(Verdict("aborted", "enough"))
        until_lost(stage.control)
        thread.start()
    assert again.get(timeout=10) == 2
    assert [answer.problem is None for answer in answers] == [True] if have_come else [False, True]
    thread.join(10)


def test_what_was_answered_is_not_asked_again_where_the_store_ends(stage: Stage) -> None:
    asking = Asking(stage.control, 10.0)
    assert isinstance(stage.store.heard.get(timeout=10), Shrink)
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=10), Join)
    answer = stage.control.recovery.take

    def answered(message: Shrunk) -> None:  # and the store ends before the thread that waits runs again
        with stage.control._changed:
            answer(message)
            stage.control._turn_to_successor()

    stage.control.recovery.take = answered  # type: ignore[method-assign, assignment]
    stage.store.say(Shrunk([1, 2], "host", 1, attempt=1))
    asking.join(10)
    assert isinstance(asking.told, Shrunk)
    successor.say(Gone(0, "it ended"))
    while not stage.control.gone:
        time.sleep(0.001)
    stage.control._post(Orphaned("what comes next"))
    assert isinstance(successor.heard.get(timeout=10), Orphaned)
    successor.connection.close()


def test_who_gives_up_says_so_to_the_next_store_too_where_the_store_ends_without_an_answer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.control.remote.COMING_S", 0.05)
    job = Job(3)  # what the next store decides
    job.store.fail(Verdict("aborted", "enough"))
    job.store.lost(0, "it ended")
    asking = Asking(stage.control, 0.05)
    assert isinstance(stage.store.heard.get(timeout=10), Shrink)
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=10), Join)
    assert isinstance(stage.store.heard.get(timeout=10), GiveUp)
    stage.store.connection.close()
    heard = [successor.heard.get(timeout=10) for _ in range(3)]
    assert [type(message) for message in heard] == [Shrink, Orphaned, GiveUp]
    for message in (heard[0], heard[2]):
        assert message is not None
        job.store.handle(2, message)
    successor.say(next(message for message in job.told[2] if isinstance(message, Shrunk)))
    asking.join(10)
    assert isinstance(asking.told, DeadlineError)
    assert asking.told.peer == 1
    successor.connection.close()


def test_a_store_that_does_not_answer_is_named_also_where_it_is_not_the_first_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.control.recovery._STORE_S", 0.05)
    successor = stage.meet_successor()
    successor.say(Verdict("lost", "rank 0 was lost", 0))
    until_lost(stage.control)
    asking = Asking(stage.control, 0.05)
    asking.join(10)
    assert isinstance(asking.told, DeadlineError)
    assert "the store with rank 1 does not answer" in str(asking.told)
    assert asking.told.peer == 1
    successor.connection.close()


def test_who_cannot_go_on_is_told_of_the_rank_whose_connection_ended_last_where_the_first_one_was_only_silent(
    stage: Stage,
) -> None:
    successor = stage.meet_successor()
    successor.say(Verdict("deadline", "rank 0 does not answer", 0))  # from then on it has the store
    until_lost(stage.control)
    successor.connection.close()
    asking = Asking(stage.control, 10)
    asking.join(20)
    assert isinstance(asking.told, PeerLostError)
    assert asking.told.peer == 1


def test_a_successor_that_is_reached_just_as_the_store_ends_is_asked(stage: Stage) -> None:
    stage.store.say(Successor(1, "host", 7))
    while stage.control._expected is None:
        time.sleep(0.001)
    looked: queue.Queue[None] = queue.Queue()
    stage.control.on_orphaned(lambda: looked.put(None))
    reached: queue.Queue[Other] = queue.Queue()
    turn = stage.control._turn_to_successor

    def turning() -> bool:
        is_turned = turn()
        if not is_turned and stage.control._expected is not None:  # another thread reaches it now
            threading.Thread(target=lambda: reached.put(stage.meet_successor()), daemon=True).start()
            time.sleep(0.1)
        return is_turned

    stage.control._turn_to_successor = turning  # type: ignore[method-assign]
    stage.store.connection.close()
    successor = reached.get(timeout=10)
    assert isinstance(successor.heard.get(timeout=10), Join)
    assert isinstance(successor.heard.get(timeout=10), Orphaned)
    assert looked.empty()
    assert stage.control.searching is None
    successor.connection.close()


def test_who_cannot_listen_where_others_would_find_it_gives_up_in_the_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.job.standby._LOOKING_S", 0.1)
    standby = Standby(stage.loop, stage.control, SECRET, True, Liveness(), None)
    stage.store.say(Welcome(b"key", [0] * 3, [None] * 3))
    stage.control.welcome(Deadline(10))
    assert stage.control._place is not None
    stage.control._place.close()
    stage.control.gone[1] = "it ended"
    asking = Asking(stage.control, 30)
    stage.store.connection.close()
    asking.join(10)
    assert isinstance(asking.told, PeerLostError)
    standby.end()


def test_what_was_agreed_is_told_to_who_goes_on_where_the_store_ends_right_after(stage: Stage) -> None:
    agreed: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(
        target=lambda: agreed.put(stage.control.recovery.agree(0, "agree #0", 3, [0, 1, 2], Deadline(10))), daemon=True
    )
    thread.start()
    assert isinstance(stage.store.heard.get(timeout=10), Agree)
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=10), Join)
    answer = stage.control.recovery.take

    def answered(message: Agreement) -> None:  # and the store ends before the thread that waits runs again
        with stage.control._changed:
            answer(message)
            stage.control._turn_to_successor()

    stage.control.recovery.take = answered  # type: ignore[method-assign, assignment]
    stage.store.say(Agreement("agree #0", 0))  # with the flag of rank 0, which none else knows
    assert agreed.get(timeout=10) == 0
    assert successor.heard.get(timeout=10) == Agree("agree #0", 0, [0, 1, 2], is_told=True)
    thread.join(10)
    successor.connection.close()


def test_who_goes_on_says_so_to_all_that_could_let_others_go_on(stage: Stage) -> None:
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=10), Join)
    stage.control.went_on()
    assert stage.store.heard.get(timeout=10) == successor.heard.get(timeout=10) == WentOn([2])
    successor.connection.close()


def test_who_is_told_that_others_have_gone_on_passes_it_on_where_the_store_ends(stage: Stage) -> None:
    successor = stage.meet_successor()
    assert isinstance(successor.heard.get(timeout=10), Join)
    successor.say(WentOn([1]))  # which does not mean that it is the store now
    while not stage.control.recovery.gone_on:
        time.sleep(0.001)
    assert Asking(stage.control, 10.0).is_alive()
    assert isinstance(stage.store.heard.get(timeout=10), Shrink)
    stage.store.connection.close()
    heard = [successor.heard.get(timeout=10) for _ in range(3)]
    assert heard[0] == WentOn([1])
    assert [type(message) for message in heard[1:]] == [Shrink, Orphaned]
    successor.connection.close()
    until_lost(stage.control)
    assert stage.control.cut  # and it looks for nobody


def test_newcomers_of_a_store_that_has_ended_are_forgotten_with_it(stage: Stage) -> None:
    stage.store.say(Verdict("lost", "rank 1 was lost", 1))
    stage.store.say(Gone(1, "it ended"))
    stage.store.say(Gone(3, "a new rank ended"))
    successor = stage.meet_successor()
    while len(stage.control.gone) < 2:
        time.sleep(0.001)
    stage.store.connection.close()
    successor.say(Gone(0, "it ended"))
    while 0 not in stage.control.gone:
        time.sleep(0.001)
    told: dict[int, str] = {}
    stage.control.on_gone(told.__setitem__)
    assert told == {0: "it ended", 1: "it ended"}  # the next store gives out the number 3 anew
    successor.connection.close()


@pytest.mark.parametrize("places", [[None] * 3, [None, Whereabouts("127.0.0.1", 1, 1, ""), None]])
def test_who_finds_no_others_gives_up(stage: Stage, monkeypatch: pytest.MonkeyPatch, places: list[Whereabouts | None]) -> None:
    monkeypatch.setattr("manyhands.job.standby._LOOKING_S", 0.1)
    standby = Standby(stage.loop, stage.control, SECRET, True, Liveness(), None)
    stage.store.say(Welcome(b"key", [0, 0, 0], places))
    stage.control.welcome(Deadline(10))
    stage.store.connection.close()
    with stage.control._changed:
        assert stage.control._changed.wait_for(lambda: stage.control.cut, 10)
    standby.end()

"""The rank that goes on where the store ends: when it does, and what it says."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from support.waiting import PATIENCE_S, until

from oneaccord.contract.seal import Seal
from oneaccord.control import timing
from oneaccord.control.protocol import (
    Agree,
    Agreement,
    Farewell,
    FromRank,
    FromStore,
    GiveUp,
    Gone,
    JobReformed,
    Join,
    Leave,
    Orphaned,
    Prepare,
    Progress,
    Report,
    Shrink,
    Shrunk,
    Verdict,
    decode_from_store,
    encode,
)
from oneaccord.control.standby_store import StandbyStore
from oneaccord.net.credentials import Credentials
from oneaccord.net.keepalive import Liveness
from oneaccord.net.loop import Loop
from oneaccord.net.proven import ProvenSocket

SIZE = 4
FIRST = Verdict("lost", "rank 3 was lost", 3)


class Company:
    """A reserve on rank 1, and the other ends of its connections; of ranks that have come."""

    def __init__(self, come: int = SIZE, certificates: tuple[str, ...] = ()) -> None:
        self.loop = Loop("test", lambda error: pytest.fail(str(error)))
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        credentials = Credentials(b"key", certificates=certificates)
        self.standby_store = StandbyStore(self.loop, listening, credentials, 1, SIZE, store=0, liveness=Liveness())
        self.ends: list[socket.socket] = []
        self.seals = [Seal(bytes(32)) for _ in range(SIZE)]
        for rank in range(come):
            self.come(rank)
        until(lambda: len(self.standby_store._seats) == come)

    def come(self, rank: int, *and_say: FromRank, certificate: str = "") -> None:
        end, its = socket.socketpair()
        its = ProvenSocket.over(its, (Seal(b"out".ljust(32)), Seal(bytes(32))))
        its.certificate = certificate
        end.settimeout(PATIENCE_S)
        self.ends.append(end)
        for message in (Join(rank, SIZE, "tcp", "", "1", "little", "host", 100 + rank), *and_say):
            self.say(rank, message)
        self.loop.call(lambda: self.standby_store._accept(its, b""))

    def say(self, rank: int, message: FromRank) -> None:
        frame, seal = encode(message), self.seals[rank]
        length = struct.pack("<I", len(frame))
        self.ends[rank].sendall(length + seal.of(length) + frame + seal.of(frame))

    def hear(self, rank: int) -> FromStore | None:
        """Return what a rank is told next, but that it is to prepare."""
        (length,) = struct.unpack("<I", self.ends[rank].recv(4 + Seal.BYTES, socket.MSG_WAITALL)[:4])
        message = decode_from_store(self.ends[rank].recv(length + Seal.BYTES, socket.MSG_WAITALL)[:length])
        return self.hear(rank) if isinstance(message, Prepare) else message

    def agree(self, verdict: Verdict) -> Verdict:
        found: list[Verdict] = []
        self.run(lambda: found.append(self.standby_store.agree(verdict)))
        return found[0]

    def run(self, function: Callable[[], object]) -> None:
        """Run a function in the loop, and wait for its end."""
        done = threading.Event()
        self.loop.call(lambda: (function(), done.set()))
        assert done.wait(PATIENCE_S)

    def close(self) -> None:
        self.standby_store.close()
        for end in self.ends:
            end.close()
        self.loop.stop()


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time run out but where a test says so; what waits for last words finds that they have come."""
    for name, seconds in {"STORE_SAYS_S": 60.0, "COMING_S": 60.0, "GATHERING_S": 60.0, "SEEN_S": 0.0}.items():
        monkeypatch.setattr(timing, name, seconds)


@pytest.fixture
def company() -> Iterator[Company]:
    made = Company()
    yield made
    made.close()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store, which lives and says nothing, seem late at once; a test whose store ends may be slower than that."""
    monkeypatch.setattr(timing, "STORE_SAYS_S", 0.05)


def test_it_goes_on_at_once_where_the_stores_process_ends(company: Company) -> None:
    company.ends[0].close()
    told = [company.hear(rank) for rank in (1, 2, 3)]
    assert len(set(map(str, told))) == 1
    assert isinstance(told[0], Verdict)
    assert (told[0].kind, told[0].peer) == ("lost", 0)
    assert "process 100 on host" in told[0].text
    assert company.agree(FIRST) == told[0]  # a store that wakes up takes this one for its own


def test_those_that_are_in_the_next_job_are_told_to_all_and_the_others_do_not_go_on_beside_them(company: Company) -> None:
    company.say(3, JobReformed([3]))
    assert [company.hear(rank) for rank in (1, 2, 3)] == [JobReformed([3])] * 3
    company.agree(FIRST)
    for rank in (3, 0):
        company.ends[rank].close()
    for rank in (1, 2):
        company.say(rank, Shrink("host", rank))
    while not isinstance(told := company.hear(2), Shrunk):
        pass
    assert told.problem is not None
    assert told.problem.text == "rank 3 continued without ranks 1-2, which must not continue beside it"


def test_a_rank_that_is_on_its_way_as_the_store_ends_is_waited_for() -> None:
    company = Company(SIZE - 1)
    company.ends[0].close()
    company.come(3)
    told = company.hear(3)
    assert isinstance(told, Verdict)
    assert told.peer == 0
    for rank in (1, 2, 3):
        company.say(rank, Shrink("host", rank))
    while not isinstance(answer := company.hear(3), Shrunk):
        assert answer == Gone(0, "the connection was closed") or isinstance(answer, Verdict)
    assert answer == Shrunk([1, 2, 3], "host", 1)
    company.close()


def test_a_rank_that_does_not_come_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COMING_S", 0.05)
    company = Company(SIZE - 1)
    company.say(2, Report("aborted", "rank 2 ended with ValueError", 2))
    company.ends[0].close()
    told = company.hear(2)
    assert isinstance(told, Verdict)
    assert told.peer == 0
    company.close()


def test_a_store_that_has_left_and_ends_is_not_lost(company: Company) -> None:
    company.say(0, Leave(Progress({}, {}, {})))
    company.ends[0].close()
    until(lambda: 0 in company.standby_store._gone)
    company.say(3, JobReformed([3]))
    assert company.hear(2) == JobReformed([3])  # and nothing before


@pytest.mark.parametrize("all_left", [False, True])
def test_a_store_that_has_left_and_ends_is_lost_to_those_that_have_not(company: Company, all_left: bool) -> None:
    leaving = range(SIZE) if all_left else (0, 1, 3)
    for rank in leaving:
        company.say(rank, Leave(Progress({}, {}, {})))
    until(lambda: len(company.standby_store._left) == len(leaving))
    company.ends[0].close()
    company.say(2, Orphaned("the connection was closed"))
    told = {str(company.hear(rank)) for rank in (1, 2, 3)}
    text = "rank 0 was lost: its process ended before all ranks had left"
    assert told == {str(Farewell() if all_left else Verdict("lost", text, 0))}


def test_where_all_have_left_the_others_hear_it_from_here_as_well(company: Company) -> None:
    """The store may have died after it had told the successor, and before it told them."""

    def end() -> None:
        company.standby_store._lose(0, "the connection was closed", vanished=True)
        company.standby_store.all_have_left()

    company.run(end)  # both at once, since last words are not waited for here
    for message in (Orphaned("the connection was closed"), JobReformed([2])):
        company.say(2, message)
    for rank in (2, 3):
        assert [company.hear(rank) for _ in range(2)] == [Farewell(), JobReformed([2])]  # and nothing in between


def test_what_the_store_has_told_it_before_it_ended_holds(company: Company) -> None:
    assert company.agree(FIRST) == FIRST
    company.say(2, Orphaned("the connection was closed"))
    company.say(2, Shrink("host", 2))
    company.ends[0].close()
    company.ends[3].close()
    assert company.hear(1) == FIRST
    company.say(1, Shrink("host", 1))
    heard = [company.hear(2) for _ in range(4)]
    assert heard[0] == FIRST
    assert {message.rank for message in heard if isinstance(message, Gone)} == {0, 3}
    assert [message for message in heard if isinstance(message, Shrunk)] == [Shrunk([1, 2], "host", 1)]


def test_a_report_to_it_means_that_the_store_does_not_answer(company: Company) -> None:
    company.say(2, Report("aborted", "rank 2 ended with ValueError", 2))
    assert [company.hear(rank) for rank in range(SIZE)] == [Verdict("aborted", "rank 2 ended with ValueError", 2)] * SIZE


@pytest.mark.usefixtures("short_grace")
def test_a_rank_that_alone_has_lost_a_store_that_lives_is_told_so_and_cannot_go_on(company: Company) -> None:
    lost = Verdict("lost", "rank 2 was lost", 2)
    assert company.agree(lost) == lost
    company.say(2, Orphaned("the connection was closed"))
    company.say(2, Shrink("host", 2))
    company.say(2, Agree("an agreement", 1, [0, 1, 2, 3]))
    assert company.hear(2) == lost
    for kind, what in ((Shrunk, "continue"), (Agreement, "agree")):
        answer = company.hear(2)
        assert isinstance(answer, kind)
        assert answer.problem is not None
        text = f"rank 2 was cut off from rank 0, which has the store, and the others were not: it cannot {what} with them"
        assert answer.problem.text == text


@pytest.mark.usefixtures("short_grace")
def test_who_has_been_told_that_it_cannot_go_on_does_not_ask_any_more_where_the_store_ends_later(company: Company) -> None:
    lost = Verdict("lost", "rank 3 was lost", 3)
    assert company.agree(lost) == lost
    company.say(2, Shrink("host", 22, attempt=1))
    assert isinstance(company.hear(2), Shrunk)
    company.ends[0].close()
    for rank in (1, 3):
        company.say(rank, Shrink("host", rank))
    wishes = company.standby_store
    until(lambda: wishes._membership is not None and len(wishes._membership._recovery._asking) == 2)
    company.say(2, Shrink("host", 2, attempt=2))
    while not isinstance(answer := company.hear(2), Shrunk):
        pass
    assert answer == Shrunk([1, 2, 3], "host", 1, attempt=2)


@pytest.mark.usefixtures("short_grace")
def test_a_store_that_says_nothing_of_a_rank_that_has_lost_it_is_taken_for_lost(company: Company) -> None:
    company.say(2, Orphaned("the connection was closed"))
    told = company.hear(3)
    assert isinstance(told, Verdict)
    assert (told.kind, told.peer) == ("lost", 0)
    assert "it says nothing of that" in told.text


def test_a_rank_that_waits_while_the_others_come_is_not_told_that_it_was_cut_off() -> None:
    company = Company(SIZE - 1)  # rank 3 is on its way
    over: list[Callable[[], object]] = []  # what is done once the store has not said in time what became of rank 2
    later = company.loop.call_later
    company.loop.call_later = lambda seconds, function: over.append(function) if seconds == 60 else later(seconds, function)  # type: ignore[method-assign]
    company.agree(FIRST)
    company.say(2, Shrink("host", 2, attempt=1))
    company.say(2, Orphaned("it ended"))
    until(lambda: len(over) == 2)
    company.standby_store.gather({0}, None)
    for function in over:
        company.run(function)
    assert company.standby_store._membership is None
    assert (2, Shrink("host", 2, attempt=1)) in company.standby_store._waiting
    company.close()


def test_who_gives_up_does_not_name_a_rank_whose_word_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COMING_S", 0.05)
    company = Company(SIZE - 1)
    company.agree(FIRST)
    company.standby_store.gather({0}, None)
    for rank in (0, 1, 2):
        company.say(rank, Shrink("host", rank, attempt=1))
    company.say(2, GiveUp(1.0, attempt=1))
    until(lambda: len(company.standby_store._waiting) == 4)
    company.come(3, Shrink("host", 3, attempt=1))
    told = [company.hear(2)]
    while not isinstance(told[-1], Shrunk):
        told.append(company.hear(2))
    assert told[-1].problem is None
    company.close()


def test_a_rank_comes_with_the_certificate_of_the_beginning_alone() -> None:
    company = Company(0, ("DNS:a", "DNS:b", "DNS:c", ""))
    try:
        for certificate in ("DNS:b", ""):
            company.come(0, certificate=certificate)
            with company.ends.pop() as refused:
                assert refused.recv(1) == b""
            company.seals[0] = Seal(bytes(32))
        for rank, certificate in enumerate(("DNS:a", "DNS:b", "DNS:c", "")):
            company.come(rank, certificate=certificate)
        until(lambda: len(company.standby_store._seats) == SIZE)
    finally:
        company.close()

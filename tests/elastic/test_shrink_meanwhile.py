"""What happens while a group shrinks: more deaths, ranks that come late, that cannot go on, or that break off."""

from __future__ import annotations

import signal
import time

import pytest
from support.fault_tools import Nursery, Ranks
from support.shrink_tools import GOING_ON, LOSING, SHRINKING, going_on
from support.waiting import until

DYING = """
import oneaccord.group.forming, oneaccord.job, oneaccord.group.shrinking
def stand_still(owner, name):
    \"\"\"Let the second call of a function be the last thing that this rank does.\"\"\"
    plain, calls = getattr(owner, name), []
    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == TURN:
            tell("stands")
            time.sleep(60)
        return plain(*args, **kwargs)
    setattr(owner, name, wrapped)
"""
STANDING = {
    "before it asks": (1, "oneaccord.control.recovery.Recovery, 'shrink'"),
    "before it comes": (2, "oneaccord.job.job.Job, 'meet'"),
    "before it starts the backend": (2, "oneaccord.job.job.Job, 'start_backend'"),
    "at the very end": (1, "oneaccord.group.shrinking, 'finish'"),
}


@pytest.mark.parametrize(
    ("where", "backend"), [*((where, "tcp") for where in STANDING), ("before it starts the backend", "shm")]
)
def test_who_dies_while_the_group_shrinks_is_left_out(nursery: Nursery, where: str, backend: str) -> None:
    turn, place = STANDING[where]
    program = (
        GOING_ON
        + f"TURN = {turn}"
        + DYING
        + f"""
if rank == 2:
    stand_still({place})
"""
        + LOSING
        + SHRINKING
    )
    with nursery.ranks(program, 4, ONEACCORD_BACKEND=backend) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        ranks.await_facts("stands", 1)
        ranks.signal(2, signal.SIGKILL)
        going_on(ranks, {0, 3})


def test_who_comes_late_still_learns_of_a_death_and_goes_on(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + "TURN = 2"
        + DYING
        + """
if rank == 2:
    stand_still(oneaccord.job.job.Job, "meet")
if rank == 3:
    plain = oneaccord.group.shrinking._Shrinking.meet
    def late(self, *args):
        if not asked:
            asked.append(1)
            tell("stands")
            until_told_to_go()
        return plain(self, *args)
    asked, oneaccord.group.shrinking._Shrinking.meet = [], late
"""
        + LOSING
        + SHRINKING
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        ranks.await_facts("stands", 2)
        ranks.signal(2, signal.SIGKILL)
        time.sleep(1.5)  # longer than a store waits that nobody is known to come to
        ranks.go()
        going_on(ranks, {0, 3})


def test_who_cannot_go_on_for_a_reason_of_its_own_is_left_out(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + LOSING
        + """
import oneaccord.job.job
if rank == 2:
    def broken(*args):
        raise MemoryError("no room for another backend")
    oneaccord.job.job.Job.start_backend = broken
    attempt(group.shrink)
    sys.exit()
"""
        + SHRINKING
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        going_on(ranks, {0, 3})
        (broken,) = ranks.await_facts("raised", 1)
    assert (broken["rank"], broken["type"], broken["text"]) == (2, "MemoryError", "no room for another backend")


LATE_CARDS = """
from oneaccord.control.connection import Control
plain = Control.give_card
def giving(self, name, card, members):
    if name == NAME and armed:
        armed.clear()
        if rank == 2:  # gives its card, and no more
            plain(self, name, card, members)
            time.sleep(0.1)
            tell("stands")
            time.sleep(60)
        if rank == 3:  # has not heard of the death when it gives its own, and looks when all that comes of it has come
            tell("stands")
            until_told_to_go()
            plain(self, name, card, members)
            time.sleep(0.3)
            return
    plain(self, name, card, members)
Control.give_card = giving
armed = []
"""


@pytest.mark.parametrize(
    ("backend", "name"),
    [("tcp", "the end of shrink()"), ("tcp", "tcp"), ("shm", "shm, opened")],
)
def test_nobody_comes_out_of_a_shrink_in_which_one_died_as_if_all_were_well(nursery: Nursery, backend: str, name: str) -> None:
    program = (
        GOING_ON
        + f"NAME = {name!r}"
        + LATE_CARDS
        + """
group = oa.init(timeout_s=30)
group.barrier()
armed.append(True)
tell("running")
until_lost(group)
"""
        + SHRINKING
    )
    with nursery.ranks(program, 4, ONEACCORD_BACKEND=backend) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        ranks.await_facts("stands", 2)
        ranks.signal(2, signal.SIGKILL)
        time.sleep(0.2)  # rank 0 learns of it, and asks again
        ranks.go()
        going_on(ranks, {0, 3})


def test_who_cannot_open_the_memory_of_a_rank_that_has_just_died_goes_on_without_it(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + """
import oneaccord.control.store
from oneaccord.api import CannotOpenError
from oneaccord_shm.segment import Segment
told, opened, armed = oneaccord.control.store.Store._lose, Segment.open.__func__, []
def told_late(self, *lost):
    self._loop.call_later(0.3, lambda: told(self, *lost))
def cannot(cls, *args):
    if rank == 3 and armed:
        armed.clear()
        raise CannotOpenError("its process has gone")
    return opened(cls, *args)
group = oa.init(timeout_s=30)
group.barrier()
tell("running")
until_lost(group)
armed.append(True)
Segment.open = classmethod(cannot)
oneaccord.control.store.Store._lose = told_late
give = oneaccord.control.connection.Control.give_card
def giving(self, name, card, members):
    give(self, name, card, members)
    if name == "shm, opened" and rank == 2:
        time.sleep(0.05)
        os._exit(9)
oneaccord.control.connection.Control.give_card = giving
"""
        + SHRINKING
    )
    with nursery.ranks(program, 4, ONEACCORD_BACKEND="shm") as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        going_on(ranks, {0, 3})


WATCHING = """
def watch():
    control, told = group._job.control, None
    while True:
        known = None if control._standby is None else (control._store.rank, control._standby.rank)
        if known not in (None, told):
            tell("knows", store=known[0], successor=known[1])
            told = known
        time.sleep(0.02)
""" + LOSING.replace("until_lost", "threading.Thread(target=watch, daemon=True).start(); until_lost")


def until_ready(ranks: Ranks, dead: tuple[int, ...]) -> None:
    """Wait until all that live are connected to one that can go on in the place of the store, and both live."""

    def is_ready() -> bool:
        ranks.read(0.1)
        latest = {fact["rank"]: {fact["store"], fact["successor"]} for fact in ranks.facts if fact["what"] == "knows"}
        living = [latest.get(rank) for rank in range(ranks.world_size) if rank not in dead]
        return all(each is not None and each == living[0] and not each & set(dead) for each in living)

    until(is_ready)


def test_rank_0_may_die_before_the_others_have_come_to_it_and_after_its_successor(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + "TURN = 2"
        + DYING
        + """
if rank == 0:
    stand_still(oneaccord.job.job.Job, "meet")
"""
        + WATCHING
        + SHRINKING
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        ranks.await_facts("stands", 1)
        until_ready(ranks, (1,))
        ranks.signal(0, signal.SIGKILL)
        going_on(ranks, {2, 3})


def test_who_breaks_off_and_lives_on_is_not_waited_for(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + LOSING
        + """
if rank == 2:
    def broken():
        raise KeyboardInterrupt
    group._job.backend.close = broken
    attempt(group.shrink)
    until_told_to_go()
    os._exit(0)
"""
        + SHRINKING
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        ranks.await_facts("works", 2)
        ranks.go()
        going_on(ranks, {0, 3})


def test_a_standby_that_breaks_off_does_not_take_over(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + """
from oneaccord.control.remote import SocketControl
follow = SocketControl.follow
def following(self, sock, standby):
    if standby == rank == 3:
        time.sleep(0.5)  # it still hears rank 2, the standby before
    follow(self, sock, standby)
    if standby == rank == 3:
        tell("followed")
SocketControl.follow = following
"""
        + LOSING
        + """
if rank == 2:
    def broken():
        raise KeyboardInterrupt
    control = group._job.control
    while control.reserve is None or len(control.reserve._members) < 3:
        time.sleep(0.005)
    group._job.backend.close = broken
    attempt(group.shrink)
    until_told_to_go()
    os._exit(0)
if rank == 0:
    until_told_to_go()
"""
        + SHRINKING
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        ranks.await_facts("followed", 1)
        ranks.go()
        going_on(ranks, {0, 3})


@pytest.mark.parametrize("order", [(1, 0), (0, 1, 2)])
def test_the_store_and_those_that_follow_it_may_die_one_after_the_other_while_the_group_shrinks(
    nursery: Nursery, order: tuple[int, ...]
) -> None:
    program = (
        GOING_ON
        + WATCHING
        + """
if rank == 4:
    until_told_to_go()
"""
        + SHRINKING
    )
    with nursery.ranks(program, 5) as ranks:
        ranks.start().await_facts("running")
        for number, victim in enumerate(order):
            until_ready(ranks, order[:number])
            ranks.signal(victim, signal.SIGKILL)
        ranks.go()
        going_on(ranks, {*range(5)} - {*order})


def test_who_was_told_to_go_on_asks_again_where_the_first_of_them_was_not_told(nursery: Nursery) -> None:
    """The store is not with the first of those that are left, where it is on another host; and it ends before that one is told."""
    program = (
        """
import socket
socket.gethostname = lambda: f"host{rank // 2}"
import oneaccord.control.standby_store
send = oneaccord.control.standby_store.StandbyStore._send
def sending(self, to, message):
    if rank == 2 and type(message).__name__ == "Shrunk":
        if to == 1:
            return
        if to == 3:
            self._loop.call_later(0.1, lambda: os._exit(9))
    send(self, to, message)
oneaccord.control.standby_store.StandbyStore._send = sending
"""
        + GOING_ON
        + LOSING
        + SHRINKING
    )
    with nursery.ranks(program, 4, ONEACCORD_BACKEND="tcp") as ranks:
        ranks.start().await_facts("running")
        ranks.signal(0, signal.SIGKILL)
        going_on(ranks, {1, 3})


def test_who_was_not_told_that_all_have_come_does_not_go_on_beside_who_was(nursery: Nursery) -> None:
    """The store of the next job, rank 1, ends as it tells them; that of the old one is with rank 3, on another host."""
    program = (
        """
import socket
socket.gethostname = lambda: f"host{rank // 3}"
from oneaccord.net.frames import FrameConnection
queue, told = FrameConnection._queue, []
def telling(self, frame):
    queue(self, frame)
    if rank == 1 and b"Cards" in frame and b"the end of shrink()" in frame:
        told.append(frame)
        if len(told) == 2:  # rank 1 itself, and rank 2
            os._exit(9)
FrameConnection._queue = telling
"""
        + GOING_ON
        + LOSING
        + """
group = attempt(group.shrink, timeout_s=30)
while not isinstance(group, Exception):
    try:
        tell("works", of=group.world_size)
        group.barrier()
        until_told_to_go()
        break
    except oa.PeerLostError:
        group = attempt(group.shrink, timeout_s=30)
"""
    )
    with nursery.ranks(program, 4, ONEACCORD_BACKEND="tcp") as ranks:
        ranks.start().await_facts("running")
        ranks.signal(0, signal.SIGKILL)
        (left_behind,) = ranks.await_facts("raised", 1)
        ranks.await_facts("works", 2)
        ranks.go()
        ranks.wait()
    assert (left_behind["rank"], left_behind["type"]) == (3, "PeerLostError")
    assert {fact["rank"] for fact in ranks.facts if fact["what"] == "works"} == {2}

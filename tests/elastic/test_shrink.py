"""After a death the survivors go on: `Group.shrink` gives them a new group, over every backend of processes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable

import pytest
from support.fault_tools import Nursery
from support.shrink_tools import GOING_ON, LOSING, SHRINKING, going_on, places, use
from support.waiting import until
from support.worlds import must, over_sockets

import oneaccord as oa
import oneaccord_simulated
from oneaccord.api import Group
from oneaccord.control.protocol import Report


@pytest.mark.parametrize(
    ("backend", "victims"),
    [("tcp", (0,)), ("tcp", (2,)), ("tcp", (0, 3)), ("tcp", (1, 2, 3)), ("shm", (1,)), ("shm", (0, 3)), ("auto", (1, 3))],
)
def test_the_survivors_of_a_kill_go_on_in_a_group_of_their_own(
    nursery: Nursery, backend: str, victims: tuple[int, ...]
) -> None:
    with nursery.ranks(GOING_ON + LOSING + SHRINKING, 4, ONEACCORD_BACKEND=backend) as ranks:
        ranks.start().await_facts("running")
        for victim in victims:
            ranks.signal(victim, signal.SIGKILL)
        going_on(ranks, {0, 1, 2, 3} - {*victims})


# In each of them rank 2 revokes the group, and the others learn of it.
BLOCKS: dict[str, Callable[[Group], object]] = {}


def block(function: Callable[[Group], object]) -> Callable[[Group], object]:
    BLOCKS[function.__name__] = function
    return function


def revoked(group: Group, whole: Group) -> None:
    """Wait in a group until that of all ranks has failed."""
    if whole.rank == 2:
        whole.revoke()
    while True:
        group.barrier()


@block
def a_split(group: Group) -> None:
    with group.split(0) as part:
        revoked(part, group)


@block
def a_split_whose_whole_is_waited_in(group: Group) -> None:
    with group.split(group.rank // 2):
        revoked(group, group)


@block
def a_split_within_a_subgroup(group: Group) -> None:
    with group.subgroup(range(4)) as some, some.split(0) as part:
        revoked(part, group)


@block
def a_split_that_is_left_by_the_programs_own_error(group: Group) -> None:
    with group.split(0) as part:
        try:
            revoked(part, group)
        except oa.AbortedError as error:
            raise RuntimeError("a step has failed") from error


@block
def a_split_in_which_it_is_caught(group: Group) -> None:
    with group.split(0) as part, pytest.raises(oa.AbortedError):
        revoked(part, group)


@block
def a_mesh(group: Group) -> None:
    with oa.DeviceMesh(group, (2, 2), ("a", "b")) as mesh:
        revoked(mesh.group("a"), group)


@block
def a_mesh_of_a_mesh(group: Group) -> None:
    with oa.DeviceMesh(group, (2, 2), ("a", "b")) as mesh, mesh.submesh("b", "a") as part:
        revoked(part.parent, group)


@block
def a_mesh_in_which_it_is_caught(group: Group) -> None:
    with oa.DeviceMesh(group, (4,)) as mesh, pytest.raises(oa.AbortedError):
        revoked(mesh.group(0), group)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_group_shrinks_although_its_failure_left_the_block_of_a_part(name: str) -> None:
    def program(group: Group) -> int:
        with contextlib.suppress(oa.AbortedError, RuntimeError):
            BLOCKS[name](group)
        assert "failed" in repr(group)
        with group.shrink() as fresh:
            use(fresh)
            return fresh.rank

    assert must(over_sockets(program, 4)) == [0, 1, 2, 3]


def test_the_survivors_go_on_although_the_death_left_the_block_of_a_part(nursery: Nursery) -> None:
    """On rank 0, which holds the store, and on the others."""
    program = """
group = oa.init(timeout_s=30)
with group.split(0) as part:
    tell("running")
    until_lost(part)
"""
    with nursery.ranks(GOING_ON + program + SHRINKING, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(2, signal.SIGKILL)
        going_on(ranks, {0, 1, 3})


def test_a_group_that_shrank_can_shrink_again(nursery: Nursery) -> None:
    """And the hosts that the configuration tells stay what they were."""
    program = (
        GOING_ON
        + """
group = oa.init(timeout_s=30)
group.barrier()
tell("running")
for _ in range(2):
    error = until_lost(group)
    tell("lost", who=error.peer, notes=getattr(error, "__notes__", []))
    group = group.shrink()
    tell("hosts", hosts=group._job.hosts)
    check(group)
group.close()
"""
    )
    with nursery.ranks(program, 5, ONEACCORD_RANKS_PER_HOST="2") as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        ranks.await_facts("works", 4)
        ranks.signal(3, signal.SIGKILL)
        works = ranks.await_facts("works", 4 + 3)
        codes = ranks.wait()
    assert places([fact for fact in works if fact["of"] == 3]) == {0: (0, 3), 2: (1, 3), 4: (2, 3)}
    second = [fact for fact in ranks.facts if fact["what"] == "lost"][4:]
    assert [fact["who"] for fact in second] == [2, 2, 2]  # as the group of four counts
    assert all(fact["notes"][0].endswith("rank 2 is the one that began as rank 3") for fact in second)
    hosts = [fact["hosts"] for fact in ranks.facts if fact["what"] == "hosts"]
    assert sorted(hosts) == [[0, 1, 1, 3]] * 4 + [[0, 1, 2]] * 3
    assert (codes[0], codes[2], codes[4]) == (0, 0, 0)


@pytest.mark.parametrize("victims", [(0, 1), pytest.param((0, 1, 2), marks=pytest.mark.long)])
def test_those_left_by_the_store_and_its_successor_find_each_other(nursery: Nursery, victims: tuple[int, ...]) -> None:
    with nursery.ranks(GOING_ON + LOSING + SHRINKING, 5) as ranks:
        ranks.start().await_facts("running")
        for victim in victims[1:]:
            ranks.signal(victim, signal.SIGSTOP)  # so that it cannot go on in the place of rank 0, and have another one prepare
        for victim in victims:
            ranks.signal(victim, signal.SIGKILL)
        going_on(ranks, {*range(5)} - {*victims})
    raised = [fact for fact in ranks.facts if fact["what"] == "raised"]
    assert len({fact["text"] for fact in raised}) <= 1
    assert all(fact["about"] in victims for fact in raised)


def test_one_rank_after_the_other_may_die_rank_0_and_whoever_follows_it_first(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + """
group = oa.init(timeout_s=30)
while group.world_size > 1:
    group.barrier()
    tell("works", rank=group.rank, size=group.world_size, was=rank)
    try:
        while True:
            group.all_reduce(np.ones(10))
    except oa.PeerLostError as error:
        tell("lost", peer=error.peer)
    group = group.shrink()
tell("works", rank=group.rank, size=group.world_size, was=rank)
group.close()
"""
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start()
        for victim in range(3):
            ranks.await_facts("works", sum(range(4, 3 - victim, -1)))
            ranks.signal(victim, signal.SIGKILL)
        ranks.await_facts("works", 4 + 3 + 2 + 1)
        codes = ranks.wait()
    assert codes[3] == 0
    assert {fact["peer"] for fact in ranks.facts if fact["what"] == "lost"} == {0}  # each time it was the first of those left


def test_who_neither_shrinks_nor_ends_is_named_on_all_who_wait_for_it_and_all_may_call_again() -> None:
    asking, told = threading.Barrier(2), threading.Barrier(3)

    def program(group: Group) -> int:
        if group.rank == 0:
            group.revoke()
        until(lambda: repr(group).endswith("failed>"))
        if group.rank < 2:
            asking.wait(30)
            with pytest.raises(oa.DeadlineError) as caught:
                group.shrink(timeout_s=2 if group.rank == 0 else 30)
            assert (caught.value.peer, caught.value.operation) == (2, "shrink")
            assert str(caught.value) == (
                "the group did not shrink within 2 s: rank 2 did not call shrink(), and did not end either; every survivor must call it"
            )
            with pytest.raises(oa.ClosedError, match=r"the group is closed; call shrink\(\) again, or close\(\) the group"):
                group.barrier()
        told.wait(50)
        with group.shrink() as fresh:
            use(fresh)
            return fresh.world_size

    assert must(over_sockets(program, 3)) == [3, 3, 3]


@pytest.mark.parametrize("ending", ["group.close(); tell('closed'); until_told_to_go()", "tell('closed')"])
def test_who_closes_or_ends_after_a_shrink_that_failed_is_not_waited_for(nursery: Nursery, ending: str) -> None:
    program = (
        GOING_ON
        + LOSING
        + f"""
if rank < 2:
    attempt(group.shrink, timeout_s=0.5)
if rank == 0:
    {ending}
    sys.exit()
until_told_to_go()  # a deadline of rank 0 would end a shrink of rank 1 as well
"""
        + SHRINKING
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(3, signal.SIGKILL)
        ranks.await_facts("raised", 2)
        ranks.await_facts("closed", 1)
        if "until" not in ending:
            assert ranks.wait([0])[0] == 0
        ranks.go()
        works = ranks.await_facts("works", 2)
        ranks.wait()
    assert places(works) == {1: (0, 2), 2: (1, 2)}


def test_who_ends_instead_is_not_waited_for(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + LOSING
        + """
if rank == 1:
    sys.exit()
elif rank == 2:
    raise ValueError("enough")
elif rank == 3:
    os._exit(3)
elif rank == 4:
    attempt(group.close)
    until_told_to_go()
    os._exit(4)
"""
        + SHRINKING
    )
    with nursery.ranks(program, 7) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(6, signal.SIGKILL)
        works = ranks.await_facts("works", 2)
        ranks.go()
        codes = ranks.wait()
    assert places(works) == {0: (0, 2), 5: (1, 2)}
    assert codes == {0: 0, 1: 0, 2: 1, 3: 3, 4: 4, 5: 0, 6: -9}


@pytest.mark.parametrize(
    "failure",
    [
        lambda group: group.all_reduce([1] * (2 + group.rank)),
        lambda group: group.barrier(timeout_s=0.3) if group.rank else until(lambda: repr(group).endswith("failed>")),
    ],
)
def test_with_nobody_lost_the_same_ranks_go_on(failure: Callable[[Group], object]) -> None:
    def program(group: Group) -> tuple[int, int]:
        group.barrier()
        with contextlib.suppress(oa.CommError):
            failure(group)
        with group.shrink() as fresh:
            use(fresh)
            return fresh.rank, fresh.world_size

    assert must(over_sockets(program, 3)) == [(0, 3), (1, 3), (2, 3)]


def test_a_group_that_is_well_does_not_shrink() -> None:
    def program(group: Group) -> None:
        with pytest.raises(oa.UsageError) as caught:
            group.shrink()
        assert str(caught.value) == (
            "shrink() is for a group that has failed, but this one has not: continue to use it, or use subgroup()"
        )
        with pytest.raises(oa.UsageError, match=r"made by split\(\)\): call it on the group of all ranks"):
            group.split(0).shrink()
        with pytest.raises(oa.UsageError):
            group.shrink(timeout_s=-1)
        use(group)
        group.close()
        with pytest.raises(oa.ClosedError) as closed:
            group.shrink()
        assert str(closed.value) == "the group is closed, and cannot shrink; make another one with oneaccord.init()"

    must(over_sockets(program))


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_nothing_of_the_old_group_stays_open(nursery: Nursery, backend: str) -> None:
    program = (
        GOING_ON
        + """
def held():
    return sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))

def threads():
    return sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("oneaccord-work"))

before = held(), threads()
group = oa.init(timeout_s=30)
half = group.split(0)
half.barrier()
group.barrier()
tell("running")
until_lost(group)
new = group.shrink()
check(new)
assert "closed" in repr(group) and "closed" in repr(half), (group, half)
attempt(half.barrier)
new.close()
until = time.monotonic() + 20  # what ends in the background has long for it
while (held(), threads()) != before and time.monotonic() < until:
    time.sleep(0.005)
assert (held(), threads()) == before, (held(), threads(), before)
tell("clean")
"""
    )
    with nursery.ranks(program, 4, ONEACCORD_BACKEND=backend) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        ranks.await_facts("clean", 3)
        codes = ranks.wait()
        assert [fact["type"] for fact in ranks.facts if fact["what"] == "raised"] == ["ClosedError"] * 3
    assert (codes[0], codes[2], codes[3]) == (0, 0, 0)


def test_after_an_interrupted_call_a_world_of_one_gets_a_fresh_group() -> None:
    with oa.init() as group:
        group._job.fail(Report("aborted", "enough", 0))
        with pytest.raises(oa.AbortedError):
            group.barrier()
        with group.shrink() as fresh:
            assert (fresh.rank, fresh.world_size, fresh.all_reduce([2.0]).tolist()) == (0, 1, [2.0])
        with pytest.raises(oa.ClosedError):
            group.barrier()


def test_ranks_of_a_simulated_world_cannot_shrink() -> None:
    def program(group: oa.Group) -> str:
        try:
            group.barrier()
        except oa.PeerLostError:
            with pytest.raises(oa.UnsupportedError, match="these are threads of a simulated world"):
                group.shrink()
            with pytest.raises(oa.PeerLostError):  # it stays as it was
                group.barrier()
        return "told"

    done = oneaccord_simulated.run(
        program, 3, faults=[oneaccord_simulated.Kill(rank=1, operation="barrier", nth=0)], check=False
    )
    assert done.results == ["told", None, "told"]

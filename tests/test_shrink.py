"""After a death the survivors go on: `Group.shrink` gives them a new group, over every backend of processes."""

from __future__ import annotations

import signal

import pytest
from fault_tools import Nursery
from shrink_tools import GOING_ON, LOSING, SHRINKING, places

import manyhands as mh
import manyhands_simulated
from manyhands.control.protocol import Report


@pytest.mark.parametrize("backend", ["tcp", "shm", "auto"])
@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (1, 3), (0, 3), (1, 2, 3)])
def test_the_survivors_of_a_kill_go_on_in_a_group_of_their_own(
    nursery: Nursery, backend: str, victims: tuple[int, ...]
) -> None:
    program = GOING_ON + LOSING + SHRINKING
    with nursery.ranks(program, 4, MANYHANDS_BACKEND=backend) as ranks:
        ranks.start().await_facts("running")
        for victim in victims:
            ranks.signal(victim, signal.SIGKILL)
        left = [rank for rank in range(4) if rank not in victims]
        works = ranks.await_facts("works", len(left))
        codes = ranks.wait()
    assert places(works) == {rank: (now, len(left)) for now, rank in enumerate(left)}
    assert {rank: code for rank, code in codes.items() if rank in left} == dict.fromkeys(left, 0)


BLOCKS = {
    "a split": "with group.split(0) as part:\n        until_lost(part)",
    "a split that another rank dies outside of": "with group.split(group.rank // 2) as part:\n        until_lost(group)",
    "a split within a subgroup": ("with group.subgroup(range(4)) as some, some.split(0) as part:\n        until_lost(part)"),
    "a split that is left by the program's own error": (
        "with group.split(0) as part:\n        try:\n            until_lost(part)\n        except mh.PeerLostError as error:\n"
        "            raise Exception('a step has failed') from error"
    ),
    "a split in which it is caught": (
        "with group.split(0) as part:\n        try:\n            until_lost(part)\n        except mh.PeerLostError:\n            pass"
    ),
    "a mesh": 'with mh.DeviceMesh(group, (2, 2), ("a", "b")) as mesh:\n        until_lost(mesh.group("a"))',
    "a mesh of a mesh": (
        'with mh.DeviceMesh(group, (2, 2), ("a", "b")) as mesh, mesh.submesh("b", "a") as part:\n        until_lost(part.parent)'
    ),
    "a mesh in which it is caught": (
        "with mh.DeviceMesh(group, (4,)) as mesh:\n        try:\n            until_lost(mesh.group(0))\n        except mh.PeerLostError:\n"
        "            pass"
    ),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_the_survivors_go_on_although_the_death_left_the_block_of_a_part(nursery: Nursery, block: str) -> None:
    """On rank 0, which holds the store, and on the others."""
    program = (
        GOING_ON
        + f"""
def until_lost(group):
    tell("running")
    while True:
        group.all_reduce(np.ones(1 << 14))

group = mh.init(timeout_s=20)
try:
    {block}
except Exception:
    pass
assert "failed" in repr(group)
"""
        + SHRINKING
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(2, signal.SIGKILL)
        works = ranks.await_facts("works", 3)
        codes = ranks.wait()
    assert places(works) == {0: (0, 3), 1: (1, 3), 3: (2, 3)}
    assert [codes[rank] for rank in (0, 1, 3)] == [0, 0, 0]


def test_a_group_that_shrank_can_shrink_again(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + """
group = mh.init(timeout_s=20)
group.barrier()
tell("running")
for _ in range(2):
    error = until_lost(group)
    tell("lost", who=error.peer, notes=getattr(error, "__notes__", []))
    group = group.shrink()
    check(group)
group.close()
"""
    )
    with nursery.ranks(program, 5) as ranks:
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
    assert (codes[0], codes[2], codes[4]) == (0, 0, 0)


@pytest.mark.parametrize("victims", [(0, 1), pytest.param((0, 1, 2), marks=pytest.mark.long)])
def test_those_left_by_the_store_and_its_successor_find_each_other(nursery: Nursery, victims: tuple[int, ...]) -> None:
    with nursery.ranks(GOING_ON + LOSING + SHRINKING, 5) as ranks:
        ranks.start().await_facts("running")
        for victim in victims[1:]:
            ranks.signal(victim, signal.SIGSTOP)  # so that it cannot go on in the place of rank 0, and have another one prepare
        for victim in victims:
            ranks.signal(victim, signal.SIGKILL)
        left = [rank for rank in range(5) if rank not in victims]
        works = ranks.await_facts("works", len(left))
        ranks.wait()
    assert places(works) == {rank: (now, len(left)) for now, rank in enumerate(left)}
    raised = [fact for fact in ranks.facts if fact["what"] == "raised"]
    assert len({fact["text"] for fact in raised}) <= 1
    assert all(fact["about"] in victims for fact in raised)


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_one_rank_after_the_other_may_die_rank_0_and_whoever_follows_it_first(nursery: Nursery, backend: str) -> None:
    program = (
        GOING_ON
        + """
group = mh.init(timeout_s=20)
while group.world_size > 1:
    group.barrier()
    tell("works", rank=group.rank, size=group.world_size, was=rank)
    try:
        while True:
            group.all_reduce(np.ones(10))
    except mh.PeerLostError as error:
        tell("lost", peer=error.peer)
    group = group.shrink()
tell("works", rank=group.rank, size=group.world_size, was=rank)
group.close()
"""
    )
    with nursery.ranks(program, 4, MANYHANDS_BACKEND=backend) as ranks:
        ranks.start()
        for victim in range(3):
            ranks.await_facts("works", sum(range(4, 3 - victim, -1)))
            ranks.signal(victim, signal.SIGKILL)
        ranks.await_facts("works", 4 + 3 + 2 + 1)
        codes = ranks.wait()
    assert codes[3] == 0
    assert {fact["peer"] for fact in ranks.facts if fact["what"] == "lost"} == {0}  # each time it was the first of those left


def test_who_neither_shrinks_nor_ends_is_named_on_all_who_wait_for_it_and_all_may_call_again(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + LOSING
        + """
if rank == 2:
    until_told_to_go()
else:
    attempt(group.shrink, timeout_s=1 if rank == 0 else 20)
    attempt(group.barrier)
"""
        + SHRINKING
        + "attempt(group.barrier)"
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(3, signal.SIGKILL)
        named = ranks.await_facts("raised", 4)
        ranks.go()
        works = ranks.await_facts("works", 3)
        codes = ranks.wait()
    for failure in (fact for fact in named if fact["type"] != "ClosedError"):
        assert (failure["type"], failure["about"], failure["operation"]) == ("DeadlineError", 2, "shrink")
        assert failure["text"] == (
            "the group did not shrink within 1 s: rank 2 did not call shrink(), and did not end either; every rank that is left must call it"
        )
    closed = [fact["text"] for fact in named if fact["type"] == "ClosedError"]
    assert closed == ["the group is closed; call shrink() again, or close() it"] * 2
    assert places(works) == {rank: (rank, 3) for rank in range(3)}
    assert [codes[rank] for rank in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("ending", ["group.close(); tell('closed'); until_told_to_go()", "tell('closed')"])
def test_who_closes_or_ends_after_a_shrink_that_failed_is_not_waited_for(nursery: Nursery, ending: str) -> None:
    program = (
        GOING_ON
        + LOSING
        + f"""
if rank == 2:
    until_told_to_go()
else:
    attempt(group.shrink, timeout_s=0.5)
    if rank == 0:
        {ending}
        sys.exit()
"""
        + SHRINKING
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(3, signal.SIGKILL)
        ranks.await_facts("closed", 1)
        if "until" not in ending:
            assert ranks.wait([0])[0] == 0
        ranks.go()
        works = ranks.await_facts("works", 2)
        ranks.wait()
    assert places(works) == {1: (0, 2), 2: (1, 2)}


@pytest.mark.parametrize(
    "ending", ["sys.exit()", "raise ValueError('enough')", "os._exit(3)", "attempt(group.close); until_told_to_go()"]
)
def test_who_ends_instead_is_not_waited_for(nursery: Nursery, ending: str) -> None:
    program = (
        GOING_ON
        + f"""
group = mh.init(timeout_s=20)
group.barrier()
tell("running")
until_lost(group)
if rank == 1:
    {ending}
"""
        + SHRINKING
    )
    with nursery.ranks(program, 4) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(2, signal.SIGKILL)
        works = ranks.await_facts("works", 2)
        ranks.go()
        ranks.wait()
    assert places(works) == {0: (0, 2), 3: (1, 2)}


@pytest.mark.parametrize(
    "failure", ["group.all_reduce(np.ones(2 + rank))", "group.barrier(timeout_s=0.3) if rank else until_failed(group)"]
)
def test_with_nobody_lost_the_same_ranks_go_on(nursery: Nursery, failure: str) -> None:
    program = (
        GOING_ON
        + f"""
group = mh.init(timeout_s=20)
group.barrier()
try:
    {failure}
except mh.CommError as error:
    tell("failed", type=type(error).__name__)
"""
        + SHRINKING
    )
    with nursery.ranks(program) as ranks:
        works = ranks.start().await_facts("works")
        ranks.wait()
    assert places(works) == {rank: (rank, 3) for rank in range(3)}


def test_a_group_that_is_well_does_not_shrink(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + """
with mh.init(timeout_s=20) as group:
    attempt(group.shrink)
    half = group.split(0)
    attempt(half.shrink)
    attempt(group.shrink, timeout_s=-1)
    check(group)
attempt(group.shrink)
"""
    )
    with nursery.ranks(program, 2) as ranks:
        ranks.start().await_facts("works")
        ranks.wait()
    said = [(fact["type"], fact["text"]) for fact in ranks.facts if fact["what"] == "raised" and fact["rank"] == 1]
    assert said[0] == (
        "UsageError",
        "shrink() is for a group that has failed, and this one has not: go on with it, or use subgroup()",
    )
    assert said[1][0] == "UsageError"
    assert "made by split() or subgroup(): call it on the group of all ranks" in said[1][1]
    assert said[2][0] == "UsageError"
    assert said[3] == ("ClosedError", "the group is closed, and cannot shrink; make another one with manyhands.init()")


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_nothing_of_the_old_group_stays_open(nursery: Nursery, backend: str) -> None:
    program = (
        GOING_ON
        + """
def held():
    return sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))

def threads():
    return sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("manyhands-work"))

before = held(), threads()
group = mh.init(timeout_s=20)
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
assert (held(), threads()) == before, (held(), threads(), before)
tell("clean")
"""
    )
    with nursery.ranks(program, 4, MANYHANDS_BACKEND=backend) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        ranks.await_facts("clean", 3)
        codes = ranks.wait()
        assert [fact["type"] for fact in ranks.facts if fact["what"] == "raised"] == ["ClosedError"] * 3
    assert (codes[0], codes[2], codes[3]) == (0, 0, 0)


def test_hosts_that_the_config_tells_stay_what_they_were(nursery: Nursery) -> None:
    program = (
        GOING_ON
        + LOSING
        + """
with group.shrink() as group:
    tell("hosts", hosts=group._job.hosts)
    check(group)
"""
    )
    with nursery.ranks(program, 4, MANYHANDS_RANKS_PER_HOST="2") as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGKILL)
        told = ranks.await_facts("hosts", 3)
        ranks.wait()
    assert [fact["hosts"] for fact in told] == [[0, 1, 1]] * 3


def test_training_goes_on_with_the_same_bits_on_all_survivors(nursery: Nursery) -> None:
    program = """
import hashlib
group = mh.init(timeout_s=20)
rng = np.random.default_rng(rank)
data, truth = rng.normal(size=(64, 8)), np.arange(8.0)
weights, step = np.zeros(8), 0
while step < 60:
    if rank == 2 and step == 30:
        os._exit(9)
    try:
        gradient = 2 * data.T @ (data @ (weights - truth)) / 64
        new = weights - 0.05 * group.all_reduce(gradient, op="mean")
        group.barrier()  # all have it, or nobody takes it
    except mh.PeerLostError:
        group = group.shrink()
        # A step that some have taken and others have not is settled by the one that is ahead.
        steps = group.all_gather(np.array([step]))
        step = int(steps.max())
        weights = group.broadcast(weights, root=int(steps.argmax()))
        continue
    weights, step = new, step + 1
tell("trained", digest=hashlib.sha256(weights.tobytes()).hexdigest(), error=float(abs(weights - truth).max()), of=group.world_size)
group.close()
"""
    with nursery.ranks(program, 4) as ranks:
        trained = ranks.start().await_facts("trained", 3)
        codes = ranks.wait()
    assert [fact["of"] for fact in trained] == [3, 3, 3]
    assert len({fact["digest"] for fact in trained}) == 1
    assert trained[0]["error"] < 0.1
    assert codes == {0: 0, 1: 0, 2: 9, 3: 0}


def test_after_an_interrupted_call_a_world_of_one_gets_a_fresh_group() -> None:
    with mh.init() as group:
        group._job.fail(Report("aborted", "enough", 0))
        with pytest.raises(mh.AbortedError):
            group.barrier()
        with group.shrink() as fresh:
            assert (fresh.rank, fresh.world_size, fresh.all_reduce([2.0]).tolist()) == (0, 1, [2.0])
        with pytest.raises(mh.ClosedError):
            group.barrier()


def test_ranks_of_a_simulated_world_cannot_shrink() -> None:
    def program(group: mh.Group) -> str:
        try:
            group.barrier()
        except mh.PeerLostError:
            with pytest.raises(mh.UnsupportedError, match="these are threads of a simulated world"):
                group.shrink()
            with pytest.raises(mh.PeerLostError):  # it stays as it was
                group.barrier()
        return "told"

    done = manyhands_simulated.run(
        program, 3, faults=[manyhands_simulated.Kill(rank=1, operation="barrier", nth=0)], check=False
    )
    assert done.results == ["told", None, "told"]

"""Arrays that the processes of a host have in common: real memory, deaths, forks, and what is left in the end."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from support.fault_tools import LONG_BEFORE_S, Nursery

NAME = "oneaccord-shared"
FOLDER = Path("/dev/shm")

MAPPED = f"""
def mapped():
    \"\"\"Return the files of shared arrays that this process has mapped, and how many it has open.\"\"\"
    lines = [line.split() for line in open("/proc/self/maps") if "{NAME}" in line]
    held = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            held += "{NAME}" in os.readlink("/proc/self/fd/" + number)
        except OSError:
            pass
    return sorted(set(line[4] for line in lines)), held

"""


def left_in_folder() -> list[str]:
    return sorted(path.name for path in FOLDER.glob(f"{NAME}*"))


@pytest.mark.parametrize("backend", ["tcp", "shm", "hybrid"])
def test_processes_have_one_memory_and_give_it_back(nursery: Nursery, backend: str) -> None:
    program = f"""
{MAPPED}
config = {{"backend": "{backend}", "backends": {{"hybrid": {{"routes": {{"intra": "shm", "inter": "tcp"}}}}}}}}
with oa.init(config=config, timeout_s=30) as group:
    shared = group.shared((3, 1000), "float32")
    shared.array[rank] = rank + 1
    shared.fence()
    tell("sums", sums=shared.read_only.sum(axis=1).tolist(), mapped=mapped())
    row = shared.array[rank]
    shared.close()
    tell("closed", row=float(row.sum()), mapped=mapped())
    del shared, row
    tell("left", mapped=mapped())
"""
    with nursery.ranks(program) as ranks:
        ranks.start()
        assert set(ranks.wait().values()) == {0}, ranks.output()
        sums = ranks.await_facts("sums")
        assert [fact["sums"] for fact in sums] == [[1000, 2000, 3000]] * 3
        # One file, which nobody has open any more.
        assert {str(fact["mapped"]) for fact in sums} == {str(sums[0]["mapped"])}
        assert len(sums[0]["mapped"][0]) == 1
        assert sums[0]["mapped"][1] == 0
        assert [(fact["row"], fact["mapped"]) for fact in ranks.await_facts("closed")] == [
            (1000.0 * (rank + 1), sums[0]["mapped"]) for rank in range(3)
        ]
        assert [fact["mapped"] for fact in ranks.await_facts("left")] == [[[], 0]] * 3
    assert not left_in_folder()


def test_the_hosts_of_the_config_have_memory_of_their_own(nursery: Nursery) -> None:
    program = """
config = {"backend": "hybrid", "ranks_per_host": 2, "backends": {"hybrid": {"routes": {"intra": "shm", "inter": "tcp"}}}}
with oa.init(config=config, timeout_s=30) as group, group.shared(4, "int64") as shared:
    shared.array[rank] = 1
    shared.fence()
    group.barrier()
    tell("has", array=shared.array.tolist(), ranks=shared.group.ranks, split=group.split_hosts().ranks)
"""
    with nursery.ranks(program, 4) as ranks:
        found = [(fact["array"], fact["ranks"], fact["split"]) for fact in ranks.start().await_facts("has")]
        assert found == [([1, 1, 0, 0], [0, 1], [0, 1])] * 2 + [([0, 0, 1, 1], [2, 3], [2, 3])] * 2


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_keep_the_memory_and_share_again(nursery: Nursery, victim: int) -> None:
    program = f"""
{MAPPED}
group = oa.init(timeout_s=30)
old = group.shared(1000, "int64")
if rank == {victim}:
    old.array[...] = 7
old.fence()
tell("running")
if rank == {victim}:
    time.sleep(60)
attempt(old.fence)
kept = int(old.array.sum())
with group.shrink() as smaller, smaller.shared(1000, "int64") as new:
    if new.is_first:
        new.array[...] = old.array + 1
    new.fence()
    try:
        old.close()
    except oa.PeerLostError:
        pass
    del old
    tell("shared", kept=kept, new=int(new.array.sum()), mapped=len(mapped()[0]), ranks=new.group.ranks)
"""
    with nursery.ranks(program) as ranks:
        ranks.start().await_facts("running")
        ranks.signal(victim, signal.SIGKILL)
        shared = ranks.await_facts("shared", 2)
        assert [(fact["kept"], fact["new"], fact["mapped"], fact["ranks"]) for fact in shared] == [(7000, 8000, 1, [0, 1])] * 2
        for fact in ranks.raised().values():
            assert (fact["type"], fact["about"]) == ("PeerLostError", victim)
    assert not left_in_folder()


def killed_while_creating(nursery: Nursery, seed: int) -> None:
    """Kill one rank, or all, at a moment of many creations."""
    chance = random.Random(seed)
    victims = chance.choice([[0], [1], [2], [0, 1, 2]])
    program = f"""
{MAPPED}
group = oa.init(timeout_s=30)
tell("running")
def create():
    while True:
        with group.shared(1 << 20, "uint8") as shared:
            shared.array[rank] = 1
            shared.fence()
attempt(create)
tell("ends", mapped=mapped())
"""
    with nursery.ranks(program, ONEACCORD_BACKEND=chance.choice(["tcp", "shm"])) as ranks:
        ranks.start().await_facts("running")
        time.sleep(chance.random() * 0.2)
        killed_at = [ranks.signal(victim, signal.SIGKILL) for victim in victims][-1]
        survivors = [rank for rank in range(3) if rank not in victims]
        failures = ranks.raised()
        # A rank that is killed after another one may have seen that one die.
        assert set(survivors) <= set(failures), (seed, ranks.output())
        for failure in [failures[rank] for rank in survivors]:
            assert (failure["type"], failure["about"]) == ("PeerLostError", victims[0]), (seed, failure)
            assert failure["ended"] - killed_at < LONG_BEFORE_S
        # What a failed creation has made is given back; the exception may still hold the last array that was made.
        for fact in ranks.await_facts("ends", len(survivors)):
            files, held = fact["mapped"]
            assert (len(files) <= 1, held) == (True, 0), (seed, fact)
    assert not left_in_folder()


def test_nothing_is_left_when_ranks_are_killed_while_they_create(nursery: Nursery) -> None:
    for seed in range(4):
        killed_while_creating(nursery, seed)


@pytest.mark.long
def test_nothing_is_left_after_many_kills(nursery: Nursery) -> None:
    for seed in range(100, 140):
        killed_while_creating(nursery, seed)


def test_a_rank_without_room_for_addresses_is_told_by_all(nursery: Nursery) -> None:
    program = """
import resource
with oa.init(timeout_s=30) as group:
    if rank == 1:
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
    attempt(group.shared, 1 << 29, "uint8")
    with group.shared(10) as shared:
        shared.fence()
        tell("usable")
"""
    with nursery.ranks(program) as ranks:
        failures = ranks.start().raised()
        assert len(ranks.await_facts("usable")) == 3
        for failure in failures.values():
            assert (failure["type"], failure["about"]) == ("OutOfMemoryError", 1)
            assert "cannot be made on the host of rank 1: 536870912 bytes of shared memory cannot be mapped" in failure["text"]
            assert "ulimit -v" in failure["text"]
        assert len(failures) == 3


def test_a_forked_child_reads_and_writes_the_array_but_has_no_fence(nursery: Nursery) -> None:
    program = """
faulthandler.cancel_dump_traceback_later()
with oa.init(timeout_s=30) as group, group.shared(10, "int64") as shared:
    shared.array[rank] = 1
    shared.fence()
    child = os.fork()
    if not child:
        shared.array[2 + rank] = int(shared.array[:2].sum())
        attempt(shared.fence)
        os._exit(0)
    tell("child", code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    shared.fence()
    tell("sees", array=shared.array.tolist())
"""
    with nursery.ranks(program, 2) as ranks:
        failures = ranks.start().raised()
        assert [fact["array"] for fact in ranks.await_facts("sees")] == [[1, 1, 2, 2, 0, 0, 0, 0, 0, 0]] * 2
        for failure in failures.values():
            assert failure["type"] == "ClosedError"
            assert "inherited the group over a fork" in failure["text"]
        assert len(failures) == 2


def test_time_that_is_up_while_pages_are_made_ends_the_call(nursery: Nursery) -> None:
    program = """
if rank == 1:
    os.posix_fallocate = lambda *_: time.sleep(0.3)
with oa.init(timeout_s=30) as group:
    attempt(group.shared, 1 << 29, "uint8", timeout_s=1.0)
    os._exit(0)
"""
    with nursery.ranks(program, 2) as ranks:
        failures = ranks.start().raised()
        assert {failure["type"] for failure in failures.values()} == {"DeadlineError"}
        assert len(failures) == 2

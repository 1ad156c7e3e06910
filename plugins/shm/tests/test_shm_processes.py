"""Ranks that are processes: what is left of them, who is told when one dies, and what ``auto`` chooses for them."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import pytest
from fault_tools import Nursery, Ranks

PROMISE_S = 1.0
"""Within what time a dead rank is named on every survivor."""
PATIENCE_S = 20.0


def over_shm(nursery: Nursery, program: str, world_size: int = 2) -> contextlib.AbstractContextManager[Ranks]:
    return nursery.ranks(program, world_size, MANYHANDS_BACKEND="shm")


WAITING = {
    "all_reduce": "x = np.zeros(8 << 20, np.float32); attempt(lambda: [group.all_reduce(x, out=x) for _ in range(10000)])",
    "barrier": "attempt(lambda: [group.barrier() for _ in range(1000000)])",
    "recv": "attempt(group.recv, VICTIM) if rank != VICTIM else time.sleep(30)",
    "send of what nobody takes": "attempt(group.send, np.zeros(8 << 20), VICTIM) if rank != VICTIM else time.sleep(30)",
}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("call", WAITING)
def test_a_killed_rank_is_named_by_all_who_wait(nursery: Nursery, call: str, victim: int) -> None:
    program = f"""
        with mh.init(timeout_s=20) as group:
            group.barrier()
            tell("running", backend=group.backend_name)
            {WAITING[call].replace("VICTIM", str(victim))}
    """
    with over_shm(nursery, program, 3) as ranks:
        running = ranks.start().await_facts("running")
        assert {fact["backend"] for fact in running} == {"shm"}
        killed_at = ranks.signal(victim, signal.SIGKILL)
        failures = ranks.raised()
    assert sorted(failures) == [rank for rank in range(3) if rank != victim]
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("PeerLostError", victim), failure
        assert f"rank {victim} was lost" in failure["text"]
        assert failure["ended"] - killed_at < PROMISE_S


def test_a_stopped_rank_is_named_when_the_time_is_up(nursery: Nursery) -> None:
    program = """
        import signal
        group = mh.init(timeout_s=20)
        group.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        attempt(group.barrier, timeout_s=0.5)
        os._exit(0)
    """
    with over_shm(nursery, program, 3) as ranks:
        ranks.start().wait([0, 2])
        failures = {fact["rank"]: fact for fact in ranks.facts if fact["what"] == "raised"}
    assert sorted(failures) == [0, 2]
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("DeadlineError", 1), failure


def shared_bytes() -> int:
    """Return how much shared memory the system has in use."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def test_nothing_is_left_when_all_are_killed(nursery: Nursery) -> None:
    program = """
        group = mh.init(timeout_s=20)
        x = np.frombuffer(group._job.backend.allocate(128 << 20), np.uint8)
        x[:] = 1
        y = np.zeros(1 << 20)
        tell("running")
        while True:
            group.all_reduce(y, out=y)
            group.sendrecv(y, 1 - rank, 1 - rank, out=y)
    """
    files = sorted(Path("/dev/shm").iterdir())
    with over_shm(nursery, program) as ranks:
        ranks.start().await_facts("running")
        full = shared_bytes()
        assert sorted(Path("/dev/shm").iterdir()) == files
        for rank in range(2):
            ranks.signal(rank, signal.SIGKILL)
        ranks.wait()
    limit = time.monotonic() + PATIENCE_S
    while shared_bytes() > full - (200 << 20):  # both arrays, but for what others on this machine do meanwhile
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert sorted(Path("/dev/shm").iterdir()) == files


def test_groups_that_are_closed_leave_nothing(nursery: Nursery) -> None:
    program = """
        def held():
            with open("/proc/self/maps") as lines:
                return len(os.listdir("/proc/self/fd")), sum("manyhands-shm" in line for line in lines)

        def use(group):
            group.all_reduce(np.ones(100_000))
            group.sendrecv(np.ones(100_000), 1 - rank, 1 - rank)

        import gc
        with mh.init(timeout_s=20) as group:
            use(group)
            before = held()
            for _ in range(30):
                part = group.split(0)
                use(part)
                part.close()
                del part
            limit = time.monotonic() + 15
            def is_more():
                return any(now > then for now, then in zip(held(), before))  # what the meeting needed may have gone since
            while is_more() and time.monotonic() < limit:  # the last may still be on its way
                gc.collect()
                time.sleep(0.01)
            tell("done", before=before, after=held(), more=is_more())
    """
    with over_shm(nursery, program) as ranks:
        for fact in ranks.start().await_facts("done"):
            assert not fact["more"], fact
        assert set(ranks.wait().values()) == {0}


def test_a_forked_child_does_not_disturb_its_parent(nursery: Nursery) -> None:
    program = """
        with mh.init(timeout_s=20) as group:
            group.all_reduce(np.ones(10))
            child = os.fork()
            if not child:
                assert not any("manyhands-shm" in os.readlink(f"/proc/self/fd/{fd}")
                               for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))
                del group
                os._exit(0)
            code = os.waitpid(child, 0)[1]
            tell("done", total=float(group.all_reduce(np.ones(10))[0]), code=code)
    """
    with over_shm(nursery, program) as ranks:
        for fact in ranks.start().await_facts("done"):
            assert (fact["total"], fact["code"]) == (2.0, 0)


def test_more_ranks_than_processors_get_on(nursery: Nursery) -> None:
    program = """
        with mh.init(timeout_s=20) as group:
            for _ in range(200):
                group.barrier()
            tell("done", total=float(group.all_reduce(np.ones(10))[0]))
    """
    with over_shm(nursery, program, 6) as ranks:
        assert {fact["total"] for fact in ranks.start().await_facts("done")} == {6.0}


# What `auto` chooses

CHOOSING = """
    def choose():
        with mh.init(timeout_s=10) as group:
            held = sum("manyhands-shm" in os.readlink(entry) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry))
            tell("chosen", backend=group.backend_name, total=float(group.all_reduce(np.ones(1000))[0]), held=held)
    attempt(choose)
"""

OTHERWISE = {
    "all on one host": ("", "shm"),
    "one cannot run it": (
        """
    if rank == 1:
        import manyhands_shm.plugin as plugin
        spec = plugin.manyhands_register_backends
        plugin._probe = lambda: "not today"
    """,
        "tcp",
    ),
    "one cannot load it": (
        """
    if rank == 1:
        sys.modules["manyhands_shm.backend"] = None
    """,
        "tcp",
    ),
    "one cannot open the other's": (
        """
    if rank == 1:
        from manyhands_shm.segment import CannotOpenError, Segment
        def refuse(*_):
            raise CannotOpenError("process 7 is another one here")
        Segment.open = refuse
    """,
        "tcp",
    ),
    "one cannot start what the other has started": (
        """
    if rank == 1:
        import manyhands_shm.backend as module
        class Late(module.ShmBackend):
            def __init__(self, bootstrap):
                super().__init__(bootstrap)
                self.close()
                raise mh.BackendUnavailableError("not on this rank")
        module.ShmBackend = Late
    """,
        "tcp",
    ),
    "two hosts of one name": (
        """
    import manyhands.job.autobackend
    manyhands.job.autobackend._system = lambda: f"boot of {rank}"
    """,
        "tcp",
    ),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_auto_takes_what_starts_on_all_ranks(nursery: Nursery, case: str) -> None:
    before, expected = OTHERWISE[case]
    with nursery.ranks(before + CHOOSING, 2, MANYHANDS_BACKEND="auto") as ranks:
        chosen = ranks.start().await_facts("chosen")
        assert [(fact["backend"], fact["total"]) for fact in chosen] == [(expected, 2.0)] * 2
        assert [fact["held"] for fact in chosen] == [2 if expected == "shm" else 0] * 2
        assert set(ranks.wait().values()) == {0}


def test_auto_without_a_backend_for_all_ranks_says_why_on_all(nursery: Nursery) -> None:
    program = OTHERWISE["one cannot open the other's"][0] + CHOOSING
    with nursery.ranks(program, 2, MANYHANDS_BACKEND="auto", MANYHANDS_PLUGINS="no:tcp") as ranks:
        failures = ranks.start().raised()
    assert {fact["type"] for fact in failures.values()} == {"BackendUnavailableError"}, failures
    assert len({fact["text"] for fact in failures.values()}) == 1
    assert "shm: the backend 'shm' needs memory that all ranks" in failures[0]["text"]
    assert "cannot open that of rank 0: process 7 is another one here" in failures[0]["text"]


def test_ranks_that_were_told_different_backends_do_not_meet(nursery: Nursery) -> None:
    with nursery.ranks(CHOOSING, 2) as ranks:
        ranks.start(0, MANYHANDS_BACKEND="auto").start(1, MANYHANDS_BACKEND="tcp")
        failures = ranks.raised()
    assert {fact["type"] for fact in failures.values()} == {"RendezvousError"}

"""Ranks that are processes: who is told when one dies, what is left of them, and what ``auto`` chooses for them."""

from __future__ import annotations

import gc
import signal
import threading
import time

import numpy as np
import pytest
from support.fault_tools import Nursery
from support.transport_tools import held
from support.waiting import until
from support.worlds import must, thread_world

from oneaccord.api import Group


@pytest.mark.parametrize(
    ("call", "victim"),
    [
        ("x = np.zeros(2 << 20, np.float32); attempt(lambda: [group.all_reduce(x, out=x) for _ in range(10000)])", 0),
        ("attempt(group.recv, 2) if rank != 2 else time.sleep(30)", 2),
    ],
    ids=["all_reduce", "recv"],
)
def test_a_killed_rank_is_named_by_all_who_wait(nursery: Nursery, call: str, victim: int) -> None:
    program = f"""
        with oa.init(timeout_s=20) as group:
            group.barrier()
            tell("running", backend=group.backend_name)
            {call}
    """
    with nursery.ranks(program, ONEACCORD_BACKEND="shm") as ranks:
        running = ranks.start().await_facts("running")
        assert {fact["backend"] for fact in running} == {"shm"}
        ranks.signal(victim, signal.SIGKILL)
        failures = ranks.raised()
    assert sorted(failures) == [rank for rank in range(3) if rank != victim]
    for failure in failures.values():
        assert (failure["type"], failure["about"]) == ("PeerLostError", victim), failure
        assert f"rank {victim} was lost" in failure["text"]


LONG_CALLS = {
    "sendrecv": "group.sendrecv(x, (rank + 1) % 2, (rank + 1) % 2, out=y)",
    "pingpong": "(group.send(x, 1), group.recv(1, out=y)) if rank == 0 else (group.recv(0, out=y), group.send(x, 0))",
    "broadcast": "group.broadcast(x, 0, out=y)",
}


@pytest.mark.parametrize("native", ["true", "false"])
@pytest.mark.parametrize("call", LONG_CALLS)
def test_a_rank_that_dies_while_arrays_are_copied_is_named(nursery: Nursery, call: str, native: str) -> None:
    program = f"""
        with oa.init(timeout_s=20) as group:
            x = np.full(1 << 21, rank, np.float32)
            y = np.empty_like(x)
            group.barrier()
            tell("running")
            attempt(lambda: [{LONG_CALLS[call]} for _ in range(100000)])
    """
    for number in range(3):
        with nursery.ranks(program, 2, ONEACCORD_BACKEND="shm", ONEACCORD_NATIVE=native) as ranks:
            ranks.start().await_facts("running")
            time.sleep(0.02 + 0.011 * number)  # in the midst of one of many calls
            victim = number % 2
            ranks.signal(victim, signal.SIGKILL)
            failures = ranks.raised()
        assert list(failures) == [1 - victim]
        failure = failures[1 - victim]
        assert (failure["type"], failure["about"]) == ("PeerLostError", victim), failure


@pytest.mark.parametrize("call", LONG_CALLS)
def test_a_rank_whose_call_has_failed_is_not_written_to(nursery: Nursery, call: str) -> None:
    program = f"""
        import time
        with oa.init(timeout_s=1) as group:
            x = np.full(1 << 21, rank, np.float32)
            y = np.empty_like(x)
            group.barrier()
            tell("running")
            attempt(lambda: [{LONG_CALLS[call]} for _ in range(100000)])
            y[...] = 7
            tell("filled")
            time.sleep(1)
            tell("seen", same=bool((y == 7).all()))
    """
    with nursery.ranks(program, 2, ONEACCORD_BACKEND="shm") as ranks:
        ranks.start().await_facts("running")
        ranks.signal(1, signal.SIGSTOP)
        ranks.await_facts("filled", 1)
        ranks.signal(1, signal.SIGCONT)
        assert all(fact["same"] for fact in ranks.await_facts("seen", 2))


def test_memory_that_peers_read_fits_into_limited_addresses(nursery: Nursery) -> None:
    program = """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        with oa.init(timeout_s=30) as group:
            x = group.empty(1 << 20)
            x[...] = rank + 1
            tell("sum", sum=float(group.all_reduce(x, out=x)[-1]))
    """
    with nursery.ranks(program, 2, ONEACCORD_BACKEND="shm") as ranks:
        assert [fact["sum"] for fact in ranks.start().await_facts("sum")] == [3.0, 3.0]
        assert ranks.wait() == {0: 0, 1: 0}


def test_a_rank_without_addresses_for_the_memory_of_another_says_so(nursery: Nursery) -> None:
    program = """
        import resource
        group = oa.init(timeout_s=30)
        x = group.empty(1 << 20) if rank == 0 else np.empty(1 << 20)
        x[...] = 1
        group.barrier()
        if rank == 1:
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        attempt(group.all_reduce, x)
    """
    with nursery.ranks(program, 2, ONEACCORD_BACKEND="shm") as ranks:
        failures = ranks.start().raised()
    assert {rank: failure["type"] for rank, failure in failures.items()} == {0: "AbortedError", 1: "OutOfMemoryError"}
    assert "ulimit -v" in failures[1]["text"]
    assert failures[0]["about"] == 1


def test_groups_that_are_closed_leave_nothing() -> None:
    def use(group: Group) -> None:
        group.all_reduce(np.ones(100_000))
        group.sendrecv(np.ones(100_000), 1 - group.rank, 1 - group.rank)

    def program(group: Group) -> None:
        use(group)
        together.wait(30)
        before = held("oneaccord-shm")
        together.wait(30)
        for _ in range(5):
            with group.split(0) as part:
                use(part)
            del part

        def is_as_before() -> bool:
            gc.collect()
            return all(now <= then for now, then in zip(held("oneaccord-shm"), before, strict=True))

        until(is_as_before)
        together.wait(30)

    together = threading.Barrier(2)
    must(thread_world(program, 2, "shm"))


def test_a_forked_child_does_not_disturb_its_parent(nursery: Nursery) -> None:
    program = """
        with oa.init(timeout_s=20) as group:
            group.all_reduce(np.ones(10))
            child = os.fork()
            if not child:
                assert not any("oneaccord-shm" in os.readlink(f"/proc/self/fd/{fd}")
                               for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))
                del group
                os._exit(0)
            code = os.waitpid(child, 0)[1]
            tell("done", total=float(group.all_reduce(np.ones(10))[0]), code=code)
    """
    with nursery.ranks(program, 2, ONEACCORD_BACKEND="shm") as ranks:
        for fact in ranks.start().await_facts("done"):
            assert (fact["total"], fact["code"]) == (2.0, 0)


def test_auto_takes_what_starts_on_all_ranks(nursery: Nursery) -> None:
    program = """
        import contextlib
        from unittest import mock
        import oneaccord.job.autobackend
        import oneaccord_shm.backend, oneaccord_shm.plugin
        from oneaccord.api import CannotOpenError
        from oneaccord_shm.segment import Segment

        class Late(oneaccord_shm.backend.ShmBackend):
            def __init__(self, bootstrap):
                super().__init__(bootstrap)
                self.close()
                raise oa.BackendUnavailableError("not on this rank")

        cases = {
            "all on one host": contextlib.nullcontext(),
            "one cannot run it": mock.patch("oneaccord_shm.plugin.sys", mock.Mock(platform="another")),
            "one cannot load it": mock.patch.dict(sys.modules, {"oneaccord_shm.backend": None}),
            "one cannot open the other's": mock.patch.object(Segment, "open", side_effect=CannotOpenError("process 7")),
            "one cannot start what the other has started": mock.patch("oneaccord_shm.backend.ShmBackend", Late),
            "two hosts of one name": mock.patch("oneaccord.job.autobackend._system", lambda: "boot of 1"),
        }
        for case, differing in cases.items():
            with differing if rank == 1 else contextlib.nullcontext(), oa.init(timeout_s=20) as group:
                held = sum("oneaccord-shm" in os.readlink(each) for each in os.scandir("/proc/self/fd") if os.path.islink(each))
                tell("chosen", case=case, got=[group.backend_name, float(group.all_reduce(np.ones(1000))[0]), held])
    """
    with nursery.ranks(program, 2, ONEACCORD_BACKEND="auto") as ranks:
        chosen = ranks.start().await_facts("chosen", 12)
        assert set(ranks.wait().values()) == {0}
    for fact in chosen:
        assert fact["got"] == (["shm", 2.0, 2] if fact["case"] == "all on one host" else ["tcp", 2.0, 0]), fact


def test_auto_without_a_backend_for_all_ranks_says_why_on_all(nursery: Nursery) -> None:
    program = """
        from oneaccord.api import CannotOpenError
        from oneaccord_shm.segment import Segment
        def refuse(*_):
            raise CannotOpenError("process 7 is another one here")
        if rank == 1:
            Segment.open = refuse
        attempt(oa.init, timeout_s=20)
    """
    with nursery.ranks(program, 2, ONEACCORD_BACKEND="auto", ONEACCORD_PLUGINS="no:tcp") as ranks:
        failures = ranks.start().raised()
    assert {fact["type"] for fact in failures.values()} == {"BackendUnavailableError"}, failures
    assert len({fact["text"] for fact in failures.values()}) == 1
    assert "shm: the backend 'shm' needs memory that all ranks" in failures[0]["text"]
    assert "cannot open the memory of rank 0: process 7 is another one here" in failures[0]["text"]

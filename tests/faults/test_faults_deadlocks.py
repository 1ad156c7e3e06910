"""Ranks that wait for each other for ever learn so at once; those that only seem to are left alone. And sends that nobody receives."""

from __future__ import annotations

import contextlib
import textwrap
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from support.fault_tools import Nursery

import oneaccord as oa
from oneaccord.api import Group

OVER_TCP = """
group = oa.init(timeout_s=30)
for case in CASES:
    group = case(group)
group.close()
"""
# A simulated world gets a process of its own, too: a thread that a test runner keeps could make a call, for all that oneaccord knows.
SIMULATED = """
import oneaccord_simulated
from oneaccord.api import current_rank
_tell = tell
def tell(what, **facts):
    _tell(what, **{"rank": current_rank(), **facts})
config = {"backends": {"simulated": {"eager_bytes": 65536}}}  # as the others, which carry small messages that nobody receives yet
for case in CASES:
    oneaccord_simulated.run(case, RANKS, timeout_s=30, check=False, config=config)
"""


def program_of(bodies: Iterable[str], before: str, after: str, ranks: int, backend: str) -> tuple[str, int]:
    """Return a program of a world in which each body, which uses ``group``, is run in its turn, and how many processes it takes."""
    lines = [f"RANKS, CASES = {ranks}, []"]
    for body in bodies:
        lines += ["def case(group):", *(textwrap.indent(textwrap.dedent(part), "    ") for part in (before, body, after))]
        lines += ["CASES.append(case)"]
    return "\n".join([*lines, OVER_TCP if backend == "tcp" else SIMULATED]), ranks if backend == "tcp" else 1


# What each rank does; 3 ranks.
DEADLOCKS = {
    "a ring of recvs": "group.recv((group.rank + 1) % 3)",
    "a ring of sends": "group.send(np.zeros(8 << 20), (group.rank + 1) % 3)",
    "barrier against recv": "group.recv(2) if group.rank == 1 else group.barrier()",
    "two that both recv first": "group.recv(1 - group.rank) if group.rank < 2 else group.barrier()",
    "two that both recv first, while the third is lost in thought": (
        "group.recv(1 - group.rank) if group.rank < 2 else (until_failed(group), group.barrier())"
    ),
    "sendrecvs the wrong way round": "group.sendrecv(np.zeros(1), (group.rank + 1) % 3, (group.rank + 1) % 3)",
    "a recv that comes before the collective": (
        "group.recv(0) if group.rank else (group.all_reduce(np.ones(1)), group.send(np.ones(1), 1))"
    ),
    "works that wait for each other": "group.recv_async((group.rank + 1) % 3).wait()",
    "any of works of which none can end": (
        "next(oa.as_completed([group.recv_async((group.rank + step) % 3) for step in (1, 2)])).wait()"
    ),
    "several works in flight": (
        "[work.wait() for work in [group.barrier_async(), group.recv_async((group.rank + 1) % 3)][::-1]]"
    ),
    "a barrier of some against a barrier of all": "group.barrier() if group.rank else pair.barrier_async().wait()",
    "a group that one does not make": "group.barrier() if group.rank else group.subgroup([0, 1])",
    "a split against a barrier": "group.split(0) if group.rank == 2 else group.barrier()",
    "closing with a work that cannot end": "(group.recv_async((group.rank + 1) % 3), group.close())",
}


@pytest.mark.parametrize(("backend", "which"), [("tcp", slice(7)), ("tcp", slice(7, None)), ("simulated", slice(None))])
def test_ranks_that_wait_for_each_other_for_ever_are_told(nursery: Nursery, backend: str, which: slice) -> None:
    # In a simulated world nobody else runs while a rank thinks.
    names = [name for name in DEADLOCKS if backend == "tcp" or "lost in thought" not in name][which]
    before = "pair = group.subgroup([0, 1])\ngroup.barrier()"
    after = "" if backend == "simulated" else "return group if 'closed' in repr(group) else group.shrink()"
    bodies = [f"attempt(lambda: {DEADLOCKS[name]})" for name in names]
    program, processes = program_of(bodies, before, after, 3, backend)
    with nursery.ranks(program, processes) as ranks:
        ranks.start().wait()
        assert ranks.output() == ""
        failures = [[fact for fact in ranks.facts if fact["what"] == "raised" and fact["rank"] == rank] for rank in range(3)]
    assert [len(each) for each in failures] == [len(names)] * 3
    for name, *told in zip(names, *failures, strict=True):
        assert [failure["type"] for failure in told] == ["DeadlockError"] * 3, (name, told)
        assert len({failure["text"] for failure in told}) == 1, (name, told)
        assert ("wait for each other" if backend == "tcp" else "no rank can go on") in told[0]["text"], (name, told)


# A thread that comes to the rescue long after the ranks have said that they wait. Two ranks.
RESCUES = {
    "a thread that sends for the first time": """
        if group.rank == 0:
            def work():
                time.sleep(1.0)
                group.send(np.arange(4), 1)
            thread = threading.Thread(target=work)
            thread.start()
            group.barrier()
            thread.join()
        else:
            assert group.recv(0).tolist() == [0, 1, 2, 3]
            group.barrier()
    """,
    "a timer that sends": """
        if group.rank == 0:
            threading.Timer(1.0, lambda: group.send(np.ones(1), 1)).start()
            assert group.recv(1).tolist() == [2]
        else:
            assert group.recv(0).tolist() == [1]
            group.send(np.full(1, 2), 0)
    """,
    "a thread that has made calls before": """
        if group.rank == 0:
            first = threading.Event()
            def work():
                group.send(np.ones(1), 1)
                first.set()
                time.sleep(1.0)
                group.send(np.ones(1), 1)
            thread = threading.Thread(target=work)
            thread.start()
            first.wait()
            group.barrier()
            thread.join()
        else:
            group.recv(0)
            group.recv(0)
            group.barrier()
    """,
    "a rank that thinks while its work waits": """
        if group.rank == 0:
            work = group.recv_async(1)
            time.sleep(1.0)
            group.send(np.ones(1), 1)
            assert work.wait().tolist() == [2]
        else:
            group.recv(0)
            group.send(np.full(1, 2), 0)
    """,
    "a callback": """
        work = group.barrier_async()
        if group.rank == 0:
            work.add_done_callback(lambda _: (time.sleep(1.0), group.send(np.ones(1), 1)))
            group.recv(1)
        else:
            group.recv(0)
            group.send(np.ones(1), 0)
    """,
    "a work that another one lets go on": """
        if group.rank == 0:
            first = group.recv_async(1)
            time.sleep(0.5)
            second = group.send_async(np.ones(1), 1)
            first.wait()
        else:
            time.sleep(1.0)
            group.recv(0)
            group.send(np.ones(1), 0)
    """,
    "a wait that gives up": """
        if group.rank == 0:
            work = group.recv_async(1)
            try:
                work.wait(timeout_s=1.0)
            except oa.DeadlineError:
                group.send(np.ones(1), 1)
            work.wait()
        else:
            group.recv(0)
            group.send(np.ones(1), 0)
    """,
    "a wait for a request that gives up": """
        if group.rank == 0:
            work = group.recv_async(1, tag=1)
            try:
                work.wait(timeout_s=1.5)
            except oa.DeadlineError:
                group.send(np.ones(1), 1, tag=2)
            work.wait()
        else:
            group.recv(0, tag=2)
            group.send(np.ones(1), 0, tag=1)
    """,
    "a wait for a connected rank that gives up": """
        group.sendrecv(np.ones(1), 1 - group.rank, 1 - group.rank)
        if group.rank == 0:
            work = group.recv_async(1)
            try:
                work.wait(timeout_s=1.5)
            except oa.DeadlineError:
                group.send(np.ones(1), 1)
            work.wait()
        else:
            group.recv(0)
            group.send(np.ones(1), 0)
    """,
    "a call that gives up its place in the queue": """
        if group.rank == 0:
            work = group.recv_async(1)
            try:
                group.recv(1, timeout_s=1.0)
            except oa.DeadlineError:
                group.send(np.ones(1), 1)
            work.wait()
        else:
            group.recv(0)
            group.send(np.ones(1), 0)
    """,
    "a thread that threading does not know": """
        import _thread
        if group.rank == 0:
            begun = threading.Event()  # before, nothing tells that it is there
            _thread.start_new_thread(lambda: (begun.set(), time.sleep(1.0), group.send(np.ones(1), 1)), ())
            begun.wait()
            group.recv(1)
        else:
            group.recv(0)
            group.send(np.ones(1), 0)
    """,
    "a pool of threads": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool:
            def late():
                time.sleep(1.0)
                group.send(np.ones(1), 1 - group.rank)
            sent = pool.submit(late)
            group.recv(1 - group.rank)
            sent.result()
    """,
}


@pytest.mark.parametrize("backend", ["tcp", "simulated"])
def test_ranks_whose_other_threads_come_to_the_rescue_are_left_alone(nursery: Nursery, backend: str) -> None:
    bodies = list(RESCUES.values())
    with contextlib.ExitStack() as stack:  # several jobs at once, as what they do is mostly to wait
        jobs = []
        for first in range(0, len(bodies), 2):
            each = program_of(bodies[first : first + 2], "", "group.barrier(); tell('done'); return group", 2, backend)
            jobs.append(stack.enter_context(nursery.ranks(*each)).start())
        for ranks in jobs:
            assert (set(ranks.wait().values()), ranks.output()) == ({0}, "")
            assert len(ranks.await_facts("done", 4)) == 4


def test_a_call_of_a_signal_handler_in_the_midst_of_another_call_is_refused_at_once(nursery: Nursery) -> None:
    program = """
        import signal
        def handler(*_):
            attempt(group.all_reduce, np.ones(1))
            tell("handled")
        signal.signal(signal.SIGUSR1, handler)
        def interrupt():
            until_blocked(threading.main_thread())
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        with oa.init(timeout_s=30) as group:
            if rank == 0:
                threading.Thread(target=interrupt, daemon=True).start()
            else:
                until_told_to_go()
            group.barrier()
            tell("sum", sum=float(group.all_reduce(np.ones(1))[0]))
    """
    with nursery.ranks(program, 2) as ranks:
        ranks.start().await_facts("handled", 1)
        ranks.go()
        assert [fact["sum"] for fact in ranks.await_facts("sum")] == [2.0, 2.0]
        failures = ranks.raised()
    assert list(failures) == [0]
    assert failures[0]["type"] == "UsageError"
    assert failures[0]["text"].startswith(
        "a signal handler called all_reduce while this thread was in the middle of another call"
    )


def test_a_send_that_nobody_received_is_told_at_close(world: Callable[..., Any]) -> None:
    def program(group: Group) -> None:
        for _ in range(2 + (group.rank == 0)):
            group.send(np.ones(3), 1) if group.rank == 0 else group.recv(0)

    for error in world.outcomes(program, 2):  # type: ignore[attr-defined]
        assert isinstance(error, oa.CollectiveMismatchError)
        assert "rank 0 sent 3 array(s) to rank 1, which received 2" in str(error)


def test_a_large_send_that_nobody_receives_is_told_when_its_receiver_closes(world: Callable[..., Any]) -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.zeros(8 << 20), 1)

    with pytest.raises((oa.PeerLostError, oa.CollectiveMismatchError), match=r"rank 1.*(closed its|left the) group"):
        world(program, 2)


def test_sends_that_were_received_later_than_the_sender_closed_are_no_problem(world: Callable[..., Any]) -> None:
    closing = threading.Event()

    def program(group: Group) -> float:
        if group.rank == 0:
            group.send(np.ones(3), 1)
            closing.set()
            return 3.0
        assert closing.wait(30)
        return float(group.recv(0).sum())

    assert world(program, 2) == [3.0, 3.0]

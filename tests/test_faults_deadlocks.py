"""Ranks that wait for each other for ever learn so at once; those that only seem to are left alone. And sends that nobody receives."""

from __future__ import annotations

import contextlib
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fault_tools import Nursery, Ranks

import manyhands as mh
from manyhands.api import Group

BACKENDS = ["tcp", "simulated"]
CONFIG = {"backends": {"simulated": {"eager_bytes": 65536}}}
"""As the other backends, which carry small messages that nobody receives yet."""
TIMEOUT_S = 30
SOON_S = 3.0
"""Far below the timeout: who is told within it was not told by a deadline."""


SIMULATED = """
import manyhands_simulated
from manyhands.api import current_rank
_tell = tell
def tell(what, **facts):
    _tell(what, **{"rank": current_rank(), **facts})
"""


def started(nursery: Nursery, backend: str, body: str, world_size: int) -> contextlib.AbstractContextManager[Ranks]:
    """Start a world whose ranks run ``body`` on a ``group``.

    A simulated world gets a process of its own, too: a thread that a test runner keeps could make a call, for all that manyhands
    knows.
    """
    program = "def program(group):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    if backend == "tcp":
        program += f"\nwith mh.init(timeout_s={TIMEOUT_S}) as group:\n    program(group)\n"
    else:
        program = f"{SIMULATED}\n{program}\nmanyhands_simulated.run(program, {world_size}, timeout_s={TIMEOUT_S}, check=False, config={CONFIG})\n"
    return nursery.ranks(program, world_size if backend == "tcp" else 1)


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
        "next(mh.as_completed([group.recv_async((group.rank + step) % 3) for step in (1, 2)])).wait()"
    ),
    "several works in flight": (
        "[work.wait() for work in [group.barrier_async(), group.recv_async((group.rank + 1) % 3)][::-1]]"
    ),
    "closing with a work that cannot end": "(group.recv_async((group.rank + 1) % 3), group.close())",
    "a barrier of some against a barrier of all": "group.barrier() if group.rank else pair.barrier_async().wait()",
    "a group that one does not make": "group.barrier() if group.rank else group.subgroup([0, 1])",
    "a split against a barrier": "group.split(0) if group.rank == 2 else group.barrier()",
}


@pytest.mark.parametrize(
    ("deadlock", "backend"),
    # In a simulated world nobody else runs while a rank thinks.
    [(name, backend) for backend in BACKENDS for name in DEADLOCKS if backend == "tcp" or "lost in thought" not in name],
)
def test_ranks_that_wait_for_each_other_for_ever_are_told(nursery: Nursery, backend: str, deadlock: str) -> None:
    body = f"""
        pair = group.subgroup([0, 1])
        group.barrier()
        attempt(lambda: {DEADLOCKS[deadlock]})
    """
    with started(nursery, backend, body, 3) as ranks:
        failures = ranks.start().raised()
    assert sorted(failures) == [0, 1, 2]
    assert {failure["type"] for failure in failures.values()} == {"DeadlockError"}, failures
    assert len({failure["text"] for failure in failures.values()}) == 1
    assert ("wait for each other" if backend == "tcp" else "no rank can go on") in failures[0]["text"]
    assert max(failure["took"] for failure in failures.values()) < SOON_S


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
            except mh.DeadlineError:
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
            except mh.DeadlineError:
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rescue", RESCUES)
def test_ranks_whose_other_threads_come_to_the_rescue_are_left_alone(nursery: Nursery, backend: str, rescue: str) -> None:
    with started(nursery, backend, RESCUES[rescue] + '\n        tell("done")', 2) as ranks:
        codes = ranks.start().wait()
        assert ranks.output() == ""
        assert set(codes.values()) == {0}
        assert len(ranks.await_facts("done", 2)) == 2


UNREAD = {
    "one of one": ("group.send(np.ones(3), 1)", "None", "rank 0 sent 1 array(s) to rank 1, which received 0"),
    "one of three": (
        "[group.send(np.ones(3), 1) for _ in range(3)]",
        "[group.recv(0) for _ in range(2)]",
        "rank 0 sent 3 array(s) to rank 1, which received 2",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unread", UNREAD)
def test_a_send_that_nobody_received_is_told_at_close(nursery: Nursery, backend: str, unread: str) -> None:
    sends, receives, words = UNREAD[unread]
    body = f"""
        group.barrier()
        {receives} if group.rank else {sends}
        attempt(group.close)
    """
    with started(nursery, backend, body, 2) as ranks:
        failures = ranks.start().raised()
    assert sorted(failures) == [0, 1]
    assert {failure["type"] for failure in failures.values()} == {"CollectiveMismatchError"}, failures
    assert all(words in failure["text"] for failure in failures.values())
    assert max(failure["took"] for failure in failures.values()) < SOON_S


def test_a_large_send_that_nobody_receives_is_told_when_its_receiver_closes(world: Callable[..., Any]) -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.zeros(8 << 20), 1)

    with pytest.raises((mh.PeerLostError, mh.CollectiveMismatchError), match=r"rank 1.*(closed its|left the) group"):
        world(program, 2)


def test_sends_that_were_received_later_than_the_sender_closed_are_no_problem(world: Callable[..., Any]) -> None:
    closing = threading.Event()

    def program(group: Group) -> float:
        if group.rank == 0:
            group.send(np.ones(3), 1)
            closing.set()
            return 3.0
        assert closing.wait(10)
        return float(group.recv(0).sum())

    assert world(program, 2) == [3.0, 3.0]

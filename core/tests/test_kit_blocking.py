"""Functions that block run at once, in threads that are used again."""

from __future__ import annotations

import threading
from functools import partial

from oneaccord.api import BlockingCalls


def test_functions_that_block_run_at_once_and_threads_are_used_again():
    calls, done = BlockingCalls("blocked"), threading.Semaphore(0)
    used: set[int] = set()

    def task(gate: threading.Barrier) -> None:
        used.add(threading.get_ident())
        gate.wait(30)
        done.release()

    for count in (4, 5, 6):  # each time one more than there may be idle threads
        gate = threading.Barrier(count)
        for _ in range(count):
            calls.start(partial(task, gate))
        for _ in range(count):
            assert done.acquire(timeout=30)
    assert 6 <= len(used) <= 15
    calls.close()
    calls.close()


def test_blocking_calls_one_after_the_other_share_threads():
    calls = BlockingCalls("one by one")
    for _ in range(100):
        done = threading.Event()
        calls.start(done.set)
        assert done.wait(30)
    made = [thread for thread in threading.enumerate() if thread.name == "one by one"]
    assert 1 <= len(made) < 100
    calls.close(30)
    assert not any(thread.is_alive() for thread in made)


def test_blocking_calls_close_waits_for_no_function_that_blocks_on():
    calls, gate, begun = BlockingCalls("blocked"), threading.Event(), threading.Event()

    def task() -> None:
        begun.set()
        gate.wait(30)

    calls.start(task)
    assert begun.wait(30)
    calls.close(0.01)
    gate.set()

"""Functions that block run at once, in threads that are used again."""

from __future__ import annotations

import threading

from manyhands.api import BlockingCalls


def test_functions_that_block_run_at_once_and_threads_are_used_again():
    calls, done = BlockingCalls("blocked"), threading.Semaphore(0)
    gate = threading.Barrier(4)
    used: set[int] = set()

    def task() -> None:
        used.add(threading.get_ident())
        gate.wait(30)
        done.release()

    for _ in range(3):
        for _ in range(4):
            calls.start(task)
        for _ in range(4):
            assert done.acquire(timeout=30)
    assert 4 <= len(used) <= 12
    calls.close()
    calls.close()

"""Locks of one word between processes."""

from __future__ import annotations

import mmap
import os

import pytest

from oneaccord_native import free_word, take_word

ROUNDS = 20_000


def test_a_word_has_one_owner() -> None:
    memory = bytearray(32)
    assert take_word(memory, 3, 5, 0) == 0
    assert take_word(memory, 3, 6, 100) == 5
    assert take_word(memory, 2, 6, 0) == 0
    assert not free_word(memory, 3, 6)
    assert take_word(memory, 3, 7, 0) == 5
    assert free_word(memory, 3, 5)
    assert take_word(memory, 3, 7, 0) == 0
    assert list(memoryview(memory).cast("Q")) == [0, 0, 6, 7]


@pytest.mark.parametrize("index", [-1, 4])
def test_a_word_outside_of_the_memory_is_refused(index: int) -> None:
    for call in (lambda: take_word(bytearray(32), index, 1, 0), lambda: free_word(bytearray(32), index, 1)):
        with pytest.raises(ValueError, match="not in the memory"):
            call()
    with pytest.raises(TypeError):
        take_word(b"12345678", 0, 1, 0)
    with pytest.raises(ValueError, match="not aligned"):
        take_word(memoryview(bytearray(32))[1:], 0, 1, 0)


def test_processes_exclude_each_other() -> None:
    with mmap.mmap(-1, 4096) as memory:
        words = memoryview(memory).cast("Q")
        children = []
        for owner in (1, 2, 3):
            pid = os.fork()
            if not pid:
                for _ in range(ROUNDS):
                    while take_word(words, 0, owner, 1000):
                        os.sched_yield()
                    words[8] += 1
                    free_word(words, 0, owner)
                os._exit(0)
            children.append(pid)
        for pid in children:
            assert os.waitpid(pid, 0)[1] == 0
        assert (words[0], words[8]) == (0, 3 * ROUNDS)
        words.release()

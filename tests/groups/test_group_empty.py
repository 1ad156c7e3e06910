"""Arrays that peers read in place, where the backend has such memory: they are arrays like all others."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group

BACKENDS = ["simulated", "tcp", "shm"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_is_an_array_of_its_own(backend: str) -> None:
    def program(group: Group) -> None:
        arrays = [group.empty((3, 5), dtype) for dtype in (np.float64, np.int8, np.bool_, np.complex64) for _ in range(3)]
        for number, array in enumerate(arrays):
            array[...] = number
        for number, array in enumerate(arrays):
            assert array.shape == (3, 5)
            assert array.flags.carray
            assert array.ctypes.data % 64 == 0
            assert (array == array.dtype.type(number)).all()
        assert group.empty(7).dtype == np.float64
        assert group.empty(()).shape == ()
        assert group.empty((0, 4)).shape == (0, 4)
        with pytest.raises(oa.DTypeError):
            group.empty(3, object)

    must(thread_world(program, 2, backend))


def test_memory_is_given_back_with_the_last_array_on_it() -> None:
    config = {"backends": {"shm": {"heap_bytes": 1 << 20}}}

    def program(group: Group) -> None:
        group.barrier()
        kept = group.empty(1000, np.float32)
        kept[...] = 5
        view = group.empty(200_000, np.float32)[10:20]
        with pytest.raises(MemoryError, match="heap_bytes"):
            group.empty(200_000, np.float32)
        del view
        gc.collect()
        for _ in range(20):
            again = group.empty(200_000, np.float32)
            again[...] = 1
            del again
        assert (kept == 5).all()
        group.barrier()

    must(thread_world(program, 2, "shm", config=config))

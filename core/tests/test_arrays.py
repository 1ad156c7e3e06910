"""From what users give to memory that can be sent."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from oneaccord.arrays.memory import bytes_of, check_out, contiguous, to_array
from oneaccord.errors import LayoutError


def test_an_array_is_taken_as_it_is():
    for array in (np.zeros(3), np.zeros((2, 3), order="F"), np.zeros(6)[::2], np.array(1.0)):
        assert to_array(array) is array


def test_memory_is_shared_where_it_can_be():
    memory = bytearray(8)
    assert np.shares_memory(to_array(memory), np.frombuffer(memory, np.uint8))
    masked = np.ma.array([1.0, 2.0])
    assert np.shares_memory(to_array(masked), masked.data)
    subclass = np.zeros(3).view(np.recarray)
    assert type(to_array(subclass)) is np.ndarray
    assert np.shares_memory(to_array(subclass), subclass)


def test_a_module_of_masked_arrays_that_another_thread_is_loading_is_of_no_concern(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy.ma", ModuleType("numpy.ma"))
    assert to_array([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_contiguous_copies_only_what_is_not():
    array = np.arange(6.0).reshape(2, 3)
    assert contiguous(array) is array
    assert np.shares_memory(contiguous(array[1:]), array)
    zero_d = np.array(3.0)
    assert contiguous(zero_d) is zero_d
    for view in (array.T, array[:, ::2], array[::-1], np.asfortranarray(array)):
        copy = contiguous(view)
        assert copy.flags.c_contiguous
        assert copy.shape == view.shape
        np.testing.assert_array_equal(copy, view)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [bool, np.float16, np.int64, np.complex128, np.longdouble])
def test_bytes_of_is_the_memory_itself(shape, dtype):
    array = np.zeros(shape, dtype)
    view = bytes_of(array)
    assert (view.ndim, view.format, view.nbytes, view.contiguous) == (1, "B", array.nbytes, True)
    view[:] = b"\1" * len(view)
    assert array.tobytes() == b"\1" * array.nbytes


def test_bytes_of_a_read_only_array_cannot_be_written():
    array = np.zeros(3)
    array.flags.writeable = False
    assert bytes_of(array).readonly


def test_an_out_of_the_right_kind_is_accepted():
    for out in (np.zeros((2, 3)), np.zeros((2, 3), order="F"), np.zeros((4, 6))[::2, ::-2], np.zeros((2, 3)).view(np.recarray)):
        check_out(out, (2, 3), np.dtype(float))
    check_out(np.zeros((1, 3))[:, ::3], (1, 1), np.dtype(float))
    check_out(np.broadcast_to(np.zeros((1, 0)), (4, 0)).copy(), (4, 0), np.dtype(float))


def test_an_out_whose_elements_are_one_is_refused():
    out = np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8))
    with pytest.raises(LayoutError, match="share memory"):
        check_out(out, (2, 3), np.dtype(float))

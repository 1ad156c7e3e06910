"""System calls that Python does not offer: other processes' memory, futexes, barriers, holes."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

import numpy as np

__all__ = ["address_of", "barrier", "futex_wait", "futex_wake", "punch_hole", "read_process", "register_barrier"]

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_read_process = getattr(_libc, "process_vm_readv", None)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

_PUNCH_HOLE = 0x01 | 0x02  # keep the size, punch a hole

# The numbers of futex and membarrier, by machine.
_NUMBERS = {
    "x86_64": (202, 324),
    "aarch64": (98, 283),
    "riscv64": (98, 283),
    "loongarch64": (98, 283),
    "ppc64le": (221, 365),
    "s390x": (238, 356),
}
_FUTEX, _MEMBARRIER = _NUMBERS.get(platform.machine(), (-1, -1))
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 2, 4


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_Two = _Iovec * 2
if _read_process is not None:
    _read_process.restype = ctypes.c_ssize_t
    _read_process.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


def address_of(view: memoryview) -> int:
    """Return the address of the memory of a view."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def read_process(pid: int, first: tuple[int, memoryview], second: tuple[int, memoryview]) -> bool:
    """Copy from two addresses of a process into memory, one after the other; return whether all was copied, which fails without permission."""
    if _read_process is None:
        return False
    here = _Two(*(_Iovec(address_of(into), len(into)) for _, into in (first, second)))
    there = _Two(*(_Iovec(address, len(into)) for address, into in (first, second)))
    return bool(_read_process(pid, here, 2, there, 2, 0) == len(first[1]) + len(second[1]))


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Give the pages of a part of a file back to the system; it reads as zeros from then on.

    Raises
    ------
    OSError
        The kernel refuses.
    """
    if _fallocate(fd, _PUNCH_HOLE, offset, nbytes):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def futex_wait(address: int, seen: int, seconds: float) -> bool:
    """Sleep while the 32-bit word at ``address`` is ``seen``, until woken or the time is up; return whether this system can."""
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    if _syscall(_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0) == -1:
        # Woken by a signal, out of time, or the word had changed: the caller looks for itself.
        return ctypes.get_errno() != errno.ENOSYS
    return True


def futex_wake(address: int) -> None:
    """Wake all threads, of any process, that sleep on the word at ``address``."""
    _syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, _EVERYBODY, None, None, 0)


def register_barrier() -> bool:
    """Make the threads of this process part of the barriers of other processes; return whether this system can do that."""
    return bool(_MEMBARRIER != -1 and _syscall(_MEMBARRIER, _REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0)


def barrier() -> None:
    """Let every thread that runs, here and in registered processes, pass a full memory barrier now."""
    _syscall(_MEMBARRIER, _GLOBAL_EXPEDITED, 0, 0)

"""Memory that processes of one host share: a file, which each of them maps.

The file has no name, so that nothing is left of it when its processes have ended in any way. Processes open it through ``/proc`` at the one
that has made it. Where that is impossible, as between containers with process numbers of their own, it lies in ``/dev/shm``, and has a name there
until the others have opened it. A file without a name counts against the memory of the control group alone, not against the size of ``/dev/shm``.

    data     whole pages
    token    bytes by which a process knows that it opened the right file
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from oneaccord.common.memory import memory_left
from oneaccord.common.units import bytes_text

__all__ = ["TOKEN_BYTES", "CannotOpenError", "SharedFile", "boot_id", "map_shared", "memory_fence", "open_in_process"]

TOKEN_BYTES: int = 32
FOLDER: Path = Path("/dev/shm")  # noqa: S108 - files made there have no name, or an unguessable one
_NAME = "oneaccord-shared"
_STEP_BYTES = 32 << 20
"""How many bytes get their pages in one system call: a signal makes the system begin it again."""


class CannotOpenError(Exception):
    """The memory of another process cannot be opened; the text says why."""


def boot_id() -> str:
    """Return an identifier that is the same for all processes of one running system, in containers or not, and for no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


@cache
def _mapping_calls() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return mmap and munmap, which not every system has; this module must be importable on all."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc.mmap, libc.munmap


def map_shared(fd: int, offset: int, nbytes: int) -> memoryview:
    """Map a part of a file; it is unmapped when the last view of it is gone.

    `mmap.mmap` keeps a copy of the file descriptor for each mapping, of which a process has few, and does not know when it is unused.

    Parameters
    ----------
    fd
        The descriptor of the file.
    offset, nbytes
        The part, in bytes; ``offset`` is a multiple of a page.

    Raises
    ------
    OSError
        The kernel refuses, usually because the process has too many mappings or address space is limited.
    """
    map_pages, unmap_pages = _mapping_calls()
    address = map_pages(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"{nbytes} bytes of shared memory cannot be mapped: {os.strerror(code)}")
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at the end of the process, when other code may still look.
    weakref.finalize(memory, unmap_pages, address, nbytes).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8).data


def memory_fence() -> None:
    """Separate the reads and writes of this thread before the call from those after it.

    Python offers no fence, but its locks are one. To take a lock is an acquire, to give it back a release. Accesses before the first release
    stay before it, accesses after the second acquire stay after it, and a release is never passed by a later acquire, neither in Arm's memory
    model nor in C's for sequentially consistent ones. So nothing passes from one side of the two pairs to the other.
    """
    lock = threading.Lock()  # a new one: a signal handler may interrupt this, and call it
    lock.acquire()
    lock.release()
    lock.acquire()
    lock.release()


def open_in_process(pid: int, number: int, name: str, token: bytes, offset: int) -> int:
    """Open the file that is the descriptor ``number`` of the process ``pid``, and has a name with ``name``, and a token at ``offset``.

    Parameters
    ----------
    pid, number
        The process, and its descriptor.
    name
        A word in the name of the file.
    token
        The bytes that stand at ``offset``.
    offset
        In bytes, from the beginning of the file.

    Raises
    ------
    CannotOpenError
        It is not there, belongs to another user, or this process may not open it.
    """
    path = f"/proc/{pid}/fd/{number}"
    strange = f"here, {pid} is the number of another process: the ranks are in different containers or PID namespaces"
    try:
        # Another process may have that number here: its open files may be anything, and must not be touched.
        target = os.readlink(path)  # noqa: PTH115 - its target is not a path
        if name not in target and not target.startswith(f"{FOLDER}/"):
            raise CannotOpenError(strange)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise CannotOpenError(f"process {pid} belongs to another user, or is protected ({error.strerror})") from error
    except FileNotFoundError as error:
        raise CannotOpenError(
            f"here, no process {pid} has it open: the ranks are in different containers or PID namespaces, or it has ended"
        ) from error
    except OSError as error:
        raise CannotOpenError(_why_not(path, error)) from error
    _check_token(fd, token, offset, strange)
    return fd


def _why_not(path: str, error: OSError) -> str:
    hint = "; raise the limit (`ulimit -n`)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return f"{path}: {error.strerror}{hint}"


def _check_token(fd: int, token: bytes, offset: int, strange: str) -> None:
    """Close a file that is not the right one."""
    try:
        if os.pread(fd, TOKEN_BYTES, offset) != token:
            raise CannotOpenError(strange)
    except BaseException:
        os.close(fd)
        raise


class SharedFile:
    """One file of memory, as this process sees it.

    Parameters
    ----------
    fd
        The file, which this object closes.
    nbytes
        The size of its data.
    is_in_folder
        Whether it counts against the size of ``/dev/shm``.
    """

    def __init__(self, fd: int, nbytes: int, *, is_in_folder: bool) -> None:
        self.fd: int = fd
        self.nbytes: int = nbytes
        self._is_in_folder = is_in_folder
        self._path: Path | None = None

    @classmethod
    def create(cls, nbytes: int, token: bytes, *, in_folder: bool) -> SharedFile:
        """Make a file whose data are zeros, and have no pages yet.

        Parameters
        ----------
        nbytes
            The size of its data.
        token
            The bytes by which others know it.
        in_folder
            Whether it is to be made in ``/dev/shm``, where it can have a name.

        Raises
        ------
        MemoryError
            There is no room for it; the text says how much there is, and what to do.
        OSError
            The system lacks the necessary calls.
        """
        in_folder = in_folder or not hasattr(os, "memfd_create")
        if in_folder and not hasattr(os, "O_TMPFILE"):
            raise OSError(errno.ENOSYS, "this system has no memory without a name that processes share; it needs Linux")
        flags = os.O_RDWR | os.O_CLOEXEC
        fd = (
            os.open(FOLDER, flags | os.O_TMPFILE, 0o600)
            if in_folder
            else os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        )
        file = cls(fd, nbytes, is_in_folder=in_folder)
        try:
            file._check_room(nbytes)
            os.fchmod(fd, 0o600)  # a memfd begins with 0777
            with file._words_for_room(nbytes):
                os.ftruncate(fd, file._token_at + mmap.PAGESIZE)
                os.pwrite(fd, token, file._token_at)
            with contextlib.suppress(OSError):  # a file of /dev/shm has no seals
                import fcntl

                # A process that opens it must not shrink it: touching the mapped pages would then kill the others.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            file.close()
            raise
        return file

    @classmethod
    def open(cls, pid: int, number: int, token: bytes, nbytes: int) -> SharedFile:
        """Open the file that is the descriptor ``number`` of the process ``pid``. Raises as `open_in_process`."""
        fd = open_in_process(pid, number, _NAME, token, _whole_pages(nbytes))
        return cls(fd, nbytes, is_in_folder=False)

    @classmethod
    def open_named(cls, name: str, token: bytes, nbytes: int) -> SharedFile:
        """Open the file that has a name in ``/dev/shm``.

        Raises
        ------
        CannotOpenError
            It is not there, belongs to another user, or is not the right one.
        """
        path = FOLDER / Path(name).name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise CannotOpenError(_why_not(str(path), error)) from error
        _check_token(fd, token, _whole_pages(nbytes), f"{path} is another file")
        return cls(fd, nbytes, is_in_folder=True)

    @property
    def _token_at(self) -> int:
        return _whole_pages(self.nbytes)

    def publish(self) -> str:
        """Give the file a name in ``/dev/shm``, until `withdraw` or `close`; return it.

        The file is locked as long as it has a name. A name without a lock is what killed processes have left, and is removed here.

        Raises
        ------
        OSError
            The system refuses.
        """
        import fcntl

        _sweep()
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        path = FOLDER / f"{_NAME}-{secrets.token_hex(16)}"
        # With a folder, so that Python makes the call that follows the link; the path is absolute, and needs none.
        os.link(f"/proc/self/fd/{self.fd}", path, src_dir_fd=self.fd, follow_symlinks=True)
        self._path = path
        return path.name

    def withdraw(self) -> None:
        """Take the name back; twice is fine."""
        path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)

    def reserve(self, part: int, parts: int, go_on: Callable[[], bool]) -> bool:
        """Give one of several parts of the data its pages, on the memory node of the calling thread; stop if not ``go_on()``, and return whether all is done.

        Raises
        ------
        MemoryError
            There is no room for them; touching one without its page would kill the process.
        """
        count = self._token_at // mmap.PAGESIZE
        first, last = (count * number // parts * mmap.PAGESIZE for number in (part, part + 1))
        with self._words_for_room(last - first):
            for start in range(first, last, _STEP_BYTES):
                if not go_on():
                    return False
                os.posix_fallocate(self.fd, start, min(_STEP_BYTES, last - start))
        return True

    def map(self) -> memoryview:
        """Map the data, which stay mapped until the last view of them is gone.

        Raises
        ------
        MemoryError
            There is no room for it in the addresses of this process.
        """
        try:
            return map_shared(self.fd, 0, self.nbytes)
        except OSError as error:
            raise MemoryError(
                f"{error.strerror}; raise the limit of addresses or of mappings (ulimit -v, vm.max_map_count)"
            ) from error

    def close(self) -> None:
        """Close the file and take its name back; mapped memory stays."""
        self.withdraw()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _check_room(self, nbytes: int) -> None:
        """Refuse a file for which there is no memory: the system would rather kill a process than refuse it."""
        left = memory_left()
        if self._is_in_folder:
            room = os.fstatvfs(self.fd)
            size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
            if size and nbytes > free:
                raise MemoryError(
                    f"{bytes_text(nbytes)} are needed, and of the {_text(size)} of {FOLDER} {_text(free)} are free: make it larger "
                    f"(docker run --shm-size; mount -o remount,size=... {FOLDER}), or let the ranks be in one PID namespace "
                    "(docker run --pid), where they need none of it"
                )
        if left is not None and nbytes > left:
            raise MemoryError(
                f"{bytes_text(nbytes)} are needed, and {_text(left)} of memory are free on {socket.gethostname()}: ask for less, or for "
                "more memory (docker run --memory, #SBATCH --mem)"
            )

    @contextlib.contextmanager
    def _words_for_room(self, nbytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise MemoryError(f"{error.strerror}: remove the limit of files (ulimit -f unlimited)") from error
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            self._check_room(nbytes)
            raise MemoryError(f"{bytes_text(nbytes)} are needed, and the system refuses them: {error.strerror}") from error


def _text(free: int) -> str:
    """Return words for memory that others use as well: the last digits mean nothing."""
    return bytes_text(free >> 20 << 20 if free >> 24 else free)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _sweep() -> None:
    """Remove the names that killed processes have left."""
    import fcntl

    for path in FOLDER.glob(f"{_NAME}-*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), path.stat()):
                    path.unlink()
            finally:
                os.close(fd)

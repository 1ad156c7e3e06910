"""A rank's shared memory: one file without a name, and its layout.

    first page    a token, by which peers know that they opened the right file; the words of `bell`
    heap          memory that peers read in place
    rings         for each channel, for each peer: the messages that this rank sends to that peer

The file is as large as a file can be, and takes memory only for written pages. So every channel has its place from
the beginning: nothing needs to be announced when a group is made, and closing one punches a hole. As it has no name, nothing is
left of it when its processes have ended in any way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import weakref
from dataclasses import dataclass

from oneaccord.api import HEADER_BYTES, map_shared, open_in_process
from oneaccord_shm.kernel import punch_hole

__all__ = [
    "LABELS",
    "LINE",
    "PAYLOADS",
    "SLOTS",
    "TOKEN_BYTES",
    "Geometry",
    "Segment",
    "least_segment_bytes",
]

PAGE = mmap.PAGESIZE
TOKEN_BYTES: int = 32
_FILE_BYTES = 1 << 62
_NAME = "oneaccord-shm"
_FOLDER = "/dev/shm"  # noqa: S108 - the file made there has no name

SLOTS: int = 32
"""How many messages fit into a ring."""
MOST_SLOT_BYTES = 512 << 10
LEAST_SLOT_BYTES: int = 512
LINE: int = 128
"""The distance between words that two processes write: processors fetch cache lines by pairs."""

LABELS: int = LINE
PAYLOADS: int = LABELS + SLOTS * LINE
"""The offsets of labels and payloads of a ring."""

_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Geometry:
    """The offsets of the parts of one ring.

    A ring begins with the word in which the receiver says how many slots it has emptied. Then come the labels of all slots, a header and
    a few words each, and then their payloads, one behind the other, so that several slots together take a larger part of a message.
    """

    world_size: int
    slot_bytes: int

    @classmethod
    def of(cls, world_size: int, segment_bytes: int) -> Geometry:
        """Return the rings that fit into ``segment_bytes`` for each channel."""
        ring = segment_bytes // max(1, world_size - 1) // PAGE * PAGE
        return cls(world_size, min((ring - PAYLOADS) // SLOTS // 64 * 64, MOST_SLOT_BYTES))

    @property
    def ring_bytes(self) -> int:
        """The size of a ring: whole pages."""
        return -(-(PAYLOADS + SLOTS * self.slot_bytes) // PAGE) * PAGE

    @property
    def channel_bytes(self) -> int:
        """The size of all rings of one channel."""
        return self.world_size * self.ring_bytes


def least_segment_bytes(world_size: int) -> int:
    """Return how small ``segment_bytes`` may be."""
    return max(1, world_size - 1) * Geometry(world_size, LEAST_SLOT_BYTES).ring_bytes


class Segment:
    """The memory of one rank, as this process sees it.

    Parameters
    ----------
    fd
        The file, which this object closes.
    heap_bytes
        The size of the rank's heap.
    """

    def __init__(self, fd: int, heap_bytes: int) -> None:
        self.fd: int = fd
        self._page: memoryview | None = None
        self._heap_bytes = -(-heap_bytes // PAGE) * PAGE
        _segments.add(self)

    @classmethod
    def create(cls, token: bytes, heap_bytes: int) -> Segment:
        """Make this rank's own memory.

        Raises
        ------
        OSError
            The system lacks the necessary calls.
        """
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            fd = os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)  # a memfd begins with 0777
            _make_large(fd)
            os.pwrite(fd, token, 0)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, heap_bytes)

    @classmethod
    def open(cls, pid: int, number: int, token: bytes, heap_bytes: int) -> Segment:
        """Open the memory of the process ``pid``, which is its file descriptor ``number``.

        Raises
        ------
        CannotOpenError
            It is not there, belongs to another user, or this process may not open it.
        """
        return cls(open_in_process(pid, number, _NAME, token, 0), heap_bytes)

    def page(self) -> memoryview:
        """Return the first page, which is mapped once."""
        if self._page is None:
            self._page = map_shared(self.fd, 0, PAGE)
        return self._page

    def heap(self) -> memoryview:
        """Map the heap.

        Raises
        ------
        MemoryError
            There is no room for it in the addresses of this process.
        OSError
            The file is closed, or the process has too many mappings.
        """
        try:
            return map_shared(self.fd, PAGE, self._heap_bytes)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise MemoryError(
                f"this process cannot map the memory of a rank: {error.strerror}; raise the limit (ulimit -v), or give each rank less: "
                "backends.shm.heap_bytes"
            ) from error

    def ring(self, geometry: Geometry, channel: int, peer: int) -> memoryview:
        """Map the messages that the owner sends to ``peer``."""
        return map_shared(self.fd, self._rings(geometry, channel) + peer * geometry.ring_bytes, geometry.ring_bytes)

    def drop_channel(self, geometry: Geometry, channel: int) -> None:
        """Give the memory of a channel back, even if it is still mapped."""
        with contextlib.suppress(OSError):
            punch_hole(self.fd, self._rings(geometry, channel), geometry.channel_bytes)

    def drop_heap(self, offset: int, nbytes: int) -> bool:
        """Give a part of the heap back, so that it is zeros; return whether that was done, which fails once the file is closed."""
        try:
            punch_hole(self.fd, PAGE + offset, nbytes)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the file; mapped memory stays."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _rings(self, geometry: Geometry, channel: int) -> int:
        offset = PAGE + self._heap_bytes + channel * geometry.channel_bytes
        if offset + geometry.channel_bytes > _FILE_BYTES:
            raise OverflowError(f"channel {channel} does not fit into the file of shared memory")
        return offset


def _make_large(fd: int) -> None:
    try:
        os.ftruncate(fd, _FILE_BYTES)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        raise OSError(
            error.errno,
            f"files of this process are limited to {limit} bytes, but its shared memory is a file that counts as {_FILE_BYTES} bytes, even if it "
            "holds less: remove the limit (ulimit -f unlimited)",
        ) from error
    with contextlib.suppress(OSError):  # a file of /dev/shm has no seals
        # A process that opens it to read messages must not shrink it: touching the mapped pages would then kill the others.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


assert HEADER_BYTES + 56 <= LINE


def _in_child() -> None:
    """Close the parent's files: a child that releases an array must not punch holes into its parent's memory."""
    for segment in list(_segments):
        segment.close()


os.register_at_fork(after_in_child=_in_child)

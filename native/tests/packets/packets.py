"""A backend of a stranger whose mailboxes have a form in C: ranks are threads, and each message is one packet of a Unix socket, or several."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oneaccord.api import (
    HEADER_BYTES,
    Backend,
    BackendConfig,
    BackendSpec,
    Bootstrap,
    Deadline,
    HeaderMismatch,
    LinkLost,
    Mailbox,
    Transfer,
    Transport,
    hookimpl,
)

Waiting = dict[tuple[int, int, int], socket.socket]
UNUSUAL, NOT_YET, YES = -1, 0, 1

made: list[PacketMailbox] = []
"""All mailboxes, for tests."""

library: ctypes.CDLL


def load(path: Path) -> None:
    """Load the library that was compiled from ``packets.c``."""
    global library  # noqa: PLW0603 - as a plugin has it that imports its library when it is itself imported
    library = ctypes.CDLL(str(path))
    library.packets_open.restype = ctypes.c_void_p
    library.packets_slot.restype = ctypes.c_void_p
    library.packets_other.restype = ctypes.c_void_p
    library.packets_open.argtypes = [ctypes.c_int, ctypes.c_double]
    library.packets_slot_bytes.restype = library.packets_taken.restype = library.packets_unasked.restype = ctypes.c_size_t
    library.packets_unasked.argtypes = [ctypes.c_void_p]
    library.packets_post.argtypes = library.packets_fetch.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    library.packets_close.argtypes = library.packets_other.argtypes = library.packets_taken.argtypes = [ctypes.c_void_p]
    library.packets_slot.argtypes = [ctypes.c_void_p, ctypes.c_int]


def capsule(address: int) -> object:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, b"oneaccord.mailbox.1", None)


class PacketMailbox(Mailbox):
    def __init__(self, sock: socket.socket, own: int, peer: int, native: Any, spin_s: float) -> None:
        self.sock, self.own, self.peer = sock, own, peer
        self.box: int = library.packets_open(sock.fileno(), spin_s)
        self.compiled = native
        if native is not None:
            self.c_mailbox = capsule(self.box)
        self.by_python = 0
        slots = [
            (ctypes.c_ubyte * library.packets_slot_bytes()).from_address(library.packets_slot(self.box, way)) for way in (0, 1)
        ]
        self.outgoing, self.incoming = ((memoryview(slot).cast("B"),) for slot in slots)
        self.next_out = self.next_in = 0
        made.append(self)

    def __del__(self) -> None:
        library.packets_close(self.box)

    def taken(self) -> int:
        """Return how many messages C has taken."""
        return int(library.packets_taken(self.box))

    def unasked(self) -> int:
        """Return how many messages C has posted without room for them."""
        return int(library.packets_unasked(self.box))

    def post(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        self.by_python += 1
        posting = Posting(self, bytes(header), nbytes)
        return None if posting.advance() else posting

    def fetch(self, header: bytes | bytearray, nbytes: int) -> Transfer | None:
        self.by_python += 1
        fetching = Fetching(self, bytes(header), nbytes)
        return None if fetching.advance() else fetching

    def lost(self) -> Exception:
        """Return what is wrong."""
        other = library.packets_other(self.box)
        if other:
            return HeaderMismatch(self.peer, ctypes.string_at(other, HEADER_BYTES))
        return LinkLost(self.peer, "the other end is closed")


class Moving(Transfer):
    def __init__(self, box: PacketMailbox, header: bytes, nbytes: int) -> None:
        self.box, self.header, self.nbytes = box, header, nbytes
        self.done, self.moved = False, 0

    def advance(self) -> bool:
        raise NotImplementedError


class Posting(Moving):
    """One packet, from the slot."""

    def advance(self) -> bool:
        if library.packets_post(self.box.box, self.header, self.nbytes) == YES:
            self.done, self.moved = True, self.nbytes
        elif self.box.sock.fileno() < 0:
            raise self.box.lost()
        return self.done


class Fetching(Moving):
    """One packet, into the slot."""

    def advance(self) -> bool:
        answer = library.packets_fetch(self.box.box, self.header, self.nbytes)
        if answer == UNUSUAL:
            raise self.box.lost()
        self.done = answer == YES
        self.moved = self.nbytes * self.done
        return self.done


class Sending(Moving):
    """A message from anywhere: one packet, or one with the header and others with parts of the payload."""

    def __init__(self, box: PacketMailbox, header: bytes, payload: memoryview) -> None:
        super().__init__(box, header, len(payload))
        most = len(box.outgoing[0])
        whole = len(payload) <= most
        self.parts = [header + bytes(payload)] if whole else [header]
        self.parts += [] if whole else [bytes(payload[at : at + most]) for at in range(0, len(payload), most)]

    def advance(self) -> bool:
        try:
            while self.parts:
                self.moved += self.box.sock.send(self.parts[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del self.parts[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise LinkLost(self.box.peer, str(error)) from error
        self.done = True
        return True


class Receiving(Moving):
    """The other end of one."""

    def __init__(self, box: PacketMailbox, header: bytes, payload: memoryview) -> None:
        super().__init__(box, header, len(payload))
        self.payload, self.begun, self.at = payload, False, 0

    def advance(self) -> bool:
        most = len(self.box.incoming[0])
        if not self.begun:
            whole = self.nbytes <= most
            first = Fetching(self.box, self.header, self.nbytes if whole else 0)
            if not first.advance():
                return False
            self.begun = True
            if whole:
                self.payload[:] = self.box.incoming[0][: self.nbytes]
                self.at = self.nbytes
        try:
            while self.at < self.nbytes:
                came = self.box.sock.recv_into(self.payload[self.at :], min(most, self.nbytes - self.at), socket.MSG_DONTWAIT)
                if not came:
                    raise LinkLost(self.box.peer, "the other end is closed")
                self.at = self.moved = self.at + came
        except BlockingIOError:
            return False
        self.done = True
        return True


class PacketTransport(Transport):
    def __init__(self, backend: PacketBackend, channel: int) -> None:
        self.backend, self.channel = backend, channel
        self.boxes: dict[int, PacketMailbox] = {}

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        for peer in set(peers) - set(self.boxes):
            sock = self.backend.end(self.channel, peer)
            self.boxes[peer] = PacketMailbox(sock, self.backend.rank, peer, self.backend.native, self.backend.spin_s)

    def mailbox(self, peer: int) -> Mailbox:
        return self.boxes[peer]

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        return self._begun(Sending(self.boxes[peer], header, payload))

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        return self._begun(Receiving(self.boxes[peer], header, payload))

    def _begun(self, moving: Moving) -> Moving:
        moving.advance()
        return moving

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        while not any([moving.done or moving.advance() for moving in transfers]):  # type: ignore[attr-defined]  # noqa: C419 - all go on
            if self.backend.aborted:
                raise LinkLost(transfers[0].box.peer, "this rank has left")  # type: ignore[attr-defined]
            if deadline.remaining() <= 0:
                raise TimeoutError("the deadline passed")
            time.sleep(1e-4)


class PacketBackend(Backend):
    def __init__(self, bootstrap: Bootstrap) -> None:
        assert bootstrap.shared is not None
        assert isinstance(bootstrap.config, Config)
        self.rank, self.native, self.spin_s = bootstrap.rank, bootstrap.native, bootstrap.config.spin_s
        with _lock:
            self.waiting: Waiting = bootstrap.shared.setdefault("packets", {})
        self.ends: list[socket.socket] = []
        self.aborted = False

    def end(self, channel: int, peer: int) -> socket.socket:
        """Return this rank's end of the pair of a channel: that which the peer has left, or one whose other end the peer will take."""
        low, high = sorted((self.rank, peer))
        with _lock:
            mine = self.waiting.pop((channel, low, high), None)
            if mine is None:
                mine, self.waiting[channel, low, high] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.ends.append(mine)
        return mine

    def open_transport(self, channel: int) -> Transport:
        return PacketTransport(self, channel)

    def abort(self) -> None:
        self.aborted = True
        for sock in self.ends:
            if sock.fileno() >= 0:
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with _lock:
            left = [self.waiting.pop(key) for key in list(self.waiting) if self.rank in key[1:]]
        for sock in (*self.ends, *left):
            sock.close()


_lock = threading.Lock()


class Config(BackendConfig):
    """The config."""

    spin_s: float = 2e-4
    """Seconds that C looks for a message before Python sleeps."""


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    return BackendSpec(name="packets", summary="packets of Unix sockets", factory=f"{__name__}:PacketBackend", config=Config)

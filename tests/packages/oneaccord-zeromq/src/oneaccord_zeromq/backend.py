"""The backend: each rank pushes frames to the others, and a thread sorts those that it pulls."""

import secrets
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import cast

import zmq

from oneaccord.api import Backend, Bootstrap, Deadline, HeaderMismatch, LinkLost, Transfer, Transport, read_cards, write_card

_KEY = struct.Struct("<32sII")  # the job's token, the channel, the rank that sends
_PIECE_BYTES = 1 << 20


class ZeromqTransfer(Transfer):
    """A message: its header comes in a frame, and the payload in none, one or many."""

    def __init__(self, peer: int, header: bytes, payload: memoryview) -> None:
        self.peer, self.header, self.payload = peer, header, payload
        self.begun, self.done, self.moved = False, False, 0


class ZeromqBackend(Backend):
    """The sockets of this rank; ``changed`` guards everything, as a socket of ZeroMQ is for one thread at a time."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._rank, self._ended, self.changed = bootstrap.rank, False, threading.Condition()
        self.arrived: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)  # frames, by channel and peer
        self._context = zmq.Context()
        try:
            host = f"[{bootstrap.host}]" if ":" in bootstrap.host else bootstrap.host
            self._pull = self._socket(zmq.PULL)
            port = self._pull.bind_to_random_port(f"tcp://{host}")
            self._pull.bind("inproc://end")
            self._end = self._socket(zmq.PUSH, "inproc://end")
            card = write_card((f"tcp://{host}:{port}", secrets.token_hex(16)))
            cards = read_cards(bootstrap.exchange("zeromq", card), tuple[str, str])
            self._token = cards[0][1].encode()  # who does not know it is no rank of this job
            self._push = {peer: self._socket(zmq.PUSH, address) for peer, (address, _) in enumerate(cards)}
        except BaseException:
            self._context.destroy(linger=0)
            raise
        threading.Thread(target=self._sort, name="oneaccord-zeromq", daemon=True).start()

    def _socket(self, kind: int, address: str = "") -> "zmq.Socket[bytes]":
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.IPV6, 1)
        sock.set_hwm(0)  # no limit: a send must not block
        if address:
            sock.connect(address)
        return sock

    def _sort(self) -> None:
        while not self._ended:
            frames = self._pull.recv_multipart()
            if len(frames) == 2 and len(frames[0]) == _KEY.size and frames[0].startswith(self._token):
                _, channel, peer = _KEY.unpack(frames[0])
                with self.changed:
                    self.arrived[channel, peer].append(frames[1])
                    self.changed.notify_all()
        with self.changed:
            self._context.destroy(linger=0)  # when a job ends well, every rank has had its last message

    def push(self, channel: int, peer: int, frame: bytes | memoryview) -> None:
        """Give ZeroMQ a copy of a frame, which its own thread sends."""
        with self.changed:
            if self._ended:
                raise LinkLost(peer, "the job ended")
            self._push[peer].send_multipart([_KEY.pack(self._token, channel, self._rank), frame], zmq.NOBLOCK)

    def wait_for(self, ready: Callable[[], bool], deadline: Deadline) -> None:
        """Sleep until something is ready; who lost a peer is woken by `abort`, as core's own connections see it."""
        with self.changed:
            came = self.changed.wait_for(lambda: self._ended or ready(), deadline.remaining())
            if self._ended:
                raise LinkLost(0, "the job ended")
            if not came:
                raise TimeoutError("the deadline passed")

    def open_transport(self, channel: int) -> Transport:
        """Return the transport of a channel."""
        return ZeromqTransport(self, channel)

    def abort(self) -> None:
        """Wake whoever waits, and the thread that sorts, which closes the sockets."""
        with self.changed:
            if not self._ended:
                self._ended = True
                self._end.send(b"")
                self.changed.notify_all()

    def close(self) -> None:
        """Close the sockets."""
        self.abort()


class ZeromqTransport(Transport):
    """The messages of one channel."""

    def __init__(self, backend: ZeromqBackend, channel: int) -> None:
        self._backend, self._channel = backend, channel

    def connect(self, peers: Sequence[int], deadline: Deadline) -> None:
        """Do nothing: ZeroMQ connects by itself, and keeps what is sent before."""

    def send(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Push the header and the pieces of the payload; they are copied, so that the message is done."""
        sending = ZeromqTransfer(peer, header, payload)
        self._backend.push(self._channel, peer, header)
        for start in range(0, len(payload), _PIECE_BYTES):
            self._backend.push(self._channel, peer, payload[start : start + _PIECE_BYTES])
        sending.moved, sending.done = len(payload), True
        return sending

    def recv(self, peer: int, header: bytes, payload: memoryview) -> Transfer:
        """Say what is expected; `wait` takes it."""
        return ZeromqTransfer(peer, header, payload)

    def wait(self, transfers: Sequence[Transfer], deadline: Deadline) -> None:
        """Take what has come until a message is whole."""
        messages = cast("Sequence[ZeromqTransfer]", transfers)
        self._backend.wait_for(lambda: any(self._take(message) for message in messages), deadline)

    def _take(self, message: ZeromqTransfer) -> bool:
        frames = self._backend.arrived[self._channel, message.peer]
        if frames and not message.begun:
            header = frames.popleft()
            if header != message.header:
                raise HeaderMismatch(message.peer, header)
            message.begun = True
        while frames and message.moved < len(message.payload):
            piece = frames.popleft()
            message.payload[message.moved : message.moved + len(piece)] = piece
            message.moved += len(piece)
        message.done = message.begun and message.moved == len(message.payload)
        return message.done

    def close(self) -> None:
        """Forget the channel; the sockets serve all channels."""
        with self._backend.changed:
            for key in [key for key in self._backend.arrived if key[0] == self._channel]:
                del self._backend.arrived[key]

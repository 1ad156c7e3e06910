"""The program of a worker on this host: it runs the calls that come over its standard input, a socket, until that ends.

The main thread runs them, one after another, so that Ctrl-C and signal handlers work there as in any program. A call that comes meanwhile, which is
to end the one under way, gets a thread of its own.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from oneaccord.common.threads import Thread
from oneaccord.engines.channel import LENGTH_BYTES
from oneaccord.net.forking import close_after_fork

__all__: list[str] = []

_Call = tuple[int, Callable[..., Any], tuple[Any, ...]]


class _Worker:
    """The calls of one worker.

    Parameters
    ----------
    sock
        The socket to the program that has started it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = close_after_fork(sock)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_busy = False

    def begin(self) -> None:
        """Take over what the program says of itself."""
        path, environ = self._receive() or ([], {})
        sys.path[:] = path
        os.environ.update(environ)
        self._send(pickle.dumps((-1, True, None)))

    def serve(self) -> None:
        """Run calls until the program closes its end."""
        Thread(target=self._listen, name="oneaccord-worker", daemon=True).start()
        while (call := self._calls.get()) is not None:
            answer = _answer(call)
            with self._lock:
                self._is_busy = False
            self._send(answer)

    def _listen(self) -> None:
        while (call := self._receive()) is not None:
            with self._lock:
                is_busy, self._is_busy = self._is_busy, True
            if is_busy:
                Thread(target=self._aside, args=(call,), daemon=True).start()
            else:
                self._calls.put(call)
        self._calls.put(None)

    def _aside(self, call: _Call) -> None:
        self._send(_answer(call))

    def _receive(self) -> Any:
        """Return what comes next; None at the end."""
        head = self._exactly(LENGTH_BYTES)
        body = None if head is None else self._exactly(int.from_bytes(head, "little"))
        return None if body is None else pickle.loads(body)  # noqa: S301 - from the program that has started this process

    def _exactly(self, count: int) -> bytearray | None:
        data, filled = bytearray(count), 0
        while filled < count:
            try:
                got = self._sock.recv_into(memoryview(data)[filled:])
            except OSError:
                return None
            if not got:
                return None
            filled += got
        return data

    def _send(self, message: bytes) -> None:
        try:
            with self._lock:
                self._sock.sendall(len(message).to_bytes(LENGTH_BYTES, "little"))
                self._sock.sendall(message)
        except OSError:  # the program is gone, and this process ends soon
            pass


def _answer(call: _Call) -> bytes:
    number, function, args = call
    try:
        answer: tuple[int, bool, Any] = (number, True, function(*args))
    except Exception as error:  # noqa: BLE001 - the program raises it
        answer = (number, False, error)
    return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)


def _main() -> None:
    sock = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    worker = _Worker(sock)
    try:
        worker.begin()
        worker.serve()
    except KeyboardInterrupt:  # between two calls: it is to end
        sys.exit(130)


if __name__ == "__main__":
    _main()

"""One background thread per process that serves the control connections and takes incoming ones.

Nothing that it runs may block: a callback reads or writes without waiting and returns. The data of collectives never pass
through it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from oneaccord.common.threads import Thread
from oneaccord.net.forking import close_after_fork, forget_after_fork

__all__ = ["Loop"]

_log = logging.getLogger("oneaccord.network")

_SPARE_BYTES = 1 << 18
"""Spare memory for the end of a loop that has no more: `malloc` gives it back to the system when it is freed."""


class Loop:
    """A selector loop in a daemon thread; every callback runs in that thread.

    If a callback raises, or there is no memory to continue, the loop ends, and with it every connection that it serves: so the other sides learn of it at once.

    It owns the sockets given to `own`, and closes the remaining ones when it ends: by then no other code can.

    Parameters
    ----------
    name
        The thread's name.
    on_crash
        Called then with the exception, which must not become a silent hang.
    """

    def __init__(self, name: str, on_crash: Callable[[Exception], None]) -> None:
        self._on_crash = on_crash
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        close_after_fork(self._wake_reader)
        close_after_fork(self._wake_writer)
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain)
        self._calls: deque[Callable[[], None]] = deque()
        self._owned: set[socket.socket] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._running = True
        self._spare = bytes(_SPARE_BYTES)
        self._lock = threading.Lock()
        forget_after_fork(self)
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the loop's thread, soon; from any thread. Ignored once the loop has stopped."""
        with self._lock:
            if not self._running:
                return
            self._calls.append(function)
            with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
                self._wake_writer.send(b"\x00")

    def own(self, sock: socket.socket) -> bool:
        """Own ``sock`` from now on; from any thread. If the loop has ended, nothing would serve it: it is closed, and False returned."""
        with self._lock:
            if self._running:
                self._owned.add(sock)
                return True
        sock.close()
        return False

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.current_thread() is self._thread

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Run ``function`` in the loop's thread after a delay; from the loop's thread."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._count), function))

    def watch(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Call ``callback`` with the selector's event mask whenever ``sock`` is ready; from the loop's thread."""
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)

    def forget(self, sock: socket.socket) -> None:
        """Stop watching ``sock``; from the loop's thread."""
        if sock.fileno() >= 0 and sock in self._selector.get_map():
            self._selector.unregister(sock)

    def let_go(self, sock: socket.socket) -> None:
        """Stop watching ``sock`` and own it no more: the caller owns it; from the loop's thread."""
        self.forget(sock)
        self._owned.discard(sock)

    def give_back(self, sock: socket.socket) -> None:
        """Stop watching ``sock``, and close it; from the loop's thread."""
        self.let_go(sock)
        sock.close()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the loop and wait for its thread; from any thread, twice is fine."""
        with self._lock:
            if not self._running:
                return
        self.call(self._finish)
        if not self.runs_here:
            self._thread.join(timeout_s)

    def after_fork(self) -> None:
        """Know in a forked child that there is no such thread there."""
        self._lock = threading.Lock()
        self._running = False

    def _finish(self) -> None:
        with self._lock:
            self._running = False

    def _drain(self, _: int) -> None:
        try:
            while self._wake_reader.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - it must reach the user's thread instead of ending this one
            self._spare = b""
            with self._lock:
                self._running = False
            self._hang_up()
            self._on_crash(error)
            _log.error("oneaccord: the background thread failed", exc_info=error)
        finally:
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()
            # A connection may outlive its owner for a moment, while it is emptied, and the request to close it may come too late.
            while self._owned:
                with contextlib.suppress(OSError):
                    self._owned.pop().close()

    def _serve(self) -> None:
        while self._running:
            timeout = min(max(0.0, self._timers[0][0] - time.monotonic()), 3600.0) if self._timers else None
            for key, mask in self._selector.select(timeout):
                if key.fd in self._selector.get_map():  # an earlier callback may have closed it
                    key.data(mask)
            while self._calls:
                self._calls.popleft()()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()

    def _hang_up(self) -> None:
        for key in self._selector.get_map().values():
            with contextlib.suppress(OSError):
                key.fileobj.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr] # all are sockets

"""One worker of UCX, which moves all messages of a rank, and the threads that wait for it.

All calls of UCX are made under one lock. A thread that waits lets UCX work. First it asks again and again, yielding the processor. Then it sleeps until
UCX's file descriptor says that there is something to do, or until its own bell rings: another thread rings it, which has let UCX
work meanwhile and so may have moved its message.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

from oneaccord.api import BackendUnavailableError, ConfigError, Deadline, LibraryMessage, LibraryUse, LinkLost, Thread
from oneaccord_ucx.config import UcxConfig
from oneaccord_ucx.library import (
    BUSY,
    ERROR_HANDLER,
    IN_PROGRESS,
    OLDEST,
    EndpointParams,
    Params,
    RequestParams,
    Ucp,
    WorkerParams,
    status_of,
)

__all__ = ["Worker"]

_TAGS, _WAKEUP = 1 << 0, 1 << 4
_ONE_THREAD_AT_A_TIME = 1
_TELL_LOST_PEERS = 1
_IGNORE_LEAKS = 1
_LONG_PAUSE_S, _SHORT_PAUSE_S = 0.02, 0.0005
_BY_FORCE = byref(RequestParams(mask=1 << 4, flags=1))
_LAST_WORDS_S = 0.1
"""How long UCX may take to let go of what was on its way."""
_LONGEST_SLEEP_S = 0.5
"""UCX has timers of its own, by which it asks whether peers live."""


_abandoned: list[Worker] = []
"""Workers that have ended and still use memory, such as that of a message from a peer that was killed: it is kept with them."""


class _Bell:
    """What wakes one thread: UCX, or another thread."""

    def __init__(self, event_fd: int) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._poll.register(event_fd, select.POLLIN)

    def __del__(self) -> None:
        os.close(self._fd)

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float) -> None:
        if any(fd == self._fd for fd, _ in self._poll.poll(timeout_s * 1000)):
            os.eventfd_read(self._fd)


class Worker(LibraryUse):
    """UCX for one rank.

    Parameters
    ----------
    ucp
        The library.
    config
        The settings.
    devices
        The network devices that UCX may use.
    rank, size
        The identity of this rank.

    Attributes
    ----------
    address
        What other ranks connect to.
    lock
        Held for each call of UCX.

    Raises
    ------
    BackendUnavailableError
        UCX has none of the transports or devices.
    ConfigError
        A variable has a value that UCX does not take.
    """

    def __init__(self, ucp: Ucp, config: UcxConfig, devices: Sequence[str], rank: int, size: int) -> None:
        super().__init__("UCX", rank, size, config.spin_us * 1e-6)
        self.ucp: Ucp = ucp
        self.lock: threading.Lock = threading.Lock()
        self.lost: dict[int, str] = {}
        self._config = config
        self._endpoints: dict[int, int] = {}
        self._bells: list[_Bell] = []
        self._sleepers: set[_Bell] = set()
        self._on_error = ERROR_HANDLER(self._peer_failed)
        self.request: Any = byref(RequestParams())
        self._context, self._worker = c_void_p(), c_void_p()
        self._begin(devices)
        self.handle: int | None = self._worker.value
        self.address: bytes = self._read_address()
        event_fd = c_int()
        self._must(ucp.worker_get_efd(self.handle, byref(event_fd)), "create a file descriptor for events")
        self._event_fd = event_fd.value
        self._progress = ucp.worker_progress
        self._closing = threading.Event()
        self._background = Thread(target=self._work_now_and_then, name="oneaccord-ucx", daemon=True)
        self._background.start()

    # ------------------------------------------------------------------ begin and end

    def _begin(self, devices: Sequence[str]) -> None:
        config, ucp = c_void_p(), self.ucp
        self._must(ucp.config_read(None, None, byref(config)), "read its settings")
        try:
            named = {"TLS": ",".join(self._config.used), "NET_DEVICES": ",".join(devices)}
            for name, value in (named | self._config.variables).items():
                self._set(config, name, value)
            params = Params(field_mask=1, features=_TAGS | _WAKEUP)
            self._must(ucp.init_version(*OLDEST, byref(params), config, byref(self._context)), "begin")
        finally:
            ucp.config_release(config)
        worker_params = WorkerParams(field_mask=1 << 0 | 1 << 5, thread_mode=_ONE_THREAD_AT_A_TIME, flags=_IGNORE_LEAKS)
        try:
            self._must(ucp.worker_create(self._context, byref(worker_params), byref(self._worker)), "make a worker")
        except BackendUnavailableError:
            ucp.cleanup(self._context)
            raise

    def _set(self, config: c_void_p, name: str, value: str) -> None:
        if self.ucp.set_global(name, value):
            return
        status = self.ucp.config_modify(config, name.encode(), value.encode())
        if status:
            raise ConfigError(
                f"UCX does not accept {value!r} for UCX_{name}: {self.ucp.why(status)}",
                key=f"backends.ucx.variables.{name}",
                value=value,
            )

    def _must(self, status: int, what: str) -> None:
        if status:
            raise BackendUnavailableError(
                f"UCX {self.ucp.words} cannot {what}: {self.ucp.why(status)}; backends.ucx.transports is "
                f"{list(self._config.transports)}, and `ucx_info -d` lists those available on this host"
            )

    def _read_address(self) -> bytes:
        address, length = c_void_p(), c_size_t()
        self._must(self.ucp.worker_get_address(self.handle, byref(address), byref(length)), "tell its address")
        try:
            return ctypes.string_at(address.value or 0, length.value)
        finally:
            self.ucp.worker_release_address(self.handle, address)

    def end(self, why: str) -> None:
        """End all waits; the first reason stays. From any thread, and without a lock."""
        super().end(why)
        self._ring()

    def close(self) -> None:
        """Give UCX's memory and connections back; threads that wait get `LinkLost`."""
        self.end("the backend was closed")
        with self.lock:
            if self.handle is None:
                return
            if self._is_quiet():
                self.ucp.worker_destroy(self._worker)
                self.ucp.cleanup(self._context)
            else:
                _abandoned.append(self)
            self.handle = None
            self._bells.clear()
        self._closing.set()
        self._background.join()

    def _is_quiet(self) -> bool:
        """Break the connections off, and return whether UCX has let go of all memory: a worker that has not must not be destroyed."""
        closing: list[int] = []
        if self._config.notices_lost_peers:  # without that, UCX closes no endpoint by force
            pointers = [self.ucp.ep_close_nbx(endpoint, _BY_FORCE) for endpoint in self._endpoints.values()]
            closing = [pointer for pointer in pointers if status_of(pointer) == IN_PROGRESS]
        until = time.monotonic() + _LAST_WORDS_S
        while True:
            self._progress(self.handle)
            for message in list(self.held.values()):
                if self._give_up(message):
                    self.release(message)
            closing = [request for request in closing if self.test(request) == IN_PROGRESS]
            if not self.held and not closing:
                return True
            if time.monotonic() > until:
                return False

    # ------------------------------------------------------------------ peers

    def connect(self, peer: int, address: bytes) -> None:
        """Make an endpoint to ``peer``, once; UCX connects in the background.

        Raises
        ------
        LinkLost
            UCX knows no way there.
        """
        with self.lock:
            self.check(peer)
            if peer in self._endpoints:
                return
            params = EndpointParams(field_mask=0b0001, address=address)
            if self._config.notices_lost_peers:
                params.field_mask = 0b1111
                params.error_mode, params.error_handler, params.user_data = _TELL_LOST_PEERS, self._on_error, peer
            endpoint = c_void_p()
            status = self.ucp.ep_create(self.handle, byref(params), byref(endpoint))
            if status:
                raise LinkLost(peer, f"UCX cannot connect to it: {self.ucp.why(status)}")
            assert endpoint.value is not None
            self._endpoints[peer] = endpoint.value

    def _peer_failed(self, peer: int | None, _endpoint: int, status: int) -> None:
        self.lost.setdefault(peer or 0, self.ucp.why(status))

    def endpoint(self, peer: int) -> int:
        """Return the endpoint to ``peer``, to which `connect` was called."""
        return self._endpoints[peer]

    def check(self, peer: int | None = None) -> None:
        """Raise `LinkLost` if ``peer`` is lost, or the backend has ended."""
        super().check(peer)
        if peer in self.lost:
            raise LinkLost(peer, self.lost[peer])

    # ------------------------------------------------------------------ requests, under the lock

    def began(self, pointer: int | None, peer: int) -> int | None:
        """Return the request of a function that starts something, None if all is done; raises as `must_be_well`."""
        status = status_of(pointer)
        if status == IN_PROGRESS:
            return pointer
        self.must_be_well(status, peer)
        return None

    def test(self, request: int) -> int:
        """Return the status of a request, which is gone once it is done."""
        status: int = self.ucp.request_check_status(request)
        if status != IN_PROGRESS:
            self.ucp.request_free(request)
        return status

    def must_be_well(self, status: int, peer: int) -> None:
        """Raise `LinkLost` if a status is an error."""
        if status:
            self.check(peer)  # with the reason why the connection broke
            raise LinkLost(peer, f"UCX: {self.ucp.why(status)}")

    def _give_up(self, message: LibraryMessage) -> bool:
        """Ask UCX to let go of a message; return whether it has."""
        if message.is_uncertain:
            return False
        message.requests[:] = [request for request in message.requests if self.test(request) == IN_PROGRESS]
        for request in message.requests:
            self.ucp.request_cancel(self.handle, request)
        return not message.requests

    # ------------------------------------------------------------------ waiting

    def wait(self, transfers: Sequence[LibraryMessage], deadline: Deadline) -> None:
        """Let UCX work until one of the transfers is done.

        Raises
        ------
        HeaderMismatch, LinkLost
            As they say.
        TimeoutError
            The deadline passed.
        """
        awake_until = time.monotonic() + self.spin_s
        while True:
            bell = None
            with self.lock:
                done, moved = self._turn(transfers)
                if done:
                    return
                if deadline.passed():
                    raise TimeoutError("the deadline passed")
                now = time.monotonic()
                if moved:
                    awake_until = now + self.spin_s
                elif now >= awake_until:
                    bell = self._lie_down()
            if bell is not None:
                self._sleep(bell, deadline)
            elif not moved:
                os.sched_yield()

    def _turn(self, transfers: Sequence[LibraryMessage]) -> tuple[bool, bool]:
        """Let UCX work once; return whether one of the transfers is done, and whether anything moved."""
        for transfer in transfers:
            if self.ended:
                raise LinkLost(transfer.peer, self.ended)
        moved = bool(self._progress(self.handle))
        if moved and self._sleepers:
            self._ring()
        # All of them are to go on, also where the first one is done.
        done = bool(sum(transfer.advance() for transfer in transfers))
        if not done and self.lost:
            for transfer in transfers:
                self.check(transfer.peer)
        return done, moved

    def _work_now_and_then(self) -> None:
        """Let UCX work while no thread waits: a send that is done may still have its last bytes in UCX, and peers may want to connect."""
        pause_s = _LONG_PAUSE_S
        while not self._closing.wait(pause_s) and not self.ended:
            pause_s = _LONG_PAUSE_S
            if not self.lock.acquire(blocking=False):
                continue  # somebody else does
            try:
                if self.handle is not None and self._progress(self.handle):
                    pause_s = _SHORT_PAUSE_S  # to connect takes several steps
                    if self._sleepers:
                        self._ring()
            finally:
                self.lock.release()

    def _lie_down(self) -> _Bell | None:
        """Return what will wake this thread, None if there is something to do."""
        if self.ucp.worker_arm(self.handle) == BUSY:
            return None
        bell = self._bells.pop() if self._bells else _Bell(self._event_fd)
        self._sleepers.add(bell)
        return bell

    def _sleep(self, bell: _Bell, deadline: Deadline) -> None:
        try:
            if not self.ended:  # `end` takes no lock: it may have rung before this thread lay down
                bell.wait(min(deadline.remaining(), _LONGEST_SLEEP_S))
        finally:
            with self.lock:
                self._sleepers.discard(bell)
                self._bells.append(bell)

    def _ring(self) -> None:
        for bell in list(self._sleepers):
            bell.ring()

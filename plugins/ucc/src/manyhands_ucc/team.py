"""A team of UCC: all ranks of a job, and a wait for its collectives that ends.

What UCC does not do is done here. It has no deadline that holds: with one of its own, a collective ended as if all were well, with wrong
numbers. It does not notice that a rank died. A request that runs cannot be cancelled, so that its memory is kept for as long as the process lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any

from manyhands.api import BackendUnavailableError, Bootstrap, CommError, Deadline, LinkLost, RendezvousError, Thread
from manyhands_ucc.agreement import StallCallback
from manyhands_ucc.library import IN_PROGRESS, NO_MESSAGE, OK, Arguments, ContextParams, LibParams, Meeting, TeamParams, Ucc

__all__ = ["Team"]

_CARD_BYTES = 32 << 10
_FIRST_STALL_S, _NEXT_STALL_S = 0.4, 0.5
_PAUSE_S = 200e-6
_SLOW_BYTES_PER_S = 250e6
"""A collective that is slower than that waits for somebody."""
_VERDICT_S = 1.0
"""How long an error of UCC waits for the job to learn what caused it, such as a rank that died."""
_LAST_S = 1.0
"""How long the end of UCC is waited for."""
_abandoned: list[object] = []
"""Teams that UCC may still use, and the memory of the collectives that they did not end."""
_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


@contextlib.contextmanager
def _variables(host: str) -> Iterator[None]:
    """Set variables that the user has not set; UCC has no functions for these."""
    wanted = {
        # It writes to standard output, also where all is well: what it does when it ends may fail.
        "UCC_TL_UCP_LOG_LEVEL": "fatal",
        # Where a process dies while UCX reads its memory, UCX aborts the reader as well.
        "UCC_UCX_TLS": "^cma,knem,xpmem",
    }
    if ip_address(host.partition("%")[0]).is_loopback:
        wanted["UCC_UCX_NET_DEVICES"] = "lo"
    ours = {name: value for name, value in wanted.items() if not {name, name.removeprefix("UCC_")} & set(os.environ)}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


class Team:
    """A team of all ranks.

    Parameters
    ----------
    ucc
        The library.
    bootstrap
        Who this rank is, and how it tells the others something.
    spin_s
        How long to give way to others between two looks before sleeping between them.

    Raises
    ------
    BackendUnavailableError
        UCC refuses something.
    RendezvousError
        UCC did not connect the ranks in time.
    DeadlineError, CommError
        Not all ranks came.
    """

    def __init__(self, ucc: Ucc, bootstrap: Bootstrap, spin_s: float) -> None:
        self._ucc = ucc
        self._rank, self._size, self._spin_s = bootstrap.rank, bootstrap.world_size, spin_s
        self._changing = threading.Lock()
        self._ended = ""
        self._held: object = None
        self._lib, self._context, self._team = (ctypes.c_void_p() for _ in range(3))
        self._meet(bootstrap)

    def _meet(self, bootstrap: Bootstrap) -> None:
        ucc, byref = self._ucc, ctypes.byref
        failures: list[BaseException] = []
        meetings = 0

        def gather(source: int, target: int, size: int, _: int, request: Any) -> int:
            """Give all ranks what each has; called by UCC, which knows no exceptions."""
            nonlocal meetings
            if self._ended:  # when it ends, UCC would wait for all ranks
                return NO_MESSAGE
            try:
                meetings += 1
                mine = ctypes.string_at(source, size)
                starts = range(0, size, _CARD_BYTES)
                parts = [bootstrap.exchange(f"ucc {meetings} {start}", mine[start : start + _CARD_BYTES]) for start in starts]
                whole = b"".join(part[rank] for rank in range(self._size) for part in parts)
                if len(whole) != size * self._size:
                    raise BackendUnavailableError("UCC's ranks tell each other unlike things")
                ctypes.memmove(target, whole, len(whole))
                request[0] = None
            except BaseException as error:  # noqa: BLE001 - it is raised where UCC has returned
                failures.append(error)
                return NO_MESSAGE
            return OK

        def must(status: int, what: str) -> None:
            if failures:
                raise failures[0]
            if status != OK:
                raise BackendUnavailableError(
                    f"UCC {ucc.words} cannot {what}: {ucc.why(status)}; UCC_TL_UCP_LOG_LEVEL=info says more"
                )

        ask = Meeting.Ask(lambda _: OK)
        meeting = Meeting(Meeting.Gather(gather), ask, ask, None, self._size, self._rank)
        self._meeting = meeting  # ctypes keeps no reference to what C calls
        try:
            with _variables(bootstrap.host):
                config = ctypes.c_void_p()
                must(ucc.lib_config_read(None, None, byref(config)), "read its configuration")
                about_lib = LibParams(mask=1 << 0, thread_mode=LibParams.MULTIPLE)
                must(ucc.init_version(*ucc.version[:2], byref(about_lib), config, byref(self._lib)), "start")
                ucc.lib_config_release(config)
                must(ucc.context_config_read(self._lib, None, byref(config)), "read the configuration of a context")
                # Without the meeting, an all_gather ended well where a rank had died.
                about_context = ContextParams(mask=1 << 2, oob=meeting)
                must(ucc.context_create(self._lib, byref(about_context), config, byref(self._context)), "make a context")
                ucc.context_config_release(config)
            about_team = TeamParams(mask=1 << 2 | 1 << 4 | 1 << 7, ep=self._rank, oob=meeting)
            must(ucc.team_create_post(byref(self._context), 1, byref(about_team), byref(self._team)), "make a team")
            while (status := ucc.team_create_test(self._team)) == IN_PROGRESS:
                ucc.context_progress(self._context)
                if bootstrap.deadline.at <= time.monotonic():
                    raise RendezvousError(
                        "UCC did not connect the ranks in time: can they reach each other? See UCX_NET_DEVICES"
                    )
                _yield()
            must(status, "make a team")
        except BaseException:
            _abandoned.append(self)
            raise

    # Collectives

    def check(self) -> None:
        """Raise `LinkLost` where nothing can be performed any more."""
        if self._ended:
            raise LinkLost((self._rank + 1) % self._size, self._ended)

    def progress(self) -> None:
        """Let UCC move what others still wait for; raises as `check`."""
        with self._changing:
            self.check()
            self._ucc.context_progress(self._context)

    def perform(self, arguments: Arguments, nbytes: int, deadline: Deadline, on_stall: StallCallback, memory: object) -> None:
        """Perform a collective.

        Parameters
        ----------
        arguments
            What to do.
        nbytes
            How much it moves: for how long it is worth to stay awake.
        deadline, on_stall
            As for a `NativeCollective`.
        memory
            What holds the memory, which is kept where UCC may still use it after a failure.

        Raises
        ------
        LinkLost
            The backend ended.
        CommError
            UCC refused it, or failed; nothing can be performed any more.
        TimeoutError
            The deadline passed; likewise.
        """
        ucc, request = self._ucc, ctypes.c_void_p()
        with self._changing:
            self.check()
            self._held = (arguments, memory)
            statuses = [ucc.collective_init(ctypes.byref(arguments), ctypes.byref(request), self._team)]
            if statuses[0] == OK:
                statuses.append(ucc.collective_post(request))
        self._must(statuses[-1])
        self._wait(ctypes.cast(request, ctypes.POINTER(ctypes.c_int32)), nbytes, deadline, on_stall)
        with self._changing:
            self.check()
            ucc.collective_finalize(request)
            self._held = None

    def _wait(self, status: Any, nbytes: int, deadline: Deadline, on_stall: StallCallback) -> None:
        began = time.monotonic()
        awake_until = began + self._spin_s + nbytes / _SLOW_BYTES_PER_S
        stalled_at = began + _FIRST_STALL_S
        while True:
            self.progress()  # which looks first whether the request is still to be touched
            found = status[0]
            if found != IN_PROGRESS:
                return self._must(found)
            now = time.monotonic()
            if now >= deadline.at:
                raise TimeoutError("UCC has not ended")
            if now >= stalled_at:
                on_stall([])  # UCC does not tell for whom it waits
                stalled_at = now + _NEXT_STALL_S
            if now < awake_until:
                _yield()
            else:
                time.sleep(_PAUSE_S)

    def _must(self, status: int) -> None:
        """Raise what a status says, once the job has had the time to learn of a death, which is often all that is wrong."""
        if status == OK:
            return
        until = time.monotonic() + _VERDICT_S
        while time.monotonic() < until:
            self.check()
            time.sleep(_PAUSE_S)
        raise CommError(f"UCC failed: {self._ucc.why(status)}", rank=self._rank)

    # The end

    def abort(self, reason: str) -> None:
        """End every wait."""
        self._ended = self._ended or reason

    def close(self) -> None:
        """Give everything back, but nothing where a collective has not ended, since UCC may still use it. Never blocks."""
        self.abort("the backend was closed")
        with self._changing:
            team, self._team = self._team, ctypes.c_void_p()
        if not team.value:
            return
        _abandoned.append(self)
        if self._held is not None:
            return

        def give_back() -> None:
            self._ucc.team_destroy(team)
            self._ucc.context_destroy(self._context)
            self._ucc.finalize(self._lib)
            _abandoned.remove(self)

        # UCC first waits, without a limit, until all that was sent has left.
        thread = Thread(target=give_back, name="manyhands-ucc", daemon=True)
        thread.start()
        thread.join(_LAST_S)

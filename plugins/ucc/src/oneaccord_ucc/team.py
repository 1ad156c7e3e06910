"""A team of UCC: all ranks of a job, and a wait for its collectives that ends.

What UCC does not do is done here. It has no deadline that holds: with one of its own, a collective ended as if all were well, with wrong
numbers. It does not notice that a rank died. A request that runs cannot be cancelled, so that its memory is kept for as long as the process lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any, ClassVar

from oneaccord.api import (
    BackendUnavailableError,
    Bootstrap,
    Deadline,
    LibraryUse,
    RendezvousError,
    StallCallback,
    Thread,
    wait_until,
)
from oneaccord_ucc.library import IN_PROGRESS, OK, Arguments, ContextParams, LibParams, TeamParams, Ucc
from oneaccord_ucc.meetings import Meetings

__all__ = ["Team"]

_LAST_S = 1.0
"""How long the end of UCC is waited for."""
_abandoned: list[object] = []
"""Teams that UCC may still use, and the memory of the collectives that they did not end."""


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


class Team(LibraryUse):
    """A team of all ranks.

    Parameters
    ----------
    ucc
        The library.
    bootstrap
        The identity of this rank, and how it sends to the others.
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

    pauses_s: ClassVar[tuple[float, float]] = (200e-6, 200e-6)

    def __init__(self, ucc: Ucc, bootstrap: Bootstrap, spin_s: float) -> None:
        super().__init__("UCC", bootstrap.rank, bootstrap.world_size, spin_s)
        self._ucc = ucc
        self._changing = threading.Lock()
        self._lib, self._context, self._team = (ctypes.c_void_p() for _ in range(3))
        self._meet(bootstrap)

    def _meet(self, bootstrap: Bootstrap) -> None:
        ucc, byref = self._ucc, ctypes.byref
        meetings = self._meetings = Meetings(bootstrap, lambda: bool(self.ended))

        def must(status: int, what: str) -> None:
            if meetings.failure is not None:
                raise meetings.failure
            if status != OK:
                raise BackendUnavailableError(
                    f"UCC {ucc.words} cannot {what}: {ucc.why(status)}; UCC_TL_UCP_LOG_LEVEL=info says more"
                )

        try:
            with _variables(bootstrap.host):
                config = ctypes.c_void_p()
                must(ucc.lib_config_read(None, None, byref(config)), "read its configuration")
                about_lib = LibParams(mask=1 << 0, thread_mode=LibParams.MULTIPLE)
                must(ucc.init_version(*ucc.version[:2], byref(about_lib), config, byref(self._lib)), "start")
                ucc.lib_config_release(config)
                must(ucc.context_config_read(self._lib, None, byref(config)), "read the configuration of a context")
                # Without the meeting, an all_gather ended well where a rank had died.
                about_context = ContextParams(mask=1 << 2, oob=meetings.callbacks)
                must(ucc.context_create(self._lib, byref(about_context), config, byref(self._context)), "make a context")
                ucc.context_config_release(config)
            about_team = TeamParams(mask=1 << 2 | 1 << 4 | 1 << 7, ep=self.rank, oob=meetings.callbacks)
            must(ucc.team_create_post(byref(self._context), 1, byref(about_team), byref(self._team)), "make a team")
            must(self._made(bootstrap.deadline), "make a team")
        except BaseException:
            _abandoned.append(self)
            raise

    def _made(self, deadline: Deadline) -> int:
        """Wait until UCC has connected the ranks, and return the status of that."""
        status = IN_PROGRESS

        def is_made() -> bool:
            nonlocal status
            status = int(self._ucc.team_create_test(self._team))
            return status != IN_PROGRESS

        try:
            wait_until(is_made, lambda: self._ucc.context_progress(self._context), deadline, math.inf)
        except TimeoutError:
            raise RendezvousError(
                "UCC did not connect the ranks in time: can they reach each other? See UCX_NET_DEVICES"
            ) from None
        return status

    # Collectives

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
        on_its_way = (arguments, memory)
        with self._changing:
            self.check()
            self.hold(on_its_way)
            status = ucc.collective_init(ctypes.byref(arguments), ctypes.byref(request), self._team)
            if status == OK:
                status = ucc.collective_post(request)
        self._must(status)
        self._wait(ctypes.cast(request, ctypes.POINTER(ctypes.c_int32)), nbytes, deadline, on_stall)
        with self._changing:
            self.check()
            ucc.collective_finalize(request)
            self.release(on_its_way)

    def _wait(self, status: Any, nbytes: int, deadline: Deadline, on_stall: StallCallback) -> None:
        def is_done() -> bool:
            self.progress()  # which looks first whether the request is still to be touched
            return bool(status[0] != IN_PROGRESS)

        # UCC does not tell for whom it waits.
        self.wait_for(is_done, nbytes, deadline, lambda _: on_stall([]))
        self._must(status[0])

    def _must(self, status: int) -> None:
        """Raise what a status says."""
        if status != OK:
            raise self.failure(self._ucc.why(status))

    # The end

    def close(self) -> None:
        """Give everything back, but nothing if a collective has not ended, since UCC may still use it. Never blocks."""
        self.end("the backend was closed")
        with self._changing:
            team, self._team = self._team, ctypes.c_void_p()
        if not team.value:
            return
        _abandoned.append(self)
        if self.held:
            return

        def give_back() -> None:
            self._ucc.team_destroy(team)
            self._ucc.context_destroy(self._context)
            self._ucc.finalize(self._lib)
            _abandoned.remove(self)

        # UCC first waits, without a limit, until all that was sent has left.
        thread = Thread(target=give_back, name="oneaccord-ucc", daemon=True)
        thread.start()
        thread.join(_LAST_S)

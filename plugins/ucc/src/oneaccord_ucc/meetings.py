"""How UCC's ranks tell each other something before UCC connects them: through the exchange of oneaccord, which is authenticated."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from oneaccord.api import BackendUnavailableError, Bootstrap
from oneaccord_ucc.library import NO_MESSAGE, OK, Meeting

__all__ = ["Meetings"]

_CARD_BYTES = 32 << 10


class Meetings:
    """The callbacks for UCC.

    Parameters
    ----------
    bootstrap
        How this rank tells the others something.
    are_over
        Whether no rank may meet any more: when it ends, UCC would wait for all ranks.

    Attributes
    ----------
    callbacks
        What UCC is given. It must live as long as UCC: ctypes keeps no reference to what C calls.
    failure
        What went wrong in a callback, to be raised where UCC has returned.
    """

    def __init__(self, bootstrap: Bootstrap, are_over: Callable[[], bool]) -> None:
        self._bootstrap = bootstrap
        self._are_over = are_over
        self._count = 0
        self.failure: BaseException | None = None
        ask = Meeting.Ask(lambda _: OK)
        self.callbacks: Meeting = Meeting(Meeting.Gather(self._gather), ask, ask, None, bootstrap.world_size, bootstrap.rank)

    def _gather(self, source: int, target: int, size: int, _: int, request: Any) -> int:
        """Give all ranks what each has; called by UCC, which knows no exceptions."""
        if self._are_over():
            return NO_MESSAGE
        try:
            self._count += 1
            mine, ranks = ctypes.string_at(source, size), range(self._bootstrap.world_size)
            starts = range(0, size, _CARD_BYTES)
            parts = [
                self._bootstrap.exchange(f"ucc {self._count} {start}", mine[start : start + _CARD_BYTES]) for start in starts
            ]
            whole = b"".join(part[rank] for rank in ranks for part in parts)
            if len(whole) != size * len(ranks):
                raise BackendUnavailableError(
                    "UCC's ranks exchanged data of different sizes: use the same version and settings of UCC on all ranks"
                )
            ctypes.memmove(target, whole, len(whole))
            request[0] = None
        except BaseException as error:  # noqa: BLE001 - it is raised where UCC has returned
            self.failure = self.failure or error
            return NO_MESSAGE
        return OK

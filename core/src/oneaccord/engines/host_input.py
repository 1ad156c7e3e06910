"""The standard input of the driver, on its way to ranks of other hosts."""

from __future__ import annotations

import base64
import os
import selectors
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from oneaccord.engines.outbox import Outbox
from oneaccord.local.stdin import ALL, StandardInput

__all__ = ["HostInput"]

_READ_BYTES: Final = 1 << 16
_MOST_UNTAKEN_BYTES: Final = 1 << 18
"""How much is sent to a host in advance: its ranks may never read it."""


@dataclass(slots=True, eq=False)
class _Feed:
    """What a host gets."""

    outbox: Outbox
    source: int
    """The pipe from which it comes."""
    is_read: bool = False
    untaken: int = 0
    """How many bytes are on their way to its ranks."""


class HostInput:
    """A copy of the standard input for each host that has a reader.

    Parameters
    ----------
    selector
        As for `StandardInput`.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._input = StandardInput(ALL, selector)
        self._feeds: dict[Outbox, _Feed] = {}

    def begin(self, outboxes: Iterable[Outbox]) -> None:
        """Begin to copy, to the agents of these hosts; to none if there are none."""
        for index, outbox in enumerate(outboxes):
            with self._input.of(index) as file:
                self._feeds[outbox] = _Feed(outbox, os.dup(file))
            self._pause_or_go_on(self._feeds[outbox])
        if self._feeds:
            self._input.start()

    def took(self, outbox: Outbox, count: int) -> None:
        """Take note that the ranks of a host have taken some of their input."""
        if (feed := self._feeds.get(outbox)) is not None:
            feed.untaken -= count
            self._pause_or_go_on(feed)

    def end(self, outbox: Outbox) -> None:
        """Read no more for a host."""
        if (feed := self._feeds.pop(outbox, None)) is not None:
            if feed.is_read:
                self._selector.unregister(feed.source)
            os.close(feed.source)

    def close(self) -> None:
        """Read no more for any host."""
        for outbox in list(self._feeds):
            self.end(outbox)
        self._input.close()

    def _pause_or_go_on(self, feed: _Feed) -> None:
        is_read = feed.untaken < _MOST_UNTAKEN_BYTES
        if is_read and not feed.is_read:
            self._selector.register(feed.source, selectors.EVENT_READ, partial(self._read, feed))
        elif feed.is_read and not is_read:
            self._selector.unregister(feed.source)
        feed.is_read = is_read

    def _read(self, feed: _Feed) -> None:
        data = os.read(feed.source, _READ_BYTES)
        feed.outbox.send(stdin=base64.b64encode(data).decode())  # an empty piece is the end
        feed.untaken += len(data)
        if data:
            self._pause_or_go_on(feed)
        else:
            self.end(feed.outbox)

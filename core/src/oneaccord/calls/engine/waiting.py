"""Waiting for transfers, with patience first and a deadline in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from oneaccord.contract.backend import Mailbox, Transfer, Transport
from oneaccord.contract.deadline import Deadline

__all__ = ["Breach", "Overdue", "StallCallback", "Waiter", "checked_mailbox", "checked_transfer", "checked_wait", "lent"]

StallCallback = Callable[[list[int]], None]
"""Called with the peers waited for, when nothing has moved for a while."""

_FIRST_STALL_S = 0.2
_NEXT_STALL_S = 0.5


class Overdue(Exception):
    """The deadline of a call passed while it waited for ``peers``."""

    def __init__(self, peers: list[int]) -> None:
        super().__init__(peers)
        self.peers: list[int] = peers


class Breach(Exception):
    """A transport does not do what `Transport` says; `failures` names the backend."""


def checked_transfer(given: Transfer | None, source: Transport | Mailbox, call: str) -> Transfer:
    """Return the result of a plugin's ``call`` if it is a `Transfer`. For first uses, and if a message must wait anyway.

    Raises
    ------
    Breach
        It is not one. An object that is only similar would seem to be done: a future, for example, whose ``done`` is a method.
    """
    if not isinstance(given, Transfer):
        raise Breach(f"{_name(source)}.{call}() returned {given!r} instead of a oneaccord.api.Transfer")
    return given


def lent(transport: Transport, peer: int, header: bytes, payload: memoryview) -> Transfer:
    """Start to send a message by `Transport.lend`; raises as `checked_transfer`, which names `Transport.send` if the plugin has no other way."""
    call = "send" if type(transport).lend is Transport.lend else "lend"
    return checked_transfer(transport.lend(peer, header, payload), transport, call)


def checked_wait(transport: Transport, transfers: Sequence[Transfer], deadline: Deadline) -> None:
    """Wait for any of ``transfers``; raises as `Transport.wait`.

    Raises
    ------
    Breach
        None is done: a caller that waits again and again would never see the deadline.
    """
    transport.wait(transfers, deadline)
    if not any(transfer.done for transfer in transfers):
        raise Breach(f"{_name(transport)}.wait() returned, but none of the transfers is done")


def checked_mailbox(transport: Transport, peer: int) -> Mailbox | None:
    """Ask a transport for its mailbox for a peer.

    Raises
    ------
    Breach
        Its result is not one.
    """
    box = transport.mailbox(peer)
    given: object = box
    if given is not None and not isinstance(given, Mailbox):
        raise Breach(f"{_name(transport)}.mailbox() returned {given!r} instead of a oneaccord.api.Mailbox or None")
    if box is not None:
        slots: list[object] = [*box.outgoing, *box.incoming]
        if not (box.outgoing and box.incoming) or not all(isinstance(slot, memoryview) for slot in slots):
            raise Breach(
                f"{_name(box)} has outgoing={box.outgoing!r} and incoming={box.incoming!r} instead of one or more memoryviews each"
            )
        if box.compiled is not None:
            _check_c_form(box)
    return box


def _check_c_form(box: Mailbox) -> None:
    """Check the form of a mailbox that the compiled executor will use; raises as `checked_mailbox`."""
    assert box.compiled is not None
    expected = len(box.outgoing[0])
    try:
        found = box.compiled.mailbox_slot_bytes(box)
    except (AttributeError, ValueError) as error:
        raise Breach(
            f"{_name(box)} sets compiled, but its c_mailbox is no capsule as mailbox.h describes it: {error}"
        ) from error
    if found != expected:
        raise Breach(f"{_name(box)} has slots of {expected} bytes in Python and of {found} in C: they must be the same")


def _name(of: object) -> str:
    return f"{type(of).__module__}.{type(of).__qualname__}"


class Waiter:
    """Wait on behalf of one call: report when nothing has moved for a while, give up at the deadline.

    ``deadline`` and ``on_stall`` are those that it was made with, None if they are not wanted. The reports cost a successful call
    nothing: they begin when nothing has moved for a while.
    """

    __slots__ = ("_moved", "_patience", "deadline", "on_stall")

    def __init__(self, deadline: Deadline, on_stall: StallCallback | None) -> None:
        self.deadline: Deadline = deadline
        self.on_stall: StallCallback | None = on_stall
        self._patience: Deadline | None = None
        self._moved = -1

    def wait(self, transport: Transport, transfers: Sequence[Transfer], peers: Callable[[], list[int]]) -> None:
        """Return when one of ``transfers`` over ``transport`` is done; ``peers`` are the ranks for which they keep this rank waiting.

        Raises
        ------
        Overdue
            The deadline passed.
        LinkLost, HeaderMismatch
            As `Transport.wait`.
        Breach
            None is done.
        """
        patience = self._patience
        if self.on_stall is None:
            patience = self.deadline
        elif patience is None:
            patience = self._patience = Deadline(_FIRST_STALL_S)
        while True:
            limit = patience if patience.at < self.deadline.at else self.deadline
            try:
                checked_wait(transport, transfers, limit)
            except TimeoutError:
                if self.on_stall is None or self.deadline.passed():
                    raise Overdue(peers()) from None
                self._report_wait(patience, transfers, peers)
            else:
                self._moved = -1
                return

    def _report_wait(self, patience: Deadline, transfers: Sequence[Transfer], peers: Callable[[], list[int]]) -> None:
        now = time.monotonic()
        moved = sum(transfer.moved for transfer in transfers)
        if moved != self._moved:
            # The first look since something moved.
            self._moved = moved
            patience.at = now + _FIRST_STALL_S
            return
        assert self.on_stall is not None
        self.on_stall(peers())
        patience.at = now + _NEXT_STALL_S

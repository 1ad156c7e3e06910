"""Names of hosts, resolved in time."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

from oneaccord.common.threads import Thread
from oneaccord.contract.deadline import Deadline

__all__ = ["resolve", "resolve_patiently"]

_log = logging.getLogger("oneaccord.network")

_TELL_S = 2.0
"""How long a name may be unknown before that is said: it may be misspelt."""
_PAUSE_S = 0.25
"""How long to wait before a name is asked for again: a pod's name comes with the pod, some seconds late."""

_Found = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


def resolve(host: str, port: int, deadline: Deadline, flags: int = 0) -> list[_Found]:
    """Return the addresses of a name, as `socket.getaddrinfo` does, and in time.

    Raises
    ------
    socket.gaierror
        It has none.
    TimeoutError
        The resolver did not answer in time; it continues in its own thread, because nothing can stop it.
    """
    found: list[_Found] = []
    failures: list[OSError] = []
    # A text goes through the codec "idna", whose import takes a while, and which changes nothing in ASCII.
    name = host.encode() if host.isascii() else host

    def ask(flags: int = flags) -> None:
        try:
            found.extend(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=flags))
        except OSError as error:
            failures.append(error)

    if host and host.isascii():
        ask(flags | socket.AI_NUMERICHOST)  # for an address no server is asked; a name may look like one, as node1 does
    if not found:
        failures.clear()
        thread = Thread(target=ask, name="oneaccord-resolver", daemon=True)
        thread.start()
        thread.join(deadline.remaining())
        if thread.is_alive():
            raise TimeoutError(f"the resolver does not answer for {host!r}")
    if failures:
        raise failures[0]
    return found


def resolve_patiently(host: str, port: int, deadline: Deadline, flags: int = 0) -> list[_Found]:
    """Return the addresses of a name as `resolve`, again and again until the deadline: a name may not be known yet.

    Raises
    ------
    socket.gaierror
        It has no address when the time is up, in the resolver's words.
    TimeoutError
        As `resolve`.
    """
    begun, is_told, unknown = time.monotonic(), False, None
    while True:
        try:
            return resolve(host, port, deadline, flags)
        except socket.gaierror as error:
            unknown = error
        except TimeoutError:
            if unknown is not None:  # the last attempt had no time
                raise unknown from None
            raise
        if deadline.passed():
            raise unknown
        if not is_told and time.monotonic() > begun + _TELL_S:
            is_told = True
            _log.warning(
                "oneaccord: the name %r does not resolve yet (%s); it is asked for again, for %.0f s at most",
                host,
                unknown.strerror or unknown,
                deadline.remaining(),
            )
        time.sleep(min(_PAUSE_S, deadline.remaining()))

"""Worlds of ranks for tests: what runs a program on every rank, and ports where ranks may meet."""

from __future__ import annotations

import collections
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import oneaccord as oa
from oneaccord.api import CommError, Group, ThreadWorld
from oneaccord_simulated.running import Simulation

__all__ = ["HYBRIDS", "free_port", "held_port", "must", "on_threads", "over_sockets", "stories", "thread_world"]

_PATIENCE_S = 40.0
"""How long a rank may take: more than any timeout of a test, so that only a hang ends by it."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "hybrid": {"routes": {"intra": "shm", "inter": "tcp"}},
    "hybrid-simulated": {"routes": {"intra": "simulated", "inter": "tcp"}},
}
"""Worlds over backends that are composed, on pretended hosts of two ranks each; the second is a simulated one."""
_HELD = 100
_held: collections.deque[int] = collections.deque()


def held_port() -> socket.socket:
    """Return a socket that holds a port, which nobody else is given until it is closed.

    It is bound, so that connections are refused until a rank listens there, which Linux lets it do beside the socket that holds the port.
    """
    is_dual = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_dual:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("", 0))
    return sock


def free_port() -> int:
    """Return a port that this process holds until a hundred more have been asked for."""
    with held_port() as sock:
        port: int = sock.getsockname()[1]
        _held.append(sock.detach())
    if len(_held) > _HELD:
        os.close(_held.popleft())
    return port


def on_threads(body: Callable[[int], Any], count: int) -> list[Any]:
    """Call ``body(number)`` on ``count`` threads; return what each returned, or the exception that it raised."""
    outcomes: list[Any] = [None] * count

    def target(number: int) -> None:
        try:
            outcomes[number] = body(number)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=target, name=f"rank {number}", args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
        assert not thread.is_alive(), f"a rank hangs; so far: {outcomes}"
    return outcomes


def thread_world(
    program: Callable[[Group], Any],
    world_size: int,
    backend: str,
    *,
    timeout_s: float = 20,
    config: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Run ``program`` on ranks that are threads; return what each returned or raised."""
    # As the other backends, which carry small messages that nobody receives yet.
    tables: dict[str, Any] = {"simulated": {"eager_bytes": 65536}} if backend.endswith("simulated") else {}
    if backend in HYBRIDS:
        config = {"backend": "hybrid", "ranks_per_host": 2, **(config or {})}
        # Who waits in a simulated world gives the processor to the rank that it waits for.
        tables |= {"hybrid": HYBRIDS[backend], "tcp": {"spin_us": 0 if backend.endswith("simulated") else 200}}
    config = {"backends": tables, **(config or {})}

    def body(_: int) -> Any:
        with oa.init(config=config, timeout_s=timeout_s) as group:
            return program(group)

    if backend.endswith("simulated"):
        done = Simulation(world_size).execute(body)
        return [done.errors.get(rank, done.results[rank]) for rank in range(world_size)]
    world = ThreadWorld(world_size, backend)

    def enter(rank: int) -> Any:
        with world.rank(rank):
            return body(rank)

    return on_threads(enter, world_size)


def over_sockets(
    program: Callable[[Group], Any],
    world_size: int = 2,
    *,
    timeout_s: float = 30,
    config: Mapping[str, Any] | None = None,
    **tcp: Any,
) -> list[Any]:
    """Run ``program`` on threads that meet as processes do, at an address; return what each returned or raised.

    ``tcp`` is the table ``[backends.tcp]``.
    """
    port = held_port()
    address = f"127.0.0.1:{port.getsockname()[1]}"
    config = {"backend": "tcp", "rendezvous": {"address": address}, "backends": {"tcp": tcp}, **(config or {})}

    def body(rank: int) -> Any:
        with oa.init(config=config, rank=rank, world_size=world_size, timeout_s=timeout_s) as group:
            return program(group)

    with port:
        return on_threads(body, world_size)


def must(outcomes: list[Any]) -> list[Any]:
    """Return the outcomes; raise the exception among them that is the cause of the others, if there is one."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        raise next((error for error in errors if not isinstance(error, CommError)), errors[0])
    return outcomes


def stories(text: str) -> dict[int, str]:
    """Read what an error says about each rank from its last lines, such as ``  ranks 0-1, 4: barrier() #1``."""
    told: dict[int, str] = {}
    for numbers, story in re.findall(r"^  ranks? ([0-9, -]+): (.*)$", text, re.MULTILINE):
        for part in numbers.split(", "):
            first, _, last = part.partition("-")
            told.update(dict.fromkeys(range(int(first), int(last or first) + 1), story))
    return told

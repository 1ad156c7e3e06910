"""Worlds of ranks for tests: what runs a program on every rank, and ports where ranks may meet."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import manyhands as mh
from manyhands.api import CommError, Group, ThreadWorld
from manyhands_simulated.running import Simulation

__all__ = ["HYBRIDS", "free_port", "must", "on_threads", "over_sockets", "thread_world"]

_PATIENCE_S = 40.0
"""How long a rank may take: more than any timeout of a test, so that only a hang ends by it."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "hybrid": {"routes": {"intra": "shm", "inter": "tcp"}},
    "hybrid-simulated": {"routes": {"intra": "simulated", "inter": "tcp"}},
}
"""Worlds over backends that are composed, on pretended hosts of two ranks each; the second is a simulated one."""
_FIRST_PORT, _PORTS, _WORKERS = 12_000, 20_000, 20


def _ports() -> Iterator[int]:
    """Return the ports of this process for ever, one after the other: below those of outgoing connections, and no other worker's."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    count = _PORTS // _WORKERS
    first = _FIRST_PORT + worker * count
    # Another run of the tests at the same time begins elsewhere.
    return (first + (os.getpid() + number) % count for number in itertools.count())


_numbers = _ports()


def free_port() -> int:
    """Return a port where nobody listens, and that no other test of this run is given for a long time."""
    for port in _numbers:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError


def on_threads(body: Callable[[int], Any], count: int) -> list[Any]:
    """Call ``body(number)`` on ``count`` threads; return what each returned, or the exception that it raised."""
    outcomes: list[Any] = [None] * count

    def target(number: int) -> None:
        try:
            outcomes[number] = body(number)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=target, args=(number,), daemon=True) for number in range(count)]
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
        with mh.init(config=config, timeout_s=timeout_s) as group:
            return program(group)

    if backend.endswith("simulated"):
        done = Simulation(world_size).execute(body)
        return [done.errors.get(rank, done.results[rank]) for rank in range(world_size)]
    world = ThreadWorld(world_size, backend)

    def enter(rank: int) -> Any:
        with world.rank(rank):
            return body(rank)

    return on_threads(enter, world_size)


def over_sockets(program: Callable[[Group], Any], world_size: int = 2, *, timeout_s: float = 20, **tcp: Any) -> list[Any]:
    """Run ``program`` on threads that meet as processes do, at an address; return what each returned or raised.

    ``tcp`` is the table ``[backends.tcp]``.
    """
    config = {"backend": "tcp", "rendezvous": {"address": f"127.0.0.1:{free_port()}"}, "backends": {"tcp": tcp}}

    def body(rank: int) -> Any:
        with mh.init(config=config, rank=rank, world_size=world_size, timeout_s=timeout_s) as group:
            return program(group)

    return on_threads(body, world_size)


def must(outcomes: list[Any]) -> list[Any]:
    """Return the outcomes; raise the exception among them that is the cause of the others, if there is one."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        raise next((error for error in errors if not isinstance(error, CommError)), errors[0])
    return outcomes

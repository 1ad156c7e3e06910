"""Telling observers of a call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from oneaccord.config.plugins import PluginManager
from oneaccord.contract.observe import OperationEvent
from oneaccord.contract.runtime import Runtime
from oneaccord.job.group_ranks import Members

__all__ = ["Observation", "observed"]


class Observation:
    """A call whose beginning observers have learned of, and whose end they learn of once.

    Parameters
    ----------
    plugins, runtime, members
        The observers, the clock, and the group.
    operation, sequence, algorithm, nbytes, dtype, call
        As for `OperationEvent`.
    """

    __slots__ = ("_event", "_plugins", "_runtime")

    def __init__(
        self,
        plugins: PluginManager,
        runtime: Runtime,
        members: Members,
        *,
        operation: str,
        sequence: int,
        algorithm: str = "",
        nbytes: int,
        dtype: str,
        call: str = "",
    ) -> None:
        self._plugins = plugins
        self._runtime = runtime
        self._event = OperationEvent(
            group=str(members.number),
            rank=members.rank,
            operation=operation,
            sequence=sequence,
            algorithm=algorithm,
            nbytes=nbytes,
            dtype=dtype,
            started_ns=self._now_ns(),
            call=call,
        )
        plugins.notify_started(self._event)

    def end(self, error: BaseException | None, **known: Any) -> None:
        """Let observers learn of the end, well or badly; ``known`` are fields of the event that are known only now."""
        self._plugins.notify_finished(replace(self._event, **known, finished_ns=self._now_ns(), error=error))

    def _now_ns(self) -> int:
        runtime = self._runtime
        return round(runtime.now() * 1e9) if runtime.is_simulated else time.monotonic_ns()


@contextmanager
def observed(plugins: PluginManager, runtime: Runtime, members: Members, **facts: Any) -> Iterator[dict[str, Any]]:
    """Let observers learn of the beginning and the end of the call in the body; what fails there is the error that they get.

    Parameters
    ----------
    plugins, runtime, members, facts
        As for `Observation`.

    Yields
    ------
    dict
        Fields of the event that are known only at the end, which the body may set.
    """
    observation = Observation(plugins, runtime, members, **facts)
    known: dict[str, Any] = {}
    error: BaseException | None = None
    try:
        yield known
    except BaseException as caught:
        error = caught
        raise
    finally:
        observation.end(error, **known)

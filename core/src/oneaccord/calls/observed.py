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

__all__ = ["observed"]


@contextmanager
def observed(
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
) -> Iterator[dict[str, Any]]:
    """Let observers learn of the beginning and the end of the call in the body; what fails there is the error that they get.

    Parameters
    ----------
    plugins, runtime, members
        The observers, the clock, and the group.
    operation, sequence, algorithm, nbytes, dtype, call
        As for `OperationEvent`.

    Yields
    ------
    dict
        Fields of the event that are known only at the end, which the body may set.
    """

    def now_ns() -> int:
        return round(runtime.now() * 1e9) if runtime.is_simulated else time.monotonic_ns()

    event = OperationEvent(
        group=str(members.number),
        rank=members.rank,
        operation=operation,
        sequence=sequence,
        algorithm=algorithm,
        nbytes=nbytes,
        dtype=dtype,
        started_ns=now_ns(),
        call=call,
    )
    plugins.notify_started(event)
    known: dict[str, Any] = {}
    error: BaseException | None = None
    try:
        yield known
    except BaseException as caught:
        error = caught
        raise
    finally:
        plugins.notify_finished(replace(event, **known, finished_ns=now_ns(), error=error))

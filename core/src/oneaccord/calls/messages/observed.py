"""Telling observers of calls that move messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from oneaccord.config.plugins import PluginManager
from oneaccord.contract.observe import OperationEvent
from oneaccord.contract.runtime import Runtime
from oneaccord.job.group_ranks import Members

__all__ = ["observe"]


def observe(
    plugins: PluginManager,
    runtime: Runtime,
    members: Members,
    what: object,
    sequence: int,
    sent: tuple[int, np.dtype[Any] | None],
    came: Callable[[], tuple[int, np.dtype[Any] | None] | None],
    call: Callable[[], None],
) -> None:
    """Make a call while observers learn of its beginning and its end.

    Parameters
    ----------
    plugins, runtime, members
        The observers, the clock, and the group.
    what, sequence
        The call in words, and its number.
    sent
        The size and dtype of what it sends.
    came
        Returns those of what has come, if it receives anything.
    call
        Makes it.
    """

    def now() -> int:
        return round(runtime.now() * 1e9) if runtime.is_simulated else time.monotonic_ns()

    words = str(what)
    event = OperationEvent(
        group=str(members.number),
        rank=members.rank,
        operation=words.split(maxsplit=1)[0],
        sequence=sequence,
        algorithm="",
        nbytes=sent[0],
        dtype="" if sent[1] is None else str(sent[1]),
        started_ns=now(),
        call=words,
    )
    plugins.notify_started(event)
    error: BaseException | None = None
    try:
        call()
    except BaseException as caught:
        error = caught
        raise
    finally:
        found = came()
        if found is not None and not sent[0]:
            event = replace(event, nbytes=found[0], dtype="" if found[1] is None else str(found[1]))
        plugins.notify_finished(replace(event, finished_ns=now(), error=error))

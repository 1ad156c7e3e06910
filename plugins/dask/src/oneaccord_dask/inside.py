"""What runs in a Dask worker."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from distributed import Worker

from oneaccord.api import Task

__all__ = ["answer", "block_of", "perform"]

_LOOK_S: Final = 0.5
"""How often a worker looks whether the launching program still lives."""

_here = threading.local()


async def perform(function: Callable[..., Any], args: tuple[Any, ...], token: str, dask_worker: Worker) -> Any:
    """Call a function in a thread of its own, so that neither the loop of the worker nor a thread of its tasks waits for a rank.

    Parameters
    ----------
    function, args
        What to call.
    token
        The key of a value which the launching program holds. The scheduler drops it when that program ends in whatever way.
    dask_worker
        This worker, from Dask.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(value)

    def run() -> None:
        _here.worker = dask_worker
        value, failure = None, None
        try:
            value = function(*args)
        except BaseException as error:  # noqa: BLE001 - it is raised in the launching program
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed: the worker ends
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name="oneaccord-rank", daemon=True).start()
    while True:
        finished, _ = await asyncio.wait({done}, timeout=_LOOK_S)
        if finished:
            return done.result()
        if token not in dask_worker.data:
            _revoke_all(args)
            return await done


def _revoke_all(args: Iterable[Any]) -> None:
    """End the calls of the rank whose launching program has gone."""
    for task in args:
        if isinstance(task, Task):
            task.revoke()


def answer() -> bool:
    """Say that oneaccord and this plugin can be imported here."""
    return True


def block_of(key: Any) -> Any:
    """Return a value that the worker of this rank holds, by its key; from the rank's own thread."""
    return _here.worker.data[key]

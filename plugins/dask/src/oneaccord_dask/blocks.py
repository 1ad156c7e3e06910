"""Ranks where the blocks of a Dask collection are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from distributed import Client, futures_of, wait

from oneaccord.api import Deadline, DeadlineError, UsageError, launch
from oneaccord_dask.config import DaskConfig
from oneaccord_dask.inside import block_of
from oneaccord_dask.launcher import client_of

if TYPE_CHECKING:
    from oneaccord.api import Group

__all__ = ["launch_over"]

_LEAST_S: Final = 0.001


def launch_over(
    function: Callable[..., Any],
    array: Any,
    *,
    args: Sequence[Any] = (),
    client: Client | None = None,
    timeout_s: float | None = None,
    backend: str | None = None,
    config: Any = None,
) -> list[Any]:
    """Call a function on ranks in the workers that hold the blocks of a Dask array; the blocks do not move.

    Parameters
    ----------
    function
        Called as ``function(group, blocks, *args)`` on each rank. ``blocks`` is a dictionary: the index of a block in the grid of blocks, a tuple of
        int, and the NumPy or CuPy array, which is the worker's own: a change is seen by Dask. Each block is given to exactly one rank.
    array
        A Dask array. It is computed first if it is not yet.
    args
        More arguments, the same on all ranks.
    client
        The client of the cluster; by default the one that this process made last.
    timeout_s, backend, config
        As for `oneaccord.launch`.

    Returns
    -------
    list
        What ``function`` returned on each rank.

    Raises
    ------
    UsageError
        ``array`` is no Dask array, ``args`` is no sequence, or there is no client.
    DeadlineError
        ``timeout_s`` is up; it counts for the computation as well.
    Exception
        As for `oneaccord.launch`; also what the computation of a block raises.

    Notes
    -----
    The ranks are the workers that hold a block when all are computed, in the order of their addresses.
    """
    client = client or client_of(DaskConfig())
    if not hasattr(array, "__dask_keys__") or not hasattr(array, "numblocks"):
        raise UsageError(f"expected a Dask array, not {type(array).__name__}; dask.array.from_array makes one")
    if isinstance(args, str | bytes) or not hasattr(args, "__iter__"):
        raise UsageError(f"args must be a sequence of arguments, not {args!r}; for one argument: args=(value,)")
    held = client.persist(array)
    futures = {future.key: future for future in futures_of(held)}
    deadline = None if timeout_s is None else Deadline(timeout_s)
    try:
        wait(list(futures.values()), timeout=timeout_s)
    except TimeoutError as error:
        raise DeadlineError(
            f"the blocks of the Dask array were not computed within {timeout_s:g} s (timeout_s): give more time, or compute it first (array.persist())"
        ) from error
    for future in futures.values():
        if future.status == "error":
            future.result()
    keys = {index: (held.name, *index) for index in np.ndindex(*held.numblocks)}
    who_has = client.who_has(list(futures.values()))
    by_worker: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, key in keys.items():
        by_worker.setdefault(min(who_has[key]), {})[index] = key
    workers = sorted(by_worker)
    return launch(
        _with_blocks,
        len(workers),
        on="dask",
        args=(function, [by_worker[worker] for worker in workers], *args),
        timeout_s=None if deadline is None else max(_LEAST_S, deadline.remaining()),
        options={"client": client, "workers": tuple(workers)},
        backend=backend,
        config=config,
    )


def _with_blocks(group: Group, function: Callable[..., Any], keys: Sequence[dict[tuple[int, ...], Any]], *args: Any) -> Any:
    return function(group, {index: block_of(key) for index, key in keys[group.rank].items()}, *args)

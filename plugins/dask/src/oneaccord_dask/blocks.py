"""Ranks where the blocks of a Dask collection are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client, futures_of, get_client, wait

from oneaccord.api import UsageError, launch
from oneaccord_dask.inside import block_of

if TYPE_CHECKING:
    from oneaccord.api import Group

__all__ = ["launch_over"]


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
        ``array`` is no Dask array.
    Exception
        As for `oneaccord.launch`; also what the computation of a block raises.

    Notes
    -----
    The ranks are the workers that hold a block when all are computed, in the order of their addresses.
    """
    client = client or get_client()
    if not hasattr(array, "__dask_keys__") or not hasattr(array, "numblocks"):
        raise UsageError(f"expected a Dask array, not {type(array).__name__}; dask.array.from_array makes one")
    held = client.persist(array)
    futures = {future.key: future for future in futures_of(held)}
    wait(list(futures.values()), timeout=timeout_s)
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
        timeout_s=timeout_s,
        options={"client": client, "workers": tuple(workers)},
        backend=backend,
        config=config,
    )


def _with_blocks(group: Group, function: Callable[..., Any], keys: Sequence[dict[tuple[int, ...], Any]], *args: Any) -> Any:
    return function(group, {index: block_of(key) for index, key in keys[group.rank].items()}, *args)

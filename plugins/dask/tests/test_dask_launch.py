"""Ranks in the workers of a real Dask cluster: what only Dask promises; test_dask_programs.py has the rest."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import oneaccord as oa

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
LONG_S = 120.0


def adds(group: oa.Group, value: float) -> tuple[int, int, float]:
    return group.rank, group.world_size, float(group.all_reduce(np.array([value + group.rank]))[0])


def turns(group: oa.Group) -> None:
    while True:
        group.barrier(timeout_s=3600)
        time.sleep(0.01)


def test_dask_tasks_run_beside_ranks(client: Any) -> None:
    job = oa.launch_async(turns, 3, on="dask", options={"client": client})
    try:
        assert client.submit(sum, [1, 2], pure=False).result(timeout=LONG_S) == 3
    finally:
        job.cancel()
    assert oa.launch(adds, 3, on="dask", args=(0.0,), timeout_s=LONG_S)[0] == (0, 3, 3.0)


def test_dask_workers_that_are_named_are_the_ranks_in_that_order(client: Any) -> None:
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])[::-1][:2]
    where = oa.launch(address, 2, on="dask", options={"workers": tuple(workers)}, timeout_s=LONG_S)
    assert where == workers


def address(group: oa.Group) -> str:
    del group
    from distributed import Worker

    (own,) = Worker._instances
    return str(own.address)


@pytest.mark.parametrize(
    ("n", "gpus", "options", "error", "said"),
    [
        (1, 0, {"workers": ("tcp://127.0.0.1:1",)}, oa.UsageError, "has no worker tcp://127.0.0.1:1"),
        (1, 0, {"client": "tcp://127.0.0.1:1"}, oa.UsageError, "must be a distributed.Client"),
        (1, 0, {"clients": None}, oa.UsageError, "There are: client, address, workers"),
    ],
)
def test_dask_impossible_launch_is_refused_in_words(
    client: Any, n: int, gpus: int, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        oa.launch(adds, n, on="dask", args=(1.0,), gpus=gpus, options=options, timeout_s=LONG_S)
    assert said in str(caught.value)


def test_dask_without_a_client_says_how_to_make_one() -> None:
    with pytest.raises(oa.UsageError, match="has no client of a Dask cluster"):
        oa.launch(adds, 1, on="dask", args=(1.0,))


def test_dask_blocks_stay_where_they_are(client: Any) -> None:
    import dask.array as da

    from oneaccord_dask import launch_over

    array = client.persist(da.arange(60, chunks=7).reshape(6, 10).rechunk((2, 5)).astype(np.float64))

    def total(group: oa.Group, blocks: dict[tuple[int, ...], Any], factor: float) -> tuple[list[tuple[int, ...]], float]:
        own = np.array([sum(float(block.sum()) for block in blocks.values()) * factor])
        return sorted(blocks), float(group.all_reduce(own)[0])

    results = launch_over(total, array, args=(2.0,), timeout_s=LONG_S)
    assert sorted(index for own, _ in results for index in own) == [(i, j) for i in range(3) for j in range(2)]
    assert {value for _, value in results} == {2.0 * sum(range(60))}


def test_dask_over_something_else_is_refused(client: Any) -> None:
    from oneaccord_dask import launch_over

    with pytest.raises(oa.UsageError, match="expected a Dask array, not ndarray"):
        launch_over(adds, np.ones(3))


@pytest.mark.parametrize("args", [5, "text"])
def test_dask_over_blocks_refuses_args_that_are_no_sequence(client: Any, args: Any) -> None:
    import dask.array as da

    from oneaccord_dask import launch_over

    with pytest.raises(oa.UsageError, match=r"for one argument: args=\(value,\)"):
        launch_over(adds, da.ones(3), args=args)


def test_dask_scheduler_that_is_not_there_ends_by_the_deadline() -> None:
    with pytest.raises(oa.DeadlineError, match=r"no Dask scheduler answers at tcp://127.0.0.1:1 "):
        oa.launch(adds, 2, on="dask", options={"address": "tcp://127.0.0.1:1"}, timeout_s=2)
    with pytest.raises(oa.UsageError, match="address must be that of a Dask scheduler"):
        oa.launch(adds, 2, on="dask", options={"address": "nonsense"}, timeout_s=2)


def test_dask_blocks_that_come_too_late_are_a_missed_deadline(client: Any) -> None:
    import dask.array as da
    from distributed import Event

    from oneaccord_dask import launch_over

    def waits(block: Any) -> Any:
        Event("go").wait(LONG_S)
        return block

    array = da.map_blocks(waits, da.ones(4, chunks=2), dtype=float, meta=np.ones(0))
    try:
        with pytest.raises(oa.DeadlineError, match=r"blocks of the Dask array were not computed within 1 s"):
            launch_over(adds, array, timeout_s=1)
    finally:
        Event("go", client=client).set()

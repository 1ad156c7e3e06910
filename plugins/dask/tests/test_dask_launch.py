"""Ranks in the workers of a real Dask cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oneaccord as oa

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
LONG_S = 120.0


def adds(group: oa.Group, value: float) -> tuple[int, int, float]:
    return group.rank, group.world_size, float(group.all_reduce(np.array([value + group.rank]))[0])


def fails(group: oa.Group) -> None:
    if group.rank == 1:
        raise KeyError("no such thing")
    group.barrier()


def killed(group: oa.Group) -> None:
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier(timeout_s=60)


def turns(group: oa.Group) -> None:
    while True:
        group.barrier(timeout_s=3600)
        time.sleep(0.01)


def test_dask_results_come_by_rank(client: Any) -> None:
    assert oa.launch(adds, 3, on="dask", args=(1.0,), timeout_s=LONG_S) == [(rank, 3, 6.0) for rank in range(3)]


def test_dask_two_launches_at_once_are_both_right(client: Any) -> None:
    meeting = threading.Barrier(2)
    results: dict[float, Any] = {}

    def start(value: float) -> None:
        meeting.wait(LONG_S)
        results[value] = oa.launch(adds, 3, on="dask", args=(value,), options={"client": client}, timeout_s=LONG_S)

    threads = [threading.Thread(target=start, args=(value,)) for value in (10.0, 100.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert results == {value: [(rank, 3, 3 * value + 3) for rank in range(3)] for value in (10.0, 100.0)}


def test_dask_tasks_run_beside_ranks(client: Any) -> None:
    job = oa.launch_async(turns, 3, on="dask", options={"client": client})
    try:
        assert client.submit(sum, [1, 2], pure=False).result(timeout=LONG_S) == 3
    finally:
        job.cancel()
    assert oa.launch(adds, 3, on="dask", args=(0.0,), timeout_s=LONG_S)[0] == (0, 3, 3.0)


def test_dask_exception_comes_back_as_its_own_type(client: Any) -> None:
    with pytest.raises(KeyError, match="no such thing") as caught:
        oa.launch(fails, 2, on="dask", timeout_s=LONG_S)
    assert "on rank 1 of 2" in caught.value.__notes__[0]


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
        (2, 0, {"workers": ("tcp://127.0.0.1:1",)}, oa.UsageError, "must name 2 different workers"),
        (2, 1, {}, oa.UsageError, '--resources "GPU=1"'),
        (40, 0, {}, oa.DeadlineError, "has 3 suitable workers, and not the 40"),
        (1, 0, {"client": "tcp://127.0.0.1:1"}, oa.UsageError, "must be a distributed.Client"),
        (1, 0, {"clients": None}, oa.UsageError, "There are: client, address, workers"),
    ],
)
def test_dask_impossible_launch_is_refused_in_words(
    client: Any, n: int, gpus: int, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        oa.launch(adds, n, on="dask", args=(1.0,), gpus=gpus, options=options, timeout_s=2.0 if n == 40 else LONG_S)
    assert said in str(caught.value)


def test_dask_without_a_client_says_how_to_make_one() -> None:
    with pytest.raises(oa.UsageError, match="has no client of a Dask cluster"):
        oa.launch(adds, 1, on="dask", args=(1.0,))


def test_dask_deadline_names_the_ranks_and_frees_the_workers(client: Any) -> None:
    with pytest.raises(oa.DeadlineError, match="ranks 0-2 of 3 had not finished"):
        oa.launch(turns, 3, on="dask", timeout_s=5)
    assert oa.launch(adds, 3, on="dask", args=(0.0,), timeout_s=LONG_S)[0] == (0, 3, 3.0)


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


def test_dask_ranks_end_when_the_driver_is_killed(client: Any, tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from distributed import Client
        import oneaccord as oa

        def turns(group, folder):
            try:
                Path(folder, f"{{group.rank}}.began").touch()
                while True:
                    group.barrier(timeout_s=3600)
                    time.sleep(0.01)
            finally:
                Path(folder, f"{{group.rank}}.ended").touch()

        client = Client({client.scheduler.address!r})
        oa.launch(turns, 3, on="dask", args=({str(tmp_path)!r},))
    """)
    driver = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(lambda: len(list(tmp_path.glob("*.began"))) == 3)
    finally:
        driver.kill()
        driver.wait(LONG_S)
    until(lambda: len(list(tmp_path.glob("*.ended"))) == 3)


def test_dask_worker_that_dies_is_named(client: Any) -> None:
    with pytest.raises(oa.RankError, match=r"rank 1 of 3 was lost: the Dask worker tcp://.* has ended"):
        oa.launch(killed, 3, on="dask", timeout_s=LONG_S)
    client.wait_for_workers(3, timeout=LONG_S)


def until(holds: Any) -> None:
    end = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)

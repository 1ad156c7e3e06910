"""The backend of Ray Train, on a real Ray cluster of two nodes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oneaccord as oa

pytest.importorskip("ray.train", reason="Ray Train is not installed: make test-engines")

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(150)]


@pytest.fixture(autouse=True)
def by_value(cluster: Any) -> Any:
    """Send the functions of this file by value: workers cannot import it."""
    import cloudpickle

    this = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(this)
    yield
    cloudpickle.unregister_pickle_by_value(this)


def fit(
    function: Callable[..., Any], folder: Path, workers: int = 2, *, config: Any = None, failures: int = 0, **more: Any
) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from oneaccord_ray import OneaccordConfig, OneaccordTrainer

    return OneaccordTrainer(
        function,
        train_loop_config=config or {},
        oneaccord_config=OneaccordConfig(**more),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=failures)),
    ).fit()


def note(path: str, name: str, *words: object) -> None:
    Path(path, name).write_text(" ".join(map(str, words)))


def adds(config: dict[str, Any]) -> None:
    from ray import train

    import oneaccord_ray

    group = oneaccord_ray.group()
    total = float(group.all_reduce(np.array([config["value"] + group.rank]))[0])
    assert oneaccord_ray.group() is group
    local = (group._job.local_rank, train.get_context().get_local_rank())
    variables = sorted(name for name in os.environ if name.startswith("ONEACCORD") or name in {"RANK", "WORLD_SIZE"})
    note(config["path"], f"rank-{group.rank}", group.world_size, train.get_context().get_world_rank(), total, *local, variables)


def test_ray_train_workers_are_ranks_of_their_own_job(tmp_path: Path) -> None:
    """Two trainers at once: each has its own group, and no worker has variables of oneaccord."""

    def one(workers: int, value: float) -> None:
        folder = tmp_path / str(workers)
        folder.mkdir()
        fit(adds, folder, workers, config={"value": value, "path": str(folder)}, backend="tcp")

    threads = [threading.Thread(target=one, args=given) for given in ((1, 100.0), (3, 1.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for workers, total in ((1, 100.0), (3, 6.0)):
        for rank in range(workers):
            size, of_ray, found, own, local, variables = (tmp_path / str(workers) / f"rank-{rank}").read_text().split()
            assert (int(size), int(of_ray), float(found), own, variables) == (workers, rank, total, local, "[]")


def fails(config: dict[str, Any]) -> None:
    import oneaccord_ray

    with oneaccord_ray.group() as group:
        if group.rank == 1:
            raise KeyError("no such thing")
        group.barrier(timeout_s=100)


def test_ray_train_exception_is_the_one_of_its_worker(tmp_path: Path) -> None:
    from ray.train import WorkerGroupError

    with pytest.raises(WorkerGroupError, match="no such thing") as caught:
        fit(fails, tmp_path)
    assert 1 in caught.value.worker_failures


def dies_once(config: dict[str, Any]) -> None:

    import oneaccord_ray

    group = oneaccord_ray.group()
    once = Path(config["path"], "once")
    if group.rank == 1 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        note(config["path"], f"again-{group.rank}", float(group.all_reduce(np.ones(1), timeout_s=100)[0]))
    except oa.PeerLostError as error:
        note(config["path"], "lost", error.peer)
        raise


def test_ray_train_dead_worker_is_named_and_replaced_by_a_new_group(tmp_path: Path) -> None:
    fit(dies_once, tmp_path, config={"path": str(tmp_path)}, failures=1)
    assert (tmp_path / "lost").read_text() == "1"
    assert [(tmp_path / f"again-{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]


def test_ray_train_group_outside_a_trainer_is_refused_in_words() -> None:
    import oneaccord_ray

    with pytest.raises(oa.UsageError, match=r"has no seat: call oneaccord_ray.group\(\) in the training function"):
        oneaccord_ray.group()


@pytest.mark.parametrize("given", [{"backend": 5}, {"config": 5}])
def test_ray_train_config_of_another_type_is_refused(given: dict[str, Any]) -> None:
    from oneaccord_ray import OneaccordConfig

    with pytest.raises(oa.UsageError, match=r"must be .* not 5"):
        OneaccordConfig(**given)

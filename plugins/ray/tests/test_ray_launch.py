"""Ranks as actors of a real Ray cluster of two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oneaccord as oa

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
LONG_S = 120.0


def adds(group: oa.Group, value: float) -> tuple[int, int, float]:
    return group.rank, group.world_size, float(group.all_reduce(np.array([value + group.rank]))[0])


def node(group: oa.Group) -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def pid(*_: Any) -> int:
    return os.getpid()


def fails(group: oa.Group) -> None:
    if group.rank == 1:
        raise KeyError("no such thing")
    group.barrier()


def killed(group: oa.Group) -> None:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier(timeout_s=60)


def hangs(group: oa.Group) -> None:
    while True:
        group.barrier(timeout_s=3600)
        time.sleep(0.01)


def speaks(group: oa.Group) -> None:
    print("spoken by", group.rank, flush=True)


def die(path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture(autouse=True)
def by_value(cluster: Any) -> Any:
    """Send the functions of this file by value: actors cannot import it."""
    import cloudpickle

    this = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(this)
    yield
    cloudpickle.unregister_pickle_by_value(this)


def test_ray_results_by_rank_and_ranks_of_a_node_are_neighbours() -> None:
    results = oa.launch(
        lambda group: (adds(group, 1.0), node(group)), 4, on="ray", options={"cpus": 0.5}, timeout_s=LONG_S, per_host=2
    )
    assert [each for each, _ in results] == [(rank, 4, 10.0) for rank in range(4)]
    nodes = [each for _, each in results]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


def test_ray_exception_comes_back_as_its_own_type() -> None:
    with pytest.raises(KeyError, match="no such thing") as caught:
        oa.launch(fails, 2, on="ray", options={"cpus": 0.5}, timeout_s=LONG_S)
    assert "on rank 1 of 2" in caught.value.__notes__[0]


def test_ray_killed_actor_is_named() -> None:
    with pytest.raises((oa.RankError, oa.PeerLostError), match="rank 1") as caught:
        oa.launch(killed, 2, on="ray", options={"cpus": 0.5}, timeout_s=LONG_S)
    assert isinstance(caught.value, oa.RankError)


def test_ray_impossible_placement_is_refused_in_words() -> None:
    with pytest.raises(
        oa.UsageError, match=r"can never place 1 times \{'CPU': 64.0\}.*nodes have \{'CPU': 2.0\}, \{'CPU': 2.0\}"
    ):
        oa.launch(adds, 1, on="ray", args=(1.0,), options={"cpus": 64}, timeout_s=LONG_S)


def test_ray_unknown_option_is_refused() -> None:
    with pytest.raises(oa.UsageError, match=r"cpu: Extra inputs.*There are: address, cpus"):
        oa.launch(adds, 1, on="ray", args=(1.0,), options={"cpu": 1})


def test_ray_deadline_ends_actors_and_frees_resources() -> None:
    import ray

    with pytest.raises(oa.DeadlineError, match="ranks 0-1 of 2 had not finished"):
        oa.launch(hangs, 2, on="ray", options={"cpus": 2, "strategy": "STRICT_SPREAD"}, timeout_s=20)
    assert oa.launch(adds, 2, on="ray", args=(1.0,), options={"cpus": 2}, timeout_s=LONG_S) == [(0, 2, 3.0), (1, 2, 3.0)]
    assert ray.is_initialized()


def test_ray_two_jobs_at_once_each_right() -> None:
    jobs = [
        oa.launch_async(adds, 2, on="ray", args=(value,), options={"cpus": 0.5}, timeout_s=LONG_S) for value in (1.0, 100.0)
    ]
    assert [[each[2] for each in job.results()] for job in jobs] == [[3.0, 3.0], [201.0, 201.0]]


def test_ray_ranks_stay_warm_and_serve_tasks(tmp_path: Path) -> None:
    with oa.Ranks(2, on="ray", options={"cpus": 0.5}, retries=1) as ranks:
        first = ranks.run(pid, timeout_s=LONG_S)
        began = time.monotonic()
        assert ranks.run(pid, timeout_s=LONG_S) == first
        print(f"a warm run took {time.monotonic() - began:.3f} s")
        with pytest.raises(KeyError):
            ranks.run(fails, timeout_s=LONG_S)
        assert ranks.run(adds, 1.0, timeout_s=LONG_S) == [(0, 2, 3.0), (1, 2, 3.0)]
        assert list(ranks.map(abs, range(-10, 0), timeout=LONG_S)) == list(range(10, 0, -1))
        assert ranks.submit(die, str(tmp_path / "once")).result(LONG_S) == "alive"
        with pytest.raises(oa.RankError, match="a group needs all"):
            ranks.run(adds, 1.0, timeout_s=LONG_S)


DRIVER = """
import os, sys, time
import oneaccord as oa
import ray
ray.init(address=sys.argv[1], _node_ip_address="127.0.0.5")

def speak(group):
    print("spoken by", group.rank, os.getpid(), flush=True)
    open(sys.argv[2] + str(group.rank), "w").write(str(os.getpid())) if False else None
    return os.getpid()

def hang(group, path):
    with open(path + str(group.rank), "w") as file:
        file.write(f"{os.getpid()}\\n")
    while True:
        group.barrier(timeout_s=3600)
        time.sleep(0.01)

if __name__ == "__main__":
    print(oa.launch(speak, 2, on="ray", options={"cpus": 0.5}), flush=True)
    time.sleep(2)
    print("ready", flush=True)
    oa.launch(hang, 2, on="ray", args=(sys.argv[2],), options={"cpus": 0.5})
"""


def test_ray_output_has_ranks_and_a_killed_driver_leaves_no_rank(cluster: Any, tmp_path: Path) -> None:
    program = tmp_path / "driver.py"
    program.write_text(textwrap.dedent(DRIVER))
    words = [sys.executable, str(program), cluster.address, str(tmp_path / "pid")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        said = []
        for line in driver.stdout:
            said.append(line)
            if line.startswith("ready"):
                break
        notes = [tmp_path / f"pid{rank}" for rank in range(2)]
        until = time.monotonic() + LONG_S
        while not all(each.exists() and each.read_text().endswith("\n") for each in notes) and time.monotonic() < until:
            time.sleep(0.05)
        processes = [int(each.read_text()) for each in notes]
        driver.kill()
    text = "".join(said)
    assert "[0] spoken by 0" in text
    assert "[1] spoken by 1" in text
    until = time.monotonic() + 20
    while not all(is_gone(each) for each in processes) and time.monotonic() < until:
        time.sleep(0.05)
    assert all(is_gone(each) for each in processes)

"""``oneaccord bench --tune`` with real ranks: they measure what is right, and say which rank found what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support import preloaded
from support.worlds import must, on_threads

import oneaccord as oa
from oneaccord.api import ThreadWorld
from oneaccord.schedule.algorithms.registry import BUILTIN
from oneaccord.schedule.steps import Collective
from oneaccord_lab.tuning.measure import measure
from oneaccord_lab.tuning.plan import Plan, Point

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PROGRAM = """
import numpy as np
import oneaccord as oa
from oneaccord.config import load
from oneaccord.config.selection import make_selector
from oneaccord.config.plugins import get_plugin_manager
from oneaccord.schedule.steps import Collective
with oa.init(timeout_s=20) as group:
    assert (group.all_reduce(np.ones(2)) == 3).all()
if group.rank == 0:
    print(make_selector(load(), get_plugin_manager()).choose(Collective.ALL_REDUCE, 16, 3, ranks_per_host=3).reason)
"""

WATCH = """
from oneaccord.api import hookimpl

@hookimpl
def oneaccord_collective_finished(event):
    with open("used.txt", "a") as file:
        file.write(f"{event.operation} {event.algorithm}\\n")
"""

WRONG = """
from oneaccord.api import hookimpl

def spoil(backend, source, target, root, deadline, on_stall):
    target[...] = 7

@hookimpl
def oneaccord_collective(request):
    return spoil if request.collective.value == "all_reduce" else None
"""


@pytest.fixture
def shell(tmp_path: Path) -> Run:
    """Run the command line in an empty folder that is on its path, without variables of oneaccord but those given."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ONEACCORD_")}
        environ |= {"PYTHONPATH": str(tmp_path), **variables}
        return preloaded.run(["-m", "oneaccord", *words], environ=environ, cwd=tmp_path)

    return run


def measured(plan: Plan, world_size: int, backend: str) -> list[list[Point]]:
    """Measure on threads; return what each rank was told."""
    world = ThreadWorld(world_size, backend)

    def body(rank: int) -> tuple[int, list[Point]]:
        with world.rank(rank):
            return measure(plan)

    outcomes = must(on_threads(body, world_size))
    assert [rank for rank, _ in outcomes] == list(range(world_size))
    return [points for _, points in outcomes]


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_algorithm_of_every_collective_is_measured_and_every_rank_told_the_same(world_size: int) -> None:
    candidates = {
        collective.value: [each.name for each in BUILTIN if each.collective is collective and not each.by_host]
        for collective in Collective
    }
    ranks = measured(Plan(candidates, [8, 1000], 50.0, "tcp", "", rounds=3), world_size, "tcp")
    assert ranks == [ranks[0]] * world_size
    for collective, names in candidates.items():
        points = [point for point in ranks[0] if point.collective == collective]
        assert len(points) == (1 if collective == "barrier" else 2)
        for point in points:
            assert set(point.times) == set(names)
            assert min(point.times.values()) > 0
            assert point.rounds == 3
    sizes = [point.nbytes for point in ranks[0] if point.collective == "all_gather"]
    assert sizes == [8 if world_size == 1 else 12, 1000 // (4 * world_size) * 4 * world_size]


def test_what_the_budget_does_not_reach_is_not_measured() -> None:
    [points, _] = measured(Plan({"all_reduce": ["ring"]}, [8, 16], 1e-9, "tcp", ""), 2, "tcp")
    assert points == [Point("all_reduce", 8), Point("all_reduce", 16)]


def test_a_table_is_measured_over_tcp_and_used_by_the_next_job(shell: Run, tmp_path: Path) -> None:
    (tmp_path / "oneaccord.toml").write_text('backend = "tcp"\n[algorithms]\nall_reduce = "ring"\n')
    # Neither the config nor a variable may decide what is to be measured.
    (tmp_path / "watch.py").write_text(WATCH)
    variables = {"ONEACCORD_ALGORITHMS__ALL_REDUCE": "ring", "ONEACCORD_PLUGINS": "watch"}
    answer = shell("bench", "all_reduce", "-n", "3", "--tune", "--sizes", "8,1KiB", "--budget", "30", **variables)
    assert answer.returncode == 0, answer.stderr
    used = set((tmp_path / "used.txt").read_text().splitlines())
    assert {"all_reduce ring", "all_reduce recursive_doubling", "all_reduce rabenseifner"} <= used
    assert "recursive_doubling" in answer.stdout
    assert 'selection = "tuned.toml"' in answer.stdout
    (tmp_path / "oneaccord.toml").write_text('backend = "tcp"\nselection = "tuned.toml"\n')
    (tmp_path / "program.py").write_text(PROGRAM)
    answer = shell("run", "--no-prefix", "-n", "3", "program.py")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("measured here at ")


def test_a_wrong_result_ends_the_measurement_and_names_the_rank(shell: Run, tmp_path: Path) -> None:
    (tmp_path / "wrong_native.py").write_text(WRONG)
    words = ("all_reduce", "-n", "2", "--algorithms", "--backend", "tcp", "--sizes", "8")
    answer = shell("bench", *words, ONEACCORD_PLUGINS="wrong_native")
    assert answer.returncode == 2
    assert "InternalError" in answer.stderr
    assert "all_reduce of 8 bytes by ring gave a wrong result: element 0 is 7.0; expected " in answer.stderr
    assert "; 2 of 2 elements are wrong" in answer.stderr
    assert "error: nothing was measured: a rank failed, as shown above (exit code 1)" in answer.stderr
    assert not (tmp_path / "tuned.toml").exists()


def test_the_worker_writes_what_rank_0_was_told(shell: Run, tmp_path: Path) -> None:
    plan = Plan({"barrier": ["dissemination"]}, [], 20.0, "tcp", str(tmp_path / "points.json"), rounds=3)
    answer = shell("run", "-n", "2", "-m", "oneaccord_lab.tuning.measure", plan.dump())
    assert answer.returncode == 0, answer.stderr
    [point] = [Point(**each) for each in json.loads((tmp_path / "points.json").read_text())]
    assert (point.collective, point.nbytes, list(point.times)) == ("barrier", 0, ["dissemination"])


def test_measuring_leaves_no_group_behind() -> None:
    measured(Plan({"barrier": ["dissemination"]}, [], 0.2, "tcp", ""), 2, "tcp")
    with oa.init(config={}) as group:
        assert group.world_size == 1


def test_a_backend_whose_time_is_virtual_is_refused(shell: Run) -> None:
    answer = shell("bench", "all_reduce", "-n", "2", "--algorithms", "--backend", "simulated", "--sizes", "8")
    assert answer.returncode == 2
    assert "the backend 'simulated' runs on its own clock, so it cannot be measured" in answer.stderr

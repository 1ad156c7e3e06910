"""One seed, one run: the same order, the same times and the same trace, wherever and however often it is repeated."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord.api import NETWORKS, Group, Jitter
from oneaccord_simulated.task import Task

JITTERY = NETWORKS["fat-tree"].model_copy(update={"jitter": Jitter(distribution="exponential", mean_s=2e-6)})
NETWORKS_TRIED: dict[str, Any] = {"none": None, "textbook": "textbook", "laptop": "laptop", "torus": "torus", "jitter": JITTERY}
FAULTS_TRIED: dict[str, Any] = {
    "none": None,
    "slow": simulated.Slow(rank=1, factor=3.0),
    "kill": simulated.Kill(rank=2, operation="all_reduce", nth=2),
    "pause": simulated.Pause(rank=1, at_s=1e-4, for_s=0.5),
    "delay": simulated.Delay(links=((0, "*"),), by_s=1e-3),
    "cut": simulated.Cut(links=((0, 1),), until_s=0.002),
    "drop": simulated.Drop(source=0, dest=1, nth=9),
    "corrupt": simulated.Corrupt(source=0, dest=1, nth=9),
}


class Everything:
    """A program that does all there is to do, and writes down what happens in the order in which it does."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def __call__(self, group: Group) -> float:
        rank, size = group.rank, group.world_size
        array = np.arange(12.0 * size) + rank
        self.log.append(("begins", rank))
        group.mark("step 0")
        group.compute(1e-4 * (rank + 1))
        for root in (0, size - 1):
            group.broadcast(array, root)
            group.reduce(array, root=root)
            group.gather(array, root)
            group.scatter(array, root)
        group.all_reduce(array, "max")
        group.all_gather(array)
        group.reduce_scatter(array)
        group.all_to_all(array)
        group.barrier()
        self.log.append(("has met", rank))
        works = [group.all_reduce_async(array * factor) for factor in range(3)]
        works.append(group.all_gather_async(array))
        for work in works:
            work.add_done_callback(lambda _: self.log.append(("callback", rank)))
        sent, received = group.send_async(array, (rank + 1) % size), group.recv_async((rank - 1) % size)
        self.log.append(("received", rank, float(received.wait()[0])))
        sent.wait()
        for work in works:
            work.wait()
        with group.coalesce() as batch:
            for count in (1, 7, 100):
                batch.all_reduce(np.full(count, rank, np.float32))
        group.all_gather_object({"rank": rank, "text": "x" * rank, "set": sorted({"a", "b"})})
        group.broadcast_object(["an", "object"], 0)
        with group.split(rank % 2) as half:
            self.log.append(("half", rank, half.rank))
            half.all_reduce(array)
        oa.sleep(0.01 * (size - rank))
        self.log.append(("ends", rank))
        return float(group.sendrecv(array, (rank + 1) % size, (rank - 1) % size)[0])


def whole(seed: int, network: Any = None, faults: Any = None, size: int = 5) -> dict[str, Any]:
    """Return all that can be told of a run of everything."""
    program = Everything()
    run = simulated.run(program, size, seed, network, faults, timeout_s=30, check=False)
    return {
        "trace": run.trace_json(),
        "results": run.results,
        "errors": {rank: f"{type(error).__name__}: {error}" for rank, error in run.errors.items()},
        "order of errors": list(run.errors),
        "log": program.log,
        "duration": run.duration_s,
    }


@pytest.mark.parametrize("network", NETWORKS_TRIED)
def test_a_seed_gives_the_same_run_again_on_every_network(network):
    first = whole(7, NETWORKS_TRIED[network])
    assert not first["errors"]
    whole(8, NETWORKS_TRIED[network], size=3)  # what else the process did in between changes nothing
    assert whole(7, NETWORKS_TRIED[network]) == first


@pytest.mark.parametrize("faults", FAULTS_TRIED)
@pytest.mark.parametrize("network", ["jitter", pytest.param("none", marks=pytest.mark.long)])
def test_a_seed_gives_the_same_run_again_whatever_goes_wrong(network, faults):
    first = whole(3, NETWORKS_TRIED[network], FAULTS_TRIED[faults])
    assert bool(first["errors"]) == (faults in {"kill", "drop", "corrupt"})
    assert whole(3, NETWORKS_TRIED[network], FAULTS_TRIED[faults]) == first


def test_a_seed_gives_the_same_run_again_on_a_computer_that_is_busy(monkeypatch):
    first, given, give_baton = whole(3), itertools.count(1), Task.give_baton

    def late(task: Task) -> None:
        if next(given) % 100 == 0:
            time.sleep(0.2)  # who passes the baton on has no processor for as long as this
        give_baton(task)

    monkeypatch.setattr(Task, "give_baton", late)
    assert whole(3) == first
    assert next(given) > 200


def test_a_deadlock_is_told_in_the_same_words_again():
    def program(group: Group) -> None:
        work = group.recv_async((group.rank + 1) % group.world_size)
        group.barrier()
        work.wait()

    texts = {str(simulated.run(program, 4, seed=5, check=False).cause) for _ in range(5)}
    assert len(texts) == 1


OPERATIONS = {
    "all_reduce": lambda group: group.all_reduce(np.arange(3.0) + group.rank).tolist(),
    "barrier": lambda group: group.barrier(),
    "broadcast": lambda group: group.broadcast(np.arange(9) + group.rank, 1).tolist(),
    "in the background": lambda group: [work.wait().tolist() for work in [group.all_gather_async(np.full(2, group.rank))] * 2],
    "around": lambda group: (
        int(group.sendrecv(np.full(400, group.rank), group.world_size - 1 - group.rank, group.world_size - 1 - group.rank)[0])
        if group.world_size % 2 == 0
        else None
    ),
    "compute": lambda group: group.compute(0.5 * group.rank),
    "sleep": lambda group: oa.sleep(1.0 / (1 + group.rank)),
    "object": lambda group: group.all_gather_object({"rank": group.rank}),
    "split": lambda group: group.split(group.rank // 2).all_reduce(group.rank).item(),
}


@settings(max_examples=25)
@given(
    names=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=6),
    size=st.integers(2, 4),
    seed=st.integers(0, 2**64),
    network=st.sampled_from(sorted(NETWORKS_TRIED)),
)
def test_any_program_gives_the_same_run_for_a_seed_and_the_same_results_for_all(names, size, seed, network):
    def program(group: Group) -> list[Any]:
        return [OPERATIONS[name](group) for name in names]

    first = simulated.run(program, size, seed, NETWORKS_TRIED[network])
    again = simulated.run(program, size, seed, NETWORKS_TRIED[network])
    assert (again.trace_json(), again.results) == (first.trace_json(), first.results)
    assert simulated.run(program, size, 0).results == first.results


# Elsewhere.

SCRIPT = """
import hashlib, json, sys
import numpy as np
import oneaccord_simulated as simulated

log = []

def program(group):
    log.append(group.rank)
    total = group.all_reduce(np.arange(100.0) * group.rank)
    works = [group.all_reduce_async(total * factor) for factor in range(3)]
    works[1].add_done_callback(lambda work: log.append((group.rank, "callback")))
    group.compute(1e-6 * group.rank)
    names = {name: len(name) for name in {"alpha", "beta", "gamma", "delta"}}
    group.all_gather_object(sorted(names))
    with group.split(group.rank % 2) as half: half.barrier()
    log.append(group.rank)
    return float(sum(work.wait()[1] for work in works))

found = []
for seed in range(4):
    run = simulated.run(program, 6, seed, network="fat-tree", faults=simulated.Slow(rank=2, factor=4.0))
    found.append([hashlib.sha256(run.trace_json().encode()).hexdigest(), run.results, run.duration_s])
print(json.dumps([found, log]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A program in a file of its own, in a folder of its own."""
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "here" / "script.py"
    path.write_text(SCRIPT)
    return path


def told(script: Path | str, cwd: Path, hash_seed: int = 0) -> Any:
    """Run a script in a process of its own; return what it says."""
    environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=cwd, env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


def test_another_process_another_hash_seed_and_another_directory_change_nothing(script):
    first = told(script, script.parent, hash_seed=1)
    assert told("../here/script.py", script.parent.parent / "elsewhere", hash_seed=2) == first


@pytest.mark.long
def test_busy_processes_and_threads_change_nothing(script):
    first, alone = told(script, script.parent), whole(11, JITTERY)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    spinner = threading.Thread(target=spin)
    spinner.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        assert told(script, script.parent) == first
        assert whole(11, JITTERY) == alone
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        spinner.join()
        for process in busy:
            process.kill()
            process.wait()


def test_the_trace_does_not_tell_where_the_program_lies_or_whence_it_was_started(tmp_path, monkeypatch):
    source = "def program(group):\n    group.barrier()\n    group.all_reduce(1)\n"
    traces = set()
    for name in ("one", "two"):
        package = tmp_path / name / "shop"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "train.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path / name)
        monkeypatch.chdir(tmp_path if name == "one" else package)
        for module in [module for module in sys.modules if module.partition(".")[0] == "shop"]:
            monkeypatch.delitem(sys.modules, module)
        from shop.train import program  # type: ignore[import-not-found]

        run = simulated.run(program, 2)
        assert {call.place for call in run.trace.calls} == {"shop/train.py:2", "shop/train.py:3"}
        traces.add(run.trace_json())
    assert len(traces) == 1


def test_a_program_may_change_its_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def program(group: Group) -> None:
        group.barrier()
        os.chdir(tmp_path.parent)
        group.barrier()

    calls = simulated.run(program, 2).trace.calls_of(0)
    assert {call.place.partition(":")[0] for call in calls} == {f"{__name__.replace('.', '/')}.py"}


# Other seeds.


def order_of(seed: int, size: int = 3) -> tuple[int, ...]:
    order: list[int] = []

    def program(group: Group) -> None:
        group.barrier()
        order.append(group.rank)

    simulated.run(program, size, seed)
    return tuple(order)


def test_seeds_find_every_order_of_three_ranks():
    found = Counter(order_of(seed) for seed in range(200))
    assert sorted(found) == sorted(itertools.permutations(range(3)))
    assert min(found.values()) >= 10, found


def test_seeds_find_every_interleaving_of_two_ranks_that_take_turns():
    """Each rank says something twice, with a call between; that makes six orders."""

    def said(seed: int) -> str:
        words: list[str] = []

        def program(group: Group) -> None:
            words.append("ab"[group.rank])
            group.send(group.rank, 1 - group.rank)  # it waits for nobody
            words.append("AB"[group.rank])
            group.recv(1 - group.rank)

        simulated.run(program, 2, seed, config={"backends": {"simulated": {"eager_bytes": 1 << 16}}})
        return "".join(words)

    found = Counter(said(seed) for seed in range(200))
    assert set(found) == {"aAbB", "abAB", "abBA", "baAB", "baBA", "bBaA"}


def test_seeds_of_any_size_are_told_apart():
    assert (
        len({simulated.run(lambda group: group.barrier(), 8, seed).trace_json() for seed in (0, 1, 2**32, 2**64 + 1, 2**200)})
        == 5
    )


PINNED = """
import numpy as np

def program(group):
    total = group.all_reduce(np.ones(1000))
    work = group.all_reduce_async(total)
    group.compute(1e-6 * group.rank)
    group.sendrecv(np.ones(300), (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size)
    work.wait()
    group.broadcast_object({"step": 1}, 0)
    group.mark("done")
    with group.split(group.rank % 2) as half: half.all_gather(np.ones(4))
    group.barrier()
"""


def test_the_trace_of_a_program_is_the_same_on_all_computers_and_in_all_versions_of_python(tmp_path, monkeypatch):
    """If this fails on some computer alone, runs no longer repeat there. If it fails everywhere, because a schedule, the network's model
    or the trace's form has changed on purpose, pin the new hash."""
    (tmp_path / "pinned_program.py").write_text(PINNED)
    monkeypatch.syspath_prepend(tmp_path)
    from pinned_program import program  # type: ignore[import-not-found]

    algorithms = dict.fromkeys(("all_reduce", "all_gather"), "ring")  # not what some table says
    run = simulated.run(program, 5, seed=2026, network=JITTERY, config={"algorithms": algorithms})
    assert (
        hashlib.sha256(run.trace_json().encode()).hexdigest()
        == "f783031a8ee60381ced29b7573815ce749b1c0776b84b995a8451aa5cacc1a27"
    )


def with_threads(group: Group) -> list[float]:
    """Use all that a program waits with: a pool, a queue, a lock that ranks share, naps, a timer and an event loop."""
    wanted: queue.Queue[int] = queue.Queue(maxsize=1)
    found: list[float] = []

    def serve() -> None:
        for number in iter(wanted.get, 0):
            with SHARED:
                time.sleep(0.001 * number)
                found.append(number + group.rank)

    async def talk() -> None:
        await asyncio.gather(group.all_reduce_async(1.0), asyncio.sleep(0.5))

    server = threading.Thread(target=serve)
    server.start()
    with ThreadPoolExecutor(2) as pool:
        sums = [pool.submit(group.compute, 0.01 * each) for each in range(4)]
        for number in (3, 1, 2, 0):
            wanted.put(number)
            with SHARED:
                oa.sleep(0.01)
        for each in sums:
            each.result()
    server.join()
    timer = threading.Timer(0.25, group.mark, ("late",))
    timer.start()
    asyncio.run(talk())
    timer.join()
    return [*found, group.all_reduce(sum(found)).item()]


SHARED = threading.Lock()


def test_a_program_with_threads_has_the_same_trace_again_beside_busy_threads():
    def told(seed: int) -> tuple[str, object]:
        run = simulated.run(with_threads, 3, seed, "fat-tree")
        return run.trace_json(), run.results

    first = [told(seed) for seed in range(4)]
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    busy = [threading.Thread(target=compute) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in busy:
            thread.start()
        assert [told(seed) for seed in range(4)] == first
    finally:
        over.set()
        sys.setswitchinterval(interval)
    for thread in busy:
        thread.join()

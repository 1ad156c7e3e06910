"""Large worlds in one process: the results are right, and the memory stays small."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import oneaccord_simulated as simulated
from oneaccord.api import Group

DIGITS = Path(__file__).parents[3] / "examples" / "gallery" / "digits.py"
MAX_MIB = 1024

Alone = Callable[[str], tuple[Any, int]]

PRELUDE = """
import json, resource, sys
import numpy as np
import oneaccord_simulated as simulated

def tell(found):
    try:  # not ru_maxrss: on Linux that is the parent's, where this was larger before exec
        with open("/proc/self/status") as status:
            mebibytes = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) >> 10
    except FileNotFoundError:
        mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) >> 20
    print(json.dumps([found, mebibytes]))
"""


@pytest.fixture
def alone() -> Alone:
    """Run lines in a process of their own; return what they ``tell``, and how many MiB they needed at most."""

    def run(lines: str) -> tuple[Any, int]:
        command = [sys.executable, "-c", PRELUDE + lines]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=400)
        found, mebibytes = json.loads(done.stdout)
        return found, mebibytes

    return run


@pytest.mark.long
@pytest.mark.parametrize("network", [None, "fat-tree"])
def test_1024_ranks_add_up_1_kib(alone, network):
    found, mebibytes = alone(
        f"""
run = simulated.run(lambda group: group.all_reduce(np.full(256, group.rank, np.float32)), 1024, network={network!r})
tell([sorted({{float(x) for result in run.results for x in result}}), len(run.results), run.trace.count("all_reduce")])
"""
    )
    assert found == [[1023 * 512.0], 1024, 1]
    assert mebibytes < MAX_MIB


@pytest.mark.long
@pytest.mark.timeout(450)
def test_256_ranks_train_the_example(alone):
    """They learn what one rank does: the same gradients are added up, in another order."""
    found, mebibytes = alone(
        f"""
sys.path.insert(0, {str(DIGITS.parent)!r})
import digits, functools
digits.BATCH = 256  # on 256 ranks an image each
digits.load = functools.cache(digits.load)  # ranks that are threads may share the images

def program(group):
    return digits.main(group, epochs=4)

one, many = simulated.run(program, 1), simulated.run(program, 256, keep_messages=False)
accuracy, losses = many.results[200]
same = all(result == many.results[200] for result in many.results)
tell([one.results[0][0], accuracy, same, one.results[0][1], losses])
"""
    )
    one, many, same, losses_of_one, losses = found
    assert same
    assert one > 0.5
    assert abs(many - one) < 0.02
    assert losses == pytest.approx(losses_of_one, rel=1e-3)
    assert mebibytes < MAX_MIB


def test_what_a_rank_costs_does_not_grow_with_their_number():
    """Counted in the messages and the calls that the trace has, which say how often anything was done."""

    def program(group: Group) -> None:
        group.all_reduce(1.0)
        group.barrier()

    def each(size: int) -> tuple[float, float]:
        trace = simulated.run(program, size).trace
        return len(trace.messages) / size, len(trace.calls) / size

    (few, calls), (many, same_calls) = each(8), each(64)
    assert calls == same_calls == 2
    assert many == 2 * few  # twice as many rounds


@pytest.mark.long
def test_who_goes_first_among_many_is_still_up_to_the_seed():
    def first(seed: int) -> int:
        order: list[int] = []

        def program(group: Group) -> None:
            group.barrier()
            order.append(group.rank)

        simulated.run(program, 64, seed, keep_messages=False)
        assert sorted(order) == list(range(64))
        return order[0]

    assert len({first(seed) for seed in range(12)}) > 6


@pytest.mark.parametrize("size", [32, pytest.param(128, marks=pytest.mark.long)])
def test_ranks_by_the_dozen_may_all_ask_whether_their_work_is_done(size):
    def program(group: Group) -> float:
        work = group.all_reduce_async(float(group.rank))
        while not work.done():
            pass
        return work.wait().item()

    assert simulated.run(program, size, network="fat-tree", keep_messages=False).results == [size * (size - 1) / 2] * size

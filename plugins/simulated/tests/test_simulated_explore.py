"""`oneaccord_simulated.explore`: trying seeds until one fails, and what is said about it."""

from __future__ import annotations

import copy
import doctest
import gc
import itertools
import re
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oneaccord as oa
import oneaccord_simulated
from oneaccord.api import Group
from oneaccord_simulated import FaultPlan, Kill, Pause, Run, explore, random_faults, run


def first_come(winner: int) -> Callable[[Group], list[int]]:
    """Return a program with a bug: where one rank is the first after the barrier, it takes another way than the others."""
    order: list[int] = []

    def program(group: Group) -> list[int]:
        if group.rank == 0:
            order.clear()
        group.barrier()
        order.append(group.rank)
        if order == [winner]:
            group.recv((winner + 1) % group.world_size)
        group.barrier()
        return list(order)

    return program


def crossed(group: Group) -> None:
    group.all_reduce(1.0)
    group.recv(1 - group.rank)


def each_of(values: list[Any]) -> Callable[[Group], Any]:
    """Return a program of one rank that returns one value after the other, run by run."""
    rest = iter(values)
    return lambda group: next(rest)


def test_all_seeds_may_pass():
    seen: list[int] = []
    exploration = explore(lambda group: group.all_reduce(1).item(), 2, range(40), check=lambda done: seen.append(done.seed))
    assert (exploration.seeds_run, exploration.seed, exploration.error, exploration.run) == (40, None, None, None)
    assert (exploration.failed, exploration.story, exploration.repeat) == (False, "", "")
    assert seen == list(range(40))
    assert str(exploration) == "function: 40 seeds passed"
    assert repr(exploration) == "<Exploration of function, 40 seeds>"
    exploration.raise_failure()


@pytest.mark.parametrize("winner", [0, 1, 2])
def test_the_first_seed_that_fails_ends_it_and_repeats_it(winner):
    program = first_come(winner)
    fails = [run(program, 3, seed, check=False).cause is not None for seed in range(30)]
    assert 0 < sum(fails) < 30, "the program tests nothing"

    exploration = explore(program, 3, itertools.count())
    assert exploration.failed
    assert exploration.seed == fails.index(True)
    assert exploration.seeds_run == exploration.seed + 1
    assert exploration.run.cause is exploration.error
    assert exploration.repeat == f"run(program, 3, seed={exploration.seed})"
    with pytest.raises(oa.DeadlockError) as again:
        eval(exploration.repeat, {"run": run, "program": program})
    assert str(again.value) == str(exploration.error)
    assert again.value.run.trace.story() == exploration.story


def test_seeds_are_tried_in_their_order_and_no_more_than_needed():
    tried: list[int] = []
    seeds = iter([9, 2, 7, 1])
    exploration = explore(lambda group: tried.append(group.rank) or 1 // (len(tried) - 3), 1, seeds)
    assert (exploration.seed, exploration.seeds_run, list(seeds)) == (7, 3, [1])


def test_the_report_has_the_error_the_end_of_the_trace_and_the_line_that_repeats_it():
    exploration = explore(crossed, 2, [17])
    here = f"test_simulated_explore.py:{crossed.__code__.co_firstlineno + 2}"
    # Before its name stands the path of the file below the working directory.
    lines, told = (
        re.sub(r" at \S*(?=test_simulated_explore)", " at ", text).splitlines()
        for text in (str(exploration), f"DeadlockError: {exploration.error}")
    )
    assert all(any(f"  rank {rank}: recv" in line and here in line for line in told) for rank in range(2))
    place = exploration.error.rank
    assert lines == [
        f"crossed: 0 seeds passed, seed 17 failed on rank {place} of 2",
        *told,
        "the end of its trace:",
        "  2 ranks, seed 17, 0.000000 s",
        "  ... 2 calls before, all ranks had finished all_reduce #0",
        f"    0.000000 s  rank 0     recv from rank 1 #1  began at {here}",
        f"    0.000000 s  rank 1     recv from rank 0 #1  began at {here}",
        "    0.000000 s  rank 0     recv from rank 1 #1  ended by DeadlockError",
        "    0.000000 s  rank 1     recv from rank 0 #1  ended by DeadlockError",
        "    0.000000 s  ranks 0-1  ended",
        "repeat with: run(crossed, 2, seed=17)",
    ]
    assert repr(exploration) == "<Exploration of crossed, 1 seed, seed 17 failed: DeadlockError>"


def test_the_failure_is_raised_with_the_report_as_a_note_and_tells_nothing_twice():
    exploration = explore(crossed, 2)
    for _ in range(2):
        with pytest.raises(oa.DeadlockError) as caught:
            exploration.raise_failure()
        assert caught.value is exploration.error
        shown = "".join(traceback.format_exception_only(caught.value))
        for words in ("deadlock: no rank can go on", "the end of its trace", "repeat with: run(crossed, 2, seed=0)"):
            assert shown.count(words) == 1


def test_what_check_raises_is_a_failure():
    def check(done: Run[int]) -> None:
        assert done.seed < 5, "five is too much"

    exploration = explore(crossed, 2, range(3, 9), check=check, expected=oa.DeadlockError)
    assert (exploration.seed, exploration.seeds_run) == (5, 3)
    assert exploration.run.results == [None, None]
    assert str(exploration).startswith("crossed: 2 seeds passed, seed 5 failed\nAssertionError: five is too much\n")
    with pytest.raises(AssertionError, match="five is too much"):
        exploration.raise_failure()


def test_check_may_fail_as_pytest_does_but_an_interrupt_is_no_failure():
    exploration = explore(lambda group: None, 1, check=lambda done: pytest.fail("by hand"))
    assert exploration.seed == 0
    with pytest.raises(pytest.fail.Exception, match="by hand"):
        exploration.raise_failure()

    def interrupt(done: Run[None]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explore(lambda group: None, 1, check=interrupt)


def test_a_run_with_an_error_goes_to_check_only_where_the_error_is_expected():
    seen: list[Any] = []
    kill = Kill(rank=1, operation="all_reduce", nth=1)

    def train(group: Group) -> None:
        for _ in range(3):
            group.all_reduce(1.0)

    for expected, failed in [((), True), (oa.DeadlineError, True), (oa.PeerLostError, False), ((OSError, KeyError), False)]:
        seen.clear()
        exploration = explore(train, 3, range(4), faults=kill, expected=expected, check=lambda done: seen.append(done.cause))
        assert exploration.failed is failed
        assert [type(cause) for cause in seen] == [oa.PeerLostError] * (0 if failed else 4)


def test_faults_may_follow_from_the_seed_and_are_written_out():
    def plan_of(seed: int) -> list[Any]:
        return [Pause(rank=0, at_s=0.5, for_s=0.25), Kill(rank=1, operation="send", nth=seed)] if seed else []

    def chat(group: Group) -> int:
        for _ in range(3):
            if group.rank == 1:
                group.send(1, 0)
            else:
                group.recv(1)
        return group.rank

    exploration = explore(chat, 2, [9, 0, 2, 1], faults=plan_of)
    assert exploration.seed == 2
    assert exploration.repeat == (
        "run(chat, 2, seed=2, faults=[Kill(rank=1, operation='send', nth=2), Pause(rank=0, at_s=0.5, for_s=0.25)])"
    )
    with pytest.raises(oa.PeerLostError) as again:
        eval(exploration.repeat, {**vars(oneaccord_simulated), "run": run, "Kill": Kill, "Pause": Pause, "chat": chat})
    assert str(again.value) == str(exploration.error)


@given(st.integers(0, 10_000))
@settings(max_examples=60)
def test_whatever_the_plan_the_line_that_repeats_it_has_the_same_one(seed):
    names = {name: getattr(oneaccord_simulated, name) for name in oneaccord_simulated.__all__}
    exploration = explore(lambda group: 1 // 0, 3, [7], faults=lambda _: random_faults(seed, 3))
    said = exploration.repeat.removeprefix("run(function, 3, seed=7").removesuffix(")").removeprefix(", faults=")
    assert FaultPlan.of(eval(said, names)).faults == random_faults(seed, 3).faults


def test_the_line_that_repeats_it_has_all_that_was_given(tmp_path):
    plan, network = tmp_path / "plan.toml", tmp_path / "net.toml"
    plan.write_text("[[cut]]\nlinks = [[0, 1]]\n")
    network.write_text('topology = "wires"\n[wire]\nlatency_s = 1e-3\nbandwidth_bytes_per_s = 1e9\n')
    given = {"network": network, "faults": str(plan), "config": {"timeout_s": 3}, "timeout_s": 0.5}
    exploration = explore(lambda group: group.all_reduce(1), 2, **given)
    assert type(exploration.error) is oa.DeadlineError
    assert "did not finish within 0.5 s" in str(exploration.error)
    assert exploration.repeat == (
        f"run(function, 2, seed=0, network={str(network)!r}, config={{'timeout_s': 3}}, timeout_s=0.5, faults={str(plan)!r})"
    )
    exploration = explore(lambda group: group.all_reduce(1), 2, **{**given, "timeout_s": None})
    assert "did not finish within 3 s" in str(exploration.error)
    times: list[float] = []
    explore(lambda group: group.all_reduce(1), 2, range(3), network, check=lambda done: times.append(done.duration_s))
    assert all(0.001 < time < 0.1 for time in times)
    assert len(times) == 3


def test_files_are_read_and_iterators_consumed_but_once(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[[kill]]\nrank = 0\noperation = "barrier"\nnth = 1\n')

    def program(group: Group) -> None:
        plan.unlink(missing_ok=True)
        group.barrier()

    assert explore(program, 2, range(3), faults=plan).seeds_run == 3
    kills = (Kill(rank=0, operation="*", nth=0) for _ in range(1))
    exploration = explore(
        lambda group: group.barrier(),
        2,
        range(3),
        faults=kills,
        expected=oa.PeerLostError,
        check=lambda done: done.results.index(None),
    )
    assert exploration.seeds_run == 3
    assert not exploration.failed


def test_no_run_but_the_one_that_failed_stays_alive():
    runs: list[weakref.ref[Run[Any]]] = []

    def program(group: Group) -> None:
        gc.collect()
        assert [each for each in runs if each() is not None] == []
        crossed(group)

    def check(done: Run[Any]) -> None:
        runs.append(weakref.ref(done))
        assert len(runs) < 6, "enough"

    exploration = explore(program, 2, range(9), check=check, expected=oa.DeadlockError, alike=True)
    assert str(exploration.error).startswith("enough")
    assert runs[-1]() is exploration.run


def test_what_describes_no_world_is_raised_and_no_failure():
    with pytest.raises(oa.UsageError, match="seeds is empty; expected one seed or more"):
        explore(crossed, 2, [])
    with pytest.raises(oa.InvalidWorldSizeError):
        explore(crossed, 0)
    with pytest.raises(oa.UsageError, match="seed is -1"):
        explore(crossed, 2, [-1])
    with pytest.raises(oa.ConfigError, match="fat-tre"):
        explore(crossed, 2, network="fat-tre")
    with pytest.raises(oa.ConfigError, match="rank 5"):
        explore(crossed, 2, faults=lambda seed: Kill(rank=5, at_s=1))


# Results that should be alike


def test_results_that_depend_on_the_order_are_found():
    order: list[int] = []

    def program(group: Group) -> dict[str, Any]:
        if group.rank == 0:
            order.clear()
        group.barrier()
        order.append(group.rank)
        group.barrier()
        return {"sum": group.all_reduce(1.0), "last": order[-1]}

    last = [run(program, 3, seed).results[0]["last"] for seed in range(20)]
    other = next(seed for seed in range(20) if last[seed] != last[0])
    assert not explore(program, 3, range(20)).failed
    exploration = explore(program, 3, range(20), alike=True)
    assert exploration.seed == other
    assert str(exploration.error) == (
        f"seed {other} gives other results than seed 0: on rank 0, result['last'] is {last[other]}, and was {last[0]}"
    )
    # All ranks finished everything, and the trace is told nevertheless.
    assert 'all_reduce #2 (float64[], op="sum")  began' in exploration.story


@dataclass
class Model:
    weights: Any
    step: int = 0


NAN = np.array([0x7FF8000000000000, 0x7FF8000000000001], np.uint64).view(float)
F = np.float32

DIFFERENT = {
    "integers": (1, 2, "result is 2, and was 1"),
    "types": (1, 1.0, "result is 1.0, and was 1"),
    "a bool": (1, True, "result is True, and was 1"),
    "nothing": (None, 0, "result is 0, and was None"),
    "texts": ("a", "b", "result is 'b', and was 'a'"),
    "floats": (1.5, 2.5, "result is 2.5, and was 1.5"),
    "zeros": (0.0, -0.0, "result is -0.0, and was 0.0"),
    "complex": (1j, 2j, "result is 2j, and was 1j"),
    "lengths": ([1], [1, 2], "result has the length 2, and had 1"),
    "list and tuple": ([1], (1,), "result is (1,), and was [1]"),
    "within": ([{"a": (1, [2, 3])}], [{"a": (1, [2, 4])}], "result[0]['a'][1][1] is 4, and was 3"),
    "keys": ({"a": 1}, {"b": 1}, "result has the keys ['b'], and had ['a']"),
    "sets": ({1}, {2}, "result is {2}, and was {1}"),
    "NumPy scalars": (F(1), F(2), "result is 2.0, and was 1.0"),
    "dtypes": (np.zeros(2), np.zeros(2, F), "result is float32[2], and was float64[2]"),
    "byte orders": (np.zeros(1), np.zeros(1, ">f8"), "result is >f8[1], and was float64[1]"),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2)), "result is float64[3, 2], and was float64[2, 3]"),
    "elements": (
        np.zeros((2, 3), int),
        np.array([[0, 0, 5], [6, 0, 0]]),
        "result[0, 2] is 5, and was 0 (2 of 6 elements differ)",
    ),
    "an array of no dimension": (np.array(1), np.array(2), "result is 2, and was 1"),
    "an array of one": ([np.zeros(1)], [np.ones(1)], "result[0][0] is 1.0, and was 0.0"),
    "zeros in arrays": (np.zeros(2), -np.zeros(2), "result[0] is -0.0, and was 0.0 (2 of 2 elements differ)"),
    "kinds of NaN": (NAN[:1], NAN[1:], "result[0] is nan (0x010000000000f87f), and was nan (0x000000000000f87f)"),
    "arrays of objects": (np.array([1, "a"], object), np.array([1, "b"], object), "result[1] is 'b', and was 'a'"),
    "dataclasses": (
        Model(np.zeros(2)),
        Model(np.array([0.0, 1])),
        "result.weights[1] is 1.0, and was 0.0 (1 of 2 elements differ)",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_is_found_and_told(what):
    before, now, words = DIFFERENT[what]
    exploration = explore(each_of([before, copy.deepcopy(before), now]), 1, [3, 4, 5], alike=True)
    assert str(exploration.error) == f"seed 5 gives other results than seed 3: on rank 0, {words}"


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        NAN,
        np.array([1, "a", None], object),
        np.zeros((0, 3)),
        np.array(["", ""]),
        {1, 2},
        {"a": 1, "b": [NAN]},
        Model(NAN),
    ],
    ids=repr,
)
def test_what_has_the_same_bits_is_alike(value):
    assert not explore(each_of([value, copy.deepcopy(value)]), 1, range(2), alike=True).failed


def test_keys_may_stand_in_another_order():
    assert not explore(each_of([{"a": 1, "b": 2}, {"b": 2, "a": 1}]), 1, range(2), alike=True).failed


LEAVES = st.one_of(
    st.integers(), st.floats(), st.text(max_size=3), st.booleans(), st.lists(st.floats(width=32), max_size=3).map(np.float32)
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=8,
)


@given(NESTED, NESTED)
@settings(max_examples=60)
def test_a_value_is_alike_to_its_copy_and_a_difference_lies_both_ways(one, other):
    def differ(a: Any, b: Any) -> bool:
        return explore(each_of([a, b]), 1, range(2), alike=True).failed

    assert not differ(one, copy.deepcopy(one))
    assert differ([one, 1], [one, 2])
    assert differ(one, other) == differ(other, one)


def test_results_are_not_compared_where_an_expected_error_ended_the_run():
    def plan_of(seed: int) -> list[Kill]:
        return [Kill(rank=1, operation="*", nth=0)] if seed == 0 else []

    exploration = explore(
        lambda group: (group.barrier(), group.rank)[1], 2, range(4), faults=plan_of, alike=True, expected=oa.PeerLostError
    )
    assert not exploration.failed


# What the package names


def test_the_package_loads_what_it_names_when_that_is_asked_for():
    program = (
        "import sys, oneaccord_simulated\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'numpy', 'pydantic', 'oneaccord', 'pytest'}))\n"
        "for name in dir(oneaccord_simulated): getattr(oneaccord_simulated, name)\n"
        "print(sorted(set(oneaccord_simulated.__all__) - set(vars(oneaccord_simulated))))\n"
        "print(oneaccord_simulated.Network is __import__('oneaccord.api').api.Network)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "[]", "True"], done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'explor'"):
        oneaccord_simulated.explor  # noqa: B018


def test_the_examples_of_the_package_are_true():
    assert doctest.testmod(oneaccord_simulated).failed == 0
    assert doctest.testmod(oneaccord_simulated).attempted > 5


def test_a_number_of_seeds_is_refused():
    with pytest.raises(oa.UsageError, match=r"^seeds is 100; expected several, such as range\(100\)$"):
        explore(lambda group: group.rank, 2, seeds=100)  # type: ignore[arg-type]


def the_helper_sleeps(group: Group) -> None:
    def helper() -> None:
        time.sleep(0.05)
        group.all_reduce(np.ones(2))

    thread = threading.Thread(target=helper)
    thread.start()
    group.broadcast(np.ones(3))
    thread.join()


def one_rank_sleeps(group: Group) -> None:
    thread = threading.Thread(target=group.all_reduce, args=(np.ones(2),))
    thread.start()
    if group.rank == 1:
        time.sleep(0.05)
    group.broadcast(np.ones(3))
    thread.join()


def two_helpers(group: Group) -> None:
    threads = [threading.Thread(target=group.all_reduce, args=(1.0, op)) for op in ("sum", "max")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("program", [the_helper_sleeps, one_rank_sleeps, two_helpers])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_order_of_threads_that_nothing_fixes_is_found(program, monkeypatch):
    found = explore(program, 2, range(30))
    assert type(found.error) is oa.CollectiveMismatchError, found
    assert found.run.errors
    with pytest.raises(oa.CollectiveMismatchError):
        run(program, 2, found.seed)


def test_an_order_of_threads_that_is_fixed_is_none():
    def program(group: Group) -> float:
        thread = threading.Thread(target=group.all_reduce, args=(np.ones(2),))
        thread.start()
        thread.join()
        return group.broadcast(np.ones(3)).sum()

    assert not explore(program, 2, range(20), alike=True).failed


def test_threads_that_never_call_are_not_waited_for_for_long(monkeypatch):
    """One waits for a lock or the like, which is for nobody; one sleeps again and again, which counts once for all seeds."""
    over = threading.Event()

    def nap() -> None:
        while not over.is_set():
            time.sleep(0.01)

    def program(group: Group) -> float:
        for body in (over.wait, nap):
            threading.Thread(target=body, daemon=True).start()
        return sum(group.all_reduce(1.0).item() for _ in range(10))

    begun = time.monotonic()
    found = explore(program, 2, range(30), alike=True)
    over.set()
    assert not found.failed, found
    assert time.monotonic() - begun < 30 * 0.3

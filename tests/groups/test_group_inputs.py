"""An array that a program writes to while a call in the background still reads it: found in simulated worlds, and elsewhere where asked."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord.api import Group

CALLS: dict[str, Callable[[Group, Any], Any]] = {
    "all_reduce": lambda group, x: group.all_reduce_async(x),
    "reduce": lambda group, x: group.reduce_async(x, "max", 0),
    "broadcast": lambda group, x: group.broadcast_async(x, 1),
    "all_gather": lambda group, x: group.all_gather_async(x),
    "gather": lambda group, x: group.gather_async(x),
    "scatter": lambda group, x: group.scatter_async(x, 1),
    "reduce_scatter": lambda group, x: group.reduce_scatter_async(x),
    "all_to_all": lambda group, x: group.all_to_all_async(x, send_counts=[1, 1]),
    "scan": lambda group, x: group.scan_async(x),
    "exscan": lambda group, x: group.exscan_async(x),
    "send to rank 0": lambda group, x: group.send_async(x, 0) if group.rank == 1 else group.recv_async(1),
}
OVER = pytest.mark.parametrize(
    ("backend", "config"), [("simulated", {}), ("tcp", {"check_inputs": True}), ("tcp", {})], ids=["simulated", "tcp", "off"]
)


def test_every_call_that_reads_an_array_in_the_background_is_tried_below():
    calls = {name for name, call in inspect.getmembers(Group, callable) if name.endswith("_async") and name[0] != "_"}
    calls.remove("sendrecv_async")  # of messages with tags alone, which nobody watches
    reading = {name for name in calls if "array" in inspect.signature(getattr(Group, name)).parameters}
    assert {f"{name.partition(' ')[0]}_async" for name in CALLS} == reading


@OVER
@pytest.mark.parametrize("name", CALLS)
def test_who_writes_to_what_is_still_read_is_named_on_every_rank(backend, config, name):
    def program(group: Group) -> None:
        x = np.ones((2, 3))
        if group.rank == 0:
            group.recv(1)  # so that the call of rank 1 can not be over
        work = CALLS[name](group, x)
        if group.rank == 1:
            x[1, 2] = 7.0
            group.send(1.0, 0)
        work.wait()
        group.barrier()

    outcomes = thread_world(program, 2, backend, config=config)
    if not config and backend == "tcp":
        assert outcomes == [None, None]  # nobody looks
        return
    for rank, error in enumerate(outcomes):
        assert type(error) is oa.InputChangedError, error
        assert (error.rank, error.peer) == (rank, 1)
        assert str(error).startswith(f"rank 1 wrote to the input of {name}, float64[2, 3], begun at test_group_inputs.py:")
        assert str(pickle.loads(pickle.dumps(error))) == str(outcomes[0])


@OVER
def test_what_calls_write_one_after_the_other_is_no_mistake(backend, config):
    def program(group: Group) -> list[float]:
        w, x, y, z = np.ones(3), np.ones(3), np.empty(3), np.full(3, 5.0)
        works = [
            group.all_reduce_async(x, out=x),
            group.all_reduce_async(x, out=x),
            group.all_reduce_async(x, out=y),
            group.all_reduce_async(y, out=z),
        ]
        with group.coalesce(wait=False) as batch:
            batch.all_reduce(w, out=w)
        works.append(group.all_reduce_async(w, out=w))
        works[-1].wait()
        group.all_reduce(x, out=x)
        return [w[0], x[0], y[0], z[0]]

    assert must(thread_world(program, 2, backend, config=config)) == [[4.0, 8.0, 8.0, 16.0]] * 2


@OVER
def test_what_a_call_does_not_read_and_what_it_has_copied_may_be_written_to(backend, config):
    def program(group: Group) -> list[float]:
        x, columns, numbers = np.full(3, float(group.rank)), np.ones((3, 2)), [1.0, 2.0]
        works = [
            group.broadcast_async(x, 0),
            group.all_reduce_async(columns[:, 0]),
            group.all_reduce_async(numbers),
            group.all_reduce_async(1.0),
        ]
        if group.rank == 1:
            x[:], columns[:], numbers[0] = 9.0, 9.0, 9.0
        got = [work.wait().flat[0] for work in works]
        y = np.ones(2)
        done = group.all_reduce_async(y)
        done.wait()
        y[:] = 9.0
        return got

    assert must(thread_world(program, 2, backend, config=config)) == [[0.0, 2.0, 2.0, 2.0]] * 2


def test_what_is_reduced_in_place_is_looked_at_until_its_turn_comes():
    def program(group: Group) -> None:
        x = np.ones(3)
        work = group.all_reduce_async(x, out=x)
        x[0] = 2.0
        work.wait()

    with pytest.raises(oa.InputChangedError, match=r"rank [01] wrote"):
        simulated.run(program, 2)


def test_also_where_nobody_waits_for_the_work():
    def program(group: Group) -> None:
        x = np.ones(3)
        group.all_reduce_async(x)
        if group.rank == 2:
            x[0] = 2.0
        group.barrier()

    found = simulated.explore(program, 3, range(10))
    assert (found.seed, type(found.error)) == (0, oa.InputChangedError)


def test_also_in_a_world_of_one():
    def program(group: Group) -> None:
        x = np.ones(3)
        work = group.all_gather_async(x)
        x[0] = 2.0
        work.wait()

    with pytest.raises(oa.InputChangedError, match=r"^rank 0 wrote to the input of all_gather, float64"):
        simulated.run(program, 1)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.uint64, ml_dtypes.bfloat16, np.bool_])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_result_that_is_read_too_early_holds_no_number_in_a_simulated_world(dtype: type, in_place: bool) -> None:
    def program(group: Group) -> tuple[list[Any], list[Any], list[Any]]:
        given = np.array([1, 0, 1]).astype(dtype)
        out = given if in_place else np.array([1, 0, 1]).astype(dtype)
        work = group.all_reduce_async(given, "max", out=out)
        early = out.copy()
        later = group.all_reduce_async(out, "max", out=out)  # goes on from what the first one gives
        work.wait()
        return [*early], [*later.wait()], [*out]

    for early, later, out in simulated.run(program, 2).results:
        assert (
            not any(value in (dtype(0), dtype(1)) for value in early)
            if dtype is not np.bool_
            else early == [False, True, False]
        )
        assert later == out == [1, 0, 1]


INTO: dict[str, Callable[[Group, Any, Any], Any]] = {
    "all_reduce": lambda group, x, out: group.all_reduce_async(x, out=out),
    "reduce": lambda group, x, out: group.reduce_async(x, "max", 1, out=out),
    "broadcast": lambda group, x, out: group.broadcast_async(x, 0, out=out),
    "all_gather": lambda group, x, out: group.all_gather_async(x[:1], out=out),
    "gather": lambda group, x, out: group.gather_async(x[:1], 1, out=out),
    "scatter": lambda group, x, out: group.scatter_async(np.ones((4, 2)) if group.rank == 0 else None, 0, out=out),
    "reduce_scatter": lambda group, x, out: group.reduce_scatter_async(np.ones((4, 2)), out=out),
    "all_to_all": lambda group, x, out: group.all_to_all_async(x, out=out),
    "scan": lambda group, x, out: group.scan_async(x, out=out),
    "exscan": lambda group, x, out: group.exscan_async(x, out=out),
    "recv": lambda group, x, out: group.recv_async(0, out=out) if group.rank == 1 else group.send_async(x, 1),
}


def test_every_call_that_writes_to_an_array_in_the_background_is_tried_below() -> None:
    calls = {name for name, call in inspect.getmembers(Group, callable) if name.endswith("_async") and name[0] != "_"}
    calls.remove("sendrecv_async")  # of messages with tags alone, which nobody watches
    assert {f"{name}_async" for name in INTO} == {
        name for name in calls if "out" in inspect.signature(getattr(Group, name)).parameters
    }


@pytest.mark.parametrize("name", INTO)
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_result_of_each_call_holds_no_number_until_it_has_ended(name: str, order: Any) -> None:
    """It is looked at before the turn of the call, and when that is on its way: rank 0 comes a second later."""

    def program(group: Group) -> None:
        x, out = np.ones((2, 2)), np.full((2, 2), 7.0, order=order)
        plain = INTO[name](group, x, out.copy(order="C")).wait()
        if group.rank == 0:
            group.compute(1.0)
            INTO[name](group, x, out).wait()
            return
        work = INTO[name](group, x, out)
        assert np.isnan(out).all()
        oa.sleep(0.5)
        assert np.isnan(out).all() or name == "scatter"  # rank 0 first tells the others how much comes
        result = work.wait()
        assert result is out
        np.testing.assert_array_equal(out, plain)

    simulated.run(program, 2)


@pytest.mark.parametrize("when", [0, 1], ids=["before the turn of the call", "after it"])
def test_a_program_that_writes_to_a_result_too_early_is_named_on_every_rank(when: int) -> None:
    def program(group: Group) -> None:
        out = np.zeros(3)
        if group.rank == 0:
            group.recv(1)  # so that the call of rank 1 can not be over
        work = group.all_reduce_async(np.ones(3), out=out)
        if group.rank == 1:
            oa.sleep(when)
            with np.errstate(invalid="ignore"):
                out += 1
            group.send(1.0, 0)
        work.wait()
        group.barrier()

    run = simulated.run(program, 2, check=False)
    for rank in range(2):
        assert type(run.errors[rank]) is oa.InputChangedError
        assert str(run.errors[rank]).startswith("rank 1 wrote to the result of all_reduce, begun at test_group_inputs.py:")


def test_a_result_is_as_it_was_when_its_call_cannot_begin() -> None:
    def program(group: Group) -> list[float]:
        mine = np.full(3, 5.0)
        if group.rank == 0:
            work = group.all_reduce_async(mine, out=mine)
            with pytest.raises(oa.CollectiveMismatchError):
                group.barrier()
            with pytest.raises(oa.CommError):
                work.wait()
            behind = np.full(3, 6.0)
            with pytest.raises(oa.CommError):
                group.all_reduce_async(behind, out=behind).wait()
            return behind.tolist()
        with pytest.raises(oa.CollectiveMismatchError):
            group.barrier()
        return []

    assert simulated.run(program, 2, check=False).results[0] == [6.0] * 3

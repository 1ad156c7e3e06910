"""`oneaccord_simulated.run`: a function on every rank, and what becomes of exceptions."""

from __future__ import annotations

import functools
import operator
import threading
import traceback

import numpy as np
import pytest

import oneaccord as oa
import oneaccord_simulated
import oneaccord_simulated as simulated
from oneaccord.api import Group, current_rank


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_results_stand_in_the_order_of_ranks(size):
    run = oneaccord_simulated.run(lambda group: (group.rank, group.world_size, group.backend_name), size)
    assert run.results == [(rank, size, "simulated") for rank in range(size)]


def test_each_rank_is_a_thread_that_knows_its_rank():
    run = oneaccord_simulated.run(lambda group: (current_rank(), threading.current_thread().name), 3)
    assert run.results == [(rank, f"rank-{rank}") for rank in range(3)]
    assert current_rank() is None


def test_config_and_timeout_are_the_groups():
    def program(group: Group) -> None:
        if group.rank == 1:
            oa.sleep(1.0)  # the other one may yet be helped
        with pytest.raises(oa.DeadlineError, match=r"recv from rank 1 #1 did not finish within 0.3 s: rank 0 waits for rank 1"):
            group.recv(1 - group.rank)

    oneaccord_simulated.run(program, 2, timeout_s=0.3)
    oneaccord_simulated.run(program, 2, config={"timeout_s": 0.3})
    with pytest.raises(oa.ConfigError, match=r"backends\.simulated\.eager_byte"):
        oneaccord_simulated.run(lambda group: None, 2, config={"backends": {"simulated": {"eager_byte": 1}}})


@pytest.mark.parametrize("eager_bytes", [0, 100, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 1 << 30))])
def test_nothing_depends_on_what_is_sent_at_once(eager_bytes):
    """With 0 every message waits for its receiver, as the strictest transport would."""

    def program(group: Group) -> None:
        size, rank = group.world_size, group.rank
        for count in (0, 1, 7, 30_000):
            array = np.full(count * size, rank, float)
            for root in range(size):
                group.broadcast(array, root)
                group.gather(array, root)
                group.scatter(array, root)
                group.reduce(array, root=root)
            assert (group.all_reduce(array) == sum(range(size))).all()
            assert group.all_gather(array).shape == (count * size * size,)
            group.reduce_scatter(array)
            group.all_to_all(array)
            group.barrier()
            assert (group.sendrecv(array, (rank + 1) % size, (rank - 1) % size) == (rank - 1) % size).all()

    oneaccord_simulated.run(program, 5, config={"backends": {"simulated": {"eager_bytes": eager_bytes}}}, timeout_s=20)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", None, True])
def test_a_world_size_that_is_none(size):
    with pytest.raises(oa.InvalidWorldSizeError, match="positive integer"):
        oneaccord_simulated.run(lambda group: None, size)


class Mine(Exception):
    """What a program raises."""


@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("wait", ["all_reduce", "recv", "barrier", "close"])
def test_the_exception_of_one_rank_stops_the_others_and_is_raised(failing, wait):
    seen: dict[int, BaseException] = {}
    ready = threading.Barrier(4)

    def program(group: Group) -> None:
        ready.wait(10)
        if group.rank == failing:
            raise Mine("what went wrong")
        try:
            if wait == "all_reduce":
                group.all_reduce(np.ones(1_000_000))
            elif wait == "recv":
                group.recv(failing)
            elif wait == "barrier":
                group.barrier()
            else:
                group.close()
        except BaseException as error:
            seen[group.rank] = error
            raise

    with pytest.raises(Mine, match="what went wrong") as caught:
        oneaccord_simulated.run(program, 4)
    assert caught.value.rank == failing
    assert any(f"raised on rank {failing} of 4" in note for note in caught.value.__notes__)
    assert "in program" in "".join(traceback.format_exception(caught.value))
    assert sorted(seen) == [rank for rank in range(4) if rank != failing]
    for error in seen.values():
        assert type(error) is oa.AbortedError
        assert error.peer == failing
        assert f"rank {failing} ended with Mine: what went wrong" in str(error)


def test_of_several_exceptions_that_of_the_first_rank_to_fail_is_raised():
    failed = threading.Event()

    def program(group: Group) -> None:
        if group.rank == 2:
            try:
                raise Mine("first")
            finally:
                failed.set()
        # It waits for the failure, and then fails in its own way.
        try:
            group.barrier()
        except oa.AbortedError:
            raise ValueError("second") from None

    with pytest.raises(Mine) as caught:
        oneaccord_simulated.run(program, 3)
    assert caught.value.rank == 2


def test_the_first_cause_is_raised_whatever_those_raise_that_it_stopped():
    """They may end before the rank that stopped them has."""

    def program(group: Group) -> None:
        if group.rank == 2:
            raise Mine("the cause")
        try:
            group.barrier()
        except oa.AbortedError as error:
            raise RuntimeError("a consequence") from error

    for _ in range(60):
        with pytest.raises(Mine) as caught:
            oneaccord_simulated.run(program, 3)
        assert caught.value.rank == 2


def test_an_exception_that_has_a_rank_keeps_it():
    def program(group: Group) -> None:
        if group.rank == 1:
            group.send(1, 7)
        group.barrier()

    with pytest.raises(oa.InvalidRankError) as caught:
        oneaccord_simulated.run(program, 3)
    assert (caught.value.rank, caught.value.peer) == (1, 7)


def test_a_rank_that_fails_while_another_has_begun_a_collective():
    inside = threading.Event()

    def program(group: Group) -> None:
        if group.rank == 1:
            assert inside.wait(10)
            raise Mine
        if group.rank == 0:
            # Rank 2 has received from rank 0, which is inside its sendrecv then.
            group.sendrecv(np.ones(10), 2, 1)
        else:
            group.recv(0)
            inside.set()
            group.all_reduce(np.ones(100_000))

    with pytest.raises(Mine) as caught:
        oneaccord_simulated.run(program, 3)
    assert caught.value.rank == 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_before_the_others_have_come(failing):
    """They learn it where they are: on their way in, or in the group."""

    def program(group: Group) -> None:
        if group.rank == failing:
            raise Mine
        with pytest.raises(oa.AbortedError):
            group.barrier()

    for _ in range(20):
        with pytest.raises(Mine) as caught:
            oneaccord_simulated.run(program, 3)
        assert caught.value.rank == failing


def test_a_rank_that_returns_early_leaves_those_that_wait_for_it_in_a_deadlock():
    with pytest.raises(oa.DeadlockError, match=r"rank 0 waits for rank 1, which has left the group") as caught:
        oneaccord_simulated.run(lambda group: None if group.rank else group.recv(1), 2)
    assert isinstance(caught.value, oa.CollectiveMismatchError)
    assert caught.value.peer == 1


def test_what_came_of_a_run_can_be_asked_where_nothing_is_raised():
    def program(group: Group) -> int:
        if group.rank == 1:
            raise Mine("what went wrong")
        group.barrier()
        return group.rank

    run = oneaccord_simulated.run(program, 3, seed=4, check=False)
    assert run.results == [None] * 3
    assert sorted(run.errors) == [0, 1, 2]
    assert run.cause is run.errors[1]
    assert {type(run.errors[rank]) for rank in (0, 2)} == {oa.AbortedError}
    assert (run.world_size, run.seed, run.duration_s) == (3, 4, 0.0)
    assert repr(run) == "<Run of 3 ranks, seed 4, 0 s, failed: Mine>"
    with pytest.raises(Mine) as caught:
        oneaccord_simulated.run(program, 3, seed=4)
    assert caught.value.run.errors.keys() == run.errors.keys()
    assert any("in a simulated world of seed 4" in note for note in caught.value.__notes__)


def test_an_error_that_a_rank_deals_with_is_none_of_the_run():
    def program(group: Group) -> str:
        try:
            group.send(1, 7)
        except oa.InvalidRankError:
            return f"rank {group.rank} went on with {group.all_reduce(1)}"
        return "?"

    run = oneaccord_simulated.run(program, 3)
    assert run.results == [f"rank {rank} went on with 3" for rank in range(3)]
    assert (run.errors, run.cause) == ({}, None)


@pytest.mark.parametrize("seed", [-1, True, 1.0, "1", None])
def test_a_seed_that_is_none(seed):
    with pytest.raises(oa.UsageError, match="expected an integer, 0 or more"):
        oneaccord_simulated.run(lambda group: None, 2, seed)


def test_messages_need_not_be_kept():
    kept, counted = (
        oneaccord_simulated.run(lambda group: group.all_reduce(np.ones(500)), 4, keep_messages=keep).trace
        for keep in (True, False)
    )
    assert len(kept.messages) == sum(kept.messages_sent(rank) for rank in range(4)) > 0
    assert counted.messages == []
    for rank in range(4):
        assert counted.messages_sent(rank) == kept.messages_sent(rank)
        assert counted.bytes_sent(rank) == kept.bytes_sent(rank)


def test_a_program_may_make_several_groups_one_after_the_other():
    def program(group: Group) -> list[int]:
        totals = []
        for _ in range(3):
            with oa.init() as again:
                totals.append(again.all_reduce(again.rank).item())
        return [*totals, group.all_reduce(1).item()]

    assert oneaccord_simulated.run(program, 4).results == [[6, 6, 6, 4]] * 4


def test_worlds_do_not_disturb_each_other():
    """Worlds at once, in several threads, and a world within a rank of another."""
    sums: list[int] = []

    def inner(group: Group) -> int:
        return group.all_reduce(group.rank).item()

    def outer(group: Group) -> list[int]:
        results = oneaccord_simulated.run(inner, 3).results
        group.barrier()
        return results

    threads = [
        threading.Thread(
            target=lambda: sums.extend(functools.reduce(operator.iadd, oneaccord_simulated.run(outer, 2).results, []))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sums == [3] * 18


def test_no_thread_is_left():
    before = set(threading.enumerate())

    def program(group: Group) -> None:
        if group.rank == 1:
            raise Mine
        group.barrier()

    for _ in range(5):
        with pytest.raises(Mine):
            oneaccord_simulated.run(program, 4)
    oneaccord_simulated.run(lambda group: group.barrier(), 4)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    "program",
    [
        lambda group: group.all_to_all(np.arange(3), **({"send_counts": [1, 1, 1]} if group.rank else {})),
        lambda group: group.broadcast(np.zeros(34, np.int64)) if group.rank else group.scatter(np.arange(3)),
        lambda group: group.all_to_all(np.arange(3), send_counts=[1, 1, 1], receive_counts=[1, 1, 1 + (group.rank == 2)]),
        lambda group: group.all_to_all(np.zeros(3, np.int8 if group.rank else np.int16), send_counts=[1, 1, 1]),
        lambda group: group.scatter(np.arange(3), out=np.zeros(1 + (group.rank == 1), np.int64)),
    ],
    ids=["counts on some ranks", "scatter and broadcast", "receive_counts", "dtype with counts", "out of one rank"],
)
def test_calls_that_trade_sizes_first_give_nobody_a_wrong_result(program):
    results = []

    def checked(group: Group) -> None:
        with pytest.raises(oa.CollectiveMismatchError):
            results.append(program(group))

    oneaccord_simulated.run(checked, 3)
    assert results == []


def test_what_a_function_returned_stays_when_the_group_is_not_left_well():
    def program(group: Group) -> str:
        if group.rank == 1:
            raise ValueError("mine")
        return "done"

    run = simulated.run(program, 3, check=False)
    assert run.results == ["done", None, "done"]
    assert isinstance(run.errors[1], ValueError)


@pytest.mark.parametrize("kind", ["coroutine", "generator"])
def test_a_function_none_of_whose_lines_runs_is_refused(kind):
    async def coroutine(group: Group) -> None:
        raise AssertionError

    def generator(group: Group):
        yield group

    function = coroutine if kind == "coroutine" else generator
    with pytest.raises(oa.UsageError, match=f"^{kind} returned a {kind}, none of whose lines has run"):
        simulated.run(function, 2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"backend": "tcp"}, "config has backend = 'tcp', but the ranks of this run are simulated"),
        ({"backends": {"simulated": {"network": "fat-tree"}}}, "backends.simulated.network = 'fat-tree'.*give it as network="),
        ({"backends": {"simulated": {"seed": 3}}}, "backends.simulated.seed = 3.*give it as seed="),
        ({"backends": {"simulated": {"trace": "x"}}}, "Run.trace_json"),
    ],
)
def test_config_that_would_change_nothing_is_refused(config, words):
    with pytest.raises(oa.UsageError, match=words):
        simulated.run(lambda group: group.rank, 2, config=config)


class _ClosedError(Exception):
    @property
    def rank(self) -> None:
        return None


def test_an_exception_that_takes_no_attributes_is_raised_all_the_same():
    def program(group: Group) -> None:
        if group.rank == 1:
            raise _ClosedError("mine")

    with pytest.raises(_ClosedError) as caught:
        simulated.run(program, 2)
    assert caught.value.__notes__ == ["raised on rank 1 of 2, in a simulated world of seed 0"]


class _WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_without_words_is_raised_as_it_is_and_the_others_are_told_its_type():
    def program(group: Group) -> None:
        if group.rank == 1:
            raise _WordlessError
        group.barrier()

    run = simulated.run(program, 2, check=False)
    assert isinstance(run.cause, _WordlessError)
    assert isinstance(run.errors[0], oa.AbortedError)
    assert "rank 1 ended with _WordlessError: (its words cannot be shown)" in str(run.errors[0])

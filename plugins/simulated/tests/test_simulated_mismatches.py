"""Ranks that do not make the same calls: each rank learns who called what, and where, whoever finds out first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord import CollectiveMismatchError
from oneaccord.api import Group

X = np.ones(4)
EAGER: dict[str, Any] = {"config": {"backends": {"simulated": {"eager_bytes": 65536}}}}

Call = Callable[[Group, bool], object]

ARGUMENTS: dict[str, tuple[Call, str, str]] = {
    "shape": (lambda group, odd: group.all_reduce(np.ones(5 if odd else 4)), "float64[4]", "float64[5]"),
    "dtype": (lambda group, odd: group.all_reduce(np.ones(4, "f4" if odd else "f8")), "float64[4]", "float32[4]"),
    "op": (lambda group, odd: group.all_reduce(X, "max" if odd else "sum"), 'op="sum"', 'op="max"'),
    "shape of one size": (lambda group, odd: group.all_reduce(np.zeros((2, 3) if odd else (3, 2))), "64[3, 2]", "64[2, 3]"),
    "ufunc": (lambda group, odd: group.all_reduce(X, np.fmax if odd else np.fmin), "np.fmin", "np.fmax"),
    "order of bits": (lambda group, odd: group.all_reduce(X, reproducible=odd), '"sum")', "reproducible=True"),
    "a number": (lambda group, odd: group.all_reduce(1 if odd else 1.0), "float64[]", "int64[]"),
    "root": (lambda group, odd: group.broadcast(X, root=1 if odd else 0), "root=0", "root=1"),
    "root of a reduce": (lambda group, odd: group.reduce(X, root=1 if odd else 0), "root=0", "root=1"),
    "root of a gather": (lambda group, odd: group.gather(X, root=1 if odd else 0), "root=0", "root=1"),
    "root of a scatter": (lambda group, odd: group.scatter(np.ones(8), root=1 if odd else 0), "root=0", "root=1"),
    "root for an object": (lambda group, odd: group.broadcast_object([1], root=1 if odd else 0), "root=0", "root=1"),
    "rows": (lambda group, odd: group.all_gather(np.ones(3 if odd else 2)), "float64[2]", "float64[3]"),
    "counts": (
        lambda group, odd: group.reduce_scatter(np.ones(8), counts=[2, 2, 2, 2] if odd else [5, 1, 1, 1]),
        "[5, 1, 1, 1]",
        "[2, 2, 2, 2]",
    ),
    "collective": (lambda group, odd: (group.all_to_all if odd else group.all_gather)(X), "all_gather(", "all_to_all("),
    "object or array": (
        lambda group, odd: group.broadcast(X) if odd else group.broadcast_object(1),
        "broadcast_object(",
        "broadcast(float64[4]",
    ),
    "object collective": (
        lambda group, odd: (group.gather_object if odd else group.all_gather_object)(1),
        "all_gather_object(",
        "gather_object(int64[1], root=0)",
    ),
    "small and large": (lambda group, odd: group.all_reduce(np.ones(2 if odd else 1_000_000)), "[1000000]", "[2]"),
    "large": (lambda group, odd: group.all_reduce(np.ones(60_001 if odd else 60_000)), "[60000]", "[60001]"),
}


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("what", ARGUMENTS)
def test_another_argument_on_one_rank(report_on, what, odd):
    call, common, different = ARGUMENTS[what]

    def program(group: Group) -> None:
        group.all_reduce(X)
        for step in range(3):
            group.mark(f"step {step}")
            if group.rank == odd and step == 2:
                call(group, True)
            else:
                call(group, False)
        group.barrier()

    report = report_on(program, 4, CollectiveMismatchError)
    assert sorted(report.told) == [0, 1, 2, 3]
    assert different in report.told.pop(odd)
    assert all(common in told and different not in told for told in report.told.values())
    assert f"rank {odd} " in report.headline
    assert report.error.operation is not None


def test_each_rank_is_told_with_the_line_of_its_call(report_on):
    def program(group: Group) -> None:
        if group.rank == 1:
            group.all_reduce(X, op="min")  # @smallest
        elif group.rank == 2:
            group.barrier()  # @barrier
        else:
            group.all_reduce(X)  # @total

    report = report_on(program, 5, CollectiveMismatchError)
    assert report.at == {0: "total", 1: "smallest", 2: "barrier", 3: "total", 4: "total"}


# Too many calls, and too few


@pytest.mark.parametrize("odd", range(4))
def test_one_call_too_many_in_a_branch(report_on, odd):
    def program(group: Group) -> None:
        for step in range(3):
            group.all_reduce(X)  # @step
            if group.rank == odd and step == 1:
                group.barrier()  # @log

    report = report_on(program, 4, CollectiveMismatchError)
    assert report.at == {rank: "log" if rank == odd else "step" for rank in range(4)}
    assert all("#2 at" in told for told in report.told.values())


@pytest.mark.parametrize("way", ["break", "continue", "exception", "short"])
@pytest.mark.parametrize("odd", [0, 2])
def test_one_call_too_few(report_on, odd, way):
    def program(group: Group) -> None:
        for step in range(3 if way == "short" and group.rank == odd else 4):
            try:
                if group.rank == odd and step == 3:
                    if way == "break":
                        break
                    if way == "continue":
                        continue
                    raise OSError("no such shard")
                group.all_reduce(X)  # @sum_up
            except OSError:
                pass
        group.broadcast(np.ones(2))  # @share

    report = report_on(program, 3, CollectiveMismatchError)
    assert report.at == {rank: "share" if rank == odd else "sum_up" for rank in range(3)}
    assert all("#3 at" in told for told in report.told.values())


def test_a_bucket_that_one_rank_skips(report_on):
    def program(group: Group) -> None:
        works = []
        for size in (10, 20, 30):
            if group.rank == 2 and size == 20:
                continue
            works.append(group.all_reduce_async(np.ones(size)))  # @bucket
        for work in works:
            work.wait()

    report = report_on(program, 4, CollectiveMismatchError)
    assert report.at == dict.fromkeys(range(4), "bucket")
    assert "float64[30]" in report.told[2]
    assert "float64[20]" in report.told[0]


def test_what_was_issued_and_never_waited_for(report_on):
    def program(group: Group) -> None:
        for _ in range(3 if group.rank else 2):
            group.all_reduce_async(X)  # @issue
        group.barrier()  # @wait

    report = report_on(program, 3, CollectiveMismatchError)
    # The others' main threads wait for their turn after the third.
    assert report.at == {0: "wait", 1: "issue", 2: "issue"}


def test_calls_in_the_background_in_another_order(report_on):
    def program(group: Group) -> None:
        if group.rank == 0:
            works = [group.all_reduce_async(X), group.all_gather_async(X)]  # @sum_first
        else:
            works = [group.all_gather_async(X), group.all_reduce_async(X)]  # @gather_first
        for work in works:
            work.wait()

    report = report_on(program, 2, CollectiveMismatchError)
    assert report.at == {0: "sum_first", 1: "gather_first"}


def test_batches_of_different_lengths(report_on):
    def program(group: Group) -> None:
        with group.coalesce() as batch:  # @batch
            for _ in range(3 if group.rank != 1 else 2):
                batch.all_reduce(X)

    report = report_on(program, 3, CollectiveMismatchError)
    assert report.at == dict.fromkeys(range(3), "batch")
    assert "batch [4] + [4] of " in report.told[1]


def test_a_group_of_some_ranks_tells_of_them_alone(report_on):
    def program(group: Group) -> None:
        part = group.subgroup([1, 2, 3])
        if part is not None:
            part.broadcast(X, root=2 if group.rank == 3 else 0)  # @part
        group.barrier()

    report = report_on(program, 4, CollectiveMismatchError)
    assert report.at == {1: "part", 2: "part", 3: "part"}
    assert "root=2) #0 of group 1 " in report.told[3]


def test_one_of_many(report_on):
    def program(group: Group) -> None:
        if group.rank == 21:
            group.all_reduce(np.ones(4, np.float32))  # @one
        else:
            group.all_reduce(X)  # @many

    report = report_on(program, 40, CollectiveMismatchError, ways=[{}])
    assert report.at == {rank: "one" if rank == 21 else "many" for rank in range(40)}
    assert str(report.error).count("\n") == 2


def test_ranks_that_wait_for_each_other_in_different_calls_although_no_message_shows_it(report_on):
    def program(group: Group) -> None:
        if group.rank == 1:
            group.barrier()  # @meet
        else:
            group.all_reduce(X)  # @add

    report = report_on(program, 3, CollectiveMismatchError)
    assert report.at == {0: "add", 1: "meet", 2: "add"}
    assert "ranks 0, 2 are in all_reduce" in report.headline
    assert "rank 1 is in barrier() #0" in report.headline
    assert report.error.peer == 1


# Who is on the way


def test_a_rank_that_is_still_on_its_way_is_told_where_it_is(report_on):
    def program(group: Group) -> None:
        group.barrier()  # @start
        if group.rank == 2:
            group.compute(5)  # @compute
        group.all_reduce(np.ones(3 if group.rank else 4))  # @end

    def late(group: Group) -> None:
        group.barrier()  # @begin
        if group.rank == 2:
            oa.sleep(5)  # @sleep
        group.all_reduce(np.ones(3 if group.rank else 4))  # @finish

    report = report_on(program, 3, CollectiveMismatchError, seconds=6)
    assert report.at == {0: "end", 1: "end", 2: "compute"}
    assert report.told[2].startswith("compute(5 s) at ")
    assert report_on(late, 3, CollectiveMismatchError, seconds=6).at == {0: "finish", 1: "finish", 2: "sleep"}


def test_a_deadline_that_comes_before_the_others_does_not_hide_the_mismatch():
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(X, 1)
        else:
            group.recv_object(0, timeout_s=1e-3)

    run = simulated.run(program, 2, check=False, **EAGER)
    assert {type(error) for error in run.errors.values()} == {CollectiveMismatchError}
    assert run.duration_s == pytest.approx(1e-3)


def test_a_mismatch_that_a_program_catches_is_raised_again_by_what_it_calls_next():
    def program(group: Group) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            group.all_reduce(np.ones(3 if group.rank else 4))
        with pytest.raises(CollectiveMismatchError) as again:
            group.barrier()
        assert str(again.value) == str(caught.value)
        return str(caught.value)

    assert len(set(simulated.run(program, 3).results)) == 1


# Between two ranks


@pytest.mark.parametrize(("size", "way"), [(6, {}), (60_000, {}), (6, EAGER)], ids=["short", "long", "eager"])
def test_an_out_that_is_not_like_what_was_sent(told, size, way):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.ones(size, np.float32), 1)  # @sent
            group.recv(1)  # @then
        else:
            group.recv(0, out=np.ones(size))  # @received

    for seed in range(4):
        run = simulated.run(program, 2, seed, check=False, **way)
        assert sorted(run.errors) == [0, 1]
        report = told(run.errors[0])
        assert type(report.error) is CollectiveMismatchError
        assert str(run.errors[1]) == str(report.error)
        assert f"rank 0 sent float32[{size}], but out= is float64[{size}]" in report.headline
        assert report.at[1] == "received"
        assert report.at[0] in ({"then sent"} if way else {"sent", "then sent"})


def test_arrays_that_are_received_in_another_order_than_they_were_sent(report_on):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(np.ones(3), 1)  # @first
            group.send(np.ones((2, 2)), 1)
            group.barrier()
        else:
            group.recv(0, out=np.ones((2, 2)))  # @wants_the_second
            group.recv(0, out=np.ones(3))

    report = report_on(program, 2, CollectiveMismatchError, ways=[EAGER], alike=False, same_lines=False)
    assert report.at[0].endswith(" first")
    assert report.at[1] == "wants_the_second"
    assert "what rank 1 receives is from its send to rank 1 #1 at" in report.told[0]


@pytest.mark.parametrize("way", [{}, EAGER], ids=["waiting", "eager"])
def test_an_array_that_is_received_as_an_object(report_on, way):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(X, 1)  # @array
        else:
            group.recv_object(0)  # @object

    report = report_on(program, 2, CollectiveMismatchError, ways=[way])
    assert report.at[1] == "object"
    assert set(report.at[0].split()) == {"array"}


def test_counts_that_do_not_fit_together(report_on):
    def program(group: Group) -> None:
        receive = [1, 1, 2] if group.rank == 1 else [1, 1, 1]
        group.all_to_all(np.ones(3), send_counts=[1, 1, 1], receive_counts=receive)  # @trade

    report = report_on(program, 3, CollectiveMismatchError, alike=False, same_lines=False)
    assert "rank 1 expects receive_counts=[1, 1, 2], and the others send it [1, 1, 1]" in report.headline
    assert {mark for told in report.at.values() for mark in told.split()} == {"trade"}


# The rank's own mistakes


@pytest.mark.parametrize(
    ("program", "kind", "odd"),
    [
        (lambda group: group.scatter(np.ones(4) if group.rank == 0 else None), oa.SizeMismatchError, 0),
        (lambda group: group.send(X, 2) if group.rank == 2 else group.barrier(), oa.SelfSendError, 2),
        (lambda group: group.send(X, 3) if group.rank == 1 else group.recv(1), oa.InvalidRankError, 1),
        (lambda group: [1][group.rank] if group.rank == 1 else group.barrier(), IndexError, 1),
    ],
    ids=["rows", "self", "no such rank", "its own"],
)
def test_an_argument_that_cannot_be_is_the_cause_and_stops_the_others(program, kind, odd):
    for seed in range(4):
        run = simulated.run(program, 3, seed, check=False)
        assert type(run.cause) is kind
        assert run.cause is run.errors[odd]
        others = {rank: error for rank, error in run.errors.items() if rank != odd}
        assert sorted(others) == [rank for rank in range(3) if rank != odd]
        assert {type(error) for error in others.values()} == {oa.AbortedError}
        assert all(f"rank {odd} ended with {kind.__name__}" in str(error) for error in others.values())


def test_a_split_that_one_rank_left_before_is_told_of_every_rank(told):
    def program(group: Group) -> None:
        group.barrier()  # @barrier
        if group.rank == 0:
            return
        group.split(0)  # @split

    for seed in range(4):
        run = simulated.run(program, 4, seed, check=False)
        assert {type(error) for error in run.errors.values()} == {CollectiveMismatchError}
        report = told(run.errors[3])
        assert "rank 0 has closed its group" in report.headline
        assert sorted(report.told) == [0, 1, 2, 3]
        assert report.at[0] == "barrier"
        assert {report.at[rank] for rank in (1, 2, 3)} <= {"barrier", "split"}


@pytest.mark.parametrize("sends_object", [True, False])
def test_an_object_that_meets_an_array_is_called_so(report_on, sends_object):
    def program(group: Group) -> None:
        if group.rank == 0:
            (group.send_object if sends_object else group.send)(1.0, 1)  # @send
        elif group.rank == 1:
            (group.recv if sends_object else group.recv_object)(0)  # @recv

    report = report_on(program, 3, CollectiveMismatchError, alike=False, same_lines=False)
    sent, received = ("send_object", "recv") if sends_object else ("send", "recv_object")
    assert report.headline == f"rank 1 is in {received} from rank 0, and what rank 0 sent it is of a {sent}:"
    assert (report.at[0], report.at[1]) == ("send", "recv")
    assert report.told[0].split(" ")[0] == sent


def test_ranks_in_the_errors_of_a_part_of_the_world_are_those_of_the_world():
    def program(group: Group) -> None:
        part = group.split(group.rank // 2)
        if group.rank == 3:
            with pytest.raises(oa.InvalidRankError) as invalid:
                part.send(X, 3)
            assert invalid.value.rank == 3
            with pytest.raises(oa.SelfSendError) as itself:
                part.send(X, 1)
            assert (itself.value.rank, itself.value.peer) == (3, 3)

    simulated.run(program, 4)


@pytest.mark.parametrize(
    "call", [lambda group: group.barrier(), lambda group: group.send(1.0, 3), lambda group: group.barrier_async().wait()]
)
def test_a_rank_may_not_use_the_group_of_another_rank(call):
    last: list[Group] = []

    def program(group: Group) -> None:
        if group.rank == 0:
            last.append(group)
        group.barrier()
        if group.rank == 2:
            call(last[0])
        group.barrier()

    with pytest.raises(oa.UsageError, match=r"^rank 2 uses the group of rank 0: ") as caught:
        simulated.run(program, 4)
    assert caught.value.rank == 2

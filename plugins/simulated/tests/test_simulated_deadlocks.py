"""When no rank can go on, the run ends at once, and the error says where each rank is, and who waits for whom."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord import DeadlockError
from oneaccord.api import Group

SMALL = np.ones(4)
LARGE = np.ones(50_000)
EAGER: dict[str, Any] = {"config": {"backends": {"simulated": {"eager_bytes": 65536}}}}
STRICT: tuple[dict[str, Any], ...] = ({}, {"network": "textbook"})
"""Every message waits for its receive."""


# Between two ranks


def test_a_ring_of_receives_is_shown_as_a_circle(report_on):
    def program(group: Group) -> None:
        group.recv((group.rank - 1) % group.world_size)  # @recv
        group.send(SMALL, (group.rank + 1) % group.world_size)

    report = report_on(program, 4, DeadlockError)
    assert report.at == dict.fromkeys(range(4), "recv")
    assert report.told[2] == report.told[2].partition(",")[0] + ", waiting for a message of rank 1"
    assert report.headline == (
        "deadlock: no rank can go on: rank 0 waits for rank 3, which waits for rank 2, which waits for rank 1, which waits for rank 0"
    )


def test_a_ring_of_sends_that_counts_on_buffers_is_found_and_the_remedy_named(report_on):
    def program(group: Group) -> None:
        group.send(SMALL, (group.rank + 1) % group.world_size)  # @send
        group.recv((group.rank - 1) % group.world_size)

    report = report_on(program, 3, DeadlockError, ways=STRICT)
    assert report.at == dict.fromkeys(range(3), "send")
    assert "waiting for rank 0 to receive" in report.told[2]
    assert "sendrecv" in report.hint
    assert "eager_bytes = 65536" in report.hint
    simulated.run(program, 3, **EAGER)


def test_a_ring_of_large_sends_is_found_in_any_case(report_on):
    def program(group: Group) -> None:
        group.send(LARGE, (group.rank + 1) % group.world_size)  # @large
        group.recv((group.rank - 1) % group.world_size)

    report = report_on(program, 3, DeadlockError, alike=False)
    assert report.at == dict.fromkeys(range(3), "large")
    assert report.hint == ""


def test_a_ring_of_sendrecvs_of_which_one_turns_the_other_way(report_on):
    def program(group: Group) -> None:
        step = -1 if group.rank == 2 else 1
        group.sendrecv(SMALL, (group.rank + step) % 5, (group.rank - step) % 5)  # @sendrecv
        group.barrier()  # @after

    report = report_on(program, 5, DeadlockError, ways=STRICT)
    assert report.at == {0: "after", 1: "sendrecv", 2: "sendrecv", 3: "sendrecv", 4: "after"}
    assert "sendrecv to rank 1 and from rank 3" in report.told[2]


def test_a_pipeline_of_which_one_stage_carries_one_batch_less(report_on):
    def program(group: Group) -> None:
        rank, last = group.rank, group.world_size - 1
        for _ in range(3 if rank == 2 else 4):
            batch = SMALL if rank == 0 else group.recv(rank - 1)  # @receives
            if rank < last:
                group.send(batch, rank + 1)  # @passes_on
        group.barrier()  # @ends

    report = report_on(program, 4, DeadlockError, ways=STRICT)
    assert report.at == {0: "ends", 1: "passes_on", 2: "ends", 3: "receives"}
    assert "rank 2 waits for rank 1, which waits for rank 2" in report.headline
    assert "send to rank 2 #8" in report.told[1]
    assert report_on(program, 4, DeadlockError, ways=[EAGER]).at == {0: "ends", 1: "ends", 2: "ends", 3: "receives"}


def test_a_server_that_answers_one_worker_twice_and_another_one_never(report_on):
    def program(group: Group) -> None:
        if group.rank == 0:
            for worker in (1, 2):
                group.recv(worker)
            for worker in (1, 1):
                group.send(LARGE, worker)  # @answers
        else:
            group.send(LARGE, 0)
            group.recv(0)  # @asks
        group.barrier()  # @meets

    report = report_on(program, 3, DeadlockError)
    assert report.at == {0: "answers", 1: "meets", 2: "asks"}
    assert "waiting for rank 1 to receive" in report.told[0]


def test_a_master_that_forgets_to_dismiss_a_worker(report_on):
    def program(group: Group) -> None:
        if group.rank == 0:
            for worker in (1, 2):
                group.send(np.zeros(0), worker)
        else:
            while group.recv(0).size:  # @works
                pass
        group.barrier()  # @joins

    report = report_on(program, 4, DeadlockError)
    assert report.at == {0: "joins", 1: "joins", 2: "joins", 3: "works"}


# Ranks that have gone


@pytest.mark.parametrize("odd", range(3))
def test_a_rank_that_leaves_a_loop_early_is_named_with_its_last_call(report_on, odd):
    def program(group: Group) -> None:
        for step in range(4):
            if step == 2 and group.rank == odd:
                break
            group.all_reduce(SMALL)  # @step

    report = report_on(program, 3, DeadlockError)
    assert report.at == dict.fromkeys(range(3), "step")
    assert report.headline.endswith(f"waits for rank {odd}, which has left the group")
    for rank, told in report.told.items():
        begins, number = ("left the group after ", 1) if rank == odd else ("", 2)
        assert told.startswith(f'{begins}all_reduce(float64[4], op="sum") #{number} at ')
    assert report.error.peer == odd


def test_a_rank_that_closes_the_group_itself_is_named_with_that_line(report_on):
    def program(group: Group) -> None:
        group.all_reduce(SMALL)  # @first
        if group.rank == 1:
            group.close()  # @close
        else:
            group.barrier()  # @second

    report = report_on(program, 3, DeadlockError)
    assert report.at == {0: "second", 1: "close first", 2: "second"}


def test_where_there_is_no_circle_the_shortest_way_to_the_reason_is_shown(report_on):
    def program(group: Group) -> None:
        if group.rank < 3:
            group.recv(group.rank + 1)  # @chain

    report = report_on(program, 4, DeadlockError)
    assert report.headline == "deadlock: no rank can go on: rank 2 waits for rank 3, which has left the group"
    assert report.at == {0: "chain", 1: "chain", 2: "chain", 3: ""}


def test_a_rank_that_did_nothing_at_all(report_on):
    def program(group: Group) -> None:
        if group.rank != 2:
            group.barrier()  # @alone

    report = report_on(program, 3, DeadlockError)
    assert report.told[2] == "left the group without a call"
    assert report.at == {0: "alone", 1: "alone", 2: ""}


def test_one_of_many_ranks_that_is_missing_takes_two_lines(report_on):
    def program(group: Group) -> None:
        for _ in range(1 if group.rank == 21 else 2):
            group.all_reduce(SMALL)  # @many

    report = report_on(program, 40, DeadlockError, ways=STRICT[:1])
    assert str(report.error).count("\n") == 2
    assert report.at == dict.fromkeys(range(40), "many")
    assert report.told[21].startswith("left the group")
    assert len(set(report.told.values())) == 2


def test_what_a_rank_that_has_gone_sent_to_nobody_is_told(report_on):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.send(SMALL, 1)  # @lost
            group.barrier()  # @gone
        elif group.rank == 1:
            group.barrier()
            group.recv(2)  # @waits
        else:
            group.barrier()  # @other

    report = report_on(program, 3, DeadlockError, ways=[EAGER])
    assert report.at == {0: "gone lost", 1: "waits", 2: "other"}
    assert "nobody received its send to rank 1 #1" in report.told[0]


# Several groups


def test_a_barrier_of_another_group(report_on):
    def program(group: Group) -> None:
        row = group.split(group.rank // 2)
        assert row is not None
        if group.rank == 1:
            row.barrier()  # @row
        else:
            group.barrier()  # @world

    report = report_on(program, 4, DeadlockError)
    assert report.at == {0: "world", 1: "row", 2: "world", 3: "world"}
    assert "of group 1" in report.told[1]


def test_rows_and_columns_in_another_order(report_on):
    def program(group: Group) -> None:
        row, column = group.split(group.rank // 2), group.split(group.rank % 2)
        assert row is not None
        assert column is not None
        if group.rank in (0, 3):
            row.all_reduce(SMALL)  # @row_first
            column.all_reduce(SMALL)
        else:
            column.all_reduce(SMALL)  # @column_first
            row.all_reduce(SMALL)

    report = report_on(program, 4, DeadlockError)
    assert report.at == {0: "row_first", 1: "column_first", 2: "column_first", 3: "row_first"}
    assert report.headline.count("waits for") == 4


def test_a_group_that_one_member_has_closed(report_on):
    def program(group: Group) -> None:
        part = group.split(0)
        assert part is not None
        if group.rank == 1:
            part.close()
        else:
            part.all_reduce(SMALL)  # @part
        group.barrier()  # @whole

    report = report_on(program, 3, DeadlockError)
    assert report.at == {0: "part", 1: "whole", 2: "part"}


def test_a_split_that_one_rank_does_not_take_part_in(report_on):
    def program(group: Group) -> None:
        if group.rank != 3:
            group.split(group.rank % 2)  # @split
        group.barrier()  # @no_split

    report = report_on(program, 4, DeadlockError)
    assert report.at == {0: "split", 1: "split", 2: "split", 3: "no_split"}
    assert "rank 3 waits for rank 2, which waits for rank 3" in report.headline


def test_subgroups_of_different_lists(report_on):
    def program(group: Group) -> None:
        group.subgroup([0, 1] if group.rank == 1 else [0, 1, 2])  # @subgroup

    report = report_on(program, 3, DeadlockError)
    assert report.at == dict.fromkeys(range(3), "subgroup")
    assert "subgroup [0, 1] #1" in report.told[1]
    assert "subgroup [0, 1, 2] #1" in report.told[2]
    assert "rank 0 waits for rank 1, which waits for rank 0" in report.headline
    assert report.hint == ""


def test_a_split_against_a_subgroup(report_on):
    def program(group: Group) -> None:
        if group.rank:
            group.split(0)  # @splits
        else:
            group.subgroup([0, 1])  # @picks

    assert report_on(program, 2, DeadlockError).at == {0: "picks", 1: "splits"}


# Calls in the background


def test_a_receive_in_the_background_is_told_with_the_line_that_issued_it_and_the_one_that_waits(report_on):
    def program(group: Group) -> None:
        if group.rank == 0:
            work = group.recv_async(1)  # @issues
            work.wait()  # @waits_for_it
        group.barrier()  # @other_rank

    report = report_on(program, 2, DeadlockError)
    assert report.at == {0: "waits_for_it issues", 1: "other_rank"}
    assert "recv from rank 1 #1" in report.told[0]


def test_the_second_of_two_receives_in_the_background_for_one_send(report_on):
    def program(group: Group) -> None:
        if group.rank == 0:
            works = [group.recv_async(1)]
            works += [group.recv_async(1)]  # @second_of_two
            for work in works:
                work.wait()  # @waits_for_both
        else:
            group.send(SMALL, 0)
            group.recv(0)  # @next

    report = report_on(program, 2, DeadlockError)
    assert report.at == {0: "waits_for_both second_of_two", 1: "next"}


def test_a_handle_that_was_dropped_is_found_when_the_group_is_closed(report_on):
    def program(group: Group) -> None:
        if group.rank == 0:
            group.recv_async(1)  # @dropped
        group.barrier()  # @last

    report = report_on(program, 2, DeadlockError)
    assert report.at == {0: "dropped", 1: "last"}
    assert report.told[0].startswith("waiting in close for calls in the background; ")


def test_a_callback_that_waits_is_told_with_its_line(caplog, told):
    def program(group: Group) -> None:
        work = group.all_reduce_async(SMALL)
        if group.rank == 0:
            work.add_done_callback(lambda _: group.recv(1))  # @callback
        work.wait()
        if group.rank == 1:
            group.recv(0)  # @its_peer

    run = simulated.run(program, 2, check=False)
    # Nobody takes what a callback raises; it is logged.
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [DeadlockError]
    report = told(run.errors[1])
    assert report.at == {0: "callback", 1: "its_peer"}


# Who may still come to the rescue


def test_who_computes_or_gives_up_or_polls_is_waited_for():
    def program(group: Group) -> float:
        if group.rank == 0:
            return float(group.recv(1)[0])
        if group.rank == 1:
            work = group.recv_async(2)
            with pytest.raises(oa.DeadlineError):
                work.wait(timeout_s=7)
            group.send(np.full(4, 5.0), 0)
            group.send(SMALL, 2)
            return float(work.wait()[0])
        oa.sleep(3)
        group.compute(1)
        group.recv(1)
        group.send(np.full(4, 9.0), 1)
        return 0.0

    run = simulated.run(program, 3, timeout_s=60)
    assert run.results == [5.0, 9.0, 0.0]
    assert run.duration_s == 7


def test_a_rank_that_polls_while_a_message_is_on_its_way_gets_it():
    def program(group: Group) -> float:
        if group.rank == 1:
            group.compute(2)
            group.send(SMALL, 0)
            return 0.0
        work = group.recv_async(1)
        while not work.done():
            pass
        return float(work.wait().sum())

    run = simulated.run(program, 2, network="fat-tree")
    assert run.results == [4.0, 0.0]


def test_the_clock_does_not_move_and_the_calls_are_marked_as_failed_in_the_trace():
    def program(group: Group) -> None:
        group.compute(0.25)
        group.recv(1 - group.rank)

    with pytest.raises(DeadlockError) as caught:
        simulated.run(program, 2, seed=7)
    run = caught.value.run
    assert run.duration_s == 0.25
    assert [call.error for rank in range(2) for call in run.trace.calls_of(rank)] == ["", "DeadlockError"] * 2
    assert isinstance(caught.value, oa.CollectiveMismatchError)


# Lines


def recv_in_vain(group: Group) -> None:
    group.recv(1 - group.rank)  # @in_vain


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Model:
    """Calls by all the ways in which Python does."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self) -> Any:
        return self.group.recv(1 - self.group.rank)  # @dunder

    @property
    def norm(self) -> Any:
        return self.group.recv(1 - self.group.rank)  # @property

    def batches(self) -> Iterator[Any]:
        yield self.group.recv(1 - self.group.rank)  # @generator

    @contextlib.contextmanager
    def synced(self) -> Iterator[None]:
        self.group.recv(1 - self.group.rank)  # @context
        yield


def nested(group: Group, depth: int) -> None:
    if depth:
        nested(group, depth - 1)
    else:
        group.recv(1 - group.rank)  # @nested


def on_exit(group: Group) -> None:
    with contextlib.ExitStack() as stack:  # @on_exit
        stack.callback(group.recv, 1 - group.rank)


def use(context: contextlib.AbstractContextManager[None]) -> None:
    with context:
        pass


WAYS_TO_CALL: dict[str, Callable[[Group], object]] = {
    "in_vain": decorated(recv_in_vain),
    "lambda_": lambda group: group.recv(1 - group.rank),  # @lambda_
    "comprehension": lambda group: [group.recv(peer) for peer in [1 - group.rank]],  # @comprehension
    "mapped": lambda group: list(map(group.recv, [1 - group.rank])),  # @mapped
    "partial": lambda group: functools.partial(group.recv, 1 - group.rank)(),  # @partial
    "sorted_": lambda group: sorted([1, 2], key=lambda _: group.recv(1 - group.rank)),  # @sorted_
    "generator": lambda group: list(itertools.chain.from_iterable([Model(group).batches()])),
    "dunder": lambda group: Model(group)(),
    "property": lambda group: Model(group).norm,
    "context": lambda group: use(Model(group).synced()),
    "on_exit": on_exit,
    "nested": lambda group: nested(group, 5),
    "lines": lambda group: group.recv(  # @lines
        1 - group.rank,
    ),
}


@pytest.mark.parametrize("mark", WAYS_TO_CALL)
def test_the_line_is_that_of_the_program_however_it_calls(report_on, mark):
    report = report_on(WAYS_TO_CALL[mark], 2, DeadlockError, ways=STRICT[:1])
    assert report.at == {0: mark, 1: mark}


def loaded(path: Path, source: str) -> ModuleType:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_line_may_be_in_another_module(report_on, tmp_path):
    module = loaded(tmp_path / "comm_tools.py", "def pull(group):\n    return group.recv(1 - group.rank)  # @elsewhere\n")
    report = report_on(module.pull, 2, DeadlockError, ways=STRICT[:1], marked=[tmp_path / "comm_tools.py"])
    assert report.at == {0: "elsewhere", 1: "elsewhere"}
    assert " at comm_tools.py:2," in report.told[0]


def test_the_line_may_be_in_code_that_has_no_file(report_on):
    names: dict[str, Any] = {}
    exec(compile("def pull(group):\n    return group.recv(1 - group.rank)", "<cell 3>", "exec"), names)
    report = report_on(names["pull"], 2, DeadlockError, ways=STRICT[:1])
    assert "recv from rank 1 #1 at <cell 3>:2, waiting" in report.told[0]

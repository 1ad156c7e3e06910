"""The files of flight recorders: when they are written, and what they tell of real ranks."""

from __future__ import annotations

import queue
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from support.fault_tools import Nursery, until_blocked
from support.waiting import PATIENCE_S, until
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group
from oneaccord.explain.reading import read_jobs
from oneaccord.explain.story import tell


def story(directory: Path) -> list[str]:
    """Return what the files in a directory tell."""
    (job, *others), left_out = read_jobs([directory])
    assert not others
    assert not left_out
    return tell(job).splitlines()


@pytest.mark.parametrize("native", [True, False])
def test_a_mismatch_is_told_with_the_lines_of_all_ranks(native: bool, tmp_path: Path) -> None:
    begun: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def program(group: Group) -> None:
        for _ in range(3):
            group.all_reduce(np.ones(4, np.float32))
        if group.rank == 1:
            for _ in range(2):
                until_blocked(begun.get(timeout=PATIENCE_S))  # else a rank may hear of the mismatch before its own call
            group.all_reduce(np.ones(4))
        begun.put(threading.current_thread())
        group.all_reduce(np.ones(4, np.float32))

    line = program.__code__.co_firstlineno
    file = __name__.replace(".", "/") + ".py"
    config = {"recorder": {"directory": str(tmp_path)}, "native": native}
    outcomes = thread_world(program, 3, "tcp", config=config)
    assert {type(outcome) for outcome in outcomes} == {oa.CollectiveMismatchError}
    lines = story(tmp_path)
    assert lines[-3:] == [
        "The ranks differ in call #3, in the dtype:",
        f'  ranks 0, 2: all_reduce(float32[4], op="sum") at {file}:{line + 8}',
        f'  rank 1: all_reduce(float64[4], op="sum") at {file}:{line + 6}',
    ]


def test_survivors_write_and_say_who_died(nursery: Nursery, tmp_path: Path) -> None:
    program = """
        def watch(thread):
            until_blocked(thread)
            tell("waiting")

        with oa.init(timeout_s=30) as group:
            group.barrier()
            if rank == 1:
                until_told_to_go()
                os.kill(os.getpid(), 9)
            threading.Thread(target=watch, args=(threading.current_thread(),)).start()
            attempt(group.all_reduce, np.ones(4))
    """
    with nursery.ranks(program, ONEACCORD_RECORDER__DIRECTORY=str(tmp_path)) as ranks:
        ranks.start().await_facts("waiting", 2)
        ranks.go()
        ranks.wait()
    lines = story(tmp_path)
    assert lines[0].endswith("3 ranks, 2 of them with a flight recorder file")
    assert lines[2] == "Rank 1 wrote nothing: it died, as other ranks reported"
    assert lines[-1] == "In the end all wait for rank 1"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json"]


def test_at_a_signal_ranks_write_and_go_on(nursery: Nursery, tmp_path: Path) -> None:
    program = """
        def load():
            tell("loading")
            until_told_to_go()

        with oa.init(timeout_s=30) as group:
            if rank == 1:
                load()
            group.barrier()
    """
    with nursery.ranks(program, 2, ONEACCORD_RECORDER__DIRECTORY=str(tmp_path)) as ranks:
        ranks.start()
        ranks.await_facts("loading", 1)
        for rank in range(2):
            ranks.signal(rank, signal.SIGUSR1)
        until(lambda: len(list(tmp_path.glob("*.json"))) == 2)
        lines = story(tmp_path)
        assert any(line.startswith("Rank 1 is in no call, at <string>:") for line in lines)
        ranks.go()
        assert set(ranks.wait().values()) == {0}
    assert story(tmp_path)[1:] == ["The job ended well"]


def test_a_directory_that_cannot_be_written_costs_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    results = thread_world(
        lambda group: group.all_reduce(np.ones(1))[0],
        2,
        "tcp",
        config={"recorder": {"directory": str(tmp_path / "file" / "x")}},
    )
    assert results == [2.0, 2.0]
    assert "could not write its flight recorder" in caplog.text


@pytest.mark.parametrize("native", [True, False])
def test_as_many_calls_are_kept_as_the_setting_says(native: bool, tmp_path: Path) -> None:
    def program(group: Group) -> None:
        for _ in range(100):
            group.barrier()

    thread_world(program, 2, "tcp", config={"recorder": {"directory": str(tmp_path), "calls": 4}, "native": native})
    (job, *_), _ = read_jobs([tmp_path])
    for dump in job.dumps.values():
        numbers = {call.sequence for call in dump.calls if call.operation == "barrier"}
        assert numbers >= set(range(96, 100))
        assert len(numbers) <= 20


@pytest.mark.parametrize("native", [True, False])
def test_the_size_of_each_call_is_kept_also_of_those_that_were_made_before(native: bool, tmp_path: Path) -> None:
    def program(group: Group) -> None:
        for _ in range(3):
            for count in (1000, 100_000):
                mine = np.ones(count)
                group.all_reduce(mine)
                group.all_gather(mine, counts=[count, count])
                group.broadcast(mine.astype(np.float32))
                group.all_reduce_async(mine).wait()
                if group.rank == 0:
                    group.send(mine, 1)
                else:
                    group.recv(0)

    thread_world(program, 2, "shm", config={"recorder": {"directory": str(tmp_path)}, "native": native})
    (job, *_), _ = read_jobs([tmp_path])
    for dump in job.dumps.values():
        sizes: dict[str, list[int]] = {}
        for call in dump.calls:
            sizes.setdefault(call.operation, []).append(call.nbytes)
        assert sizes["all_reduce"] == [8000, 8000, 800_000, 800_000] * 3
        assert sizes["all_gather"] == [16_000, 1_600_000] * 3
        assert sizes["broadcast"] == [4000, 400_000] * 3
    assert [call.nbytes for call in job.dumps[0].calls if call.operation == "send"] == [8000, 800_000] * 3
    assert next(call.nbytes for call in job.dumps[1].calls if call.operation == "recv") == 8000


def test_a_record_whose_name_is_taken_gets_another_and_is_for_its_owner_alone(nursery: Nursery, tmp_path: Path) -> None:
    program = """
        os.umask(0)
        with oa.init(timeout_s=30) as group:
            tell("there")
            until_told_to_go()
    """
    with nursery.ranks(program, 2, ONEACCORD_RECORDER__DIRECTORY=str(tmp_path)) as ranks:
        ranks.start().await_facts("there", 2)
        ranks.signal(0, signal.SIGUSR1)
        until(lambda: list(tmp_path.glob("*.json")))
        (first,) = tmp_path.glob("*.json")
        assert first.stat().st_mode & 0o777 == 0o600
        first.unlink()
        first.mkdir()
        ranks.go()
        assert set(ranks.wait().values()) == {0}
    (job,), left_out = read_jobs([tmp_path])
    assert {rank: dump.reason for rank, dump in job.dumps.items()} == {0: "closed", 1: "closed"}
    assert [text.partition(":")[0] for text in left_out] == [str(first)]


@pytest.mark.parametrize("native", [True, False])
def test_requests_run_from_their_start_to_their_end(native: bool, tmp_path: Path) -> None:
    records: dict[bool, list[tuple[str, bool, float]]] = {}

    def program(group: Group) -> None:
        if group.rank == 0:
            group.barrier()
            group.send(np.ones(3), 1, tag=1)
            group.recv(1, tag=3)
            return

        def look(ended: bool) -> None:
            recorder = group._job.control.recorder
            records[ended] = [
                (each.what, bool(each.finished), (each.finished or recorder._now()) - each.started)
                for each in recorder.records()
                if each.what.startswith("recv")
            ]

        first, second = group.recv_async(0, tag=1), group.recv_async(oa.ANY, tag=2)
        oa.sleep(0.05)
        look(False)
        group.barrier()
        first.wait()
        assert second.cancel()
        look(True)
        group.send(np.ones(1), 0, tag=3)

    must(thread_world(program, 2, "shm", config={"recorder": {"directory": str(tmp_path)}, "native": native}))
    names = ["recv from rank 0, tag 1", "recv from any rank, tag 2"]
    assert [each[:2] for each in records[False]] == [(name, False) for name in names]
    assert [each[:2] for each in records[True]] == [(name, True) for name in names]
    assert min(lasted for each in records.values() for *_, lasted in each) >= 0.05

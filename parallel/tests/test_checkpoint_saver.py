"""Checkpoints in the background: the copy is staged, old ones go, errors come out."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord_parallel as mp
from oneaccord.errors import ClosedError, CommError, DeadlineError, PeerLostError, UsageError
from oneaccord_parallel.checkpoint import storage
from oneaccord_simulated import Kill, explore, run


def steps(path):
    return sorted(int(folder.name) for folder in path.iterdir())


def tree_of(group, value, give=lambda array: array):
    return {
        "all": give(np.full(100, value)),
        "mine": mp.ShardedArray((2 * group.world_size,), [((2 * group.rank,), give(np.full(2, value)))]),
    }


def train(group, path, count, keep=2, give=lambda array: array):
    """Change the arrays right after each save; return what the saver says in the end."""
    tree = tree_of(group, -1, give)
    with mp.AsyncSaver(path, group, keep=keep) as saver:
        for step in range(count):
            tree["all"][:] = tree["mine"].pieces[0][1][:] = step
            saver.save(tree, step=step)
            tree["all"][:] = tree["mine"].pieces[0][1][:] = -2
            group.all_reduce(1.0)
    return saver.latest()


@pytest.mark.parametrize("backend", ["simulated", "tcp"])
def test_each_checkpoint_has_what_the_arrays_held_when_save_returned(tmp_path, backend, library):
    newest = must(thread_world(lambda group: train(group, tmp_path / "c", 5, give=library.give), 3, backend))
    assert len(set(newest)) == 1
    assert newest[0].step == 4
    assert steps(tmp_path / "c") == [3, 4]
    for step in (3, 4):
        found = mp.load(tmp_path / "c" / str(step), verify=True)
        assert (found["all"] == step).all()
        assert found["mine"].tolist() == [step] * 6
    assert mp.latest(tmp_path / "c") == newest[0]
    assert mp.describe(newest[0]).step == 4


def test_the_newest_is_the_one_that_was_saved_last_and_stays(tmp_path):
    def program(group):
        with mp.AsyncSaver(tmp_path / "c", group, keep=2) as saver:
            assert saver.latest() is None
            for step in (9, 10, 100):
                saver.save({"x": step}, step=step).wait()
        with mp.AsyncSaver(tmp_path / "c", group, keep=2) as saver:
            assert saver.latest().step == 100
            saved = saver.save({"x": 50}, step=50).wait()  # the program went back to step 40
            assert saver.latest() == saved
            assert steps(tmp_path / "c") == [50, 100]
            saver.save({"x": -100}, step=100).wait()
        assert mp.latest(tmp_path / "c", group).step == 100
        return mp.load(saver.latest())

    assert run(program, 2).results == [{"x": -100}] * 2
    assert steps(tmp_path / "c") == [50, 100]
    mp.save({"x": 0}, tmp_path / "c" / "best")
    mp.save({"x": 0}, tmp_path / "c" / "7" / "inner")
    run(lambda group: train(group, tmp_path / "c", 1, keep=1), 1)
    assert {file.name for file in (tmp_path / "c").iterdir()} == {"0", "7", "best"}  # what the saver did not make


def test_incomplete_ones_are_not_the_newest_and_are_tidied_up(tmp_path):
    for step in range(3):
        mp.save({"x": np.arange(5)}, tmp_path / str(step), step=step)
    (tmp_path / "2" / "metadata.json").unlink()
    assert mp.latest(tmp_path).step == 1
    next((tmp_path / "1").glob("data-*")).unlink()
    assert mp.latest(tmp_path).step == 0
    assert mp.latest(tmp_path / "none") is None
    run(lambda group: train(group, tmp_path, 4, keep=None), 1)
    assert steps(tmp_path) == [0, 1, 2, 3]


class Gate:
    """Stands for `os` in the module that writes: writes wait until it is opened."""

    def __init__(self):
        self.opened, self.reached = threading.Event(), threading.Event()
        self.fails = False

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, descriptor, data):
        self.reached.set()
        assert self.opened.wait(30)
        if self.fails:
            raise OSError(28, "No space left on device")
        return os.write(descriptor, data)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(storage, "os", gate)
    yield gate
    gate.opened.set()


def test_save_returns_before_the_disk_has_it(tmp_path, gate):
    def program(group):
        with mp.AsyncSaver(tmp_path, group) as saver:
            work = saver.save({"x": np.ones(3)}, step=1)
            assert gate.reached.wait(30)
            assert not work.done()
            assert work.exception() is None
            assert saver.latest() is None
            with pytest.raises(DeadlineError, match=r"not complete within 0.001 s; the save continues"):
                work.wait(0.001)
            gate.opened.set()
            assert work.wait().step == 1
            assert work.done()
        with pytest.raises(ClosedError):
            saver.save({}, step=2)
        saver.close()

    must(thread_world(program, 1, "tcp"))


def test_errors_come_out_at_wait_or_at_the_next_save_or_at_close(tmp_path, gate):
    gate.opened.set()
    tree = {"x": np.ones(3)}

    def program(group):
        saver = mp.AsyncSaver(tmp_path, group)
        gate.fails = True
        with pytest.raises(mp.CheckpointWriteError) as one:
            saver.save(tree, step=1).wait()
        saver.save(tree, step=2)
        with pytest.raises(mp.CheckpointWriteError) as two:
            saver.save(tree, step=3)
        work = saver.save(tree, step=4)
        with pytest.raises(mp.CheckpointWriteError) as three:
            saver.close()
        assert work.done()
        assert type(work.exception()) is mp.CheckpointWriteError
        group.barrier()
        gate.fails = False
        with mp.AsyncSaver(tmp_path, group) as saver:
            with pytest.raises(UsageError, match="leaf 'x'"):
                saver.save({"x": object()}, step=5)
            saver.save(tree, step=5)
        return str((one.value, two.value, three.value))

    said = must(thread_world(program, 2, "tcp"))
    assert said[0] == said[1]
    assert "rank 0: cannot write" in said[0]
    assert mp.latest(tmp_path).step == 5


def test_ranks_must_agree_on_the_folder(tmp_path):
    def program(group):
        with pytest.raises(UsageError, match="the same path and keep=") as one:
            mp.AsyncSaver(tmp_path, group, keep=group.rank + 1)
        with pytest.raises(UsageError, match="keep must be at least 1, or None for all, not 0") as two:
            mp.AsyncSaver(tmp_path, group, keep=0)
        return str((one.value, two.value))

    assert len(set(run(program, 2).results)) == 1


def test_a_rank_that_dies_in_a_save_in_the_background_leaves_the_one_before(tmp_path):
    def program(group):
        with mp.AsyncSaver(tmp_path, group, keep=1) as saver:
            saver.save(tree_of(group, 1), step=1).wait()
            work = saver.save(tree_of(group, 2), step=2)
            try:
                work.wait()
            except CommError as error:
                return type(error)
        return None

    done = run(program, 3, faults=Kill(rank=1, operation="gather_object", nth=1), check=False)
    assert [done.results[rank] for rank in (0, 2)] == [PeerLostError] * 2
    newest = mp.latest(tmp_path)
    assert newest.step == 1
    assert mp.load(newest, verify=True)["mine"].tolist() == [1] * 6
    run(lambda group: train(group, tmp_path, 3, keep=1), 2)
    assert steps(tmp_path) == [2]


def test_no_order_of_ranks_and_threads_makes_a_difference(tmp_path):
    def program(group):
        train(group, tmp_path / "c", 2)
        return mp.load(tmp_path / "c" / "1", group=group)["mine"].tolist()

    explore(program, 2, alike=True, seeds=range(5)).raise_failure()


def test_a_block_that_an_exception_leaves_ends_the_save_in_flight(tmp_path):
    class Mine(Exception):
        pass

    def program(group):
        with mp.AsyncSaver(tmp_path, group) as saver:
            saver.save(tree_of(group, 1), step=1)
            raise Mine

    outcomes = thread_world(program, 2, "tcp")
    assert all(isinstance(outcome, Mine | CommError) for outcome in outcomes)
    assert mp.latest(tmp_path).step == 1

"""A save that is killed leaves the old checkpoint or the new one, whole, wherever it is killed."""
# ruff: noqa: PTH102, PTH105, PTH106, PTH108 - what stands for os does what os does

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord_parallel.checkpoint import storage
from oneaccord_simulated import Kill, run

OLD, NEW = {"w": np.arange(5.0), "b": np.zeros(3, "f4"), "n": 1}, {"w": -np.arange(7.0), "b": np.ones(3, "f4"), "n": 2}


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


class Disk:
    """Stands for `os` in the module that writes: dies at the ``dies_at``-th place where it can, and knows what a computer then loses."""

    def __init__(self, dies_at=None, fails_at=None, every_byte=False):
        self.places = 0
        self.dies_at, self.fails_at, self.every_byte = dies_at, fails_at, every_byte
        self.is_dead = False
        self.opened: dict[int, Path] = {}
        self.unsynced: dict[Path, int] = {}
        self.undo: list[tuple[str, Path, Any]] = []

    def __getattr__(self, name):
        return getattr(os, name)

    def place(self):
        """Stand at a place where the process may die, or an operation may fail."""
        if self.is_dead or self.places == self.dies_at:
            self.is_dead = True
            raise Killed
        self.places += 1
        if self.places - 1 == self.fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, path, flags, mode=0o777):
        self.place()
        descriptor = os.open(path, flags, mode)
        self.opened[descriptor] = Path(path)
        if flags & os.O_CREAT:
            self.undo.append(("create", Path(path).parent, lambda: os.unlink(path)))
            self.unsynced[Path(path)] = 0
        return descriptor

    def close(self, descriptor):
        os.close(descriptor)

    def write(self, descriptor, data):
        self.place()
        step = 1 if self.every_byte else max(len(data) // 2, 1)
        return os.write(descriptor, data[:step])

    def fsync(self, descriptor):
        self.place()
        path = self.opened[descriptor]
        self.unsynced.pop(path, None)
        self.undo = [entry for entry in self.undo if entry[1] != path]
        self.place()

    def mkdir(self, path):
        self.place()
        os.mkdir(path)
        self.undo.append(("create", path.parent, lambda: shutil.rmtree(path)))

    def replace(self, source, target):
        self.place()
        before = target.read_bytes() if target.exists() else None
        os.replace(source, target)

        self.undo.append(("replace", target.parent, lambda: target.unlink() if before is None else target.write_bytes(before)))
        if source in self.unsynced:
            self.unsynced[target] = self.unsynced.pop(source)
        self.place()

    def unlink(self, path):
        self.place()
        before = Path(path).read_bytes()
        os.unlink(path)
        self.undo.append(("unlink", Path(path).parent, lambda: Path(path).write_bytes(before)))
        self.place()

    def rmdir(self, path):
        self.place()
        os.rmdir(path)

    def lose(self, what):
        """Lose what a computer without power may lose: contents that were not synchronised, and some of what was done to names."""
        if "contents" in what:
            for path, size in self.unsynced.items():
                if path.exists():
                    os.truncate(path, size)
        for kind, _, undo in reversed(self.undo):
            if kind in what:
                with contextlib.suppress(FileNotFoundError):
                    undo()


LOSSES = [(), ("contents",), ("contents", "create"), ("replace",), ("contents", "create", "replace", "unlink")]


@pytest.fixture
def disk(monkeypatch):
    def insert(**options):
        disk = Disk(**options)
        monkeypatch.setattr(storage, "os", disk)
        return disk

    return insert


def load(path):
    found = mp.load(path, verify=True)
    return {"w": found["w"].tolist(), "b": found["b"].tolist(), "n": found["n"]}


def plain(tree):
    return {"w": tree["w"].tolist(), "b": tree["b"].tolist(), "n": tree["n"]}


def kill_everywhere(path, disk, save, first=OLD, losses=LOSSES, **options):
    """Kill a save of NEW at each place in turn, and check what is left. Return at how many places, and how often it was the new one."""
    news = total = 0
    for loses in losses:
        for place in itertools.count():
            disk()
            if first is None:
                shutil.rmtree(path, ignore_errors=True)
            else:
                mp.save(first, path)
            dying = disk(dies_at=place, **options)
            with contextlib.suppress(Killed):
                save(NEW)
            dying.lose(loses)
            disk()
            if first is None and not (path / "metadata.json").exists():
                assert dying.is_dead
                with pytest.raises(mp.CheckpointMissingError):
                    mp.load(path)
            else:
                left = load(path)
                assert left == plain(NEW) or (dying.is_dead and left == plain(first)), (place, loses)
                news += left == plain(NEW)
            mp.save(OLD, path)
            assert load(path) == plain(OLD)
            assert {file.name for file in path.iterdir()} == {"metadata.json", *mp.describe(path).files}
            total += 1
            if not dying.is_dead:
                break
    return total, news


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("first", "losses", "places"), [(OLD, LOSSES, 90), (None, [(), LOSSES[-1]], 30)], ids=["another", "none"]
)
def test_killed_at_every_operation(tmp_path, disk, first, losses, places):
    total, news = kill_everywhere(tmp_path / "c", disk, lambda tree: mp.save(tree, tmp_path / "c"), first, losses)
    assert total > places
    assert 0 < news < total


@pytest.mark.long
@pytest.mark.timeout(300)
def test_killed_at_every_byte(tmp_path, disk):
    total, _ = kill_everywhere(
        tmp_path / "c", disk, lambda tree: mp.save(tree, tmp_path / "c"), losses=[(), ("contents",)], every_byte=True
    )
    assert total > 1500


def split(tree, group):
    """Return the tree with one array divided among the ranks."""
    count = -(-len(tree["w"]) // group.world_size)
    first = min(group.rank * count, len(tree["w"]))
    piece = mp.ShardedArray.of_range(tree["w"].shape, first, tree["w"][first : first + count])
    return {**tree, "w": piece}


def save_on_three(tree, path):
    def program(group):
        mp.save(split(tree, group), path, group)

    done = run(program, 3, check=False)
    for error in done.errors.values():
        if isinstance(error, Killed):
            raise error
    assert not done.errors


@pytest.mark.long
@pytest.mark.timeout(300)
def test_three_ranks_killed_at_every_operation(tmp_path, disk):
    total, news = kill_everywhere(tmp_path / "c", disk, lambda tree: save_on_three(tree, tmp_path / "c"), losses=LOSSES[:2])
    assert total > 100
    assert 0 < news < total


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("operation", ["all_gather_object", "gather_object", "broadcast_object"])
def test_a_rank_that_dies_in_a_save_ends_it_and_the_old_checkpoint_stays(tmp_path, rank, operation):
    save_on_three(OLD, tmp_path / "c")

    def program(group):
        try:
            mp.save(split(NEW, group), tmp_path / "c", group)
        except oa.CommError as error:
            return type(error)
        return None

    done = run(program, 3, faults=Kill(rank=rank, operation=operation, nth=0), check=False)
    assert [done.results[other] for other in range(3) if other != rank] == [oa.PeerLostError] * 2
    assert load(tmp_path / "c") == plain(NEW if operation == "broadcast_object" else OLD)
    save_on_three(OLD, tmp_path / "c")
    assert {file.name for file in (tmp_path / "c").iterdir()} == {"metadata.json", *mp.describe(tmp_path / "c").files}


def fail_everywhere(path, disk, save):
    """Let each operation fail in turn; return the errors that all ranks raised."""
    place, texts = 0, []
    while True:
        disk()
        mp.save(OLD, path)
        failing = disk(fails_at=place)
        errors = save(NEW)
        disk()
        left = load(path)
        if failing.places <= place:
            assert not errors
            return texts
        if errors:
            assert {type(error) for error in errors} == {mp.CheckpointWriteError}, errors
            assert len({str(error) for error in errors}) == 1
            texts.append(str(errors[0]))
        else:  # only what was to be tidied up is left
            assert left == plain(NEW)
        assert left in (plain(OLD), plain(NEW))
        place += 1


def test_a_rank_that_cannot_write_is_named_on_all_and_the_old_checkpoint_stays(tmp_path, disk):
    def save(tree):
        def program(group):
            error = None
            try:
                mp.save(split(tree, group), tmp_path / "c", group)
            except mp.CheckpointError as caught:
                error = caught
            group.barrier()
            return error

        return [error for error in run(program, 2).results if error is not None]

    texts = fail_everywhere(tmp_path / "c", disk, save)
    assert {text[:24] for text in texts} >= {f"rank {rank}: cannot write {tmp_path}"[:24] for rank in range(2)}
    assert any("metadata.json: [Errno 28] No space left on device" in text for text in texts)
    assert any("-1.safetensors: [Errno 28] No space left on device" in text for text in texts)


def test_what_a_killed_save_has_left_gives_its_room_to_the_next(tmp_path, disk):
    mp.save(OLD, tmp_path)
    disk(dies_at=3)
    with pytest.raises(Killed):
        mp.save(NEW, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    disk(fails_at=2)
    with pytest.raises(mp.CheckpointWriteError, match="No space left"):
        mp.save(NEW, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"metadata.json", *mp.describe(tmp_path).files}


PROGRAM = """
import sys
import numpy as np
import oneaccord as oa
import oneaccord_parallel as mp

with oa.init() as group:
    with mp.AsyncSaver(sys.argv[1], group, keep=2) as saver:
        first = saver.latest().step + 1 if saver.latest() else 0
        tree = {"w": np.full(200_000, first), "s": mp.ShardedArray.of_range((10,), group.rank * 5, np.full(5, first))}
        for step in range(first, 100_000):
            tree["w"][:] = step
            tree["s"].pieces[0][1][:] = step
            saver.save(tree, step=step)
            print(step, flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_processes_killed_at_random_leave_a_whole_checkpoint(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "oneaccord", "run", "-n", "2", "--backend", "shm", "train.py", "ckpt"]
    chance, before = random.Random(7), -1
    for _ in range(8):
        job = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True)
        try:
            for _ in range(chance.randrange(2, 30)):
                assert job.stdout is not None
                assert job.stdout.readline()
        finally:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
        newest = mp.latest(tmp_path / "ckpt")
        assert newest is not None
        assert newest.step is not None
        assert newest.step >= before
        before = newest.step
        found = mp.load(newest, verify=True)
        assert (found["w"] == newest.step).all()
        assert found["s"].tolist() == [newest.step] * 10
    assert len(list((tmp_path / "ckpt").iterdir())) <= 4

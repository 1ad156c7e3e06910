"""Plain ``python`` without a launcher: a world of one, in which everything works, and what a group is after its end."""

from __future__ import annotations

import numpy as np
import pytest
from support import preloaded

import oneaccord as oa
from oneaccord.api import Group


def test_every_call_works_in_a_world_of_one():
    with oa.init() as group:
        assert (group.rank, group.world_size) == (0, 1)
        x = np.arange(6.0).reshape(3, 2)
        results = [
            *(group.all_reduce(x), group.all_reduce(x, "mean"), group.all_reduce(x, np.hypot), group.reduce(x), group.scan(x)),
            *(group.broadcast(x), group.all_gather(x), group.gather(x), group.scatter(x), group.reduce_scatter(x)),
            *(group.all_to_all(x), group.all_gather(x, counts=[3]), group.gather(x, counts=[3])),
            *(group.scatter(x, counts=[3]), group.reduce_scatter(x, counts=[3]), group.all_to_all(x, send_counts=[3])),
            group.sendrecv(x, 0, 0),
        ]
        for result in results:
            assert result.tolist() == x.tolist()
            assert not np.shares_memory(result, x)
        assert group.exscan(x, "max").tolist() == [[-np.inf] * 2] * 3
        for method in (group.all_reduce, group.reduce, group.broadcast, group.all_gather, group.all_to_all, group.scan):
            y = x.copy()
            assert method(y, out=y) is y
            assert (x == y).all()
        group.barrier()
        assert group.all_gather(5).tolist() == [5]
        assert group.all_reduce([True], "and").tolist() == [True]
        for refused in (lambda: group.send(x, 0), lambda: group.recv(0), lambda: group.sendrecv(x, 0, None)):
            with pytest.raises(oa.SelfSendError):
                refused()
        with pytest.raises(oa.DTypeError):
            group.all_reduce([1], "mean")
        assert "rank 0 of 1" in repr(group)
    group.close()
    assert repr(group).startswith("<oneaccord.Group rank 0 of 1")
    assert repr(group).endswith("closed>")
    with pytest.raises(oa.ClosedError, match="the group is closed"):
        group.barrier()


def test_a_world_of_one_may_end_without_closing(run_python, tmp_path):
    done = run_python("-W", "error", "-c", "import oneaccord as oa; g = oa.init(); print(g.all_reduce(2).item())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_a_script_that_fails_alone_shows_its_own_error_only(run_python):
    done = run_python("-c", "import oneaccord as oa\nwith oa.init() as g:\n    raise KeyError('mine')")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("KeyError: 'mine'")
    assert "oneaccord" not in done.stderr.splitlines()[-1]


ALONE = """
import os, sys, oneaccord as oa
os.environ.update(word.split("=") for word in sys.argv[1].split())
with oa.init(**eval(sys.argv[2])) as group:
    print(group.world_size)
"""


@pytest.mark.parametrize("variable", ["SLURM_NTASKS=4", "LOCAL_RANK=1", "PMI_ID=3"])
def test_a_rank_that_is_alone_although_it_seems_to_have_been_launched_says_so(tmp_path, variable):
    done = preloaded.run(["-c", ALONE, variable, "{}"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.startswith("oneaccord: ")
    assert "a world of one" in done.stderr
    assert "init(rank=0, world_size=1)" in done.stderr
    done = preloaded.run(["-c", ALONE, variable, "{'rank': 0, 'world_size': 1}"], cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_launcher_of_pmix_is_told_what_to_set_or_to_give(tmp_path):
    done = preloaded.run(["-c", ALONE, "PMIX_RANK=0", "{}"], cwd=tmp_path)
    assert done.returncode == 1
    assert "ConfigError: PMIX_RANK=0 is set, by a launcher that uses only PMIx" in done.stderr
    for more, given in (("", "{'rank': 0, 'world_size': 1}"), (" ONEACCORD_WORLD_SIZE=1", "{}")):
        done = preloaded.run(["-c", ALONE, "PMIX_RANK=0" + more, given], cwd=tmp_path)
        assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize("size", [1, 3])
def test_a_closed_group_refuses_every_call(world, size):
    def program(group: Group) -> None:
        group.barrier()
        group.close()
        group.close()
        other, whole = (group.rank + 1) % size, np.zeros(size)
        calls = [
            lambda: group.all_reduce(1),
            lambda: group.reduce(1),
            lambda: group.broadcast(1),
            lambda: group.all_gather(1),
            lambda: group.gather(1),
            lambda: group.scatter(whole),
            lambda: group.reduce_scatter(whole),
            lambda: group.all_to_all(whole),
            lambda: group.all_to_all(whole, send_counts=[1] * size),
            group.barrier,
        ]
        calls += [
            lambda: group.send(1, None),
            lambda: group.recv(None),
            lambda: group.recv_async(None).wait(),
            lambda: group.sendrecv(1, group.rank, group.rank),
            lambda: group.broadcast_object(1),
        ]
        if size > 1:
            calls += [
                lambda: group.send(1, other),
                lambda: group.recv(other),
                lambda: group.sendrecv(1, other, other),
                lambda: group.send_object(1, other),
            ]
        for call in calls:
            with pytest.raises(oa.ClosedError, match=r"closed.*init") as caught:
                call()
            assert caught.value.rank == group.rank

    world(program, size)


def test_with_closes_and_repr_tells(world):
    def program(group: Group) -> None:
        name = f"<oneaccord.Group rank {group.rank} of 2 over {group.backend_name}"
        assert repr(group) == f"{name}>"
        with group as entered:
            assert entered is group
        assert repr(group) == f"{name}, closed>"

    world(program, 2)


def test_a_failed_group_says_so(world):
    def program(group: Group) -> str:
        with pytest.raises(oa.CollectiveMismatchError):
            group.all_reduce(np.zeros(2 + group.rank))
        with pytest.raises(oa.CollectiveMismatchError):
            group.barrier()
        return repr(group)

    for rank, text in enumerate(world(program, 2)):
        assert text.startswith(f"<oneaccord.Group rank {rank} of 2")
        assert text.endswith(", failed>")


def test_one_group_after_another(world):
    """A program may close its group and make another one; nothing of the first is left in the way."""

    def program(group: Group) -> None:
        group.all_reduce(1)
        if group.rank == 0:
            group.send(5, 1)
        elif group.rank == 1:
            group.recv(0)
        group.close()
        for number in range(5):
            with oa.init(config={}) as again:
                assert again.all_reduce(np.full(1000, number)).tolist() == [3 * number] * 1000

    world(program, 3)

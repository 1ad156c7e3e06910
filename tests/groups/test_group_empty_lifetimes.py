"""When memory of `Group.empty` on GPUs is given back: never while NCCL knows it, nor while the device or a graph may use it.

The fakes call each of these a crime, and give an address out again as soon as its memory is free.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.device_worlds import HYBRID, NCCL, gpu_world, gpus, mine, ranks
from support.fake_gpu import fake_cupy
from support.fake_gpu.fake_nccl import FakeNccl
from support.waiting import until
from support.worlds import held_port, must, over_sockets

import oneaccord as oa
from oneaccord.api import Group
from oneaccord_nccl.communicator import destroy_revoked, wait_for_ends

__all__ = ["gpus"]

pytestmark = pytest.mark.usefixtures("few_objects")

REVOKES, ABORTS = 23203, 22800


def filled(group: Group, shape: Any = 4, dtype: Any = np.float32) -> Any:
    """Return an array of `Group.empty` that is full of this rank's number + 1."""
    made = group.empty(shape, dtype, device="cuda")
    made[...] = group.rank + 1
    return made


def may_abort(gpus: FakeNccl) -> None:
    """Forgive older versions of NCCL that they can only abort, which takes memory away from ranks that have not aborted yet."""
    gpus.crimes[:] = [crime for crime in gpus.crimes if not crime.startswith("comm_abort of rank")]


def collected() -> None:
    """Let all that nobody refers to be gone."""
    for _ in range(2):
        gc.collect()


def test_arrays_that_die_before_the_close_are_freed_after_the_communicator(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = filled(group, 5000)
        view = x[10:]
        group.all_reduce(x, out=x)
        del x
        collected()
        group.barrier()
        assert len(gpus.allocated) == 2  # a view keeps the memory
        assert view[:3].get().tolist() == [3] * 3
        del view
        collected()
        group.barrier()
        assert len(gpus.allocated) == 2  # and NCCL knows it

    ranks(program, 2)
    until(lambda: not gpus.allocated)
    names = gpus.names()
    assert names.index("mem_free") > names.index("comm_destroy")


WIDE: dict[str, Any] = NCCL | {"backends": {"nccl": {"accumulate": "float32"}}}
COPIED: dict[str, tuple[dict[str, Any], Callable[[Group, Any, Any], Any], Any, int]] = {
    "broadcast": (NCCL, lambda group, x, out: group.broadcast(x, root=1, out=out), np.float32, 4),
    "strided": (NCCL, lambda group, x, out: group.all_reduce(x[::2], out=out), np.float32, 8),
    "message": (NCCL, lambda group, x, out: group.sendrecv(x, 1 - group.rank, 1 - group.rank, out=out), np.float32, 4),
    "float32": (WIDE, lambda group, x, out: group.all_reduce(x, out=out), np.float16, 4),
}
"""Calls that NCCL performs on copies of registered memory."""


@pytest.mark.parametrize("name", COPIED)
def test_memory_that_a_captured_call_copies_waits_for_the_graph(gpus: FakeNccl, name: str) -> None:
    config, call, dtype, count = COPIED[name]

    def program(group: Group) -> None:
        x, out = filled(group, count, dtype), fake_cupy.zeros(4, dtype)
        call(group, x, out)
        expected = out.get().tolist()
        stream = fake_cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            call(group, x, out)
            graph = stream.end_capture()
        del x
        collected()
        other = group.empty(count, dtype, device="cuda")
        other[...] = 77
        other.get()
        group.barrier(device="cuda")
        out.fill(0)
        out.get()
        with stream:
            graph.launch(stream)
            found = out.get().tolist()
        group.barrier(device="cuda")
        del graph
        assert found == expected
        group.synchronize()

    ranks(program, 2, config=config)


def test_an_array_that_outlives_its_group_is_an_array_as_any_other(gpus: FakeNccl) -> None:
    def program(group: Group) -> Any:
        first, second = filled(group), filled(group)
        total = group.all_reduce(first, out=second)
        return first, total

    left = ranks(program, 2)
    until(lambda: gpus.open_communicators() == 0)
    ranks(lambda group: group.all_reduce(filled(group)), 2)  # nothing of another group frees it
    assert [(first.get().tolist(), total.get().tolist()) for first, total in left] == [([1] * 4, [3] * 4), ([2] * 4, [3] * 4)]
    left[0][0][...] = 7
    assert (left[0][0] + left[0][1]).get().tolist() == [10] * 4
    del left
    collected()
    until(lambda: not gpus.allocated)


def test_an_address_that_is_given_out_again_belongs_to_the_new_array(gpus: FakeNccl) -> None:
    def program(group: Group) -> Any:
        first = filled(group)
        address = first.data.ptr
        del first
        collected()
        second = filled(group)
        assert second.data.ptr == address
        return second

    left = ranks(program, 2)
    until(lambda: gpus.open_communicators() == 0)
    wait_for_ends()
    assert [array.get().tolist() for array in left] == [[1] * 4, [2] * 4]
    assert len(gpus.allocated) == 2
    del left
    collected()
    until(lambda: not gpus.allocated)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("version", [REVOKES, ABORTS])
def test_memory_of_a_failed_group_is_freed_when_nccl_holds_it_no_more(gpus: FakeNccl, version: int, when: str) -> None:
    gpus.version = version
    kept: list[Any] = []

    def program(group: Group) -> None:
        x = filled(group)
        group.all_reduce(x, out=x)
        group.synchronize()
        kept.append(x)
        group.barrier()
        if group.rank == 0:
            raise KeyError("mine")
        group.all_reduce(x)
        group.synchronize()

    outcomes = gpu_world(program, 2)
    assert isinstance(outcomes[0], KeyError)
    del outcomes  # whose tracebacks refer to the arrays
    until(lambda: gpus.names().count("comm_revoke" if version == REVOKES else "comm_abort") == 2)
    wait_for_ends()
    if when == "before":
        kept.clear()
        collected()
    if version == REVOKES:
        assert (len(gpus.allocated), gpus.open_communicators()) == (2, 2)
        destroy_revoked()  # as when the survivors have met
        wait_for_ends()
    if when == "after":
        assert (len(gpus.allocated), gpus.open_communicators()) == (2, 0)
        kept.clear()
        collected()
    until(lambda: not gpus.allocated)
    may_abort(gpus)


def test_memory_is_not_freed_while_an_abort_is_under_way(gpus: FakeNccl) -> None:
    """The ranks have agreed that nobody uses the memory any more, and then lose the communicator."""

    def program(group: Group) -> None:
        x = filled(group)
        group.all_reduce(x, out=x)
        group.synchronize()
        del x
        collected()
        if group.rank == 0:
            gpus.refuse("comm_window_deregister", 3)
        group.barrier()
        with pytest.raises(oa.CommError):
            _ = group.empty(4, device="cuda"), group.empty(4, device="cuda")

    ranks(program, 2)


def test_a_window_that_does_not_come_about_is_freed_with_the_communicator(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        group.barrier()
        if group.rank == 0:
            gpus.refuse("comm_window_register", 3)
        group.barrier()
        with pytest.raises(oa.CommError):
            _ = group.empty(4, device="cuda"), group.empty(4, device="cuda")

    ranks(program, 2)
    wait_for_ends()
    destroy_revoked()
    wait_for_ends()
    until(lambda: not gpus.allocated)


def test_a_graph_keeps_the_memory_of_its_calls_until_the_group_ends(gpus: FakeNccl) -> None:
    def program(group: Group) -> Any:
        x, y, other = filled(group), filled(group), filled(group)
        group.all_reduce(x, out=y)
        group.all_reduce(other, out=other)
        stream = fake_cupy.cuda.Stream(non_blocking=True)
        x.get()
        with stream:
            stream.begin_capture()
            group.all_reduce(x, out=y)
            graph = stream.end_capture()
        group.all_reduce(other, out=other)
        del x, other
        collected()
        more = [filled(group) for _ in range(2)]
        group.barrier()
        assert len(gpus.allocated) == 8  # of x, y, and the two of `more`, of which one is where `other` was
        y[...] = 0
        host(y)
        with stream:
            for _ in range(2):
                graph.launch(stream)
            stream.synchronize()
        assert y.get().tolist() == [3] * 4
        assert [array.get().tolist() for array in more] == [[group.rank + 1] * 4] * 2
        group.synchronize()
        return graph

    graphs = ranks(program, 2)
    assert len(gpus.allocated) == 8
    assert gpus.open_communicators() == 2
    del graphs
    collected()
    until(lambda: not gpus.allocated)


def test_a_capture_of_another_stream_lets_all_ranks_keep_the_memory(gpus: FakeNccl) -> None:
    """CUDA refuses to wait for a device then. It spoils the capture too, which the page forbids."""

    def program(group: Group) -> None:
        kept, x = filled(group), filled(group)
        group.all_reduce(x, out=kept)
        host(kept)
        del x
        collected()
        stream = fake_cupy.cuda.Stream(non_blocking=True)
        if group.rank == 0:
            fake_cupy.begin_capture(stream)
        more = filled(group)
        group.barrier()
        assert len(gpus.allocated) == 6
        if group.rank == 0:
            with pytest.raises(fake_cupy.cuda.runtime.CUDARuntimeError):
                fake_cupy.end_capture(stream)
        last = filled(group)
        group.barrier()
        assert len(gpus.allocated) == 6  # the last is where x was
        assert group.all_reduce(last, out=more).get().tolist() == [3] * 4

    ranks(program, 2)


def host(array: Any) -> None:
    """Wait until an array is as it will be."""
    array.get()


def lose_rank_1(group: Group, array: Any) -> None:
    group.barrier()
    if group.rank == 1:
        raise KeyError("mine")
    group.all_reduce_async(array).synchronize()


@pytest.mark.parametrize("version", [REVOKES, ABORTS])
def test_those_that_are_left_use_the_arrays_of_the_old_group_as_any_others(gpus: FakeNccl, version: int) -> None:
    gpus.version = version

    def program(group: Group) -> Any:
        fake_cupy.cuda.Device(group.rank).use()
        x, dropped = filled(group), filled(group)
        group.all_reduce(x, out=x)
        group.all_reduce(dropped, out=dropped)
        group.synchronize()
        with pytest.raises(oa.AbortedError):
            lose_rank_1(group, dropped)
        del dropped
        with group.shrink() as left:
            y = left.empty(4, np.float32, device="cuda")
            y[...] = left.rank + 1
            # A rank that has other memory than the others makes no mismatch: the new group does not know the old one's.
            assert left.all_reduce(x if left.rank else mine(left, 4) + 5).get().tolist() == [12] * 4
            assert left.all_reduce(x, out=y).get().tolist() == [12] * 4
            return x, left.all_reduce(y, out=y).get().tolist()

    outcomes = over_sockets(program, 3, config=HYBRID)
    assert isinstance(outcomes[1], KeyError)
    must([outcomes[0], outcomes[2]])
    assert [outcomes[rank][1] for rank in (0, 2)] == [[24] * 4] * 2
    assert [outcomes[rank][0].get().tolist() for rank in (0, 2)] == [[6] * 4] * 2
    del outcomes
    collected()
    until(lambda: not gpus.allocated)
    may_abort(gpus)


AT_EXIT = """
import sys
import pytest
from support.device_worlds import gpu_world
from support.fake_gpu import fake_cupy
from support.fake_gpu.fake_nccl import FakeNccl
from oneaccord_nccl import plugin
from support.worlds import must, on_threads
import oneaccord as oa
import numpy as np

monkeypatch = pytest.MonkeyPatch()
fake = FakeNccl()
fake.install(monkeypatch)
fake_cupy.install(monkeypatch, 2)
monkeypatch.setattr(plugin, "_DRIVER", None)

def program(group):
    x = group.empty(4, np.float32, device="cuda")
    x[...] = group.rank + 1
    group.all_reduce(x, out=x)
    return x

class Knot:
    pass

closed = must(gpu_world(program, 2))
knot = Knot()
knot.itself, knot.array = knot, closed.pop()

def joining(rank):
    fake_cupy.cuda.Device(rank).use()
    routes = {"hybrid": {"routes": {"cpu": "tcp", "cuda": "nccl"}}}
    config = {"backend": "hybrid", "backends": routes, "rendezvous": {"address": sys.argv[1]}}
    group = oa.init(config=config, rank=rank, world_size=2)
    return group, program(group)

opened = must(on_threads(joining, 2))
assert [array.get().tolist() for _, array in opened] == [[3] * 4] * 2
assert closed[0].get().tolist() == [3] * 4
opened[1][0].close(timeout_s=0.5)  # in vain it waits for rank 0, which is in this process too

import atexit
atexit.register(lambda: print("freed" if "mem_free" in fake.names() else "kept", fake.crimes))
"""
"""Ends with an array of a group that is closed, one in a circle, and a group that nobody closes."""


def test_a_program_may_end_with_such_arrays(tmp_path: Path) -> None:
    here = Path(__file__).resolve().parents[1]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    script = tmp_path / "ends.py"
    script.write_text(AT_EXIT)
    with held_port() as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, script, address], env=environ, capture_output=True, text=True, timeout=120, check=False
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "kept []\n", "")

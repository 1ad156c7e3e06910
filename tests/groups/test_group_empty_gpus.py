"""Arrays in memory that NCCL knows beforehand: `Group.empty` with a device, on fakes that call it a crime where ranks differ."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.device_worlds import BACKENDS, NCCL, gpu_world, gpus, mine, ranks
from support.fake_gpu import fake_cupy
from support.fake_gpu.fake_nccl import FakeNccl
from support.waiting import until
from support.worlds import thread_world

import oneaccord as oa
from oneaccord.api import Group

__all__ = ["gpus"]

pytestmark = pytest.mark.usefixtures("few_objects")

REGISTERED = ["mem_alloc", "comm_window_register"]


def filled(group: Group, shape: Any = 4, dtype: Any = np.float32, value: float | None = None) -> Any:
    """Return an array of `Group.empty` that is full of a number, by default this rank's + 1."""
    made = group.empty(shape, dtype, device="cuda")
    made[...] = group.rank + 1 if value is None else value
    return made


@BACKENDS
def test_it_is_an_array_of_cupy_in_a_window(gpus: FakeNccl, config: dict[str, Any]) -> None:
    def program(group: Group) -> None:
        made = group.empty((3, 5), np.int16, device="cuda")
        assert isinstance(made, fake_cupy.ndarray)
        assert (made.shape, made.dtype, made.device.id) == ((3, 5), np.int16, group.rank)
        assert made.flags.c_contiguous
        made[...] = group.rank
        assert (made.get() == group.rank).all()
        for device in (group.rank, f"cuda:{group.rank}"):
            assert group.empty(2, device=device).dtype == np.float64
        assert group.empty((0, 3), device="cuda").shape == (0, 3)
        assert isinstance(group.empty(3, device="cpu"), np.ndarray)

    ranks(program, 2, config=config)
    assert gpus.names().count("comm_window_register") == 6
    assert ("comm_window_register", 30, 1) in gpus.calls


def test_calls_of_even_blocks_use_it_as_it_is(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x, y = filled(group), filled(group)
        plain = mine(group, 4)
        for _ in range(3):  # the third goes the fast way
            assert group.all_reduce(x, out=y) is y
            assert y.get().tolist() == [3] * 4
            assert group.all_reduce(plain).get().tolist() == [3] * 4
            assert group.all_reduce(x).get().tolist() == [3] * 4
        assert group.all_reduce_async(x[2:], out=y[2:]).wait().get().tolist() == [3, 3]
        both = filled(group, 8)
        assert group.all_gather(x, out=both).get().tolist() == [1] * 4 + [2] * 4
        assert group.reduce_scatter(both, out=x).get().tolist() == [[2] * 4, [4] * 4][group.rank]
        assert group.all_to_all(x, out=y).get().tolist() == [2, 2, 4, 4]
        group.all_reduce(x, out=x)
        assert x.get().tolist() == [6] * 4

    ranks(program, 2)


def test_the_other_calls_copy_it(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x, y = filled(group), filled(group)
        group.broadcast(x, root=1, out=y)
        assert y.get().tolist() == [2] * 4
        group.reduce(x, root=0, out=y)
        assert y.get().tolist() == ([3] * 4 if group.rank == 0 else [2] * 4)
        both = filled(group, 8)
        group.gather(x, root=1, out=both if group.rank else None)
        assert both.get().tolist() == ([1] * 4 + [2] * 4 if group.rank else [1] * 8)
        group.scatter(both if group.rank else None, root=1, out=x)
        assert x.get().tolist() == [group.rank + 1] * 4
        group.send(x, dest=1) if group.rank == 0 else group.recv(0, out=y)
        if group.rank:
            assert y.get().tolist() == [1] * 4
        group.sendrecv(x, dest=1 - group.rank, source=1 - group.rank, out=y)
        assert y.get().tolist() == [2 - group.rank] * 4
        assert group.all_gather(x[: group.rank + 1], uneven=True).get().tolist() == [1, 2, 2]
        sent = group.all_to_all(x, send_counts=[1, 3] if group.rank else [2, 2])
        assert sent.get().tolist() == ([1, 1, 2, 2, 2] if group.rank else [1, 1, 2])
        with pytest.raises(oa.LayoutError, match="was given memory of group"):
            group.broadcast_async(x, out=y)
        group.broadcast_async(x).wait()

    ranks(program, 2)


def test_the_fast_way_of_other_memory_is_not_taken(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        plain, x = mine(group, 4), filled(group)
        for array in (plain, plain, x, x):  # from the second one on, the fast way is there
            assert group.broadcast(array, root=1).get().tolist() == [2] * 4
            assert group.all_reduce(array).get().tolist() == [3] * 4

    ranks(program, 2)


def test_a_part_of_the_ranks_with_such_memory_is_a_mismatch_on_all(gpus: FakeNccl) -> None:
    def program(group: Group) -> str:
        x = filled(group)
        group.all_reduce(x)

        def call() -> None:
            group.all_reduce(x if group.rank else mine(group, 4))
            group.synchronize()  # where the call was known

        with pytest.raises(oa.CollectiveMismatchError) as caught:
            call()
        return str(caught.value)

    for text in ranks(program, 2):
        assert "all_reduce(float32[4] on cuda" in text
        assert "input in empty() number 1 at byte 0, result elsewhere" in text


@pytest.mark.parametrize("way", ["array", "offset"])
def test_other_places_are_a_mismatch_on_all(gpus: FakeNccl, way: str) -> None:
    def program(group: Group) -> str:
        x, y = filled(group, 8), filled(group, 8)
        other = y[:4] if way == "array" else x[4:]
        with pytest.raises(oa.CollectiveMismatchError) as caught:
            group.all_reduce(x[:4] if group.rank else other)
        return str(caught.value)

    for text in ranks(program, 2):
        assert "input in empty() number 1 at byte 0, result elsewhere" in text
        assert ("number 2 at byte 0" if way == "array" else "number 1 at byte 16") in text


def test_another_shape_is_a_mismatch_and_nothing_is_registered(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        with pytest.raises(oa.CollectiveMismatchError):
            group.empty(4 + group.rank, device="cuda")

    ranks(program, 2)
    assert not set(REGISTERED) & set(gpus.names())


def test_a_rank_in_another_call_is_a_mismatch(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = mine(group)
        with pytest.raises(oa.CollectiveMismatchError):
            group.empty(4, device="cuda") if group.rank else group.all_reduce(x)

    ranks(program, 2)


def test_memory_is_given_back_when_no_rank_has_it_any_more(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        kept = filled(group, 5000)
        first = filled(group, 5000)
        view = first[10:20]
        group.all_reduce(first, out=first)
        del first
        if group.rank:
            del view  # rank 0 still has it
        gc.collect()
        second = filled(group, 5000)
        group.barrier()
        assert len(gpus.allocated) == 6
        if not group.rank:
            assert view.get().tolist() == [3] * 10
            del view
        gc.collect()
        group.all_reduce(second, out=second)
        third = filled(group, 5000)
        group.barrier()
        assert len(gpus.allocated) == 6  # third's, where first was
        for array, expected in ((kept, 1), (second, 3), (third, 1)):
            total = group.all_reduce(array)
            assert (total.get() == (6 if expected == 3 else 3)).all()

    ranks(program, 2)
    gc.collect()
    until(lambda: not gpus.allocated)


def test_an_array_outlives_its_group(gpus: FakeNccl) -> None:
    def program(group: Group) -> Any:
        return group.all_reduce(filled(group)), filled(group)

    left = ranks(program, 2)
    assert [(total.get().tolist(), own.get().tolist()) for total, own in left] == [([3] * 4, [rank + 1] * 4) for rank in (0, 1)]
    until(lambda: len(gpus.allocated) == 2)
    del left
    gc.collect()
    until(lambda: not gpus.allocated)


def test_a_rank_without_memory_is_told_on_all_and_the_group_goes_on(gpus: FakeNccl) -> None:
    gpus.largest = 4096

    def program(group: Group) -> None:
        with pytest.raises(oa.OutOfMemoryError, match="rank 0 has no 8000 bytes"):
            group.empty(1000, device="cuda")
        assert group.all_reduce(filled(group)).get().tolist() == [3] * 4

    ranks(program, 2)


@pytest.mark.parametrize(("version", "has_symmetric", "names"), [
    (21805, True, set()),
    (22602, True, {"mem_alloc", "comm_register"}),
    (23203, False, {"mem_alloc", "comm_window_register", "comm_register"}),
])  # fmt: skip
def test_what_nccl_lacks_is_done_without(gpus: FakeNccl, version: int, has_symmetric: bool, names: set[str]) -> None:
    gpus.version, gpus.has_symmetric_memory = version, has_symmetric

    def program(group: Group) -> None:
        x = filled(group)
        for _ in range(2):
            assert group.all_reduce(x, out=x[:]) is not None
        assert x.get().tolist() == [6] * 4
        del x
        gc.collect()
        assert group.all_reduce(filled(group)).get().tolist() == [3] * 4

    ranks(program, 2)
    assert {name for name in gpus.names() if name in {*REGISTERED, "comm_register"}} == names


def test_a_subgroup_has_memory_of_its_own(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        x = filled(group)
        half = group.split(group.rank % 2)
        assert half is not None
        with half:
            y = filled(half)
            assert half.all_reduce(y).get().tolist() == [3] * 4
            # Whose memory it is not knows nothing of it.
            assert half.broadcast(x, root=1).get().tolist() == [half.ranks[1] + 1] * 4
            half.all_reduce(x, out=y)
            assert y.get().tolist() == [sum(half.ranks) + 2] * 4
        assert group.all_reduce(x).get().tolist() == [10] * 4

    ranks(program, 4)


def test_a_rank_that_dies_in_it_ends_the_others(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        if group.rank:
            raise RuntimeError("gone")
        group.empty(4, device="cuda")

    outcomes = gpu_world(program, 2, config=NCCL)
    assert isinstance(outcomes[0], oa.AbortedError)


def test_it_is_refused_in_a_capture(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        stream = fake_cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with pytest.raises(oa.UnsupportedError, match="before the capture"):
                group.empty(4, device="cuda")
            stream.end_capture()
        assert filled(group).get().tolist() == [group.rank + 1] * 4

    ranks(program, 2)


BAD: list[tuple[Callable[[Group], Any], type[Exception], str]] = [
    (lambda group: group.empty(3, device="gpu"), oa.UsageError, 'device must be "cuda", "cuda:N"'),
    (lambda group: group.empty(3, device=True), oa.UsageError, "True was given"),
    (lambda group: group.empty(3, device=-1), oa.UsageError, "-1 was given"),
    (lambda group: group.empty(3, device=7), oa.UsageError, "sees 4 GPUs"),
    (lambda group: group.empty(3, device=group.rank ^ 1), oa.LayoutError, "this rank's group uses device"),
    (lambda group: group.empty(3, ml_dtypes.float8_e4m3fn, device="cuda"), oa.DTypeError, "uint8"),
    (lambda group: group.empty(3, object, device="cuda"), oa.DTypeError, "object"),
    (lambda group: group.empty(-3, device="cuda"), oa.SizeMismatchError, "-3"),
]


def test_bad_input_is_refused_and_the_group_goes_on(gpus: FakeNccl) -> None:
    def program(group: Group) -> None:
        for call, error, text in BAD:
            with pytest.raises(error, match=text):
                call(group)
        assert group.all_reduce(filled(group)).get().tolist() == [3] * 4

    ranks(program, 2)


@pytest.mark.parametrize("backend", ["simulated", "tcp", "shm"])
@pytest.mark.parametrize("size", [1, 2])
def test_backends_without_gpus_give_plain_arrays_of_cupy(gpus: FakeNccl, backend: str, size: int) -> None:
    def program(group: Group) -> None:
        fake_cupy.cuda.Device(1).use()
        made = group.empty((2, 3), np.float32, device="cuda")
        assert (type(made), made.shape, made.device.id) == (fake_cupy.ndarray, (2, 3), 1)
        assert group.empty(4, device="cuda:3").device.id == 3

    for outcome in thread_world(program, size, backend):
        assert outcome is None, outcome
    assert gpus.names() == []


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)

    def program(group: Group) -> None:
        with pytest.raises(oa.UnsupportedError, match=r"cannot be imported .*; try: pip install .*nccl"):
            group.empty(3, device="cuda")

    for outcome in thread_world(program, 1, "simulated"):
        assert outcome is None, outcome

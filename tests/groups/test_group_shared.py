"""Arrays that the ranks of a host have in common, on every backend; the ranks are threads of this process."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_S
from support.worlds import must, over_sockets, thread_world

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord.api import Group

STRUCTURED = np.dtype([("at", "<f8", (2,)), ("kind", "u1")], align=True)


class OneHost:
    """Runs a function on every rank of a host over one backend; the ranks are threads of this process."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def outcomes(self, program: Any, size: int) -> list[Any]:
        """Return for each rank what it returned or raised."""
        return thread_world(program, size, self.backend, config={"ranks_per_host": size})

    def __call__(self, program: Any, size: int) -> list[Any]:
        """Return the results, or raise the exception that is the cause of the others."""
        return must(self.outcomes(program, size))


@pytest.fixture(params=["simulated", "tcp", "shm", "hybrid", pytest.param("hybrid-simulated", marks=pytest.mark.long)])
def one_host(request: pytest.FixtureRequest) -> OneHost:
    return OneHost(request.param)


def in_two_hosts(program: Any, backend: str) -> list[Any]:
    return must(thread_world(program, 4, backend, config={"ranks_per_host": 2}))


def test_what_one_rank_writes_all_ranks_of_the_host_read(one_host):
    def program(group: Group) -> list[int]:
        with group.shared((group.world_size, 3), "int64") as shared:
            shared.array[group.rank] = group.rank + 1
            shared.fence()
            return shared.array.sum(axis=1).tolist()

    assert one_host(program, 3) == [[3, 6, 9]] * 3


def test_the_array_is_plain_aligned_and_zero(one_host):
    def program(group: Group) -> None:
        for shape, dtype in (((5, 3), "float32"), (7, "complex128"), ((), "int8"), ((3,), STRUCTURED)):
            with group.shared(shape, dtype) as shared:
                array = shared.array
                plain = np.zeros(shape, dtype)
                assert (type(array), array.dtype, array.shape) == (np.ndarray, plain.dtype, plain.shape)
                assert (shared.dtype, shared.shape, shared.nbytes) == (plain.dtype, plain.shape, plain.nbytes)
                assert array.flags.c_contiguous
                assert array.flags.writeable
                assert array.ctypes.data % 64 == 0
                assert array.tobytes() == bytes(array.nbytes)

    one_host(program, 2)


@pytest.mark.parametrize("dtype", ["M8[ns]", "U7", "S3", ">i4", "V5", (np.float32, (2, 2))], ids=str)
def test_any_dtype_without_objects_may_be_shared(dtype):
    def program(group: Group) -> bytes:
        with group.shared((4,), dtype) as shared:
            assert shared.array.shape == np.zeros(4, dtype).shape
            if shared.is_first:
                shared.array[...] = (
                    np.ones(shared.shape, "i8").astype(shared.dtype, casting="unsafe") if shared.dtype.kind != "V" else b"abcde"
                )
            shared.fence()
            return shared.array.tobytes()

    first, second = must(over_sockets(program))
    assert first == second != bytes(len(first))


def test_an_array_without_elements_needs_no_memory(one_host):
    def program(group: Group) -> None:
        with group.shared((0, 4), "U3") as shared:
            shared.fence()
            assert shared.array.shape == shared.read_only.shape == (0, 4)

    one_host(program, 2)


@pytest.mark.parametrize("backend", ["simulated", "hybrid", pytest.param("hybrid-simulated", marks=pytest.mark.long), "tcp"])
def test_each_host_has_an_array_of_its_own(backend):
    def program(group: Group) -> tuple[Any, ...]:
        with group.shared(4, "int64") as shared:
            shared.array[group.rank] = 1
            shared.fence()
            group.barrier()
            return shared.group.ranks, shared.is_first, shared.array.tolist()

    near, far = [1, 1, 0, 0], [0, 0, 1, 1]
    assert in_two_hosts(program, backend) == [
        ((0, 1), True, near),
        ((0, 1), False, near),
        ((2, 3), True, far),
        ((2, 3), False, far),
    ]


@pytest.mark.parametrize("backend", ["simulated", "hybrid"])
def test_split_hosts_gives_the_ranks_of_each_host(backend):
    def program(group: Group) -> tuple[Any, ...]:
        here = group.split_hosts()
        turned = group.subgroup([3, 1, 0])
        there = () if turned is None else turned.split_hosts().ranks
        return here.ranks, here.rank, int(here.all_reduce(np.array([group.rank]))[0]), there

    assert in_two_hosts(program, backend) == [
        ((0, 1), 0, 1, (1, 0)),
        ((0, 1), 1, 1, (1, 0)),
        ((2, 3), 0, 5, ()),
        ((2, 3), 1, 5, (3,)),
    ]


def test_processes_of_one_system_share_memory_without_a_name_for_it():
    def program(group: Group) -> tuple[int, ...]:
        return group.split_hosts().ranks

    assert must(over_sockets(program, 3)) == [(0, 1, 2)] * 3


def test_a_world_of_one_has_an_array_of_its_own():
    with oa.init(config={}) as group, group.shared(3) as shared:
        shared.array[...] = 2
        shared.fence()
        assert shared.is_first
        assert shared.read_only.tolist() == [2, 2, 2]


def test_calls_take_a_shared_array_as_any_other(one_host):
    def program(group: Group) -> None:
        with group.shared(4) as shared:
            if shared.is_first:
                shared.array[...] = 3
            shared.fence()
            assert group.all_reduce(shared).tolist() == group.all_reduce(shared.array).tolist() == [6, 6, 6, 6]
            shared.fence()
            group.broadcast(np.full(2, 8.0), root=0, out=shared.array[2 * group.rank :][:2])
            shared.fence()
            assert np.asarray(shared) is shared.array
            assert shared.array.tolist() == [8, 8, 8, 8]

    one_host(program, 2)


@pytest.mark.parametrize("other", [((4,), "float64"), ((3,), "float32")], ids=["shape", "dtype"])
def test_different_arrays_are_a_mismatch_on_every_rank(one_host, other):
    def program(group: Group) -> None:
        group.shared(*(other if group.rank == 1 else ((3,), "float64")))

    for outcome in one_host.outcomes(program, 3):
        assert isinstance(outcome, oa.CollectiveMismatchError)
        words = f"rank 1 shared({other[0]}, {other[1]})"
        assert f"in shared #1 of the group of all ranks, and there are ranks 0, 2 shared((3,), float64); {words}" in str(
            outcome
        )
        assert outcome.peer == 1


@pytest.mark.alone
def test_another_call_in_its_place_is_found(one_host):
    def program(group: Group) -> None:
        if group.rank == 1:
            group.all_reduce(np.ones(2))
        group.shared(3)

    for outcome in one_host.outcomes(program, 2):
        assert isinstance(outcome, oa.CollectiveMismatchError), outcome
        assert "shared #1 of the group of all ranks" in str(outcome)
        assert "all_reduce" in str(outcome)


def test_a_rank_that_does_not_come_in_time_ends_the_job(one_host):
    gate = threading.Event()

    def program(group: Group) -> None:
        if group.rank == 0:
            assert gate.wait(PATIENCE_S)
            group.barrier()
        else:
            try:
                group.shared(3, timeout_s=0.3)
            finally:
                gate.set()

    for outcome in one_host.outcomes(program, 2):
        assert isinstance(outcome, oa.DeadlineError)
        assert "shared #1 of the group of all ranks" in str(outcome)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((3, object), oa.DTypeError, "holds Python objects"),
        ((3, [("a", "O"), ("b", "i4")]), oa.DTypeError, "holds Python objects"),
        ((3, "U"), oa.DTypeError, "give their length, such as U10"),
        ((3, "no such"), oa.DTypeError, "must be a dtype of NumPy, not 'no such'"),
        (((3, -1),), oa.SizeMismatchError, "at least 0"),
        ((2.5,), oa.SizeMismatchError, "shape must be"),
        (((0, 1 << 62, 4),), oa.SizeMismatchError, "no array of NumPy has the shape"),
        (((1,) * 65,), oa.SizeMismatchError, "no array of NumPy has the shape"),
    ],
    ids=str,
)
def test_what_cannot_be_shared_is_refused_and_leaves_the_group_usable(one_host, arguments, error, words):
    def program(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(error, match=words):
                group.shared(*arguments)
        with group.shared(2) as shared:
            shared.fence()

    one_host(program, 2)


@pytest.mark.parametrize("runs", [OneHost("simulated").outcomes, over_sockets], ids=["threads", "processes"])
def test_too_much_memory_is_refused_alike_on_all_ranks(runs):
    def program(group: Group) -> str:
        with pytest.raises(oa.OutOfMemoryError) as info:
            group.shared((1 << 24, 1 << 24), "float64")
        assert (info.value.peer, info.value.operation) == (0, "shared")
        with group.shared(2) as shared:
            shared.fence()
        return str(info.value)

    first, second = must(runs(program, 2))
    assert first == second
    assert "shared((16777216, 16777216), float64) cannot be made on the host of rank 0: " in first
    assert runs is not over_sockets or ("2,097,152 GiB are needed, and " in first and "ask for less" in first)


def test_read_only_refuses_to_be_written_to(one_host):
    def program(group: Group) -> None:
        with group.shared(3) as shared:
            view = shared.read_only
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True
            with pytest.raises(oa.LayoutError):
                group.all_reduce(np.ones(3), out=view)
            shared.fence()
            if shared.is_first:
                shared.array[0] = 5
            shared.fence()
            assert view[0] == 5

    one_host(program, 2)


def test_an_array_taken_before_close_stays_valid(one_host):
    def program(group: Group) -> None:
        shared = group.shared(100_000)
        array, tail = shared.array, shared.read_only[-3:]
        if shared.is_first:
            array[...] = 4
        shared.fence()
        shared.close()
        shared.close()
        assert "closed" in repr(shared)
        for access in (lambda: shared.array, lambda: shared.read_only, lambda: np.asarray(shared), shared.fence):
            with pytest.raises(oa.ClosedError, match=r"this shared array is closed: .* stay valid"):
                access()
        group.barrier()
        array[:50_000] = 4
        assert (array.sum(), tail.tolist()) == (400_000, [4, 4, 4])
        group.barrier()

    one_host(program, 2)


def test_an_array_outlives_its_group(one_host):
    def program(group: Group) -> float:
        shared = group.shared(3)
        shared.array[...] = 1
        shared.fence()
        group.close()
        with pytest.raises(oa.ClosedError, match=r"group \d+ \(.*\) is closed|the group is closed"):
            shared.fence()
        return float(shared.array.sum())

    assert one_host(program, 2) == [3, 3]


def test_a_rank_that_raises_before_the_fence_ends_the_others(one_host):
    def program(group: Group) -> None:
        with group.shared(3) as shared:
            if shared.is_first:
                raise FileNotFoundError("table.npy")
            shared.fence()

    first, second = one_host.outcomes(program, 2)
    assert isinstance(first, FileNotFoundError)
    assert isinstance(second, oa.AbortedError)
    assert "rank 0 ended with FileNotFoundError: table.npy" in str(second)


def test_it_cannot_be_pickled_but_its_array_can(one_host):
    def program(group: Group) -> None:
        with group.shared(3) as shared:
            for take in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(oa.UsageError, match="give its array, of which a copy travels"):
                    take(shared)
            kept = pickle.loads(pickle.dumps(shared.array))
            shared.fence()
            shared.array[...] = 7
            assert kept.tolist() == [0, 0, 0]
            with pytest.raises(oa.UsageError):
                group.all_gather_object(shared)

    one_host(program, 1)


def test_threads_of_a_rank_share_by_groups_of_their_own(one_host):
    def program(group: Group) -> list[int]:
        groups = [group.subgroup(range(2)) for _ in range(3)]
        found = [0] * 3

        def work(number: int) -> None:
            with groups[number].shared(2, "int64") as shared:
                shared.array[group.rank] = 10**number
                shared.fence()
                found[number] = int(shared.array.sum())

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert one_host(program, 2) == [[2, 20, 200]] * 2


def test_survivors_of_a_simulated_death_keep_what_was_written():
    def fill(group: Group, kept: list[Any]) -> None:
        for number in range(1, 10**6):
            with group.shared(3, "int64") as shared:
                shared.array[group.rank] = number
                shared.fence()
                kept.append(shared.array)
                shared.fence()

    def program(group: Group) -> tuple[int, list[int]]:
        kept: list[Any] = []
        with pytest.raises(oa.PeerLostError) as info:
            fill(group, kept)
        return info.value.peer, kept[-1].tolist()

    for seed, microseconds in enumerate((15, 17, 19, 21, 23)):
        victim = seed % 3
        run = simulated.run(
            program,
            3,
            seed=seed,
            network="textbook",
            faults=simulated.Kill(rank=victim, at_s=microseconds * 1e-6),
            config={"ranks_per_host": 3},
            check=False,
        )
        found = [run.results[rank] for rank in range(3) if rank != victim]
        assert [peer for peer, _ in found] == [victim] * 2
        for _, array in found:
            assert array == [array[0]] * 3
            assert array[0] > 0

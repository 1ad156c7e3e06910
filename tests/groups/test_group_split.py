"""Groups of some of the ranks: who is in them, and that they never get in each other's way."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.waiting import PATIENCE_S, until
from support.worlds import must, over_sockets

import oneaccord as oa
from oneaccord.api import Group


def test_ranks_of_one_color_come_together_in_the_order_of_their_keys(world):
    def program(group: Group) -> tuple[int, int, tuple[int, ...]]:
        sub = group.split(group.rank % 2, key=-group.rank)
        assert sub is not None
        return sub.rank, sub.world_size, sub.ranks

    assert world(program, 5) == [(2, 3, (4, 2, 0)), (1, 2, (3, 1)), (1, 3, (4, 2, 0)), (0, 2, (3, 1)), (0, 3, (4, 2, 0))]


def test_equal_keys_keep_the_order_of_the_group(world):
    def program(group: Group) -> tuple[int, ...]:
        reverse = group.subgroup([3, 2, 1, 0])
        assert reverse is not None
        whole = reverse.split(-7, key=1)
        assert whole is not None
        return whole.ranks

    assert world(program, 4) == [(3, 2, 1, 0)] * 4


def test_who_gives_no_color_is_in_no_group(world):
    def program(group: Group) -> int | None:
        sub = group.split(None if group.rank == 1 else 0)
        return None if sub is None else int(sub.all_reduce(np.array([10**group.rank]))[0])

    assert world(program, 3) == [101, None, 101]


def test_colors_and_keys_may_be_any_integers_of_64_bits(world):
    def program(group: Group) -> tuple[int, ...]:
        sub = group.split(np.int64(-(2**63)) if group.rank < 2 else 2**63 - 1, key=-(2**63) + 3 - group.rank)
        assert sub is not None
        return sub.ranks

    assert world(program, 4) == [(1, 0), (1, 0), (3, 2), (3, 2)]


def test_a_color_that_is_none_is_refused_and_leaves_the_group_usable(world):
    def program(group: Group) -> None:
        for color, key in ((1.5, 0), ("a", 0), (True, 0), (2**63, 0), (0, "b"), (0, 0.0)):
            with pytest.raises(oa.UsageError, match="must be an integer of 64 bits or None"):
                group.split(color, key)
        group.barrier()

    world(program, 2)


def test_a_subgroup_has_its_members_in_the_order_given(world):
    def program(group: Group) -> tuple[int, ...] | None:
        sub = group.subgroup([2, 0])
        if sub is None:
            return None
        # Roots, peers and blocks count the ranks of the subgroup.
        assert sub.broadcast(np.array([group.rank]), root=0).tolist() == [2]
        assert sub.all_gather(np.array([group.rank])).tolist() == [2, 0]
        assert sub.sendrecv(np.array([group.rank]), 1 - sub.rank, 1 - sub.rank).tolist() == [2 - group.rank]
        return sub.rank, sub.world_size

    assert world(program, 3) == [(1, 2), None, (0, 2)]


def test_ranks_that_cannot_be_are_refused(world):
    def program(group: Group) -> None:
        for ranks, error in (
            ([], oa.UsageError),
            ([0, 0], oa.UsageError),
            ([0, 3], oa.InvalidRankError),
            ([-1], oa.InvalidRankError),
        ):
            with pytest.raises(error):
                group.subgroup(ranks)
        group.barrier()

    world(program, 2)


def test_threads_that_make_groups_at_once_get_different_ones(world):
    def program(group: Group) -> list[float]:
        trio = [group.subgroup(range(3)) for _ in range(4)]
        ready = threading.Barrier(4)

        def make(parent: Group) -> tuple[str, float]:
            ready.wait()
            sums = []
            for _ in range(5):
                sub = parent.split(0)
                assert sub is not None
                sums.append(float(sub.all_reduce(np.ones(1))[0]))
            return repr(sub), sum(sums)

        with ThreadPoolExecutor(4) as pool:
            found = [future.result(30) for future in [pool.submit(make, parent) for parent in trio if parent]]
        assert len({name for name, _ in found}) == 4
        return [total for _, total in found]

    assert world(program, 3) == [[15.0] * 4] * 3


def test_a_closed_group_is_refused_and_its_parent_goes_on(world):
    def program(group: Group) -> None:
        with group.split(0) as sub:  # type: ignore[union-attr]
            sub.barrier()
        assert "closed" in repr(sub)
        for call in (sub.barrier, sub.barrier_async, lambda: sub.split(0), lambda: sub.subgroup([0])):
            with pytest.raises(oa.ClosedError, match=r"^group \d+ \(ranks 0-1, made by split\(\)\) is closed"):
                call()
        sub.close()
        group.barrier()

    world(program, 2)


def test_closing_the_world_closes_its_groups(world):
    def program(group: Group) -> None:
        sub = group.split(0)
        assert sub is not None
        x = np.full(200_000, 1.0)
        sub.all_reduce_async(x, out=x)
        group.close()
        assert (x == 2).all()
        with pytest.raises(oa.ClosedError):
            sub.barrier()

    world(program, 2)


def test_the_connections_of_a_group_are_given_back():
    def program(group: Group) -> None:
        backend = group.backend()
        before = set(backend._links)
        with group.split(0) as sub:  # type: ignore[union-attr]
            sub.all_reduce(np.ones(1))
            sub.sendrecv(np.ones(1), 1 - sub.rank, 1 - sub.rank)
            opened = [sock for key, link in list(backend._links.items()) if key not in before for sock in link]
        assert len(opened) >= 2
        until(lambda: all(sock.fileno() == -1 for sock in opened))  # when all have left it
        assert set(backend._links) == before

    must(over_sockets(program, 2))


def test_a_mismatch_in_a_subgroup_ends_the_job_on_every_rank_and_names_ranks_of_the_world(world):
    def program(group: Group) -> None:
        sub = group.subgroup([3, 1])
        if sub is None:
            group.barrier()
        else:
            sub.all_reduce(np.ones(2 + sub.rank))

    for outcome in world.outcomes(program, 4):
        assert isinstance(outcome, oa.CollectiveMismatchError)
        assert "rank 1" in str(outcome)
        assert "rank 3" in str(outcome)
        assert "rank 0" not in str(outcome)
        assert "(ranks 1, 3, made by subgroup())" in str(outcome)


@pytest.mark.parametrize(
    ("make", "ranks", "made"),
    [
        (lambda group, _: group.split(group.rank % 2), "0, 2", "made by split()"),
        (lambda group, _: group.subgroup([0, 3]), "0, 3", "made by subgroup()"),
        (lambda group, _: group.split_hosts(), "0-3", "made by split_hosts()"),
        (lambda group, _: group.shared(1).group, "0-3", "made by shared()"),
        (lambda _, mesh: mesh.group("dp"), "0, 2", "along axis 'dp' of a mesh"),
        (lambda _, mesh: mesh.submesh("tp", "dp").parent, "0-3", "along axes 'tp' and 'dp' of a mesh"),
        (lambda _, mesh: mesh.submesh("tp").group(0), "0-1", "along axis 'tp' of a mesh"),
    ],
)
def test_an_error_says_how_its_group_was_made(make, ranks, made):
    def program(group: Group) -> None:
        with oa.DeviceMesh(group, (2, 2), ("dp", "tp")) as mesh:
            sub = make(group, mesh)
            if group.rank == 0:
                sub.barrier(timeout_s=0.2)
            elif sub is not None:
                sub.all_reduce(1.0)

    words = rf"barrier\(\) #\d+ of group \d+ \(ranks {ranks}, {re.escape(made)}\)"
    assert re.search(words, str(over_sockets(program, 4)[0]))


def test_a_send_that_is_never_received_is_found_when_all_have_closed_the_group(world):
    def program(group: Group) -> None:
        with group.split(0) as sub:  # type: ignore[union-attr]
            if sub.rank == 0:
                sub.send(np.ones(1), 1)
        group.barrier()

    outcomes = world.outcomes(program, 2)
    assert [type(outcome) for outcome in outcomes] == [oa.CollectiveMismatchError] * 2
    assert "every send needs its recv" in str(outcomes[0])


def test_a_rank_that_leaves_without_making_the_group_is_named(world):
    def program(group: Group) -> None:
        if group.rank:
            group.subgroup([0, 1, 2])

    for outcome in world.outcomes(program, 3):
        assert isinstance(outcome, oa.CollectiveMismatchError)
        assert outcome.peer == 0
        assert "rank 0 has closed its group" in str(outcome)


def test_a_rank_that_does_not_come_in_time_ends_the_job(world):
    gate = threading.Event()

    def program(group: Group) -> None:
        if group.rank == 0:
            assert gate.wait(PATIENCE_S)
            group.barrier()
        else:
            try:
                group.split(0, timeout_s=0.3)
            finally:
                gate.set()

    for outcome in world.outcomes(program, 2):
        assert isinstance(outcome, oa.DeadlineError)
        assert "split #1 of the group of all ranks" in str(outcome)


def test_an_exception_that_leaves_a_group_ends_the_job(world):
    def program(group: Group) -> None:
        with group.split(0) as sub:  # type: ignore[union-attr]
            if sub.rank == 1:
                raise KeyError("broken")
            sub.barrier()

    outcomes = world.outcomes(program, 3)
    assert [type(outcome) for outcome in outcomes] == [oa.AbortedError, KeyError, oa.AbortedError]
    assert "rank 1 ended with KeyError" in str(outcomes[0])


def test_a_world_of_one_can_be_split():
    with oa.init(config={}) as group, group.split(3) as sub, sub.subgroup([0]) as same:  # type: ignore[union-attr]
        assert (sub.rank, sub.world_size, same.ranks) == (0, 1, (0,))
        assert same.all_reduce(np.ones(2)).tolist() == [1, 1]
        assert same.all_reduce_async(np.ones(2)).wait().tolist() == [1, 1]
        assert sub.split(None) is None

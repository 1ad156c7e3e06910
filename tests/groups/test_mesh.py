"""The device mesh: where ranks are on it, the groups along its axes, and what cannot be one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import must, over_sockets, thread_world

import oneaccord as oa
from oneaccord.api import DeviceMesh, Group


@pytest.mark.parametrize(
    ("shape", "names"), [((4,), ["dp"]), ((2, 2), ("dp", "tp")), ((1, 4, 1), ("a", "b", "c")), ((2, 1, 2), ("x", "y", "z"))]
)
def test_ranks_are_laid_out_in_row_major_order_with_a_group_along_each_axis(world, shape, names):
    def program(group: Group) -> None:
        grid = np.arange(4).reshape(shape)
        with DeviceMesh(group, shape, names) as mesh:
            assert (mesh.shape, mesh.names, mesh.ndim, mesh.size()) == (shape, tuple(names), len(shape), 4)
            assert mesh.parent is group
            assert mesh.ranks.tolist() == grid.tolist()
            assert mesh.ranks[mesh.coordinates] == group.rank
            for axis, name in enumerate(names):
                place = mesh.coordinates
                line = grid[(*place[:axis], slice(None), *place[axis + 1 :])].tolist()
                along = mesh.group(name)
                assert along is mesh.group(axis)
                assert along is mesh.group(axis - len(shape))
                assert along.ranks == tuple(line)
                assert along.rank == mesh.coordinates[axis]
                assert mesh.size(name) == mesh.size(axis) == shape[axis]
                assert along.all_reduce(10**group.rank) == sum(10**rank for rank in line)

    world(program, 4)


@settings(max_examples=12)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda shape: np.prod(shape) <= 8), st.data())
def test_every_layout_has_groups_that_divide_the_ranks_along_each_axis(shape, data):
    hidden = data.draw(st.sampled_from([None, *range(len(shape))]))
    given_shape = [-1 if axis == hidden else extent for axis, extent in enumerate(shape)]

    def program(group: Group) -> list[tuple[int, ...]]:
        with DeviceMesh(group, given_shape) as mesh:
            assert mesh.shape == tuple(shape)
            for rank in range(group.world_size):
                assert mesh.rank_at(*mesh.coordinates_of(rank)) == rank
            return [mesh.group(axis).ranks for axis in range(mesh.ndim)]

    size = int(np.prod(shape))
    told = must(thread_world(program, size, "simulated"))
    grid = np.arange(size).reshape(shape)
    for axis in range(len(shape)):
        lines = {tuple(line) for line in np.moveaxis(grid, axis, -1).reshape(-1, shape[axis]).tolist()}
        assert {groups[axis] for groups in told} == lines


def test_coordinates_and_ranks_lead_to_each_other(world):
    def program(group: Group) -> None:
        with DeviceMesh(group, (2, 3), ("pp", "tp")) as mesh:
            for rank, place in enumerate(itertools.product(range(2), range(3))):
                assert mesh.coordinates_of(rank) == place
                assert mesh.rank_at(*place) == mesh.rank_at(pp=place[0], tp=np.int32(place[1])) == rank
            assert mesh.coordinates == divmod(group.rank, 3)
            assert all(type(place) is int for place in mesh.coordinates)
            # A coordinate that is not given is this rank's.
            assert mesh.rank_at(pp=1) == 3 + group.rank % 3
            assert mesh.rank_at(tp=2) == group.rank // 3 * 3 + 2

    world(program, 6)


def test_what_is_not_on_the_mesh_is_refused_in_words(world):
    def program(group: Group) -> None:
        with DeviceMesh(group, (2, 2), ("data", "tensor")) as mesh:
            for use in (mesh.group, mesh.size, mesh.axis, mesh.submesh):
                with pytest.raises(
                    oa.UsageError, match=r"no axis 'tensr' \(did you mean 'tensor'\?\): its axes are data=2 x tensor=2"
                ):
                    use("tensr")
                for axis in (2, -3, 1.5, True):
                    with pytest.raises(oa.UsageError, match="numbered from 0"):
                        use(axis)  # type: ignore[arg-type]
            for rank in (4, -1, "0"):
                with pytest.raises(oa.InvalidRankError, match="its ranks are 0 to 3"):
                    mesh.coordinates_of(rank)  # type: ignore[arg-type]
            for wrong in (2, -1, 0.5):
                with pytest.raises(oa.InvalidRankError, match=f"tensor={wrong} is not in the mesh: that axis goes from 0 to 1"):
                    mesh.rank_at(0, wrong)  # type: ignore[arg-type]
                with pytest.raises(oa.InvalidRankError, match="data="):
                    mesh.rank_at(data=wrong)  # type: ignore[arg-type]
            for places, named in (((0,), {}), ((0, 0, 0), {}), ((), {}), ((0, 0), {"data": 1})):
                with pytest.raises(oa.UsageError, match=r"rank_at takes 2 coordinates \(data, tensor\)"):
                    mesh.rank_at(*places, **named)
            with pytest.raises(oa.UsageError, match="no axis 'pipe'"):
                mesh.rank_at(pipe=0)
            with pytest.raises(oa.UsageError, match="each only once"):
                mesh.submesh("data", 0)
            with pytest.raises(oa.UsageError, match="at least one axis"):
                mesh.submesh()
            with pytest.raises(ValueError, match="read-only"):
                mesh.ranks[0, 0] = 5
        assert group.all_reduce(1) == 4

    world(program, 4)


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=3).filter(
        lambda axes: np.prod([extent for extent, _ in axes]) <= 8
    ),
    st.integers(-5, 5),
)
def test_a_shift_brings_each_rank_what_lies_so_many_steps_before_it(axes, steps):
    shape, periodic = zip(*axes, strict=True)

    def program(group: Group) -> None:
        with DeviceMesh(group, shape, periodic=periodic) as mesh:
            assert mesh.periodic == periodic
            for axis, (extent, is_ring) in enumerate(axes):
                source, dest = mesh.shift(axis, steps)
                got = mesh.group(axis).sendrecv(mesh.coordinates, dest, source)
                # What np.roll does, but for what comes in at an open end.
                before = mesh.coordinates[axis] - steps
                assert (source is None) == (not is_ring and not 0 <= before < extent)
                expected = list(mesh.coordinates)
                expected[axis] = before % extent
                assert got is None if source is None else got.tolist() == expected
                assert mesh.shift(axis, -steps) == (dest, source)

    must(thread_world(program, int(np.prod(shape)), "simulated"))


def test_a_halo_exchange_is_the_same_program_on_a_ring_a_line_and_alone(world):
    whole = np.arange(12.0)

    def program(group: Group) -> None:
        for is_ring in (True, False):
            with DeviceMesh(group, (-1,), ("x",), periodic=is_ring) as mesh:
                line = mesh.group("x")
                mine = np.split(whole, group.world_size)[group.rank]
                block = np.full(len(mine) + 2, -1.0)
                block[1:-1] = mine
                source, dest = mesh.shift("x")
                line.sendrecv(block[-2:-1], dest, source, out=block[:1])
                line.sendrecv(block[1:2], source, dest, out=block[-1:])
                around = np.pad(whole, 1, "wrap") if is_ring else np.pad(whole, 1, constant_values=-1)
                start = len(mine) * group.rank
                assert block.tolist() == around[start : start + len(block)].tolist()

    for size in (1, 2, 4):
        world(program, size)


def test_axes_that_are_rings_are_part_of_a_mesh(world):
    def program(group: Group) -> None:
        with (
            DeviceMesh(group, (2, 2), ("x", "y"), periodic=(True, False)) as mesh,
            DeviceMesh(group, (2, 2), ("x", "y")) as other,
        ):
            assert (mesh.periodic, other.periodic) == ((True, False), (False, False))
            assert mesh != other
            with mesh.submesh("y", "x") as turned:
                assert turned.periodic == (False, True)
            with pytest.raises(oa.UsageError, match=r"integer number of steps, not 0\.5"):
                mesh.shift("x", 0.5)  # type: ignore[arg-type]
            with pytest.raises(oa.UsageError, match="no axis 'z'"):
                mesh.shift("z")
        for wrong in (1, None, "no", (True,), (True, 0), [True] * 3):
            with pytest.raises(oa.UsageError, match="periodic must be True or False, or 2 of these"):
                DeviceMesh(group, (2, 2), periodic=wrong)  # type: ignore[arg-type]
        with pytest.raises(oa.UsageError, match=r"(?s)and the same periodic:.*rank 3: .*periodic=\(False, True\)"):
            DeviceMesh(group, (2, 2), periodic=(False, group.rank == 3))
        assert group.all_reduce(1) == 4

    world(program, 4)


# A shape and names, the error, and what it says.
CANNOT_BE: list[tuple[Any, Any, type[Exception], str]] = [
    ((2, 3), None, oa.InvalidWorldSizeError, r"shape \(2, 3\) has 2 x 3 = 6 places, and the group has 4 ranks"),
    ((3, -1), None, oa.InvalidWorldSizeError, "a multiple of 3 places, and the group has 4 ranks"),
    ((8, -1), None, oa.InvalidWorldSizeError, "a multiple of 8 places"),
    ((2,), None, oa.InvalidWorldSizeError, "2 = 2 places"),
    ((-1, -1), None, oa.UsageError, "one of which may be -1"),
    ((), None, oa.UsageError, "a sequence of positive integers"),
    ((4, 0), None, oa.UsageError, "a sequence of positive integers"),
    ((-2, -2), None, oa.UsageError, "a sequence of positive integers"),
    ((2.0, 2), None, oa.UsageError, "a sequence of positive integers"),
    ((True, 4), None, oa.UsageError, "a sequence of positive integers"),
    (4, None, oa.UsageError, "a sequence of positive integers"),
    ("22", None, oa.UsageError, "a sequence of positive integers"),
    ((2, 2), ("a",), oa.UsageError, "names must be 2 strings"),
    ((2, 2), "ab", oa.UsageError, "names must be 2 strings"),
    ((2, 2), ("a", ""), oa.UsageError, "names must be 2 strings"),
    ((2, 2), ("a", 1), oa.UsageError, "names must be 2 strings"),
    ((2, 2), ("dp", "dp"), oa.UsageError, "axis names must differ, and 'dp' is given more than once"),
]


def test_a_mesh_that_cannot_be_is_refused_before_any_byte_moves(world):
    def program(group: Group) -> None:
        for shape, names, kind, words in CANNOT_BE:
            with pytest.raises(kind, match=words) as caught:
                DeviceMesh(group, shape, names)
            assert type(caught.value) is kind
        with pytest.raises(oa.UsageError, match="made of a group"):
            DeviceMesh(4, (4,))  # type: ignore[arg-type]
        assert group._call_sequence.next == 0

    world(program, 4)


@pytest.mark.parametrize(
    "other", [((4, 2), ("a", "b")), ((2, 4), ("b", "a")), ((8,), ("a",)), ((2, 4), ("a", "c")), ((2, 2, 2), ("a", "b", "c"))]
)
def test_ranks_that_give_different_meshes_all_learn_it_and_the_group_goes_on(world, other):
    def program(group: Group) -> None:
        with pytest.raises(oa.UsageError, match="every rank must give the same shape and names") as caught:
            DeviceMesh(group, *(other if group.rank == 5 else ((2, -1), ("a", "b"))))
        stories = str(caught.value).splitlines()[1:]
        assert stories[4] == "  rank 4: shape=(2, 4), names=('a', 'b')"
        assert stories[5] == f"  rank 5: shape={other[0]}, names={other[1]}"
        with DeviceMesh(group, (8,)) as mesh:
            assert mesh.group(0).all_reduce(1) == 8

    world(program, 8)


def test_a_mesh_against_another_call_is_a_mismatch_on_every_rank(world):
    def program(group: Group) -> None:
        group.barrier() if group.rank == 1 else DeviceMesh(group, (2, 2))

    outcomes = world.outcomes(program, 4)
    assert [type(outcome) for outcome in outcomes] == [oa.CollectiveMismatchError] * 4


def test_axes_without_names_have_numbers_and_default_names(world):
    def program(group: Group) -> None:
        with DeviceMesh(group, np.array([2, -1])) as mesh:
            assert mesh.names == ("axis0", "axis1")
            assert mesh.group("axis1") is mesh.group(1)
            assert mesh.rank_at(axis0=1, axis1=0) == 2

    world(program, 4)


def test_a_submesh_holds_the_ranks_that_share_the_other_coordinates():
    def program(group: Group) -> None:
        with DeviceMesh(group, (2, 2, 2), ("pp", "dp", "tp")) as mesh:
            pp, dp, tp = mesh.coordinates
            with mesh.submesh("tp", "pp") as part:
                assert (part.names, part.shape) == (("tp", "pp"), (2, 2))
                assert part.coordinates == (tp, pp)
                assert part.parent.ranks == tuple(mesh.rank_at(p, dp, t) for t in range(2) for p in range(2))
                assert part.group("tp").ranks == mesh.group("tp").ranks
                assert part.parent.all_reduce(1) == 4
                assert part.group("pp").all_reduce(group.rank) == mesh.group("pp").all_reduce(group.rank)
            for closed in (part.parent, part.group("tp")):
                with pytest.raises(oa.ClosedError):
                    closed.barrier()
            assert mesh.group("tp").all_reduce(1) == 2
            with pytest.raises(oa.UsageError, match="every rank must give the same axes"):
                mesh.submesh("dp", "tp" if group.rank else "pp")
            with mesh.submesh(1) as line:
                assert line.parent.ranks == mesh.group("dp").ranks

    must(over_sockets(program, 8))


def test_the_groups_of_a_mesh_talk_at_once(world):
    def program(group: Group) -> None:
        with DeviceMesh(group, (2, 3), ("dp", "tp")) as mesh:
            works = [mesh.group(axis).all_reduce_async(np.full(100, group.rank)) for axis in ("dp", "tp", "tp", "dp")]
            row, column = group.rank // 3, group.rank % 3
            expected = [3 + 2 * column, 9 * row + 3, 9 * row + 3, 3 + 2 * column]
            assert [int(work.wait()[-1]) for work in works] == expected

    world(program, 6)


def test_closing_a_mesh_closes_its_groups_and_not_the_one_laid_out(world):
    def program(group: Group) -> None:
        mesh = DeviceMesh(group, (2, 1))
        mesh.close()
        mesh.close()
        for axis in range(2):
            with pytest.raises(oa.ClosedError):
                mesh.group(axis).barrier()
        assert mesh.rank_at(1, 0) == 1
        assert group.all_reduce(1) == 2

    world(program, 2)


def test_a_program_that_fails_inside_a_mesh_does_not_wait_for_anybody(world):
    """The rank leaves with its own error, at once; the others learn it."""

    def program(group: Group) -> None:
        with DeviceMesh(group, (3,)) as mesh:
            if group.rank == 1:
                mesh.group(0).all_reduce_async(1)
                raise ZeroDivisionError
            group.barrier()

    outcomes = world.outcomes(program, 3)
    assert [type(outcome) for outcome in outcomes] == [oa.AbortedError, ZeroDivisionError, oa.AbortedError]


def test_equal_meshes_have_the_same_ranks_shape_and_names(world):
    def program(group: Group) -> None:
        mesh = DeviceMesh(group, (2, 2), ("a", "b"))
        same, turned, wide = (
            DeviceMesh(group, (-1, 2), ["a", "b"]),
            DeviceMesh(group, (2, 2), ("b", "a")),
            DeviceMesh(group, (4,)),
        )
        half = group.split(group.rank // 2)
        assert half is not None
        assert mesh == same
        assert hash(mesh) == hash(same)
        assert mesh not in (turned, wide, "mesh")
        assert DeviceMesh(half, (2,)) != DeviceMesh(group, (4,))
        assert repr(mesh) == f"<oneaccord.DeviceMesh a=2 x b=2, rank {group.rank} at {divmod(group.rank, 2)}>"

    world(program, 4)


def test_a_world_of_one_has_meshes_of_any_number_of_axes():
    with oa.init() as group, oa.DeviceMesh(group, (1, -1, 1)) as mesh:
        assert mesh.coordinates == (0, 0, 0)
        assert mesh.group(2).all_reduce(5) == 5

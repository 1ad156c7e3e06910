"""Neighbours on a mesh, grids that are made by themselves, and groups of the ranks of a host."""

from __future__ import annotations

import numpy as np
import pytest

import oneaccord as oa
from oneaccord.api import Group
from oneaccord_simulated import run


@pytest.mark.parametrize(
    ("size", "names", "shape"),
    [
        (1, None, (1, 1)),
        (6, None, (3, 2)),
        (7, ("x",), (7,)),
        (8, ("x", "y", "z"), (2, 2, 2)),
        (12, ("x", "y", "z"), (3, 2, 2)),
        (13, None, (13, 1)),
        (16, None, (4, 4)),
        (18, ("x", "y", "z"), (3, 3, 2)),
        (36, None, (6, 6)),
    ],
)
def test_auto_makes_the_most_equal_grid(size, names, shape):
    def program(group: Group) -> tuple[int, ...]:
        with oa.DeviceMesh(group, "auto", names) as mesh:
            return mesh.shape

    assert run(program, size).results == [shape] * size


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("shape", [(3, 2), (1, 6), (6,)])
def test_neighbors_exchange_along_each_axis(world, shape, periodic):
    def program(group: Group) -> None:
        with oa.DeviceMesh(group, shape, periodic=periodic) as mesh:
            for count in (2, 20_000):
                got = mesh.neighbor_all_gather(np.full(count, group.rank))
                mine = [np.full(count + place, 100 * group.rank + place) for place in range(2 * mesh.ndim)]
                own = mesh.neighbor_all_to_all(mine)
                for place, peer in enumerate(mesh.neighbors):
                    if peer is None:
                        assert got[place] is None
                        assert own[place] is None
                    else:
                        assert (got[place] == peer).all()
                        assert (own[place] == 100 * peer + (place ^ 1)).all()
                        assert own[place].shape == (count + (place ^ 1),)
            assert mesh.neighbors[0] == mesh.ranks[(mesh.coordinates[0] - 1, *mesh.coordinates[1:])] or not periodic
            with pytest.raises(oa.SizeMismatchError, match="takes"):
                mesh.neighbor_all_to_all([1])

    world(program, 6)

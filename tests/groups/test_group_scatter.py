"""A scatter that is made again and again, with other arrays each time: what the root tells first decides, and not what was last time."""

from __future__ import annotations

import numpy as np
import pytest

import oneaccord as oa
from oneaccord.api import Group

FORMS = ["array", "list", "strided"]


def test_the_root_may_divide_another_array_each_time(world):
    def program(group: Group) -> None:
        chance = np.random.default_rng(7)
        for number in range(60):
            root, rows, form = number % group.world_size, int(chance.integers(0, 5)), FORMS[int(chance.integers(3))]
            dtype = [np.float32, np.int64, np.complex128][int(chance.integers(3))]
            whole = (np.arange(group.world_size * rows * 2).reshape(-1, 2) + number).astype(dtype)
            given = {"array": whole, "list": whole.tolist() or whole, "strided": np.asfortranarray(whole)}[form]
            expected = whole[group.rank * rows : (group.rank + 1) * rows]
            out = np.empty((rows, 2), np.asarray(given).dtype) if chance.random() < 0.5 else None
            part = group.scatter(given if group.rank == root else None, root, out=out if group.rank != number % 2 else None)
            assert part.shape == expected.shape
            assert (part == expected).all()

    world(program, 3)


def test_a_part_that_fits_no_more_ends_the_call_on_all_ranks(world):
    def program(group: Group) -> None:
        for rows in (4, 4, 4, 6):
            group.scatter(np.ones(rows) if group.rank == 0 else None, out=np.empty(2))

    for outcome in world.outcomes(program, 2):
        with pytest.raises(oa.CommError, match=r"out= has shape \(2,\), but the result has \(3,\)"):
            raise outcome

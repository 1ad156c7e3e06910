"""Schedules made by hand, and what the verifier says of those that are wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from oneaccord.schedule.proof.verify import ScheduleError, verify
from oneaccord.schedule.steps import Buffer, Collective, Ref, Schedule, Step

__all__ = ["IN", "INPUT", "OUT", "OUTPUT", "SCRATCH", "TMP", "caught", "world"]

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH
IN, OUT, TMP = Ref(INPUT, 0), Ref(OUTPUT, 0), Ref(SCRATCH, 0)


def world(
    collective: Collective,
    *steps: Sequence[Step],
    chunks: tuple[int, int] = (1, 1),
    scratch: tuple[Ref, ...] = (),
    root: int = 0,
    even: bool = False,
) -> list[Schedule]:
    """Return one schedule for each rank's steps."""
    size = len(steps)
    return [
        Schedule(collective, "handmade", rank, size, root, *chunks, scratch, tuple(mine), even)
        for rank, mine in enumerate(steps)
    ]


def caught(error: type[ScheduleError], schedules: Any, words: str, **claims: bool) -> None:
    """Check that the schedules are refused, with exactly that error, a counterexample in words and its place."""
    with pytest.raises(ScheduleError, match=words) as found:
        verify(schedules, **claims)
    assert type(found.value) is error
    place = re.match(r"rank (\d+), (?:step (\d+)|output chunk \d+ .*?\(.*?step (\d+))", str(found.value))
    if place and not claims:  # what is claimed is claimed of all ranks
        rank, *steps = place.groups()
        assert (found.value.rank, found.value.step) == (int(rank), int(next(filter(None, steps))))

"""How many processors this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from oneaccord.common.control_groups import control_groups, read_text

__all__ = ["processors"]


def processors() -> int:
    """Return how many processors this process may use, at least 1.

    That is how many the scheduler lets it run on (``taskset``, cpusets), or how many its control group has time for, if these are fewer: a container with
    ``--cpus=1.5`` sees all processors of its host, and has the time of 2 at most.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(-(-quota // period) for quota, period in quotas(Path("/")))]))


def quotas(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limits that control groups set for this process: how many microseconds it may compute in how many.

    Parameters
    ----------
    root
        The folder of ``proc`` and ``sys``; for tests.
    """
    for version, folder in control_groups(root, "cpu"):
        if version == 2:
            yield from _limit(read_text(folder / "cpu.max").split())
        else:
            yield from _limit(read_text(folder / f"cpu.cfs_{what}_us").strip() for what in ("quota", "period"))


def _limit(words: list[str] | Iterator[str]) -> Iterator[tuple[int, int]]:
    found = list(words)
    if len(found) == 2 and found[0].isdigit() and found[1].isdigit() and int(found[0]) and int(found[1]):  # and not max, or -1
        yield int(found[0]), int(found[1])

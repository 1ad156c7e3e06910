"""How many processors a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oneaccord.common.processors import processors, quotas


@pytest.mark.parametrize(
    ("groups", "files", "found"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, [(150000, 100000)]),
        ("0::/\n", {"cpu.max": "max 100000\n"}, []),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000", "cpu.max": "x"}, [(50000, 100000)]),
        ("0::/gone\n", {}, []),
        ("4:cpu,cpuacct:/x\n", {"cpu,cpuacct/x/cpu.cfs_quota_us": "30", "cpu,cpuacct/x/cpu.cfs_period_us": "10"}, [(30, 10)]),
        ("1:cpu:/\n2:cpuset:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        ("nonsense", {}, []),
        (None, {}, []),
    ],
)
def test_limits_of_control_groups_are_read(
    tmp_path: Path, groups: str | None, files: dict[str, str], found: list[tuple[int, int]]
) -> None:
    if groups is not None:
        files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {"proc/self/cgroup": groups}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert set(quotas(tmp_path)) == set(found)


@pytest.mark.parametrize(
    ("limits", "count"), [([(50_000, 100_000)], 1), ([(110_000, 100_000), (900_000, 100_000)], 2), ([], 8)]
)
def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch, limits: list[tuple[int, int]], count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("oneaccord.common.processors.quotas", lambda _: iter(limits))
    assert processors() == count

"""How much memory is left, from files of a made-up system."""

from __future__ import annotations

from pathlib import Path

import pytest

from oneaccord.common.memory import memory_left

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nSwapFree:        1048576 kB\nHugePages_Total:       0\n"


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, limit: str, used: int, idle: int) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {idle}\n",
    }


def test_without_groups_it_is_what_the_host_has(tmp_path):
    assert memory_left(system(tmp_path, {})) == 9 * GIB


@pytest.mark.parametrize(
    ("inner", "outer", "left"),
    [
        ("max", "max", 9 * GIB),
        (str(3 * GIB), "max", 2 * GIB + 7),
        ("max", str(2 * GIB), GIB + 7),
        (str(100 * GIB), "max", 9 * GIB),
        ("1000", "max", 0),
    ],
)
def test_a_group_of_version_2_or_one_around_it_may_have_less(tmp_path, inner, outer, left):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        **group("sys/fs/cgroup/a/b", inner, GIB, 7),
        **group("sys/fs/cgroup/a", outer, GIB, 7),
    }
    assert memory_left(system(tmp_path, files)) == left


def test_a_group_of_version_1_may_have_less(tmp_path):
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/c\n3:memory:/c\n",
        "sys/fs/cgroup/memory/c/memory.limit_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/c/memory.usage_in_bytes": str(GIB // 2),
        "sys/fs/cgroup/memory/c/memory.stat": "total_inactive_file 4096\n",
    }
    assert memory_left(system(tmp_path, files)) == GIB // 2 + 4096


def test_a_system_that_does_not_say_leaves_it_open(tmp_path):
    assert memory_left(tmp_path) is None

"""The tool that builds the distributions finds what two builds have not in common, and the sdist of the compiled part is the same each time."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.scripts import module_of


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders for distributions."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    return first, second


def wheel(folder: Path, text: str, year: int) -> None:
    with zipfile.ZipFile(folder / "some-1.0-py3-none-any.whl", "w") as made:
        made.writestr("same.py", "")
        made.writestr(zipfile.ZipInfo("some.py", (year, 1, 1, 0, 0, 0)), text)


def sdist(folder: Path, mtime: int, packed_at: int) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as made:
        entry = tarfile.TarInfo("some-1.0/some.py")
        entry.mtime = mtime
        made.addfile(entry, io.BytesIO())
    (folder / "some-1.0.tar.gz").write_bytes(gzip.compress(plain.getvalue(), mtime=packed_at))


@pytest.mark.parametrize(
    ("text", "year", "mtime", "packed_at", "said"),
    [
        ("x = 1", 2026, 1, 1, []),
        ("x = 2", 2026, 1, 1, ["some-1.0-py3-none-any.whl differs in some.py"]),
        ("x = 1", 2025, 1, 1, ["some-1.0-py3-none-any.whl differs in some.py"]),
        ("x = 1", 2026, 2, 1, ["some-1.0.tar.gz differs in some-1.0/some.py"]),
        ("x = 1", 2026, 1, 2, ["some-1.0.tar.gz differs in how it is packed"]),
    ],
    ids=["nothing", "a line", "a time in the wheel", "a time in the sdist", "the time of packing"],
)
def test_what_two_builds_have_not_in_common_is_named(repository, pair, text, year, mtime, packed_at, said):
    for folder, *what in ((pair[0], "x = 1", 2026, 1, 1), (pair[1], text, year, mtime, packed_at)):
        wheel(folder, *what[:2])
        sdist(folder, *what[2:])
    assert module_of(repository / "tools" / "build_wheels.py").differences(*pair) == said


def test_a_distribution_that_was_built_once_only_is_named(repository, pair):
    wheel(pair[1], "", 2026)
    assert module_of(repository / "tools" / "build_wheels.py").differences(*pair) == [
        "some-1.0-py3-none-any.whl was built once only"
    ]


@pytest.mark.timeout(300)  # it starts setuptools twice
def test_the_sdist_of_the_compiled_part_is_the_same_each_time(repository, tmp_path):
    made = []
    for age_s in (0, 100_000):
        folder = tmp_path / str(age_s) / "native"
        shutil.copytree(
            repository / "native", folder, ignore=shutil.ignore_patterns("*.so", "*.egg-info", "build", "__pycache__")
        )
        for path in folder.rglob("*"):
            os.utime(path, (2**30 + age_s, 2**30 + age_s))
            path.chmod(path.stat().st_mode & ~(0o077 if age_s else 0))
        environ = {**os.environ, "SOURCE_DATE_EPOCH": str(2**30)}
        command = [sys.executable, "-W", "ignore", "setup.py", "-q", "sdist"]
        subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True)
        made += [path.read_bytes() for path in (folder / "dist").glob("*.tar.gz")]
    assert len(made) == 2
    assert made[0] == made[1]

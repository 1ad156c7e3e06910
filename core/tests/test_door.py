"""Who of those that are left waits at the door for the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.control.credentials import Credentials
from manyhands.control.lobby import Door

fcntl = pytest.importorskip("fcntl")

OTHER = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("has it", flush=True)
sys.stdin.read()
"""


def door(folder: Path) -> Door:
    return Door(None, folder, Credentials(b"secret"))


def test_nobody_takes_itself_for_the_one_by_what_an_earlier_one_has_written(tmp_path: Path) -> None:
    keeper = tmp_path / "keeper"
    keeper.write_text("3")  # rank 3 of an earlier time was killed there
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(keeper)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(OSError):  # noqa: PT011 - the kernel's words differ
            door(tmp_path).claim(3)
        keeper.write_text("")
        with pytest.raises(OSError):  # noqa: PT011
            door(tmp_path).claim(3)
        keeper.write_text("2")
        assert door(tmp_path).claim(3) == 2
        other.communicate("")
    own = door(tmp_path)
    assert [own.claim(3), own.claim(3)] == [3, 3]
    assert keeper.read_text() == "3"
    own.disclaim()
    assert keeper.read_text() == ""

"""What a process must not leave behind, even if it is killed: a temporary folder, and the process groups that it started."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["Guard", "guarded"]

_END_S = 3.0


class Guard:
    """Knows what would be left behind.

    Attributes
    ----------
    folder
        A temporary folder that only this user can read.
    """

    def __init__(self, folder: Path, pipe: IO[bytes]) -> None:
        self.folder: Path = folder
        self._pipe = pipe

    def add(self, group: int) -> None:
        """Have a process group killed, should this process end before `remove`.

        Parameters
        ----------
        group
            Its number.
        """
        self._announce(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Leave a process group alone from now on.

        Parameters
        ----------
        group
            Its number.
        """
        self._announce(f"-{group}\n")

    def _announce(self, line: str) -> None:
        # A guard that was killed protects nobody, and that is no reason to end the job.
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(line.encode())
            self._pipe.flush()


@contextlib.contextmanager
def guarded() -> Iterator[Guard]:
    """Make a temporary folder that is removed when the context ends, or when this process does, in whatever way."""
    # The guard knows the folder before there is one, so that no moment is left in which nobody would remove it.
    folder = Path(tempfile.gettempdir(), f"manyhands-{secrets.token_hex(8)}")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("process.py")), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        folder.mkdir(0o700)
        yield Guard(folder, process.stdin)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

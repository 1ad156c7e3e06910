"""A file for each output of each rank, which holds its bytes as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

from oneaccord.errors import UsageError

__all__ = ["Log", "Logs"]


class Log:
    """One file. It is opened for each write: a job of many ranks would otherwise need two more files for each of them.

    Parameters
    ----------
    path
        The file, which exists.
    say
        Shows a message.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._has_failed = False

    def write(self, data: bytes) -> None:
        """Write bytes behind the others. What cannot be written, as on a full disk, is lost, and a message says so once."""
        try:
            with self._path.open("ab") as file:
                file.write(data)
        except OSError as error:
            if not self._has_failed:
                self._say(
                    f"oneaccord run: {self._path} cannot be written ({error.strerror}): the job continues, but output there is lost\n"
                )
            self._has_failed = True


class Logs:
    """The files ``rank-N.out`` and ``rank-N.err`` of one folder.

    Parameters
    ----------
    folder
        The folder, which is made if it does not exist.
    ranks
        The ranks that begin.
    say
        Shows a message.

    Raises
    ------
    UsageError
        The folder holds one of the files already, or cannot be made or written. No file was made.
    """

    def __init__(self, folder: str, ranks: Iterable[int], say: Callable[[str], None]) -> None:
        self._folder = Path(folder).absolute()
        self._say = say
        self._unused: dict[int, tuple[Log, Log]] = {}
        made: list[Path] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for rank in ranks:
                self._unused[rank] = self._make(f"rank-{rank}", made)
        except OSError as error:
            for path in made:
                path.unlink()
            if isinstance(error, FileExistsError) and self._folder.is_dir():
                raise UsageError(
                    f"--log-dir {folder}: {error.filename} exists already, from an earlier run: name another folder, or remove the files of that run"
                ) from error
            raise UsageError(f"--log-dir {folder}: it cannot be written: {error}; name another folder") from error

    def begin(self, rank: int) -> tuple[Log, Log]:
        """Return the files of a rank's standard output and error; those of one that comes in the place of another have names of their own.

        Raises
        ------
        OSError
            A file cannot be made.
        """
        if rank in self._unused:
            return self._unused.pop(rank)
        for number in count(1):
            try:
                return self._make(f"rank-{rank}.restart-{number}", [])
            except FileExistsError:
                continue
        raise AssertionError  # count does not end

    def _make(self, name: str, made: list[Path]) -> tuple[Log, Log]:
        paths = self._folder / f"{name}.out", self._folder / f"{name}.err"
        for path in paths:
            path.touch(exist_ok=False)
            made.append(path)
        return Log(paths[0], self._say), Log(paths[1], self._say)

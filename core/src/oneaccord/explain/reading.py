"""Finding the files of flight recorders, and putting those of one job together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from oneaccord.common.folders import read_regular
from oneaccord.errors import UsageError
from oneaccord.explain.dump import Dump, decode

__all__ = ["Job", "read_jobs"]

_LARGEST = 1 << 30


class Job(NamedTuple):
    """The files of one job that could be read.

    Attributes
    ----------
    name
        The name of the job.
    world_size
        How many ranks it had.
    dumps
        By rank the newest file of each.
    """

    name: str
    world_size: int
    dumps: Mapping[int, Dump]

    @property
    def missing(self) -> list[int]:
        """The ranks of which there is no file."""
        return [rank for rank in range(self.world_size) if rank not in self.dumps]

    @property
    def time(self) -> float:
        """When its newest file was written, in seconds since the epoch."""
        return max(dump.time for dump in self.dumps.values())


def read_jobs(paths: Sequence[Path]) -> tuple[list[Job], list[str]]:
    """Read all files; return the jobs, the newest first, and in words which files were left out.

    Parameters
    ----------
    paths
        Folders with such files, one from each host if they share none, or the files.

    Raises
    ------
    UsageError
        There is no such path, or no file of a flight recorder.
    """
    found: dict[str, dict[int, Dump]] = {}
    left_out = []
    for path in _files(paths):
        dump, problem = _read(path)
        if dump is None:
            left_out.append(f"{path}: {problem}")
            continue
        dumps = found.setdefault(dump.job, {})
        other = dumps.get(dump.rank)
        if other is not None and other.world_size != dump.world_size:
            left_out.append(
                f"{path}: this file says {dump.world_size} ranks, but another file of its job says {other.world_size}"
            )
        elif other is None or other.time < dump.time:
            dumps[dump.rank] = dump
    if not found:
        where = ", ".join(map(str, paths))
        more = f"; what is there cannot be read: {left_out[0]}" if left_out else ""
        raise UsageError(
            f"there is no file of a flight recorder in {where}{more}. Ranks write them to the folder of the setting recorder.directory, as with "
            "`oneaccord run --record DIR`: when their job fails, at SIGUSR1, and at its end"
        )
    jobs = [Job(name, max(dump.world_size for dump in dumps.values()), dumps) for name, dumps in found.items()]
    return sorted(jobs, key=lambda job: job.time, reverse=True), left_out


def _files(paths: Sequence[Path]) -> Iterable[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.glob("*-rank-*.json"))
        elif path.exists():
            yield path
        else:
            raise UsageError(f"there is no folder or file {path}; give the folder that recorder.directory names")


def _read(path: Path) -> tuple[Dump | None, str]:
    try:
        dump = decode(read_regular(path, _LARGEST))
    except (OSError, MemoryError, UsageError) as error:
        return None, str(error)
    return dump, "it is damaged, or another version of oneaccord wrote it"

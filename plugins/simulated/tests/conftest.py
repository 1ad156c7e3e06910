"""What is told of a planted bug: the program is run in many ways, and the report is read as a person would."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import oneaccord as oa
import oneaccord_simulated as simulated
from oneaccord.api import Group

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"config": {"backends": {"simulated": {"eager_bytes": 65536}}}},
    {"network": "fat-tree"},
)
"""Every message waits for its receive; short ones do not; messages take time."""
MARK = re.compile(r"# @(\w+)$", re.MULTILINE)


class Report:
    """A report, taken apart.

    Attributes
    ----------
    error
        The error that was raised.
    headline
        The first line of its text.
    told
        For each rank that is named below, what is said of it.
    hint
        What stands below that and names no rank.
    at
        For each of these ranks the marks (``# @name``) of the lines that are named there.
    """

    def __init__(self, error: BaseException, marks: dict[str, str]) -> None:
        self.error = error
        self.headline, *lines = str(error).split("\n")
        self.told: dict[int, str] = {}
        self.hint = ""
        for line in lines:
            found = re.fullmatch(r"  ranks? ([\d, -]+): (.*)", line)
            if found is None:
                self.hint += line
                continue
            for part in found[1].split(", "):
                first, _, last = part.partition("-")
                for rank in range(int(first), int(last or first) + 1):
                    assert rank not in self.told, f"rank {rank} is told of twice:\n{error}"
                    self.told[rank] = found[2]
        self.at = {
            rank: " ".join(
                marks.get(f"{Path(file).name}:{line}", f"{file}:{line}") for file, line in re.findall(r"at (\S+):(\d+)", told)
            )
            for rank, told in self.told.items()
        }


def marks_of(*files: str | Path) -> dict[str, str]:
    """Return the marks of some files, by where they stand: ``"file.py:7"``."""
    found = {}
    for file in files:
        for number, line in enumerate(Path(file).read_text().splitlines(), start=1):
            for mark in MARK.findall(line):
                found[f"{Path(file).name}:{number}"] = mark
    return found


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Callable[[BaseException], Report]:
    """Take apart what an error tells."""
    return lambda error: Report(error, marks_of(request.path))


@pytest.fixture
def report_on(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Run a program that has a bug, with several seeds and in several ways; check what must always hold, and return the first report.

    Every rank raises the same error of the type that is expected, before ``seconds`` of virtual time have passed. A seed changes nothing in
    the text, unless it need not be ``alike``, and nothing changes the lines that are named, unless these need not be the ``same_lines``.
    """

    def run(
        program: Callable[[Group], object],
        world_size: int,
        kind: type[BaseException],
        *,
        ways: Sequence[dict[str, Any]] = WAYS,
        alike: bool = True,
        same_lines: bool = True,
        seconds: float = 1,
        marked: Sequence[str | Path] = (),
    ) -> Report:
        marks = marks_of(request.path, *marked)
        reports: list[Report] = []
        for way in ways:
            texts = set()
            for seed in range(1 + settings().max_examples // 30):
                done = simulated.run(program, world_size, seed, check=False, **way)
                assert sorted(done.errors) == list(range(world_size)), done.errors
                assert {(type(error), str(error)) for error in done.errors.values()} == {(kind, str(done.cause))}
                assert all(isinstance(error, oa.CommError) and error.rank == rank for rank, error in done.errors.items())
                assert done.duration_s < seconds
                texts.add(str(done.cause))
                assert done.cause is not None
                reports.append(Report(done.cause, marks))
            assert not alike or len(texts) == 1, "\n".join(texts)
        for report in reports if same_lines else []:
            assert report.at == reports[0].at, f"{report.error}\n{reports[0].error}"
        return reports[0]

    return run

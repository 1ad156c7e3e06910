"""``oneaccord bench overlap``: its arithmetic, its table, and what it refuses."""

from __future__ import annotations

import io

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.errors import ConfigError, DTypeError, InvalidWorldSizeError, UnknownBackendError, UsageError
from oneaccord_lab.bench.plan import Opened, Overlap, Plan, Point, Problem, Skipped, Target
from oneaccord_lab.bench.statistics import overlapped
from oneaccord_lab.commands.bench_overlap import Table, bench_overlap


@pytest.mark.parametrize(
    ("comm", "work", "both", "expected"),
    [
        (4.0, 8.0, 8.0, 1.0),  # the call is hidden
        (8.0, 4.0, 8.0, 1.0),  # the work is hidden
        (4.0, 8.0, 12.0, 0.0),  # one after the other
        (4.0, 8.0, 9.0, 0.75),
        (8.0, 4.0, 10.0, 0.5),
        (4.0, 8.0, 13.0, 0.0),  # they are in each other's way
        (4.0, 8.0, 7.0, 1.0),  # noise
        (0.0, 8.0, 8.0, 0.0),  # there is nothing to hide
    ],
)
def test_the_overlap_is_the_part_of_the_shorter_that_was_hidden(comm: float, work: float, both: float, expected: float) -> None:
    assert overlapped(comm, work, both) == expected


@given(*[st.floats(1e-9, 1e3)] * 3)
def test_an_overlap_is_a_part_and_does_not_depend_on_what_is_called_work(comm: float, work: float, both: float) -> None:
    assert 0 <= overlapped(comm, work, both) <= 1
    assert overlapped(comm, work, both) == overlapped(work, comm, both)


def table_of(ranks: int) -> tuple[Table, io.StringIO]:
    points = [Point("numpy", 1 << 20), Point("python", 1 << 20)]
    plan = Plan([Target("tcp"), Target("mpi", "raw")], points, "float32", "sum", 7, None, 9.0, 9.0, "", "")
    stream = io.StringIO()
    return Table(plan, ranks, stream), stream


def test_a_row_has_the_three_times_and_the_overlap() -> None:
    table, stream = table_of(2)
    table.heading()
    found = Overlap("tcp", "numpy", "float32", 2, 1 << 20, 7, 4.0, 8.0, 9.0, 0.75)
    table.take(Opened(["Open MPI v9"], {}, "compiled"))
    for record in (found, Problem("mpi+raw", "numpy", 1 << 20, "rank 1: it broke"), Skipped("python", 1 << 20)):
        table.take(record)
    said = stream.getvalue()
    assert said.startswith("# oneaccord bench overlap: tcp, mpi+raw; 2 ranks on this host\n")
    assert "# all_reduce of 1 MiB of float32, 7 iterations; times in ms\n" in said
    assert "# Open MPI v9\n# executor of tcp and shm: compiled\n" in said
    head, first, second, third = (line.split() for line in said.splitlines()[-4:])
    assert head == ["#", "work", "backend", "call", "work", "both", "overlap"]
    assert first == ["numpy", "tcp", "4.00", "8.00", "9.00", "75%"]
    assert second == ["numpy", "mpi+raw", "failed:", "rank", "1:", "it", "broke"]
    assert third[:3] == ["python", "not", "measured:"]
    assert (len(table.rows), table.problems) == (1, 1)
    assert table.rows[0]["overlap"] == 0.75
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("spare", [0, 1])
def test_the_head_says_where_no_processor_is_idle(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneaccord.api.processors", lambda: 2 + spare)
    table, stream = table_of(2)
    table.heading()
    assert ("2 ranks leave none of 2 processors idle" in stream.getvalue()) == (not spare)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["-n", "0"], InvalidWorldSizeError, "-n 0: a job has at least one rank"),
        (["--iterations", "0"], UsageError, "--iterations 0: expected at least 1"),
        (["--budget", "0"], UsageError, "--budget 0: expected a positive number"),
        (["--timeout", "nan"], UsageError, "--timeout nan: expected a positive number"),
        (["--bytes", "12q"], UsageError, "'12q' is not a number of bytes"),
        (["--dtype", "float12"], DTypeError, "there is no dtype 'float12'"),
        (["--config", "none.toml"], ConfigError, "none.toml: there is no such file"),
        (["--json", "no/folder.json"], UsageError, "--json no/folder.json cannot be written"),
        (["--backends", "tpc"], UnknownBackendError, "tpc"),
        (["--backends", "tcp,tcp"], UsageError, "tcp is there twice"),
        (["--backends", "tcp+raw"], UsageError, r"no other library behind tcp; \+raw is for gloo, mpi"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(options: list[str], error: type[Exception], message: str) -> None:
    app = typer.Typer()
    app.command()(bench_overlap)
    with pytest.raises(error, match=message):
        typer.main.get_command(app).main(options, standalone_mode=False)

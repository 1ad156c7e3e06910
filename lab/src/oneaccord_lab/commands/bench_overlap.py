"""``oneaccord bench overlap``: the part of an all_reduce that runs while its caller does other work."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import msgspec
import typer

from oneaccord_lab.commands.options import Config, JsonFile, Ranks, Timeout, at_least, seconds

if TYPE_CHECKING:
    from oneaccord_lab.bench.plan import Plan, Record

__all__ = ["Table", "bench_overlap"]

_WORKER: Final[str] = "oneaccord_lab.bench.overlap"
_PEERS: Final[tuple[str, ...]] = ("gloo+raw", "mpi+raw")
_WORDS: Final[dict[str, str]] = {"numpy": "matrix products of NumPy", "python": "Python alone"}
_ROW: Final[str] = "{:>6}  {:<14}{:>10}{:>10}{:>10}{:>9}"


def bench_overlap(
    ranks: Ranks = 2,
    backends: Annotated[
        str | None,
        typer.Option(
            "--backends",
            "--backend",
            metavar="NAMES",
            help="The backends, such as tcp,shm; gloo+raw is torch's own asynchronous call, mpi+raw MPI_Iallreduce. By default that "
            "of the configuration, and those two if they are installed.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[str, typer.Option("--bytes", help="The size of the call.")] = "64MiB",
    dtype: Annotated[str, typer.Option(help="The dtype of the arrays.")] = "float32",
    iterations: Annotated[int, typer.Option(callback=at_least(1), help="How often each time is measured.")] = 7,
    budget_s: Annotated[
        float, typer.Option("--budget", callback=seconds, help="Seconds after which no further kind of work is begun.")
    ] = 120.0,
    timeout_s: Timeout = 20.0,
    json_file: JsonFile = None,
    config: Config = None,
) -> None:
    """Measure which part of an all_reduce runs while its caller multiplies matrices, or runs Python.

    Each backend begins a call, does work that takes about as long alone, and waits for the call. The overlap is the part of the
    shorter of both that was hidden behind the longer one. Ends with exit code 1 if a backend failed or computed a wrong result.
    """
    from oneaccord.arrays.dtypes import resolve_op
    from oneaccord.common.units import parse_bytes
    from oneaccord_lab.bench.cases import parse_dtype
    from oneaccord_lab.bench.plan import WORKS, Plan, Point, round_size
    from oneaccord_lab.bench.raw import ASYNC_RAW
    from oneaccord_lab.bench.running import Interrupted, compare
    from oneaccord_lab.commands.bench_ranks import start_ranks, targets_of, write_json
    from oneaccord_lab.commands.files import check_folder

    if json_file is not None:
        check_folder("--json", json_file)
    kind = parse_dtype(dtype)
    resolve_op("sum", kind)
    targets, resolutions = targets_of(backends, config, ASYNC_RAW, [] if backends else _installed_peers())
    nbytes = round_size("all_reduce", parse_bytes(size), ranks, kind.itemsize)
    points = [Point(work, nbytes) for work in WORKS]
    plan = Plan(targets, points, dtype, "sum", iterations, None, budget_s, timeout_s, "", "")
    # Standard output must contain nothing but JSON.
    table = Table(plan, ranks, sys.stderr if json_file == "-" else sys.stdout)
    table.heading()

    def start(text: str, ranks: int) -> int:
        return start_ranks(_WORKER, text, ranks, resolutions, config)

    try:
        compare(plan, ranks, start, table.take)
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.code) from None
    if json_file is not None:
        write_json(json.dumps(table.rows, indent=2), json_file)
    raise typer.Exit(1 if table.problems else 0)


def _installed_peers() -> list[str]:
    """Return the targets that are other people's libraries, of those that can run here."""
    from oneaccord.config.plugins import get_plugin_manager

    plugins = get_plugin_manager()
    names = plugins.names()
    return [peer for peer in _PEERS if (name := peer.partition("+")[0]) in names and plugins.available(name) is None]


class Table:
    """Prints the results, each row as soon as it is there."""

    def __init__(self, plan: Plan, ranks: int, stream: TextIO) -> None:
        self.rows: list[dict[str, Any]] = []
        self.problems: int = 0
        self._plan = plan
        self._ranks = ranks
        self._stream = stream
        self._work = ""

    def heading(self) -> None:
        """Print a heading: the measurement and the machine."""
        from oneaccord.api import processors
        from oneaccord.common.units import bytes_text
        from oneaccord_lab.bench.machine import describe

        plan, ranks = self._plan, self._ranks
        size = bytes_text(plan.points[0].nbytes)
        names = ", ".join(target.name for target in plan.targets)
        self._comment(f"oneaccord bench overlap: {names}; {ranks} rank{'s' if ranks > 1 else ''} on this host")
        for line in describe():
            self._comment(line)
        if ranks >= processors():
            self._comment(f"{ranks} ranks leave none of {processors()} processors idle, so that little can be hidden")
        self._comment(f"all_reduce of {size} of {plan.dtype}, {plan.iterations} iterations; times in ms")

    def take(self, record: Record) -> None:
        """Print a record."""
        from oneaccord_lab.bench.plan import Opened, Overlap, Problem, Skipped

        match record:
            case Opened():
                if record.versions:
                    self._comment(", ".join(record.versions))
                self._comment(f"executor of tcp and shm: {record.executor}")
            case Overlap():
                self._begin(record.work)
                self.rows.append(msgspec.structs.asdict(record))
                times = [f"{each:.2f}" for each in (record.comm_ms, record.work_ms, record.both_ms)]
                self._line(_ROW.format(record.work, record.backend, *times, f"{record.overlap:.0%}"))
            case Problem():
                self.problems += 1
                self._begin(record.collective)
                words = "WRONG" if record.wrong else "failed"
                self._line(f"{record.collective:>6}  {record.backend:<14}  {words}: {record.text}")
            case Skipped():
                self._line(f"{record.collective:>6}  not measured: the budget is used up; give more with --budget")
            case _:
                pass

    def _begin(self, work: str) -> None:
        if work != self._work:
            self._work = work
            self._comment("")
            self._comment(_WORDS[work])
            self._line("#" + _ROW.format("work", "backend", "call", "work", "both", "overlap")[1:])

    def _comment(self, text: str) -> None:
        from oneaccord_lab.commands.bench_table import wrapped

        for line in wrapped(f"# {text}".rstrip(), "#   "):
            self._line(line)

    def _line(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

"""The table of ``oneaccord bench``, with the sizes and bandwidths of nccl-tests: a row as soon as it is there, in the order asked for."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

import msgspec

from oneaccord.cli.console import columns
from oneaccord.common.units import bytes_text
from oneaccord.config.sources import as_toml
from oneaccord_lab.bench.limits import limit_us, link_of
from oneaccord_lab.bench.machine import describe
from oneaccord_lab.bench.plan import Limits, Opened, Plan, Point, Problem, Record, Row, Skipped, Target

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Printer", "wrapped"]

_BARRIER: Final[str] = "barrier"
_REDUCING: Final[frozenset[str]] = frozenset({"all_reduce", "reduce", "reduce_scatter", "scan", "exscan"})
_NAMES: Final[tuple[str, ...]] = ("size", "backend", "median", "min", "p95")
_UNITS: Final[tuple[str, ...]] = ("", "", "(us)", "(us)", "(us)")
_BANDWIDTHS: Final = ("algbw", "busbw"), ("(GB/s)", "(GB/s)"), (7, 7)
_LIMITS: Final = ("limit", "share"), ("(us)", ""), (8, 6)
"""Names, units and widths of the last columns but one: bandwidths, or the machine's limits if they are requested."""
_TIMES: Final[tuple[int, ...]] = (8, 8, 8)
"""How wide the columns of times are."""


class Printer:
    """Prints the results.

    Parameters
    ----------
    plan
        The plan.
    ranks
        How many ranks there are.
    stream
        The output; a terminal gets colours.

    Attributes
    ----------
    rows
        The results, in the order of the table.
    problems
        Failures and wrong results.
    """

    def __init__(self, plan: Plan, ranks: int, stream: TextIO) -> None:
        self.rows: list[Row] = []
        self.problems: list[Problem] = []
        self._plan = plan
        self._ranks = ranks
        self._stream = stream
        self._console = _console(stream) if stream.isatty() else None
        self._pending: list[Point] = list(plan.points)
        self._known: dict[tuple[str, int], dict[str, Row | Problem]] = {}
        self._limits: dict[tuple[str, int], Limits] = {}
        self._links = {target.name: link_of(target, os.environ) for target in plan.targets}
        self._skipped: set[tuple[str, int]] = set()
        self._rounded: dict[str, list[tuple[int, int]]] = {}
        self._section = ""
        self._said: dict[str, str] = {}
        self._opened = False
        first = plan.targets[0].name
        self._compared = "" if len(plan.targets) == 1 else f"/ {first}" if len(first) < 8 else "/ first"
        sizes = [len("size"), *(len(_size(point)) for point in plan.points)]
        backends = [len("backend"), *(len(target.name) for target in plan.targets)]
        names, units, widths = _LIMITS if plan.limits else _BANDWIDTHS
        self._names = (*_NAMES, *names, self._compared)
        self._units = (*_UNITS, *units, "")
        self._widths = (max(sizes), max(backends), *_TIMES, *widths, max(5, len(self._compared)))
        # Two blanks between columns, or one if the line would be too long.
        self._gap = " " * (2 if 1 + sum(self._widths) + 2 * (len(self._names) - 1) <= columns() else 1)

    def heading(self, rounded: dict[str, list[tuple[int, int]]]) -> None:
        """Print a heading: the measurement and the machine; ``rounded`` holds for each benchmark the sizes that became others."""
        self._rounded = rounded
        plan = self._plan
        names = ", ".join(target.name for target in plan.targets)
        self._comment(f"oneaccord bench: {names}; {self._ranks} rank{'s' if self._ranks > 1 else ''} on this host")
        for line in describe():
            self._comment(line)
        count = "as the budget allows" if plan.iterations is None else f"{plan.iterations} iterations"
        self._comment(f"{count}, within {plan.budget_s:g} s in all; {plan.timeout_s:g} s for a call")

    def take(self, record: Record) -> None:
        """Take in a record; print all points that are complete by now and have their turn."""
        match record:
            case Opened():
                self._open(record)
            case Limits():
                self._limits[record.collective, record.bytes] = record
            case Row() | Problem():
                self._known.setdefault((record.collective, record.bytes), {})[record.backend] = record
            case Skipped():
                self._skipped.add((record.collective, record.bytes))
        while self._pending and self._is_complete(self._pending[0]):
            self._print_point(self._pending.pop(0))

    def as_dict(self, row: Row) -> dict[str, Any]:
        """Return a row as in the file of JSON: with its limits, if they are requested."""
        told: dict[str, Any] = msgspec.structs.asdict(row)
        if self._plan.limits:
            limits = self._limits.get((row.collective, row.bytes))
            speeds = {} if limits is None else msgspec.structs.asdict(limits)
            told["limit_us"], told["share"] = self._limit(row)
            told["limits"] = {name: value for name, value in speeds.items() if name.endswith("_us")}
        return told

    def _limit(self, row: Row) -> tuple[float | None, float | None]:
        """Return the least possible microseconds of a row, and their share of its median; None if they are not known."""
        limits, link = self._limits.get((row.collective, row.bytes)), self._links[row.backend]
        if limits is None or link is None or row.world_size == 1:
            return None, None
        least = limit_us(limits, row.world_size, link)
        return least, least / row.median_us if row.median_us else None

    def _open(self, record: Opened) -> None:
        if self._opened:
            self._comment("the other backends continue in new processes")
            return
        self._opened = True
        if record.versions:
            self._comment(", ".join(record.versions))
        if record.executor:
            self._comment(f"executor of tcp and shm: {record.executor}")
        for backend, table in record.settings.items():
            self._comment(f"[backends.{backend}] {', '.join(f'{key} = {as_toml(value)}' for key, value in table.items())}")

    def _is_complete(self, point: Point) -> bool:
        key = (point.benchmark, point.nbytes)
        known = self._known.get(key, {})
        return all(target.name in known for target in self._plan.targets) or key in self._skipped

    def _print_point(self, point: Point) -> None:
        if point.benchmark != self._section:
            self._section = point.benchmark
            self._print_section(point.benchmark)
        limits = self._limits.get((point.benchmark, point.nbytes))
        if limits is not None:
            self._comment(_speeds(limits))
        known = self._known.get((point.benchmark, point.nbytes), {})
        for target in self._plan.targets:
            self._print_target(point, target, known)

    def _print_section(self, benchmark: str) -> None:
        self._comment("")
        words = f"{benchmark} {self._plan.op}" if benchmark in _REDUCING else benchmark
        self._comment(words if benchmark == _BARRIER else f"{words}, {self._plan.dtype}")
        for asked, measured in self._rounded.get(benchmark, ()):
            self._comment(
                f"{bytes_text(asked)} measured as {bytes_text(measured)}: equal blocks of whole elements, at least one for each rank"
            )
        self._line(self._names, "bold", front="#")
        self._line(self._units, "dim", front="#")

    def _print_target(self, point: Point, target: Target, known: dict[str, Row | Problem]) -> None:
        has_bytes = point.benchmark != _BARRIER
        front = _size(point)
        found = known.get(target.name)
        match found:
            case None:
                self._line((front, target.name), "dim", "not measured: the budget is used up; give more with --budget")
            case Problem():
                self.problems.append(found)
                self._line((front, target.name), "bold red", self._complaint(found))
            case Row():
                self.rows.append(found)
                times = [_microseconds(value) for value in (found.median_us, found.min_us, found.p95_us)]
                last = [f"{value:.2f}" if has_bytes else "" for value in (found.algbw_GBps, found.busbw_GBps)]
                if self._plan.limits:
                    least, share = self._limit(found)
                    last = ["-" if least is None else _microseconds(least), "-" if share is None else f"{share:.1%}"]
                self._line((front, target.name, *times, *last, self._ratio(found, known)), "")

    def _complaint(self, problem: Problem) -> str:
        if problem.wrong:
            return f"WRONG: {problem.text}"
        if self._said.get(problem.backend) == problem.text:
            return "failed: as above"
        self._said[problem.backend] = problem.text
        return f"failed: {problem.text}"

    def _ratio(self, row: Row, known: dict[str, Row | Problem]) -> str:
        first = known.get(self._plan.targets[0].name)
        if len(self._plan.targets) == 1:
            return ""
        return f"{row.median_us / first.median_us:.3f}" if isinstance(first, Row) and first.median_us else "-"

    def _comment(self, text: str) -> None:
        for line in wrapped(f"# {text}".rstrip(), "#   "):
            self._write(line, "dim")

    def _line(self, cells: Sequence[str], style: str, text: str = "", *, front: str = " ") -> None:
        padded = [
            cell.ljust(width) if place == 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, self._widths, strict=False))
        ]
        row = f"{front}{self._gap.join(padded)}"
        for line in wrapped(f"{row}{self._gap}{text}", " " * (len(row) + len(self._gap))) if text else [row.rstrip()]:
            self._write(line, style)

    def _write(self, line: str, style: str) -> None:
        if self._console is None:
            print(line, file=self._stream, flush=True)
            return
        from rich.text import Text

        self._console.print(Text(line, style), soft_wrap=True)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False)


def _size(point: Point) -> str:
    return "" if point.benchmark == _BARRIER else bytes_text(point.nbytes)


def _speeds(limits: Limits) -> str:
    """Return words for the machine's limits at a point."""
    speeds = {
        "copy alone": limits.copy_1_us,
        "by two": limits.copy_2_us,
        "by all": limits.copy_all_us,
        "add": limits.add_all_us,
        "TCP both ways": limits.both_ways_us,
        "one way": limits.one_way_us,
    }
    delays = {"flag": limits.flag_us, "TCP ping": limits.ping_us}
    words = [f"{name} {limits.bytes / each / 1000:.2f} GB/s" for name, each in speeds.items() if each]
    words += [f"{name} {each:.2f} us" for name, each in delays.items() if each]
    return f"the machine: {', '.join(words)}"


def wrapped(line: str, indent: str) -> list[str]:
    """Return a line as lines that fit the terminal; all but the first begin with ``indent``."""
    return textwrap.wrap(line, columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _microseconds(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 100_000 else f"{value:.0f}"

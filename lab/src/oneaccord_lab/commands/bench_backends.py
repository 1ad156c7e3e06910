"""``oneaccord bench``: backends side by side, in the same processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oneaccord.errors import UsageError
from oneaccord_lab.commands.bench_ranks import names_of, start_ranks, targets_of, write_json
from oneaccord_lab.commands.bench_table import Printer
from oneaccord_lab.commands.files import check_folder

if TYPE_CHECKING:
    from oneaccord_lab.bench.plan import Point

__all__ = ["Request", "compare_backends"]

_WORKER = "oneaccord_lab.bench.measure"
_FEWEST_S = 60.0
_EACH_S = 4.0


@dataclass(frozen=True, slots=True)
class Request:
    """The options of the command line; None leaves a choice to oneaccord."""

    collective: str
    ranks: int
    backends: str | None
    file: str | None
    sizes: Sequence[int] | None
    dtype: str
    op: str
    iterations: int | None
    warmup: int | None
    budget_s: float | None
    timeout_s: float
    limits: bool


def compare_backends(request: Request, json_file: str | None, plot: Path | None) -> int:
    """Measure, print a row as soon as it is there, and write the requested files; return the exit code.

    Raises
    ------
    UsageError, DTypeError
        An argument cannot be, or a file cannot be written.
    UnsupportedError
        Limits are asked for, and the compiled part of oneaccord is missing.
    PluginError
        A backend is not installed, or cannot run here.
    CommError
        A rank failed before anything was measured.
    """
    from oneaccord_lab.bench.plan import Plan
    from oneaccord_lab.bench.raw import RAW as RAW_CALLS
    from oneaccord_lab.bench.running import Interrupted, compare

    if plot is not None:
        from oneaccord_lab.commands.plots import check_plot

        check_plot(plot)
    if json_file is not None:
        check_folder("--json", json_file)
    if request.limits:
        from oneaccord_lab.bench.probes import compiled

        compiled()
    targets, resolutions = targets_of(request.backends, request.file, RAW_CALLS)
    points, rounded = _points(request)
    budget_s = max(_FEWEST_S, _EACH_S * len(points)) if request.budget_s is None else request.budget_s
    plan = Plan(
        targets,
        points,
        request.dtype,
        request.op,
        request.iterations,
        request.warmup,
        budget_s,
        request.timeout_s,
        "",
        "",
        request.limits,
    )
    # Standard output must contain nothing but JSON.
    printer = Printer(plan, request.ranks, sys.stderr if json_file == "-" else sys.stdout)
    printer.heading(rounded)

    def start(text: str, ranks: int) -> int:
        return start_ranks(_WORKER, text, ranks, resolutions, request.file)

    try:
        compare(plan, request.ranks, start, printer.take)
    except Interrupted as interrupted:
        return interrupted.code
    if json_file is not None:
        write_json(json.dumps([printer.as_dict(row) for row in printer.rows], indent=2), json_file)
    if plot is not None:
        from oneaccord_lab.commands.plots import write_bench_plot

        write_bench_plot(printer.rows, plot)
    return 1 if printer.problems else 0


def _points(request: Request) -> tuple[list[Point], dict[str, list[tuple[int, int]]]]:
    """Return the calls to measure, and for each benchmark the sizes that were rounded to others."""
    from oneaccord.arrays.dtypes import check_dtype, resolve_op
    from oneaccord_lab.bench.cases import parse_dtype
    from oneaccord_lab.bench.plan import BENCHMARKS, BETWEEN_TWO, DEFAULT_SIZES, Point, round_size

    names = names_of(request.collective, BENCHMARKS)
    if request.ranks == 1:
        alone = [name for name in names if name not in BETWEEN_TWO]
        if not alone:
            raise UsageError(f"-n 1: {' and '.join(names)} need at least two ranks; give -n 2 or more")
        names = alone
    dtype = parse_dtype(request.dtype)
    check_dtype(dtype)
    if any("reduce" in name or "scan" in name for name in names):
        resolve_op(request.op, dtype)
    points: list[Point] = []
    rounded: dict[str, list[tuple[int, int]]] = {}
    for name in names:
        for size in request.sizes or DEFAULT_SIZES:
            point = Point(name, round_size(name, size, request.ranks, dtype.itemsize))
            if point.nbytes != size and name != "barrier":
                rounded.setdefault(name, []).append((size, point.nbytes))
            if point not in points:
                points.append(point)
    return points, rounded

"""Measured time against bytes, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from manyhands.cli.charts import check_name, line_look, new_figure, save_figure
from manyhands.common.units import bytes_text
from manyhands.errors import UsageError

if TYPE_CHECKING:
    from manyhands.bench.plan import Row

__all__ = ["check_plot", "write_bench_plot"]

_COLUMNS: Final[int] = 3


def check_plot(path: Path) -> None:
    """Find out before anything is measured whether a plot could be written.

    Raises
    ------
    UsageError
        The name ends otherwise than with .svg or .png, there is no such folder, or matplotlib is not installed.
    """
    check_name(path)
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path} cannot be written: there is no folder {path.parent}; name another file")
    new_figure(1, 1)


def write_bench_plot(rows: Sequence[Row], path: Path) -> None:
    """Write a plot of the median times, with one picture for each collective and one line for each backend.

    A barrier has no bytes, and is left out.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """
    rows = [row for row in rows if row.bytes]
    collectives = list(dict.fromkeys(row.collective for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    columns = min(_COLUMNS, len(collectives)) or 1
    lines = -(-len(collectives) // columns) or 1
    figure = new_figure(4.5 * columns + 3 * (columns == 1), 4.2 * lines)
    grid = figure.subplots(lines, columns, squeeze=False).flat
    for axes, collective in zip(grid, collectives, strict=False):
        _draw(axes, [row for row in rows if row.collective == collective], backends)
    for axes in list(figure.axes)[len(collectives) :]:
        axes.remove()
    save_figure(figure, path)


def _draw(axes: Any, rows: Sequence[Row], backends: Sequence[str]) -> None:
    for position, backend in enumerate(backends):
        own = [row for row in rows if row.backend == backend]
        if own:
            points = [row.bytes for row in own], [row.median_us for row in own]
            axes.plot(*points, label=backend, **line_look(position))
    sizes = sorted({row.bytes for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [bytes_text(nbytes) for nbytes in sizes], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel("bytes, as nccl-tests counts")
    axes.set_ylabel("median time in us")
    axes.set_title(f"{rows[0].collective}: {rows[0].world_size} ranks, {rows[0].dtype}", loc="left")
    axes.grid(visible=True, color="#e4e8ed")
    axes.legend(frameon=False)

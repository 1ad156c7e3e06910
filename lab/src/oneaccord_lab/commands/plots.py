"""Time against bytes, measured or predicted; matplotlib is imported only here, and only when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oneaccord.common.installing import install_command
from oneaccord.common.units import bytes_text
from oneaccord.errors import UsageError
from oneaccord.schedule.algorithms.registry import Algorithm
from oneaccord.schedule.steps import Collective
from oneaccord_lab.bench.plan import Row
from oneaccord_lab.commands.files import check_folder, unwritable
from oneaccord_lab.commands.predictions import Question, weigh
from oneaccord_lab.drawing.labels import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from oneaccord.config.select import Selector

__all__ = ["SIZES", "check_plot", "write_bench_plot", "write_plot"]

SIZES: Final[tuple[int, ...]] = tuple(1 << power for power in range(6, 31, 2))
"""The sizes of a plot of predictions: 64 bytes to 1 GiB."""

_FORMATS: Final[tuple[str, ...]] = (".svg", ".png")
_MARKERS: Final[str] = "osD^vP*X"
_COLUMNS: Final[int] = 3


def check_plot(path: Path) -> None:
    """Find out before anything is measured or predicted whether a plot could be written.

    Raises
    ------
    UsageError
        The name ends otherwise than with .svg or .png, there is no such folder, or matplotlib is not installed.
    """
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"--plot {path}: the name ends with {path.suffix!r}; expected {' or '.join(_FORMATS)}")
    check_folder("--plot", path)
    _new_figure(1, 1)


def write_bench_plot(rows: Sequence[Row], path: Path) -> None:
    """Write a plot of the median times, with one picture for each collective and one line for each backend.

    A barrier has no bytes, and is left out.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    rows = [row for row in rows if row.bytes]
    collectives = list(dict.fromkeys(row.collective for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    columns = min(_COLUMNS, len(collectives)) or 1
    lines = -(-len(collectives) // columns) or 1
    figure = _new_figure(4.5 * columns + 3 * (columns == 1), 4.2 * lines)
    grid = figure.subplots(lines, columns, squeeze=False).flat
    for axes, collective in zip(grid, collectives, strict=False):
        own = [row for row in rows if row.collective == collective]
        for position, backend in enumerate(backends):
            points = [(row.bytes, row.median_us) for row in own if row.backend == backend]
            if points:
                axes.plot(*zip(*points, strict=True), label=backend, **_line_look(position))
        title = f"{collective}: {own[0].world_size} ranks, {own[0].dtype}"
        _finish(
            axes, sorted({row.bytes for row in own}), "bytes, as nccl-tests counts", "median time in us", title, rotation=45
        )
    for axes in list(figure.axes)[len(collectives) :]:
        axes.remove()
    _save_figure(figure, path)


def write_plot(question: Question, algorithms: Sequence[Algorithm], path: Path, *, selector: Selector) -> None:
    """Write a plot of the predicted times of every algorithm of a collective, with the choice for each size marked.

    Parameters
    ----------
    question
        The call; its bytes do not matter.
    algorithms
        All that there are.
    path
        The file, whose name ends with .svg or .png.
    selector
        Chooses the algorithm.

    Raises
    ------
    UsageError
        As `check_plot`; or the collective moves no bytes, or the file cannot be written.
    """
    check_plot(path)
    call = question.call
    if call.collective is Collective.BARRIER:
        raise UsageError("--plot: a barrier moves no bytes, so there is nothing to plot; oneaccord show barrier --why compares")
    figure = _new_figure(8.5, 5.2)
    times: dict[str, list[tuple[int, float]]] = {}
    chosen: list[tuple[int, float]] = []
    for nbytes in SIZES:
        choice, candidates = weigh(replace(question, call=replace(call, nbytes=nbytes)), algorithms, selector)
        for each in candidates:
            if each.outcome is not None and each.out is None:
                times.setdefault(each.algorithm.name, []).append((nbytes, each.outcome.time_s))
                if each.algorithm is choice.algorithm:
                    chosen.append((nbytes, each.outcome.time_s))
    axes = figure.add_subplot()
    names = [each.name for each in algorithms if each.collective is call.collective and each.name in times]
    for position, name in enumerate(names):
        # Every other line is dashed, so that two lines in one place are both visible.
        dashes = (0, (5, 2)) if position % 2 else "-"
        axes.plot(*zip(*times[name], strict=True), label=name, linestyle=dashes, **_line_look(position))
    axes.plot(
        *zip(*chosen, strict=True), linestyle="none", marker="o", markersize=11, markerfacecolor="none", color="#1f2933",
        label="chosen",
    )  # fmt: skip
    hosts = f", {call.ranks_per_host} per host" if call.ranks_per_host > 1 else ""
    title = f"{call.collective.value}: {call.world_size} ranks{hosts}, {question.network_name} network"
    _finish(axes, SIZES[::2], "bytes of the call", "predicted time in seconds", title)
    _save_figure(figure, path)


def _new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches."""
    try:
        import matplotlib.figure
    except ImportError as error:
        command = install_command("pip install 'oneaccord[plot]'")
        raise UsageError(f"--plot needs matplotlib ({error}); try: {command}") from None
    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _line_look(position: int) -> dict[str, Any]:
    """Return colour and marker of the line with this number, and the attributes of all lines."""
    return {
        "color": PALETTE[position % len(PALETTE)],
        "marker": _MARKERS[position % len(_MARKERS)],
        "markersize": 4,
        "linewidth": 1.6,
    }


def _finish(axes: Any, sizes: Sequence[int], x_label: str, y_label: str, title: str, rotation: float = 0) -> None:
    """Give both axes logarithmic scales and their words."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [bytes_text(nbytes) for nbytes in sizes], rotation=rotation)
    axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, loc="left")
    axes.grid(visible=True, color="#e4e8ed")
    axes.legend(frameon=False)


def _save_figure(figure: Figure, path: Path) -> None:
    import matplotlib as mpl

    try:
        # Without the date, and with ids that do not come from chance: the same plot has the same bytes.
        with mpl.rc_context({"svg.hashsalt": "oneaccord", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise unwritable("--plot", path, error) from None

"""Predicted time against bytes, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.cli.candidates import Question, weigh
from manyhands.cli.charts import check_name, line_look, new_figure, save_figure
from manyhands.common.units import bytes_text
from manyhands.errors import UsageError
from manyhands.schedule.algorithms.registry import Algorithm
from manyhands.schedule.steps import Collective

if TYPE_CHECKING:
    from manyhands.config.select import Selector

__all__ = ["SIZES", "write_plot"]

SIZES: tuple[int, ...] = tuple(1 << power for power in range(6, 31, 2))
"""The sizes of a plot: 64 bytes to 1 GiB."""


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
        What chooses.

    Raises
    ------
    UsageError
        The name ends otherwise, the collective moves no bytes, or matplotlib is not installed.
    ConfigError
        The file cannot be written.
    """
    check_name(path)
    if question.call.collective is Collective.BARRIER:
        raise UsageError("--plot: a barrier moves no bytes, so there is nothing to plot; manyhands show barrier --why compares")
    figure = new_figure(8.5, 5.2)
    times: dict[str, list[tuple[int, float]]] = {}
    chosen: list[tuple[int, float]] = []
    for nbytes in SIZES:
        choice, candidates = weigh(replace(question, call=replace(question.call, nbytes=nbytes)), algorithms, selector)
        for each in candidates:
            if each.outcome is not None and each.out is None:
                times.setdefault(each.algorithm.name, []).append((nbytes, each.outcome.time_s))
                if each.algorithm is choice.algorithm:
                    chosen.append((nbytes, each.outcome.time_s))
    axes = figure.add_subplot()
    names = [each.name for each in algorithms if each.collective is question.call.collective and each.name in times]
    for position, name in enumerate(names):
        # Every other line is dashed, so that one shows where two lie on each other.
        dashes = (0, (5, 2)) if position % 2 else "-"
        axes.plot(*zip(*times[name], strict=True), label=name, linestyle=dashes, **line_look(position))
    axes.plot(
        *zip(*chosen, strict=True), linestyle="none", marker="o", markersize=11, markerfacecolor="none", color="#1f2933",
        label="chosen",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SIZES[::2], [bytes_text(nbytes) for nbytes in SIZES[::2]])
    axes.minorticks_off()
    axes.set_xlabel("bytes of the call")
    axes.set_ylabel("predicted time in seconds")
    hosts = f", {question.call.ranks_per_host} per host" if question.call.ranks_per_host > 1 else ""
    axes.set_title(
        f"{question.call.collective.value}: {question.call.world_size} ranks{hosts}, {question.network_name} network",
        loc="left",
    )
    axes.grid(visible=True, color="#e4e8ed")
    axes.legend(frameon=False)
    save_figure(figure, path)

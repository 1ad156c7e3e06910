"""Draw every algorithm for docs/pictures, and plot the predicted times of every collective.

Usage: python tools/make_pictures.py [--check] [--plots] [NAME ...]

Without NAME, such as ring_all_reduce, all are drawn. ``--plots`` draws the plots as well, which needs matplotlib and takes longer.
``--check`` writes nothing, and tells which drawings of algorithms are not as they would be drawn now: missing, changed, or of an
algorithm that is no longer there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES
from oneaccord.schedule.steps import Collective
from oneaccord_lab.drawing.svg import svg_of
from oneaccord_lab.drawing.timeline import timeline_of

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
PLOTTED_WORLD = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """The world in which an algorithm is drawn: small, and large enough to see the idea."""

    size: int = 8
    root: int = 0
    segments: int = 1
    ranks_per_host: int = 1


# Rounds of a ring are all alike, so a few ranks are enough; what serves worlds of any size is drawn in one that is no power of two.
SHAPES: dict[str, Shape] = {
    "ring_all_reduce": Shape(4),
    "ring_all_gather": Shape(4),
    "ring_reduce_scatter": Shape(4),
    "pairwise_all_to_all": Shape(4),
    "pairwise_reduce_scatter": Shape(4),
    "bruck_all_gather": Shape(6),
    "bruck_all_to_all": Shape(6),
    "circulant_all_reduce": Shape(6),
    "circulant_reduce_scatter": Shape(6),
    "dissemination_barrier": Shape(6),
    "chain_broadcast": Shape(5, root=1, segments=4),
    "scatter_all_gather_broadcast": Shape(4, root=1),
    "hierarchical_broadcast": Shape(8, root=5, ranks_per_host=4),
}


def name_of(algorithm: Algorithm) -> str:
    """Return the name under which an algorithm is drawn."""
    return f"{algorithm.name}_{algorithm.collective.value}"


def shape_of(algorithm: Algorithm) -> Shape:
    """Return the world in which an algorithm is drawn."""
    promise = PROMISES[algorithm.collective]
    # A root in the middle shows that a tree needs no rank 0.
    root = 3 if promise.input_on_root or promise.output_on_root else 0
    usual = Shape(8, root, 4 if algorithm.pipelined else 1, 4 if algorithm.by_host else 1)
    return SHAPES.get(name_of(algorithm), usual)


def draw(algorithm: Algorithm) -> str:
    """Return the picture of an algorithm."""
    shape = shape_of(algorithm)
    schedules = [
        algorithm.schedule(rank, shape.size, shape.root, shape.segments, shape.ranks_per_host) for rank in range(shape.size)
    ]
    return svg_of(timeline_of(schedules), summary=algorithm.summary, ranks_per_host=shape.ranks_per_host)


def check(folder: Path = PICTURES) -> list[str]:
    """Return what is wrong with the drawings on disk, one line for each."""
    wrong = []
    for algorithm in BUILTIN:
        path = folder / f"{name_of(algorithm)}.svg"
        if not path.exists():
            wrong.append(f"{path.name} is missing")
        elif path.read_text(encoding="utf-8") != draw(algorithm):
            wrong.append(f"{path.name} is not as {name_of(algorithm)} is drawn now")
    known = {name_of(algorithm) for algorithm in BUILTIN}
    strangers = sorted(
        path.name for path in folder.glob("*.svg") if path.stem not in known and not path.name.startswith("plot_")
    )
    return wrong + [f"{name} is of no algorithm" for name in strangers]


def plot(collective: Collective) -> None:
    """Write the plot of a collective."""
    from oneaccord.config.select import Selector
    from oneaccord_lab.commands.plots import write_plot
    from oneaccord_lab.commands.predictions import Question

    question = Question.of(collective, "1MiB", PLOTTED_WORLD, None)
    write_plot(question, BUILTIN, PICTURES / f"plot_{collective.value}.svg", selector=Selector())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; return the exit code."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to draw, such as ring_all_reduce")
    parser.add_argument("--check", action="store_true", help="write nothing, and tell which drawings are not current")
    parser.add_argument("--plots", action="store_true", help="plot predicted times as well")
    arguments = parser.parse_args(argv)
    if arguments.check:
        wrong = check()
        for line in wrong:
            print(f"docs/pictures: {line}; run: python tools/make_pictures.py", file=sys.stderr)
        return 1 if wrong else 0
    PICTURES.mkdir(parents=True, exist_ok=True)
    for algorithm in BUILTIN:
        if not arguments.names or name_of(algorithm) in arguments.names:
            (PICTURES / f"{name_of(algorithm)}.svg").write_text(draw(algorithm), encoding="utf-8", newline="\n")
    for collective in Collective:
        wanted = not arguments.names or collective.value in arguments.names
        if arguments.plots and wanted and collective is not Collective.BARRIER:
            plot(collective)
    return 0


if __name__ == "__main__":
    sys.exit(main())

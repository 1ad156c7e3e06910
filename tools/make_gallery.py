"""Run the programs of examples/gallery, and draw what they find for docs/pictures/gallery.

Usage: python tools/make_gallery.py [NAME ...]

Without NAME, such as heat, all are drawn. The ranks are those of a simulated world, in this process. The program in torch needs torch, and
is left out without it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np

import oneaccord_parallel as mp
from oneaccord.api import Group
from oneaccord_simulated import run

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures" / "gallery"
GALLERY = ROOT / "examples" / "gallery"
RANKS = 4
WIDTH, HEIGHT, MARGIN = 560, 300, 46
INK, FAINT = "#7b8494", "#7b849455"
"""Both can be read on a light page and on a dark one."""
COLOURS = ("#3b82c4", "#d9822b", "#3f9b63", "#b565a7", "#c2504f", "#8a8d2f")
FONT = "DejaVu Sans, Verdana, Segoe UI, Helvetica, Arial, sans-serif"

Pairs = Any  # an array of shape (n, 2), or what becomes one


class Picture:
    """An SVG document with a transparent ground."""

    def __init__(self, title: str, text: str, width: float = WIDTH, height: float = HEIGHT) -> None:
        self.root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "font-family": FONT})
        self.root.attrib.update(viewBox=f"0 0 {width} {height}", width=str(width), height=str(height))
        ET.SubElement(self.root, "title").text = title
        ET.SubElement(self.root, "desc").text = text

    def add(self, tag: str, **attributes: object) -> ET.Element:
        """Add an element; an underscore in a name is a hyphen."""
        shown = {
            name.replace("_", "-"): f"{value:.4g}" if isinstance(value, float) else str(value)
            for name, value in attributes.items()
        }
        return ET.SubElement(self.root, tag, shown)

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, fill: str = INK) -> None:
        """Write words."""
        self.add("text", x=round(x, 1), y=round(y, 1), text_anchor=anchor, font_size=size, fill=fill).text = words

    def line(self, points: Pairs, colour: str, width: float = 2.0, **more: object) -> None:
        """Draw a line through points."""
        path = "M" + " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add("path", d=path, fill="none", stroke=colour, stroke_width=width, stroke_linejoin="round", **more)

    def dots(self, points: Pairs, colour: str, radius: float = 1.5, opacity: float = 0.9) -> None:
        """Draw points of one colour, as one path."""
        path = "".join(f"M{x:.0f},{y:.0f}h0" for x, y in points)
        self.add("path", d=path, stroke=colour, stroke_width=2 * radius, stroke_linecap="round", fill="none", opacity=opacity)

    def cells(self, values: Any, x: float, y: float, side: float, colour: str) -> None:
        """Draw values from 0 to 1 as squares whose opacity they are, in nine steps; neighbours in a row are one path."""
        steps = np.rint(np.clip(values, 0.0, 1.0) * 9).astype(int)
        for step in range(1, 10):
            path = ""
            for row, column in np.argwhere(steps == step):
                if column and steps[row, column - 1] == step:
                    continue
                length = int((np.append(steps[row, column:], -1) != step).argmax())
                path += f"M{x + column * side:.1f},{y + row * side:.1f}h{length * side:.1f}v{side:.1f}h{-length * side:.1f}z"
            if path:
                self.add("path", d=path, fill=colour, opacity=round(step / 9, 2))

    def legend(self, names: Sequence[str], x: float, y: float) -> None:
        """Say what the colours stand for, one below the other."""
        for number, name in enumerate(names):
            self.add("circle", cx=x, cy=y + 18 * number - 4, r=5, fill=COLOURS[number])
            self.text(x + 11, y + 18 * number, name)

    def write(self, name: str) -> None:
        """Write the document."""
        ET.indent(self.root, " ")
        (PICTURES / f"{name}.svg").write_text(ET.tostring(self.root, encoding="unicode") + "\n", encoding="utf-8", newline="\n")


class Plot(Picture):
    """A picture with two axes."""

    def __init__(
        self, title: str, text: str, x: tuple[float, float], y: tuple[float, float], labels: tuple[str, str], log: bool = False
    ) -> None:
        super().__init__(title, text)
        self.x, self.y, self.log = x, y, log
        steps = next((count for count in (4, 5, 6) if (x[1] - x[0]) % count == 0), 4)
        for value in np.linspace(*x, steps + 1):
            at = self.at(value, y[0])[0]
            self.text(at, HEIGHT - MARGIN + 17, f"{value:.4g}", anchor="middle", size=11)
        powers = range(round(np.log10(y[0])), round(np.log10(y[1])) + 1, 2) if log else ()
        for value in [10.0**power for power in powers] if log else np.linspace(*y, 5).tolist():
            at = self.at(x[0], value)[1]
            self.line([(MARGIN, at), (WIDTH - 14, at)], FAINT, 1.0)
            self.text(MARGIN - 6, at + 4, f"{value:.0e}" if log else f"{value:.3g}", anchor="end", size=11)
        self.text((MARGIN + WIDTH - 14) / 2, HEIGHT - 8, labels[0], anchor="middle")
        self.text(4, 14, labels[1])

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point lies."""
        low, high, value = (np.log10(each) if self.log else each for each in (*self.y, y))
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        return MARGIN + across * (WIDTH - 14 - MARGIN), HEIGHT - MARGIN - (value - low) / (high - low) * (HEIGHT - MARGIN - 26)

    def curve(self, xs: Any, ys: Any, colour: str = COLOURS[0], width: float = 2.0) -> None:
        """Draw a curve."""
        self.line([self.at(x, y) for x, y in zip(xs, ys, strict=True)], colour, width)


def program(name: str) -> Any:
    """Return a program of the gallery."""
    return importlib.import_module(name)


def of_ranks(function: Callable[[Group], Any], ranks: int = RANKS) -> list[Any]:
    """Call a function on ranks; return what each returned."""
    return run(function, ranks).results


def monte_carlo() -> Picture:
    """The estimate after so many blocks, and the error that is to be expected."""
    estimates = of_ranks(program("monte_carlo").main)[0]
    blocks = np.arange(1, len(estimates) + 1)
    means, error = estimates.cumsum() / blocks, estimates.std(ddof=1) / np.sqrt(blocks)
    plot = Plot(
        "The estimate of pi", "The mean of the first blocks, and twice the standard error around pi.",
        (0, len(blocks)), (3.12, 3.16), ("blocks of 20,000 darts", "estimate"),
    )  # fmt: skip
    shown = slice(3, None, 4)
    band = [*zip(blocks[shown], np.pi + 2 * error[shown], strict=True)]
    band += [*zip(blocks[shown][::-1], np.pi - 2 * error[shown][::-1], strict=True)]
    points = " ".join("{:.1f},{:.1f}".format(*plot.at(x, min(max(y, 3.12), 3.16))) for x, y in band)
    plot.add("polygon", points=points, fill=COLOURS[1], opacity=0.25)
    plot.curve([0, len(blocks)], [np.pi, np.pi], COLOURS[1], 1.0)
    plot.curve(blocks[shown], means[shown])
    return plot


def heat() -> Picture:
    """The plate at the start and after some steps, and the blocks of the ranks."""
    module = program("heat")
    before = module.start(60)
    picture = Picture("Heat on a plate", "A plate at the start and after 150 steps. Dashed lines divide it among four ranks.")
    for number, (plate, name) in enumerate(
        ((before, "at the start"), (of_ranks(lambda group: module.main(group, before, 150))[0], "after 150 steps"))
    ):
        left, side = 14 + 276 * number, 4.2
        picture.cells(plate / 0.7, left, 28, side, COLOURS[4])
        picture.add("rect", x=left, y=28, width=60 * side, height=60 * side, fill="none", stroke=INK)
        for middle in (
            (left, 28 + 30 * side, left + 60 * side, 28 + 30 * side),
            (left + 30 * side, 28, left + 30 * side, 28 + 60 * side),
        ):
            picture.line([middle[:2], middle[2:]], INK, 1.0, stroke_dasharray="5 4")
        picture.text(left, 18, name)
        for rank in range(RANKS):
            picture.text(left + 6 + rank % 2 * 30 * side, 44 + rank // 2 * 30 * side, f"rank {rank}", size=11)
    return picture


def fft() -> Picture:
    """Rows, columns, and the solution."""
    module = program("fft")
    parts = of_ranks(lambda group: module.main(group, module.example(group, 44)[1]))
    picture = Picture(
        "A transposed FFT", "A square is divided by rows, then by columns; a colour for each rank. On the right, the solution.",
        height=230,
    )  # fmt: skip
    side, width = 160 / RANKS, 160
    for number, name in enumerate(("FFT along rows", "FFT along columns")):
        left = 14 + 190 * number
        picture.text(left, 18, name)
        for rank in range(RANKS):
            shape = (left, 30 + rank * side, width, side) if number == 0 else (left + rank * side, 30, side, width)
            picture.add(
                "rect",
                **dict(zip(("x", "y", "width", "height"), shape, strict=True)),
                fill=COLOURS[rank],
                opacity=0.55,
                stroke=INK,
            )
    picture.text(189, 115, "→", anchor="middle", size=18)
    picture.text(189, 210, "all_to_all", anchor="middle")
    solution = np.concatenate(parts)
    solution = solution / np.abs(solution).max()
    picture.text(394, 18, "the solution u")
    picture.cells(solution, 394, 30, 160 / 44, COLOURS[4])
    picture.cells(-solution, 394, 30, 160 / 44, COLOURS[0])
    return picture


def kmeans() -> Picture:
    """The points, by the centre that is nearest."""
    module = program("kmeans")
    with tempfile.TemporaryDirectory() as folder:
        path = module.write(Path(folder) / "points.npy", 1500)
        points = np.load(path)
        centres, _ = of_ranks(lambda group: module.main(group, path))[0]
    nearest = ((points[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    plot = Plot(
        "Clusters", "1,500 points, coloured by the nearest of five centres, which are crosses.", (-8, 8), (-6, 6), ("x", "y")
    )
    for number, (x, y) in enumerate(centres):
        plot.dots([plot.at(*point) for point in points[nearest == number]], COLOURS[number], opacity=0.55)
        at = np.array(plot.at(x, y))
        for step in ((7, 7), (7, -7)):
            plot.line([at - step, at + step], INK, 4.0)
    return plot


def sample_sort() -> Picture:
    """Where the numbers of each rank lie, before and after."""
    module = program("sample_sort")
    edges = np.linspace(0.0, 4.0, 65)

    def both(group: Group) -> tuple[Any, Any]:
        mine = module.numbers(group, 20_000)
        return np.histogram(mine, edges)[0], np.histogram(module.main(group, mine), edges)[0]

    counts = np.array(of_ranks(both), float)
    picture = Picture("A sample sort", "How the numbers of four ranks are spread before and after; each rank has a colour.")
    for number, name in enumerate(
        ("before: every rank has numbers of all sizes", "after: a rank's numbers are next to each other")
    ):
        bottom, below = 138 + 138 * number, np.zeros(64)
        picture.text(14, bottom - 114, name)
        for rank in range(RANKS):
            heights = counts[rank, number] * 100 / counts[:, 0].sum(axis=0).max()
            path = "".join(
                f"M{14 + 8 * bin_:.0f},{bottom - low:.1f}h7v{-high:.1f}h-7z"
                for bin_, (low, high) in enumerate(zip(below, heights, strict=True)) if high > 0.05
            )  # fmt: skip
            picture.add("path", d=path, fill=COLOURS[rank], opacity=0.8)
            below = below + heights
        picture.line([(14, bottom + 1), (526, bottom + 1)], INK, 1.0)
    for value in range(5):
        picture.text(14 + 128 * value, 294, str(value), anchor="middle", size=11)
    picture.legend([f"rank {rank}" for rank in range(RANKS)], 470, 50)
    return picture


def conjugate_gradient() -> Picture:
    """The residual of each iteration, for grids of several sizes."""
    module = program("conjugate_gradient")
    plot = Plot(
        "Conjugate gradients", "The residual falls by ten powers of ten; larger grids need more iterations.",
        (0, 280), (1e-10, 100), ("iterations", "residual"), log=True,
    )  # fmt: skip

    def solve(side: int, group: Group) -> list[float]:
        first, last = (side * side * rank // group.world_size for rank in (group.rank, group.rank + 1))
        matrix = module.Matrix(group, *module.laplacian(side, first, last))
        norms: list[float] = module.main(group, matrix, matrix @ np.sin(np.arange(first, last)))[1]
        return norms

    sides = (30, 60, 120)
    for number, side in enumerate(sides):
        norms = np.array(of_ranks(partial(solve, side))[0])
        plot.curve(range(len(norms)), np.maximum(norms / norms[0], 1e-10), COLOURS[number])
    plot.legend([f"{side} x {side} unknowns" for side in sides], 380, 40)
    return plot


def nbody() -> Picture:
    """The ways of some bodies."""
    path, _ = of_ranks(lambda group: program("nbody").main(group, 120, 121, 0.02))[0]
    ways = np.array(path)
    picture = Picture(
        "Bodies on a disc", "The ways of 120 bodies around a heavy one; each rank moves those of one colour.", 420, 400
    )
    for rank, bodies in enumerate(np.array_split(np.arange(120), RANKS)):
        for body in bodies[::3]:
            picture.line(200 + 84 * ways[::6, body] * [1, -1], COLOURS[rank], 0.8, opacity=0.6)
        picture.dots(200 + 84 * ways[-1, bodies] * [1, -1], COLOURS[rank], 3.0)
    picture.add("circle", cx=200, cy=200, r=8, fill=INK)
    picture.legend([f"rank {rank}" for rank in range(RANKS)], 350, 24)
    return picture


def sweep() -> Picture:
    """The peak for every pair of rates."""
    infections, recoveries = np.linspace(0.15, 1.2, 24), np.linspace(0.08, 0.38, 11)
    with ThreadPoolExecutor(1) as pool:
        peaks = program("sweep").main(pool, infections, recoveries)[..., 0].T[::-1]
    picture = Picture("A sweep", "The share of people ill at the peak, for 24 rates of infection and 11 of recovery.")
    picture.text(4, 14, "rate of recovery")
    picture.cells(peaks / peaks.max(), MARGIN, 24, 20, COLOURS[4])
    picture.add("rect", x=MARGIN, y=24, width=480, height=220, fill="none", stroke=INK)
    for value, y in ((0.38, 34), (0.23, 138), (0.08, 242)):
        picture.text(MARGIN - 6, y, str(value), anchor="end", size=11)
    for number, value in enumerate((0.15, 0.5, 0.85, 1.2)):
        picture.text(MARGIN + 160 * number, 260, str(value), anchor="middle", size=11)
    picture.text(286, 286, f"rate of infection; the darkest square: {peaks.max():.0%} ill at a time", anchor="middle")
    return picture


def pagerank() -> Picture:
    """The score of the pages, by their place."""
    score, _ = of_ranks(program("pagerank").main)[0]
    ordered = np.sort(score)[::-1]
    places = np.unique(np.geomspace(1, len(score), 90).astype(int))
    plot = Plot(
        "PageRank", "The score of the pages in order, both axes logarithmic: a few pages have much, most have little.",
        (0, 4), (1e-5, 0.1), ("place of the page, as a power of ten", "score"), log=True,
    )  # fmt: skip
    plot.dots([plot.at(np.log10(place), ordered[place - 1]) for place in places], COLOURS[0], 3.0)
    return plot


def losses_plot(title: str, text: str, losses: Sequence[float], top: float, label: str = "epoch") -> Plot:
    """Draw the loss of each epoch or step."""
    plot = Plot(title, text, (0, len(losses)), (0.0, top), (label, "loss"))
    plot.curve(range(1, len(losses) + 1), losses)
    return plot


def digits() -> Picture:
    """Some images, and the loss."""
    _, losses = of_ranks(program("digits").main)[0]
    plot = losses_plot("Digits", "The loss of each of 30 epochs, and an image of each digit.", losses, 1.6)
    images, labels, _, _ = program("digits_data").load()
    for digit in range(10):
        left = 110 + 44 * digit
        plot.cells(images[labels == digit][0].reshape(8, 8), left, 60, 4.5, COLOURS[0])
        plot.text(left + 18, 114, str(digit), anchor="middle")
    return plot


def torch_ddp() -> Picture | None:
    """The loss of each epoch."""
    if importlib.util.find_spec("torch") is None:
        return None
    command = [sys.executable, "-m", "oneaccord", "run", "-n", str(RANKS), "--no-prefix", str(GALLERY / "torch_ddp.py")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    return losses_plot("torch's DistributedDataParallel", "The loss of each of 10 epochs.", losses, 2.0)


def sharded() -> Picture:
    """The memory of each rank, by the number of ranks."""
    counts = (1, 2, 4, 8)
    peaks, whole = [], 0
    for count in counts:
        results = of_ranks(lambda group: program("sharded").main(group, epochs=1), count)
        peaks.append(results[0][1] / 1024)
        whole = sum(each.size for layer in results[0][2].values() for each in layer.values()) * 16 // 1024
    picture = Picture(
        "Memory of a divided model",
        "KiB that a rank needs at most for weights, gradients and moments, on 1, 2, 4 and 8 ranks.",
        height=180,
    )
    picture.text(MARGIN, 18, f"KiB of the model on each rank; the whole of it is {whole}")
    for number, (count, peak) in enumerate(zip(counts, peaks, strict=True)):
        top, width = 32 + 36 * number, peak / max(peaks) * 370
        picture.text(MARGIN + 40, top + 18, f"{count} rank{'s' if count > 1 else ''}", anchor="end")
        picture.add("rect", x=MARGIN + 50, y=top, width=round(width, 1), height=26, fill=COLOURS[number], opacity=0.8)
        picture.text(MARGIN + 58 + width, top + 18, f"{peak:.0f}")
    return picture


def checkpoint() -> Picture:
    """The loss of a training in two parts."""
    module = program("checkpoint")
    with tempfile.TemporaryDirectory() as folder:
        one = of_ranks(lambda group: module.main(group, folder, 100)[2], 4)[0]
        two = of_ranks(lambda group: module.main(group, folder, 200)[2], 2)[0]
    plot = Plot(
        "A training in two parts",
        "The loss of each step: 100 on four ranks, then 100 on two.",
        (0, 200),
        (0.0, 2.6),
        ("step", "loss"),
    )
    plot.curve(range(1, 101), one, COLOURS[0])
    plot.curve(range(100, 201), [one[-1], *two], COLOURS[1])
    top, bottom = plot.at(100, 2.6), plot.at(100, 0.0)
    plot.line([top, bottom], INK, 1.0, stroke_dasharray="5 4")
    plot.text(top[0] + 6, 100, "saved, and continued")
    plot.legend(["on 4 ranks", "on 2 ranks"], 420, 40)
    return plot


def elastic() -> Picture:
    """The processes of a job in which one was killed, by what the job prints."""
    command = [sys.executable, "-m", "oneaccord", "run", "-n", str(RANKS), "--no-prefix", "--max-restarts", "1"]
    command += [str(GALLERY / "elastic.py"), "--kill-at", "100"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    first, last = done.stdout.splitlines()
    begun, end = int(first.split()[-1]), int(last.split()[0])
    picture = Picture("An elastic job", "Rank 3 is killed after step 100; a new process takes its place.", height=190)
    scale = 440 / end
    for rank in range(RANKS):
        y = 36 + 30 * rank
        picture.text(14, y + 15, f"rank {rank}")
        length = begun * scale - 4 if rank == RANKS - 1 else end * scale
        picture.add("rect", x=70, y=y, width=round(length, 1), height=20, rx=4, fill=COLOURS[0], opacity=0.8)
    x = 70 + begun * scale
    picture.add("rect", x=x + 8, y=126, width=(end - begun) * scale - 8, height=20, rx=4, fill=COLOURS[2], opacity=0.8)
    picture.line([(x, 28), (x, 152)], COLOURS[4], 2.0, stroke_dasharray="5 4")
    picture.text(x, 20, f"killed after step {begun}", anchor="middle")
    picture.text(x + 16, 141, "a new process", fill="#ffffff")
    picture.text(70, 174, f"generation 0: steps 1 to {begun}")
    picture.text(x + 8, 174, f"generation 1: steps {begun + 1} to {end}")
    return picture


def draw(name: str) -> bool:
    """Write one picture; return whether it could be drawn."""
    if name == "pipeline":  # the layer draws its own
        (PICTURES / "pipeline.svg").write_text(mp.schedule("1f1b", RANKS, 8).svg(), encoding="utf-8", newline="\n")
        return True
    picture = globals()[name]()
    if picture is not None:
        picture.write(name)
    return picture is not None


NAMES = (
    "monte_carlo heat fft kmeans sample_sort conjugate_gradient nbody sweep pagerank digits torch_ddp sharded pipeline checkpoint elastic"
).split()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; return the exit code."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the gallery.")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*NAMES, []], help="what to draw, such as heat")
    names = parser.parse_args(argv).names or NAMES
    sys.path.insert(0, str(GALLERY))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(f"{name}: {'drawn' if draw(name) else 'left out, because torch is not installed'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

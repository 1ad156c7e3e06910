"""The curves of predicted times: a page that has the line ``<!-- curves -->`` gets a chart of every collective there, with a slider for the world.

The times are those of `oneaccord show --why`: each message is simulated, on its default network. The build keeps them for the next one, until
an algorithm, the simulation or the table of choices changes. A table shows one world without a script.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from html import escape
from pathlib import Path
from typing import Any, Final

from oneaccord.common.units import bytes_text, time_text
from oneaccord.config.select import Selector
from oneaccord.schedule.algorithms.registry import BUILTIN
from oneaccord.schedule.steps import Collective
from oneaccord_lab.commands.plots import SIZES
from oneaccord_lab.commands.predictions import Question, segments_of
from oneaccord_lab.simulation import Prepared

MARK: Final = "<!-- curves -->"
WORLDS: Final = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
FIRST: Final = Collective.ALL_REDUCE
SOURCES: Final = ("oneaccord.schedule", "oneaccord.config.select", "oneaccord_lab.simulation")
"""What the times follow from."""


def bake(size: int) -> dict[str, Any]:
    """Return the times of one world, in seconds, by collective and algorithm for each of `SIZES`, and which one is chosen."""
    selector, found = Selector(), {}
    for collective in Collective:
        if collective is Collective.BARRIER:
            continue  # it has no bytes
        question = Question.of(collective, "0", size, None)
        call, times = question.call, dict[str, list[float]]()
        choices = [
            selector.choose(collective, nbytes, size, ranks_per_host=call.ranks_per_host, even=True, reproducible=False)
            for nbytes in SIZES
        ]
        for algorithm in BUILTIN:
            if algorithm.collective is not collective or (algorithm.by_host and not call.by_host):
                continue
            prepared: dict[int, Prepared] = {}
            row = times[algorithm.name] = []
            for nbytes, choice in zip(SIZES, choices, strict=True):
                cut = segments_of(algorithm, choice, nbytes, size)
                if cut not in prepared:
                    prepared[cut] = Prepared.of(algorithm, size, question.network, root=0, segments=cut)
                row.append(float(f"{prepared[cut].at(nbytes).time_s:.3g}"))
        found[collective.value] = {"times": times, "chosen": [choice.algorithm.name for choice in choices]}
    return found


def bake_all(folder: Path) -> dict[str, Any]:
    """Return the times of all worlds; from a file in the folder if nothing has changed that they follow from."""
    sources = [path for name in SOURCES for path in Path(str(importlib.import_module(name).__file__)).parent.rglob("*.*")]
    read = sorted((str(path.name), path.read_bytes()) for path in [*sources, Path(__file__)] if path.suffix in {".py", ".toml"})
    kept = folder / f"curves-{hashlib.sha256(repr(read).encode()).hexdigest()[:16]}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        worlds = dict(zip(reversed(WORLDS), pool.map(bake, reversed(WORLDS)), strict=True))
    baked = {
        "sizes": [bytes_text(size) for size in SIZES],
        "hosts": [placed(size) for size in WORLDS],
        "worlds": [[size, worlds[size]] for size in WORLDS],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("curves-*.json"):
        old.unlink()
    part = kept.with_suffix(".part")
    part.write_text(json.dumps(baked), encoding="utf-8")
    part.replace(kept)
    return baked


def placed(size: int) -> str:
    """Return how the ranks of a world are placed."""
    per_host = Question.of(FIRST, "0", size, None).network.neighbours(size)
    hosts = -(-size // per_host)
    return f"{size} ranks on {'one host' if hosts == 1 else f'{hosts} hosts'}"


def figure(baked: dict[str, Any]) -> str:
    """Return the figure without a script: the table of one collective in the largest world."""
    found = baked["worlds"][-1][1][FIRST.value]
    names = list(found["times"])
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = []
    for place, size in enumerate(baked["sizes"]):
        cells = (
            f"<td>{time_text(found['times'][name][place])}{' ●' if found['chosen'][place] == name else ''}</td>"
            for name in names
        )
        rows.append(f'<tr><th scope="row">{size}</th>{"".join(cells)}</tr>')
    title = f"Predicted time of {FIRST.value}, {baked['hosts'][-1]}; ● marks what the table chooses"
    return (
        f'<figure class="curves" data-first="{FIRST.value}"><div class="curves-table" tabindex="0"><table class="table"><caption>{title}</caption>'
        f'<thead><tr><th scope="col">bytes</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></figure>'
    )


class _Curves:
    """The times, from the begin of the build on."""

    baked: dict[str, Any]


def begin(app: Any) -> None:
    """Predict before Sphinx reads the pages, because it reads them in several processes."""
    _Curves.baked = bake_all(Path(app.doctreedir))


def fill(_app: Any, _page: str, source: list[str]) -> None:
    """Put the figure into a page, as Sphinx reads it."""
    if MARK in source[0]:
        source[0] = source[0].replace(MARK, figure(_Curves.baked))


def load(app: Any, _page: str, _template: str, context: dict[str, Any], _tree: Any) -> None:
    """Load the script, and the times before it, on a page with the figure."""
    if 'class="curves"' in context.get("body", ""):
        app.add_css_file("pictures.css")
        app.add_js_file("curves-data.js", loading_method="defer")
        app.add_js_file("draw.js", loading_method="defer")
        app.add_js_file("curves.js", loading_method="defer")


def write(app: Any, failed: Exception | None) -> None:
    """Write the times beside the script."""
    if failed is None and app.builder.format == "html":
        words = json.dumps(_Curves.baked, separators=(",", ":"), ensure_ascii=False)
        (Path(app.outdir) / "_static" / "curves-data.js").write_text(f"window.oneaccordCurves = {words};\n", encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("builder-inited", begin)
    app.connect("source-read", fill)
    app.connect("html-page-context", load)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""The players of the algorithms: each picture of a built-in algorithm becomes one, which shows the same run step by step.

The steps come from `timeline_of`, which also makes the pictures and proves the schedules. The build bakes them into one small script per
algorithm, ``_players/NAME.js``, because a page in a folder can load scripts and nothing else. Without a script, the picture stays.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES
from oneaccord.schedule.steps import Buffer, Collective
from oneaccord_lab.drawing.labels import many, name_of
from oneaccord_lab.drawing.timeline import Timeline, Value, timeline_of

WORLDS: Final = range(2, 10)
SEGMENTS: Final = 4
PICTURE: Final = re.compile(r"pictures/(\w+)\.svg$")
NAMES: Final = {f"{each.name}_{each.collective.value}": each for each in BUILTIN}


def bake(algorithm: Algorithm) -> dict[str, Any]:
    """Return all runs of an algorithm that a player can show, in a form for JSON.

    ``worlds`` has, by the number of ranks, one run for each root. Of a run, ``cells`` says for each rank how many chunks its input, its
    scratch memory and its result have, and cells count through all three. A value is ``piece * 2**ranks + the ranks whose input it
    combines, as a bit mask``. A step consists of messages (sender, receiver, whether it is reduced, words, values) and of what is
    written at its end (rank, cell, value); step 0 has local copies alone.
    """
    promise = PROMISES[algorithm.collective]
    rooted = promise.input_on_root or promise.output_on_root
    worlds = {}
    for size in WORLDS:
        hosts = _ranks_per_host(algorithm, size)
        if hosts:
            worlds[str(size)] = [_run(algorithm, size, root, hosts) for root in range(size if rooted else 1)]
    barrier = algorithm.collective is Collective.BARRIER
    return {
        "title": f"{algorithm.name} {algorithm.collective.value}",
        "rows": ["", "", "heard"] if barrier else ["input", "scratch", "result"],
        "reduces": promise.reduces or barrier,
        "rooted": rooted,
        "worlds": worlds,
    }


def _ranks_per_host(algorithm: Algorithm, size: int) -> int:
    """Return the number of ranks of a host, 1 if hosts do not matter, and 0 if the world has no two hosts of several ranks."""
    if not algorithm.by_host:
        return 1
    return max((count for count in range(2, size // 2 + 1) if size % count == 0), default=0)


def _run(algorithm: Algorithm, size: int, root: int, hosts: int) -> dict[str, Any]:
    segments = SEGMENTS if algorithm.pipelined else 1
    schedules = [algorithm.schedule(rank, size, root, segments, hosts) for rank in range(size)]
    timeline = timeline_of(schedules)
    contract = timeline.contract
    if algorithm.collective is Collective.BARRIER:
        return {"hosts": hosts, "names": [""], "cells": [[0, 0, 1]] * size, **_signals(timeline)}
    ranks = range(size)
    pieces = sorted({piece for rank in ranks for piece in (*contract.input_pieces(rank), *contract.output_pieces(rank))})
    number = {piece: place for place, piece in enumerate(pieces)}

    def code(value: Value) -> int:
        return number[value.piece] * 2**size + value.ranks

    def cell(rank: int, buffer: Buffer, chunk: int) -> int:
        before = {Buffer.INPUT: 0, Buffer.SCRATCH: cells[rank][0], Buffer.OUTPUT: sum(cells[rank][:2])}
        return before[buffer] + chunk

    cells = [
        [
            contract.input_chunks if contract.holds_input(rank) else 0,
            len(schedules[rank].scratch_chunks),
            contract.output_chunks if contract.holds_output(rank) else 0,
        ]
        for rank in ranks
    ]
    steps: list[list[list[Any]]] = [[[], []] for _ in range(timeline.slots + 1)]
    for message in timeline.messages:
        words = many(message.values, contract)
        steps[message.start + 1][0].append(
            [message.sender, message.receiver, int(message.reduces), words, [*map(code, message.values)]]
        )
    for write in timeline.writes:
        steps[write.time][1].append([write.rank, cell(write.rank, write.buffer, write.chunk), code(write.value)])
    return {
        "hosts": hosts,
        "names": [name_of(piece, contract) for piece in pieces],
        "cells": cells,
        "start": [[rank, place, code(value)] for rank in ranks for place, value in enumerate(timeline.before[rank])],
        "steps": steps,
    }


def _signals(timeline: Timeline) -> dict[str, Any]:
    """Return the steps of a barrier, whose messages are empty: what grows is the set of ranks from which a rank has heard."""
    size = timeline.contract.size
    heard = [1 << rank for rank in range(size)]
    start = [[rank, 0, heard[rank]] for rank in range(size)]
    steps: list[list[list[Any]]] = [[[], []]]
    for time in range(timeline.slots):
        now = [each for each in timeline.messages if each.start == time]
        messages = [[each.sender, each.receiver, 1, "", [heard[each.sender]]] for each in now]
        told = [heard[each.sender] for each in now]
        for each, mask in zip(now, told, strict=True):
            heard[each.receiver] |= mask
        steps.append([messages, [[each.receiver, 0, heard[each.receiver]] for each in now]])
    return {"start": start, "steps": steps}


def described(picture: Path) -> str:
    """Return the alternative text of a picture: its own title and description."""
    text = picture.read_text(encoding="utf-8")
    parts = re.findall(r"<(?:title|desc)>(.*?)</", text, re.DOTALL)[:2]
    return ". ".join(html.unescape(part).strip() for part in parts)


def _pictures(tree: Any) -> Iterator[tuple[str, Any]]:
    from docutils import nodes  # the tests of what is baked have no Sphinx

    for image in list(tree.findall(nodes.image)):
        found = PICTURE.search(image["uri"])
        if found and found[1] in NAMES:
            yield found[1], image


def place(app: Any, tree: Any) -> None:
    """Put a figure around each picture of an algorithm, which the script makes a player, and describe the picture."""
    from docutils import nodes

    for name, image in _pictures(tree):
        image["alt"] = described(Path(app.srcdir) / "pictures" / f"{name}.svg")
        paragraph = image.parent
        begin = nodes.raw("", f'<figure class="player" data-player="{name}">', format="html")
        paragraph.replace_self([begin, image, nodes.raw("", "</figure>", format="html")])


def load(app: Any, _page: str, _template: str, context: dict[str, Any], _tree: Any) -> None:
    """Load the script on pages that have a player."""
    if 'class="player"' in context.get("body", ""):
        app.add_js_file("draw.js", loading_method="defer")
        app.add_js_file("player.js", loading_method="defer")
        app.add_css_file("pictures.css")


def write(app: Any, failed: Exception | None) -> None:
    """Bake the runs of every algorithm beside the pages."""
    if failed is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir) / "_players"
    folder.mkdir(exist_ok=True)
    for name, algorithm in NAMES.items():
        baked = json.dumps(bake(algorithm), separators=(",", ":"), ensure_ascii=False)
        (folder / f"{name}.js").write_text(f'oneaccordPlayer("{name}",{baked});\n', encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("doctree-read", place)
    app.connect("html-page-context", load)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Draw some calls of a recorded run for docs/pictures/explanation: which rank waits, and for which.

Usage: python tools/make_timeline.py TRACE [--call all_reduce] [--first 2] [--count 6]

TRACE is what `oneaccord explain RECORDS --trace TRACE` writes. docs/guides/profiling.md has the program of the picture that is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "explanation" / "timeline.svg"
INK, GREY, FAINT, CALL, WAIT = "#1f2933", "#5f6b7a", "#e4e8ed", "#0072b2", "#cfe3f1"
FONT = "DejaVu Sans, Verdana, Segoe UI, Helvetica, Arial, sans-serif"
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 720, 84, 28, 84, 58, 26


def calls_of(trace: dict[str, Any], name: str) -> list[list[tuple[float, float]]]:
    """Return begin and end of each call of that name, in milliseconds, for each rank in turn."""
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["name"] == name:
            by_rank.setdefault(event["tid"], []).append((event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000))
    ranks = [sorted(by_rank[rank]) for rank in sorted(by_rank)]
    if not ranks or len({len(calls) for calls in ranks}) > 1:
        raise ValueError(
            f"{name}: the ranks have {[len(calls) for calls in ranks]} calls in the trace; expected equally many, at least one"
        )
    return [list(call) for call in zip(*ranks, strict=True)]


def draw(calls: Sequence[Sequence[tuple[float, float]]], name: str) -> str:
    """Return the picture: a row for each rank, a bar for each call, pale as long as a rank waits for the last one to begin."""
    size = len(calls[0])
    origin, end = min(begin for begin, _ in calls[0]), max(stop for call in calls for _, stop in call)
    scale = (WIDTH - LEFT - RIGHT) / (end - origin)
    latest = [max((begin, rank) for rank, (begin, _) in enumerate(call))[1] for call in calls]
    waited = [sum(max(begin for begin, _ in call) - call[rank][0] for call in calls) for rank in range(size)]
    bottom = TOP + size * ROW
    root = ET.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "font-family": FONT, "viewBox": f"0 0 {WIDTH} {bottom + 72}"},
    )
    root.attrib.update(width=str(WIDTH), height=str(bottom + 72))
    late = max(set(latest), key=latest.count)
    first = max(range(size), key=lambda rank: waited[rank])
    often = "each call" if latest.count(late) == len(calls) else f"{latest.count(late)} of the {len(calls)} calls"
    ET.SubElement(root, "title").text = f"{len(calls)} calls of {name} on {size} ranks, as recorded"
    ET.SubElement(
        root, "desc"
    ).text = (
        f"Rank {late} begins {often} last. Rank {first} waits {waited[first]:.0f} ms for it, of {end - origin:.0f} ms in all."
    )
    add(root, "rect", x=0.5, y=0.5, width=WIDTH - 1, height=bottom + 71, rx=8, fill="#ffffff", stroke="#d5dbe2")
    text(root, 24, 34, f"{len(calls)} calls of {name} on {size} ranks", 17, INK, weight="bold")
    text(root, 24, 56, root[1].text or "", 12, GREY)
    step = next(each for each in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if (end - origin) / each <= 12)
    for tick in range(0, int(end - origin) + 1, step):
        x = LEFT + tick * scale
        add(root, "line", x1=x, y1=TOP, x2=x, y2=bottom, stroke=FAINT)
        text(root, x, bottom + 18, f"{tick}", 11, GREY, anchor="middle")
    text(root, WIDTH - RIGHT, bottom + 34, "ms", 11, GREY, anchor="end")
    for rank in range(size):
        y = TOP + rank * ROW + (ROW - BAR) / 2
        text(root, 24, y + BAR / 2 + 5, f"rank {rank}", 13, INK)
        for call in calls:
            begin, stop = call[rank]
            met = min(stop, max(each for each, _ in call))
            bar(root, LEFT + (begin - origin) * scale, y, (met - begin) * scale, WAIT)
            bar(root, LEFT + (met - origin) * scale, y, (stop - met) * scale, CALL)
    for x, colour, words in (
        (LEFT, WAIT, "in the call, until the last rank begins it"),
        (LEFT + 300, CALL, "in the call, after that"),
    ):
        bar(root, x, bottom + 44, 18, colour, 12)
        text(root, x + 26, bottom + 54, words, 12, INK)
    ET.indent(root, " ")
    return ET.tostring(root, encoding="unicode") + "\n"


def bar(root: ET.Element, x: float, y: float, width: float, colour: str, height: float = BAR) -> None:
    """Add a bar, if it can be seen."""
    if width > 0.2:
        add(root, "rect", x=x, y=y, width=width, height=height, fill=colour, stroke=CALL)


def text(
    root: ET.Element, x: float, y: float, words: str, size: int, colour: str, anchor: str = "start", weight: str = "normal"
) -> None:
    """Add a text."""
    shape = add(root, "text", x=x, y=y, fill=colour)
    shape.attrib.update({"font-size": str(size), "text-anchor": anchor, "font-weight": weight})
    shape.text = words


def add(root: ET.Element, tag: str, **attributes: object) -> ET.Element:
    """Add a shape."""
    written = {key: f"{value:.1f}" if isinstance(value, float) else str(value) for key, value in attributes.items()}
    return ET.SubElement(root, tag, written)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; return the exit code."""
    parser = argparse.ArgumentParser(description="Draw some calls of a recorded run.")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="what oneaccord explain --trace has written")
    parser.add_argument("--call", default="all_reduce", help="the name of the calls")
    parser.add_argument("--first", type=int, default=2, help="the first call to draw; earlier ones warm up")
    parser.add_argument("--count", type=int, default=6, help="how many calls to draw")
    parser.add_argument("--to", type=Path, default=PICTURE, help="the picture")
    arguments = parser.parse_args(argv)
    calls = calls_of(json.loads(arguments.trace.read_text(encoding="utf-8")), arguments.call)
    chosen = calls[arguments.first : arguments.first + arguments.count]
    if not chosen:
        parser.error(f"--first {arguments.first}: the trace has {len(calls)} calls of {arguments.call}")
    arguments.to.write_text(draw(chosen, arguments.call), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pictures of the diagrams in the pages, which are written in Mermaid: a forge draws those itself, and the site without a script of another host.

All nodes stand in one column, in the order in which they are written. An arrow to the next one is straight; any other goes around, on the right
downwards and on the left upwards. So a diagram is as narrow as its text, and reads like the list that it is.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

WIDEST: Final = 470
NARROWEST: Final = 120
LETTER: Final = 7.2
LINE: Final = 18
GAP: Final = 34
LANE: Final = 18
COLUMNS: Final = 64
NODE: Final = re.compile(r"""(\w+|\[\*\])(?:\[\"(.*?)\"\]|\{\"(.*?)\"\}|\(\(\"(.*?)\"\)\))?""")
ARROW: Final = re.compile(r"\s*(?:-- (\w[^>]*?) )?-->\s*")


@dataclass
class Diagram:
    """The nodes, by their names, and the arrows between them."""

    nodes: dict[str, str] = field(default_factory=dict)
    arrows: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, line: str) -> None:
        """Read one line: nodes, and the arrows between them; behind a colon, the words of the last arrow."""
        place, before, words = 0, "", ""
        while found := NODE.match(line, place):
            name, *texts = found.groups()
            text = next((each for each in texts if each), "")
            self.nodes[name] = text or self.nodes.get(name, "" if name == "[*]" else name)
            if before:
                self.arrows.setdefault((before, name), []).append(words)
            place, before = found.end(), name
            if not (arrow := ARROW.match(line, place)):
                break
            words, place = arrow[1] or "", arrow.end()


def read(text: str) -> Diagram:
    """Return the diagram that a text in Mermaid describes."""
    diagram = Diagram()
    for line in text.splitlines()[1:]:
        if line.strip():
            diagram.add(line.strip())
    return diagram


def lanes(arrows: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Give each arrow that goes around a lane of its own: the shortest ones run next to the nodes."""
    taken: list[list[tuple[int, int]]] = []
    found = {}
    for arrow in sorted(arrows, key=lambda arrow: abs(arrow[1] - arrow[0])):
        low, high = sorted(arrow)
        free = (number for number, others in enumerate(taken) if all(high <= other[0] or low >= other[1] for other in others))
        lane = next(free, len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((low, high))
        found[arrow] = lane
    return found


def draw(diagram: Diagram, alt: str) -> str:
    """Return the picture, as an SVG that takes its colours from the page."""
    names = list(diagram.nodes)
    place = {name: number for number, name in enumerate(names)}
    around = [(place[a], place[b]) for a, b in diagram.arrows if place[b] != place[a] + 1]
    right = lanes([arrow for arrow in around if arrow[1] > arrow[0]])
    left = lanes([arrow for arrow in around if arrow[1] <= arrow[0]])
    lines = {name: textwrap.wrap(text, COLUMNS) for name, text in diagram.nodes.items()}
    longest = max((len(line) for each in lines.values() for line in each), default=0)
    wide = round(min(WIDEST, max(NARROWEST, longest * LETTER + 24)))
    x = 12 + LANE * (1 + max(left.values(), default=-1))
    parts, tops, bottoms, y = [], [], [], 8
    for name in names:
        height = LINE * len(lines[name]) + 14 if lines[name] else 12
        tops.append(y)
        if lines[name]:
            parts.append(f'<rect class="node" x="{x}" y="{y}" width="{wide}" height="{height}" rx="6"/>')
            parts += [
                f'<text x="{x + 12}" y="{y + LINE * (row + 1) + 2}">{escape(line)}</text>'
                for row, line in enumerate(lines[name])
            ]
        else:
            parts.append(f'<circle class="start" cx="{x + 20}" cy="{y + 6}" r="6"/>')
        y += height
        bottoms.append(y)
        y += GAP
    for (a, b), words in diagram.arrows.items():
        start, end = place[a], place[b]
        title = f"<title>{escape('; '.join(dict.fromkeys(word for word in words if word)) or f'{a} to {b}')}</title>"
        label = next((word for word in words if word), "")
        if end == start + 1:
            path = f"M{x + 20} {bottoms[start]}V{tops[end] - 2}"
            parts.append(f'<text class="label" x="{x + 30}" y="{bottoms[start] + 21}">{escape(label)}</text>')
        else:
            down = end > start
            edge = x + wide if down else x
            lane = edge + (LANE * (right[start, end] + 1) if down else -LANE * (left[start, end] + 1))
            out = bottoms[start] - 8 if down else tops[start] + 8
            into = tops[end] + 8 if down else bottoms[end] - 8
            path = f"M{edge} {out}H{lane}V{into}H{edge + (2 if down else -2)}"
            if label:
                parts.append(
                    f'<text class="label" x="{edge - 8}" y="{bottoms[start] + 14}" text-anchor="end">{escape(label)}</text>'
                )
        parts.append(f'<path class="arrow" marker-end="url(#arrow-head)" d="{path}">{title}</path>')
    width = x + wide + LANE * (1 + max(right.values(), default=-1)) + 12
    head = (
        '<defs><marker id="arrow-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    return (
        f'<div class="diagram" tabindex="0"><svg role="img" aria-label="{escape(alt)}" viewBox="0 0 {width} {y - GAP + 8}" '
        f'width="{width}" height="{y - GAP + 8}">{head}{"".join(parts)}</svg></div>'
    )


class Diagrams(SphinxPostTransform):
    """Puts a picture in the place of each block of Mermaid."""

    default_priority = 6

    def run(self, **_options: Any) -> None:
        """Draw the diagrams of one page."""
        for block in list(self.document.findall(nodes.literal_block)):
            if block.get("language") != "mermaid":
                continue
            section = block.parent
            while section is not None and not isinstance(section, nodes.section):
                section = section.parent
            title = "" if section is None else section[0].astext()
            block.replace_self(nodes.raw("", draw(read(block.astext()), f"Diagram: {title}"), format="html"))


def setup(app: Any) -> dict[str, bool]:
    """Add the transform to Sphinx."""
    app.add_post_transform(Diagrams)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""A pipeline as a picture: self-contained SVG, and text for terminals. Ranks are rows, time goes across."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple
from xml.etree import ElementTree as ET

from oneaccord_parallel.pipeline.actions import KINDS, Action, Kind
from oneaccord_parallel.pipeline.timeline import Span, Timeline

__all__ = ["Heading", "svg_of", "text_of"]

_LETTER = dict(zip(KINDS, "FBIW", strict=True))
_WORDS = dict(
    zip(
        KINDS,
        ("forward", "backward", "backward, for the stage before", "backward, for the weights"),
        strict=True,
    )
)
_COLOUR = dict(zip(KINDS, ("#0072b2", "#e69f00", "#d55e00", "#009e73"), strict=True))
"""Of the palette of Okabe and Ito (2008), which people with any kind of colour vision can distinguish."""
_INK, _GREY, _IDLE = "#1f2933", "#5f6b7a", "#eef1f4"
_FONT = "DejaVu Sans, Verdana, Segoe UI, Helvetica, Arial, sans-serif"
_MARGIN, _PITCH, _HEIGHT, _LABELS, _LEAST, _WIDEST = 16.0, 30.0, 24.0, 64.0, 17, 6000
_CHUNKS = "a, b, ...: the stages of a rank"
_FINEST = 8
"""Into how many columns of text the shortest action is divided at most."""
_MOST_COLUMNS = 16
"""How many columns of text there are at most, for each action."""


class Heading(NamedTuple):
    """The heading of a picture, and for each stage its index among those of its rank."""

    title: str
    cost: str
    chunks: Mapping[int, int]

    def name(self, action: Action) -> str:
        """Return the number of a microbatch, with a letter for the stage if ranks have several."""
        chunk = chr(ord("a") + self.chunks[action.stage] % 26) if any(self.chunks.values()) else ""
        return f"{action.microbatch}{chunk}"


def _shown(timeline: Timeline) -> list[Span]:
    return [span for spans in timeline.spans for span in spans if span.end > span.start]


def svg_of(timeline: Timeline, heading: Heading) -> str:
    """Draw a timeline as an SVG document; see `Plan.svg`."""
    shown = _shown(timeline)
    shortest = min((span.end - span.start for span in shown), default=Fraction(1))
    letters = max((len(heading.name(span.action)) for span in shown), default=1)
    # The shortest action has room for its name, unless the picture would be of no use.
    scale = min((_LEAST + 7 * (letters - 1)) / shortest, _WIDEST / (timeline.makespan or Fraction(1)))
    left, top = _MARGIN + _LABELS, _MARGIN + 52
    right = left + float(timeline.makespan * scale)
    bottom = top + _PITCH * len(timeline.spans)
    kinds = [kind for kind in KINDS if any(span.action.kind == kind for span in shown)]
    width = (
        max(right, _MARGIN + 7.2 * len(heading.cost), left + sum(_legend_width(kind) for kind in kinds) + 6 * len(_CHUNKS))
        + _MARGIN
    )
    height = bottom + 30 + _MARGIN
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "font-family": _FONT})
    root.attrib.update(viewBox=f"0 0 {_number(width)} {_number(height)}", width=_number(width), height=_number(height))
    ET.SubElement(root, "title").text = heading.title
    ET.SubElement(root, "desc").text = heading.cost
    _add(root, "rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=8, fill="#ffffff", stroke="#d5dbe2")
    _text(root, _MARGIN, _MARGIN + 7, heading.title, size=17, fill=_INK, font_weight="bold")
    _text(root, _MARGIN, _MARGIN + 27, heading.cost, size=12, fill=_GREY)
    for rank, spans in enumerate(timeline.spans):
        y = top + _PITCH * rank
        row = _add(root, "g", class_="rank", data_rank=rank)
        _text(row, _MARGIN, y + _HEIGHT / 2 + 4, f"rank {rank}", size=12, fill=_INK, font_weight="bold")
        _add(row, "rect", x=left, y=y, width=right - left, height=_HEIGHT, fill=_IDLE)
        for span in spans:
            _draw_action(row, span, heading, left, y, scale)
    end = _draw_legend(root, kinds, left, bottom + 12)
    if any(heading.chunks.values()):
        _text(root, end, bottom + 23, _CHUNKS, size=10, fill=_GREY)
    ET.indent(root, " ")
    return ET.tostring(root, encoding="unicode") + "\n"


def _draw_action(row: ET.Element, span: Span, heading: Heading, left: float, y: float, scale: Fraction) -> None:
    action, x, width = span.action, left + float(span.start * scale), float((span.end - span.start) * scale)
    group = _add(
        row, "g", class_="action", data_kind=action.kind, data_microbatch=action.microbatch, data_stage=action.stage,
        data_start=str(span.start), data_end=str(span.end),
    )  # fmt: skip
    ET.SubElement(group, "title").text = f"{action}: {span.start} to {span.end}"
    fade = 1 - 0.28 * min(heading.chunks[action.stage], 2)
    _add(group, "rect", x=x, y=y, width=width, height=_HEIGHT, rx=2, fill=_faded(_COLOUR[action.kind], fade), stroke="#ffffff")
    light = action.kind == "forward" and fade == 1
    if width >= _LEAST - 3:
        _text(
            group, x + width / 2, y + _HEIGHT / 2 + 4, heading.name(action), size=11, anchor="middle",
            fill="#ffffff" if light else _INK,
        )  # fmt: skip


def _draw_legend(root: ET.Element, kinds: Sequence[Kind], x: float, y: float) -> float:
    """Draw the legend of the colours, and return its end."""
    group = _add(root, "g", class_="legend")
    for kind in kinds:
        _add(group, "rect", x=x, y=y, width=14, height=14, rx=2, fill=_COLOUR[kind])
        _text(group, x + 20, y + 11, _WORDS[kind], size=10, fill=_GREY)
        x += _legend_width(kind)
    return x


def _legend_width(kind: Kind) -> float:
    return 40 + 6.4 * len(_WORDS[kind])


def text_of(timeline: Timeline, heading: Heading, width: int, *, colour: bool = False) -> str:
    """Draw a timeline with characters; see `Plan.text`."""
    shown = _shown(timeline)
    unit = _unit(shown)
    letters = max((len(heading.name(span.action)) for span in shown), default=1) + 2
    columns = round(timeline.makespan / unit)
    margin = len(f"rank {len(timeline.spans) - 1}") + 2
    width = max(width, margin + letters)
    per_line = (width - margin) // letters
    rows = [_row(spans, unit, letters, columns, heading, colour=colour) for spans in timeline.spans]
    lines = [heading.title, *textwrap.wrap(heading.cost, width)]
    for first in range(0, columns, per_line):
        lines.append("")
        for rank, row in enumerate(rows):
            cells = "".join(row[first : first + per_line])
            lines.append(f"{f'rank {rank}':{margin}}{cells}".rstrip())
    used = [kind for kind in KINDS if any(span.action.kind == kind for span in shown)]
    notes = [f"{_LETTER[kind]} {_WORDS[kind]}" for kind in used] + [". idle"]
    if any(heading.chunks.values()):
        notes.append(_CHUNKS)
    return "\n".join([*lines, "", *textwrap.wrap("; ".join(notes), width)]) + "\n"


def _unit(shown: Sequence[Span]) -> Fraction:
    """Return the duration of a column of text: a divisor of all durations, if that does not make too many columns."""
    if not shown:
        return Fraction(1)
    times = [time for span in shown for time in (span.start, span.end) if time]
    below = math.lcm(*(time.denominator for time in times))
    unit = Fraction(math.gcd(*(int(time * below) for time in times)), below)
    shortest = min(span.end - span.start for span in shown)
    return max(unit, shortest / _FINEST, max(times) / (_MOST_COLUMNS * len(shown)))


def _row(spans: Sequence[Span], unit: Fraction, letters: int, columns: int, heading: Heading, *, colour: bool) -> list[str]:
    """Return the text of each column."""
    row = [".".ljust(letters)] * columns
    for span in spans:
        start, end = round(span.start / unit), round(span.end / unit)
        label = f"{_LETTER[span.action.kind]}{heading.name(span.action)}"
        bar = label.ljust((end - start) * letters - 1, "-") + " "
        for column, cell in zip(range(start, end), _cut(bar, letters), strict=False):
            row[column] = _coloured(cell, _COLOUR[span.action.kind]) if colour else cell
    return row


def _cut(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


def _coloured(text: str, colour: str) -> str:
    red, green, blue = _channels(colour)
    return f"\x1b[38;2;{red};{green};{blue}m{text}\x1b[0m"


def _add(parent: ET.Element, tag: str, **attributes: str | float) -> ET.Element:
    """Add an element; ``stroke_width`` becomes ``stroke-width``, ``class_`` becomes ``class``, and numbers have one decimal at most."""
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    return ET.SubElement(
        parent, tag, {key: value if isinstance(value, str) else _number(value) for key, value in named.items()}
    )


def _text(parent: ET.Element, x: float, y: float, words: str, *, size: float, anchor: str = "start", **more: str) -> None:
    placed = {"text_anchor": anchor} if anchor != "start" else {}
    _add(parent, "text", x=x, y=y, font_size=size, **placed, **more).text = words


def _number(value: float) -> str:
    # Rounded here and nowhere else, so that a picture is the same on every machine.
    tenths = math.floor(value * 10 + 0.5)
    return str(tenths // 10) if tenths % 10 == 0 else f"{tenths / 10:.1f}"


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[start : start + 2], 16) for start in (1, 3, 5))


def _faded(colour: str, share: float) -> str:
    return "#" + "".join(f"{round(255 - (255 - channel) * share):02x}" for channel in _channels(colour))

"""A collective as a picture: self-contained SVG, the same bytes for the same schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.etree import ElementTree as ET

from oneaccord_lab.drawing.labels import colour_of, cost_line, many, reading, title_of
from oneaccord_lab.drawing.layout import MARGIN, TILE, Bundle, Layout, bundle_of, layout_of, message_bundle, text_width
from oneaccord_lab.drawing.timeline import Message, Timeline, Value

__all__ = ["svg_of"]

_INK, _GREY, _FAINT, _ROW = "#1f2933", "#5f6b7a", "#e4e8ed", "#c3cad3"
_FONT = "DejaVu Sans, Verdana, Segoe UI, Helvetica, Arial, sans-serif"
_STATE_LIMIT = 300.0


def svg_of(timeline: Timeline, *, summary: str = "", ranks_per_host: int = 1) -> str:
    """Draw a collective.

    Parameters
    ----------
    timeline
        The timeline to draw.
    summary
        A line below the title.
    ranks_per_host
        The number of neighbouring ranks that share a host; hosts are drawn if it is more than 1.

    Returns
    -------
    str
        An SVG document. Each row is a group of the class ``rank``, each message one of the class ``message`` with the
        attributes ``data-time``, ``data-from``, ``data-to``, ``data-chunks`` and ``data-kind`` (``copy`` or ``reduce``).
    """
    return _Picture(timeline, summary, ranks_per_host).text()


class _Picture:
    def __init__(self, timeline: Timeline, summary: str, ranks_per_host: int) -> None:
        self.timeline = timeline
        self.summary = summary
        self.ranks_per_host = ranks_per_host
        self.before = [bundle_of(values, timeline.contract, _STATE_LIMIT) for values in timeline.before]
        self.after = [bundle_of(values, timeline.contract, _STATE_LIMIT) for values in timeline.after]
        self.at: Layout = layout_of(timeline, self.before, self.after, ranks_per_host)
        self.right = max(self.at.right, *(MARGIN * 2 + text_width(line, size) for line, size in self._head()))
        self.root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "font-family": _FONT})

    def text(self) -> str:
        ET.SubElement(self.root, "title").text = title_of(self.timeline)
        ET.SubElement(self.root, "desc").text = f"{self.summary}. {cost_line(self.timeline)}".removeprefix(". ")
        card = _add(self.root, "rect", x=0.5, y=0.5, rx=8, fill="#ffffff", stroke="#d5dbe2")
        self._draw_head()
        self._draw_time()
        for rank in range(self.timeline.contract.size):
            self._draw_rank(rank)
        for message in self.timeline.messages:
            self._draw_message(message)
        self._draw_local()
        bottom = self._draw_legend()
        card.attrib.update(width=_number(self.right - 1), height=_number(bottom - 1))
        self.root.attrib.update(
            viewBox=f"0 0 {_number(self.right)} {_number(bottom)}", width=_number(self.right), height=_number(bottom)
        )
        ET.indent(self.root, " ")
        return ET.tostring(self.root, encoding="unicode") + "\n"

    def _head(self) -> list[tuple[str, float]]:
        return [(title_of(self.timeline), 17.0), (self.summary, 12.0), (cost_line(self.timeline), 12.0)]

    def _draw_head(self) -> None:
        y = MARGIN
        for line, size in self._head():
            if line:
                y += 7 if size > 15 else 18
                bold = {"font_weight": "bold"} if size > 15 else {}
                _text(self.root, MARGIN, y, line, size=size, fill=_INK if bold else _GREY, **bold)

    def _draw_time(self) -> None:
        """Draw the numbers of the columns and the lines between them."""
        at, top = self.at, self.at.rows[0] - self.at.pitch / 2
        if self.before and self.timeline.contract.input_chunks:
            _text(self.root, at.inputs, top - 6, "input", size=10, fill=_GREY)
        if self.timeline.contract.output_chunks:
            _text(self.root, at.outputs, top - 6, "output", size=10, fill=_GREY)
        for time, column in enumerate(at.columns):
            _text(self.root, (column.left + column.right) / 2, top - 6, str(time + 1), size=10, fill=_GREY, anchor="middle")
            if time:
                x = column.left - 1
                _add(self.root, "line", x1=x, y1=top, x2=x, y2=at.bottom, stroke=_FAINT, stroke_width=1)
        per_host = self.ranks_per_host
        if per_host > 1:
            for first in range(0, len(at.rows), per_host):
                self._draw_host(first // per_host, at.rows[first], at.rows[min(first + per_host, len(at.rows)) - 1])

    def _draw_host(self, host: int, top: float, bottom: float) -> None:
        reach, x = self.at.pitch / 2 - 5, MARGIN + 8
        group = _add(self.root, "g", class_="host")
        _add(
            group, "rect", x=x - 8, y=top - reach, width=self.right - MARGIN - x + 8, height=bottom - top + 2 * reach, rx=6,
            fill="#f5f7f9",
        )  # fmt: skip
        y = (top + bottom) / 2
        _text(
            group, x + 4, y, f"host {host}", size=10, fill=_GREY, anchor="middle",
            transform=f"rotate(-90 {_number(x + 4)} {_number(y)})",
        )  # fmt: skip

    def _draw_rank(self, rank: int) -> None:
        at, y = self.at, self.at.rows[rank]
        group = _add(self.root, "g", class_="rank", data_rank=rank)
        _text(group, at.labels, y + 4, f"rank {rank}", size=12, fill=_INK, font_weight="bold")
        promise = self.timeline.contract.promise
        if (promise.input_on_root or promise.output_on_root) and rank == self.timeline.contract.root:
            _text(group, at.labels, y + 16, "root", size=9, fill=_GREY)
        _add(group, "line", x1=at.begin, y1=y, x2=at.end, y2=y, stroke=_ROW, stroke_width=1)
        self._draw_bundle(group, self.before[rank], at.inputs, y)
        self._draw_bundle(group, self.after[rank], at.outputs, y)

    def _draw_message(self, message: Message) -> None:
        timeline, column = self.timeline, self.at.columns[message.start]
        y1, y2 = self.at.rows[message.sender], self.at.rows[message.receiver]
        chunks = many(message.values, timeline.contract) if message.values else ""
        kind = "reduce" if message.reduces else "copy"
        group = _add(
            self.root, "g", class_="message", data_time=message.start + 1, data_from=message.sender, data_to=message.receiver,
            data_chunks=chunks, data_kind=kind,
        )  # fmt: skip
        what = chunks or "an empty message"
        ending = ", which is reduced there" if message.reduces else ""
        ET.SubElement(
            group, "title"
        ).text = f"{message.start + 1}: rank {message.sender} sends {what} to rank {message.receiver}{ending}"
        knee1, knee2 = column.knees
        stop = column.stop if message.reduces else column.head - 2
        points = ((column.start, y1), (knee1, y1), (knee2, y2), (stop, y2))
        colours = list(dict.fromkeys(colour_of(value) for value in message.values)) or [_GREY]
        _draw_line(group, points, colours)
        if message.reduces:
            _plus(group, column.head, y2, colours[-1])
        else:
            tip = column.head + 5
            shape = (
                f"{_number(tip)},{_number(y2)} {_number(tip - 9)},{_number(y2 - 4.5)} {_number(tip - 9)},{_number(y2 + 4.5)}"
            )
            _add(group, "polygon", points=shape, fill=colours[-1])
        if message.values:
            bundle = message_bundle(timeline, message.values)
            self._draw_bundle(group, bundle, column.start - bundle.boxes, y1)
        else:
            _add(group, "circle", cx=column.start - 5, cy=y1, r=4.5, fill="#ffffff", stroke=_GREY, stroke_width=1.5)

    def _draw_local(self) -> None:
        """Draw copies and reductions that need no message, one mark for all of a rank at one time."""
        marks: dict[tuple[int, int, bool], list[Value]] = {}
        for done in self.timeline.locals:
            marks.setdefault((done.time, done.rank, done.reduces), []).extend(done.values)
        for (time, rank, reduces), values in marks.items():
            x, y = self.at.local[time], self.at.rows[rank]
            group = _add(
                self.root, "g", class_="local", data_time=time, data_rank=rank, data_kind="reduce" if reduces else "copy"
            )
            names = many(values, self.timeline.contract)
            ET.SubElement(group, "title").text = f"rank {rank} {'reduces' if reduces else 'copies'} {names}"
            if reduces:
                _plus(group, x, y, colour_of(values[-1]))
            else:
                _copied(group, x, y)

    def _draw_bundle(self, parent: ET.Element, bundle: Bundle, x: float, y: float) -> None:
        for position, value in enumerate(bundle.values):
            name = bundle.names[position] if bundle.names else None
            done = value.contributions / self.timeline.complete
            _draw_tile(parent, x + position * bundle.box, y, bundle.box, colour_of(value), name, done)
        if bundle.caption:
            _text(parent, x + bundle.boxes / 2, y + TILE / 2 + 9, bundle.caption, size=9, fill=_INK, anchor="middle")

    def _draw_legend(self) -> float:
        """Draw the legend, in as many lines as it takes, and return the bottom of the picture."""
        timeline = self.timeline
        colour = colour_of(timeline.messages[0].values[0]) if timeline.messages and timeline.messages[0].values else _GREY
        items: list[tuple[Callable[[ET.Element, float, float], None] | None, str]] = []
        if timeline.contract.promise.reduces and timeline.contract.size > 1:
            items.append(
                (lambda group, x, y: _draw_tile(group, x, y, TILE, colour, "", 0.4), "combines some ranks (the bar: how many)")
            )
            if any(value.contributions == timeline.complete for values in timeline.after for value in values):
                items.append((lambda group, x, y: _draw_tile(group, x, y, TILE, colour, "", 1.0), "combines all ranks"))
        if any(message.reduces for message in timeline.messages):
            items.append((lambda group, x, y: _plus(group, x + 9, y, colour), "reduced into what is there"))
        if any(not message.reduces for message in timeline.messages):
            items.append(
                (
                    lambda group, x, y: _arrow(group, x, y, colour),
                    "received as it is" if timeline.contract.input_chunks else "an empty message",
                )
            )
        if any(not done.reduces for done in timeline.locals):
            items.append((lambda group, x, y: _copied(group, x + 9, y), "copied locally"))
        if reading(timeline):
            items.append((None, reading(timeline)))
        if timeline.messages:
            items.append((None, "a column is the time of one message; a rank sends one and receives one at a time"))
        group = _add(self.root, "g", class_="legend")
        x, y = MARGIN, self.at.bottom + 22
        for draw, words in items:
            width = text_width(words, 10.0) + (26 if draw else 0) + 16
            if x > MARGIN and x + width > self.right:
                x, y = MARGIN, y + 22
            if draw:
                draw(group, x, y)
            _text(group, x + (26 if draw else 0), y + 4, words, size=10, fill=_GREY)
            x += width
        return y + MARGIN


def _draw_line(parent: ET.Element, points: Sequence[tuple[float, float]], colours: Sequence[str]) -> None:
    """Draw a line, striped if it has several colours, with a white edge that separates it from those that it crosses."""
    path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    _add(parent, "polyline", points=path, fill="none", stroke="#ffffff", stroke_width=4.5, stroke_linejoin="round")
    for position, colour in enumerate(colours):
        striped: dict[str, str | float] = {
            "stroke_dasharray": f"7 {7 * (len(colours) - 1)}",
            "stroke_dashoffset": -7 * position,
        }
        _add(
            parent, "polyline", points=path, fill="none", stroke=colour, stroke_width=2, stroke_linejoin="round",
            **(striped if len(colours) > 1 else {}),
        )  # fmt: skip


def _draw_tile(parent: ET.Element, x: float, y: float, width: float, colour: str, name: str | None, done: float) -> None:
    """Draw a chunk: filled if it is complete, otherwise pale with a bar as long as its share of the contributions."""
    top, whole = y - TILE / 2, done >= 1
    gap = 1.0 if name is not None else 0.0
    group = _add(parent, "g", class_="chunk", fill=colour)
    _add(
        group, "rect", x=x + gap / 2, y=top, width=width - gap, height=TILE, rx=3 * gap,
        fill=colour if whole else _pale(colour), stroke=colour if gap else "#ffffff", stroke_width=1 if gap else 0.5,
    )  # fmt: skip
    if not whole:
        inset = 2.5 * gap
        _add(group, "rect", x=x + inset, y=top + TILE - 5, width=(width - 2 * inset) * done, height=3)
    if name:
        ink = _ink_on(colour) if whole else _INK
        _text(group, x + width / 2, y + (4 if whole else 2.5), name, size=11, fill=ink, anchor="middle")


def _plus(parent: ET.Element, x: float, y: float, colour: str) -> None:
    _add(parent, "circle", cx=x, cy=y, r=7, fill="#ffffff", stroke=colour, stroke_width=1.8)
    cross = f"M{_number(x - 4)} {_number(y)}h8M{_number(x)} {_number(y - 4)}v8"
    _add(parent, "path", d=cross, stroke=_INK, stroke_width=1.6, fill="none")


def _copied(parent: ET.Element, x: float, y: float) -> None:
    _add(parent, "rect", x=x - 3.5, y=y - 3.5, width=7, height=7, fill="#ffffff", stroke=_GREY, stroke_width=1.4)


def _arrow(parent: ET.Element, x: float, y: float, colour: str) -> None:
    _add(parent, "line", x1=x, y1=y, x2=x + 12, y2=y, stroke=colour, stroke_width=2)
    _add(
        parent,
        "polygon",
        points=" ".join(f"{_number(x + dx)},{_number(y + dy)}" for dx, dy in ((20, 0), (11, -4.5), (11, 4.5))),
        fill=colour,
    )


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
    # Rounded here and nowhere else, and never to "-0", so that a picture is the same on every machine.
    tenths = math.floor(value * 10 + 0.5)
    return str(tenths // 10) if tenths % 10 == 0 else f"{tenths / 10:.1f}"


def _channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def _pale(colour: str) -> str:
    return "#" + "".join(f"{round(255 - (255 - channel) * 0.22):02x}" for channel in _channels(colour))


def _ink_on(colour: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    red, green, blue = ((channel / 255) ** 2.2 for channel in _channels(colour))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.19 else "#1f2933"

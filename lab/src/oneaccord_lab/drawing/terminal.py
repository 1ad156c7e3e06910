"""A collective as text: ranks as rows, time across, each message a vertical arrow in a lane of its own."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from oneaccord_lab.drawing.labels import colour_of, cost_line, many, reading, title_of
from oneaccord_lab.drawing.timeline import Message, Timeline

__all__ = ["Line", "in_ascii", "text_of"]

Line = tuple[tuple[str, str | None], ...]
"""A line of text: pieces, each with its colour as ``#rrggbb`` or None."""

_ASCII = str.maketrans(
    {"─": "-", "│": "|", "┼": "+", "▼": "v", "▲": "^", "⊕": "@", "□": "=", "→": ">", "–": "-", "…": "~", "·": ";"}
)
_APART = 2
"""How many characters are left free between two units of time."""


def in_ascii(text: str) -> str:
    """Return a text with nothing but ASCII for a terminal or a file that cannot take more."""
    return text.translate(_ASCII)


def text_of(timeline: Timeline, *, summary: str = "", width: int = 100) -> tuple[Line, ...]:
    """Draw a collective with characters.

    A message is named on the row of its sender, and ends on that of its receiver: with an arrowhead, or with a circled plus
    if it is reduced. The part that does not fit the width continues below.

    Parameters
    ----------
    timeline
        The timeline to draw.
    summary
        A line below the title.
    width
        The number of characters in a line. One unit of time is never divided, so that a line can be longer.

    Returns
    -------
    tuple of Line
        The lines, without colours that text could not do without.
    """
    lines = _plain((title_of(timeline), summary, cost_line(timeline)), width)
    for panel in _panels(timeline, width):
        lines += [(), *panel.lines()]
    notes = _plain(_notes(timeline), width)
    return (*lines, (), *notes) if notes else tuple(lines)


def _plain(texts: Sequence[str], width: int) -> list[Line]:
    return [((line, None),) for text in texts for line in textwrap.wrap(text, max(width, 1), break_long_words=False)]


def _notes(timeline: Timeline) -> list[str]:
    marks = []
    if any(message.reduces for message in timeline.messages):
        marks.append("⊕ received and reduced")
    if any(not message.reduces for message in timeline.messages):
        marks.append("▼ ▲ received")
    if any(not done.reduces for done in timeline.locals):
        marks.append("□ copied locally")
    if any(done.reduces for done in timeline.locals):
        marks.append("+ reduced locally")
    return [" · ".join(marks), reading(timeline)]


@dataclass(slots=True)
class _Block:
    """A part of the drawing as wide as one unit of time: the character in each place of the grid, and its colour."""

    header: str
    width: int = 0
    cells: dict[tuple[int, int], tuple[str, str | None]] = field(default_factory=dict)

    def put(self, line: int, column: int, text: str, colour: str | None = None) -> None:
        for offset, character in enumerate(text):
            self.cells[line, column + offset] = (character, colour)
        self.width = max(self.width, column + len(text))


@dataclass(slots=True)
class _Panel:
    """As many units of time as fit the width, between two columns of text."""

    left: Sequence[str]
    right: Sequence[str]
    header: tuple[str, str]
    blocks: list[_Block]

    def lines(self) -> list[Line]:
        margin = max(map(len, (*self.left, self.header[0])))
        header = self.header[0].ljust(margin + 1 + _APART)
        for block in self.blocks:
            header += block.header.ljust(block.width + _APART)
        drawn: list[Line] = [((f"{header} {self.header[1]}".rstrip(), None),)] if self.blocks else []
        for line in range(2 * len(self.left) - 1):
            on_row = not line % 2
            row = _Line("─" if on_row else " ")
            row.add((self.left[line // 2] if on_row else "").ljust(margin + 1), None)
            row.skip(_APART)
            for block in self.blocks:
                for column in range(block.width):
                    row.add(*block.cells.get((line, column), (row.filler, None)))
                row.skip(_APART)
            row.add(f" {self.right[line // 2]}" if on_row else "", None)
            drawn.append(row.done())
        return drawn


class _Line:
    """A line in the making, in which neighbours of one colour become one piece."""

    def __init__(self, filler: str) -> None:
        self.filler = filler
        self.pieces: list[tuple[str, str | None]] = []

    def add(self, text: str, colour: str | None) -> None:
        if self.pieces and self.pieces[-1][1] == colour:
            text = self.pieces.pop()[0] + text
        self.pieces.append((text, colour))

    def skip(self, count: int) -> None:
        self.add(self.filler * count, None)

    def done(self) -> Line:
        text, colour = self.pieces[-1]
        if text.rstrip():
            self.pieces[-1] = (text.rstrip(), colour)
        else:
            self.pieces.pop()
        return tuple(self.pieces)


def _panels(timeline: Timeline, width: int) -> list[_Panel]:
    contract = timeline.contract
    ranks = range(contract.size)
    rooted = contract.promise.input_on_root or contract.promise.output_on_root
    names = [f"rank {rank}{' (root)' if rooted and rank == contract.root else ''}" for rank in ranks]
    names = [name.ljust(max(map(len, names))) for name in names]
    inputs = [many(values, contract) if values else "" for values in timeline.before]
    outputs = [many(values, contract) if values else "" for values in timeline.after]
    first = [f"{name}  {held}" for name, held in zip(names, inputs, strict=True)] if any(inputs) else names
    nothing = [""] * contract.size
    titles = (" " * len(names[0]) + ("  input" if any(inputs) else ""), "output" if any(outputs) else "")
    panels = [_Panel(first, nothing, (titles[0], ""), [])]
    used = max(map(len, (*first, titles[0])))
    for block in filter(lambda block: block.width, _blocks(timeline)):
        if panels[-1].blocks and used + block.width + _APART > width - 2:
            panels.append(_Panel(names, nothing, ("", ""), []))
            used = len(names[0])
        panels[-1].blocks.append(block)
        used += block.width + _APART
    panels[-1].right, panels[-1].header = outputs, (panels[-1].header[0], titles[1])
    return panels


def _blocks(timeline: Timeline) -> list[_Block]:
    """Return the steps before the first message, and then during each unit of time and at its end."""
    blocks = [_Block("")]
    _put_local(timeline, blocks[0], 0)
    for time in range(timeline.slots):
        block = _Block(str(time + 1))
        blocks.append(block)
        for lane in _lanes([message for message in timeline.messages if message.start == time]):
            labels = [many(message.values, timeline.contract) if message.values else "o" for message in lane]
            left = block.width + (1 if block.width else 0)
            middle = left + (max(map(len, labels)) - 1) // 2
            for message, label in zip(lane, labels, strict=True):
                _put_message(block, message, label, middle)
        _put_local(timeline, block, time + 1)
    return blocks


def _put_message(block: _Block, message: Message, label: str, middle: int) -> None:
    colour = colour_of(message.values[0]) if message.values else None
    low, high = sorted((2 * message.sender, 2 * message.receiver))
    for line in range(low + 1, high):
        block.put(line, middle, "│" if line % 2 else "┼", colour)
    block.put(2 * message.sender, middle - (len(label) - 1) // 2, label, colour)
    head = "⊕" if message.reduces else "▼" if message.receiver > message.sender else "▲"
    block.put(2 * message.receiver, middle, head, colour)


def _put_local(timeline: Timeline, block: _Block, time: int) -> None:
    done = [done for done in timeline.locals if done.time == time]
    column = block.width + (1 if block.width else 0)
    for each in done:
        block.put(2 * each.rank, column, "+" if each.reduces else "□", colour_of(each.values[0]) if each.values else None)


def _lanes(messages: Sequence[Message]) -> list[list[Message]]:
    """Divide messages into as few lanes as possible, so that no two in a lane touch the same row."""
    lanes: list[list[Message]] = []
    ends: list[int] = []
    for message in sorted(messages, key=lambda message: (min(message.sender, message.receiver), message.sender)):
        low, high = sorted((message.sender, message.receiver))
        free = next((lane for lane, end in enumerate(ends) if end < low), None)
        if free is None:
            lanes.append([])
            ends.append(0)
            free = len(lanes) - 1
        lanes[free].append(message)
        ends[free] = high
    return lanes

"""The layout of a picture: ranks as rows, time across, in pixels.

Each unit of time is a column of three zones: on the left the chunks that ranks send, on the right what becomes of those that they
receive, and between them, alone, the lines. A rank sends one message and receives one at a time, so no two things in the
outer zones share a place, and no line crosses a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oneaccord.schedule.contracts import Contract
from oneaccord_lab.drawing.labels import many, name_of
from oneaccord_lab.drawing.timeline import Timeline, Value

__all__ = ["TILE", "Bundle", "Column", "Layout", "bundle_of", "layout_of", "text_width"]

TILE = 18.0
"""The height of the box of a chunk."""

MARGIN = 24.0
_TOP = 92.0
_LETTER = 6.6
_HOST_GAP = 16.0
_LABEL_WIDTH = 62.0
_HOST_WIDTH = 22.0
_STUB = 8.0
_CAPTION = 40.0
_HEAD = 16.0


def text_width(text: str, size: float = 11.0) -> float:
    """Return the approximate width of a text; the renderer decides, so leave some room."""
    return len(text) * _LETTER * size / 11.0


@dataclass(frozen=True, slots=True)
class Bundle:
    """Several chunks side by side: a labelled box for each, or stripes with one text below.

    Attributes
    ----------
    values
        The chunks.
    names
        The text in each box; empty for stripes.
    caption
        The text below; empty for boxes.
    box
        The width of a box or stripe.
    """

    values: tuple[Value, ...]
    names: tuple[str, ...]
    caption: str
    box: float

    @property
    def boxes(self) -> float:
        """The width of all boxes."""
        return self.box * len(self.values)

    @property
    def width(self) -> float:
        """The width, text included."""
        return max(self.boxes, text_width(self.caption, 9.0))


def bundle_of(values: Sequence[Value], contract: Contract, limit: float) -> Bundle:
    """Return chunks as boxes if these are no wider than ``limit`` together, else as stripes."""
    names = tuple(name_of(value.piece, contract) for value in values)
    box = max([TILE, *(text_width(name) + 8 for name in names)])
    if box * len(values) <= limit:
        return Bundle(tuple(values), names, "", box)
    return Bundle(tuple(values), (), many(values, contract), min(8.0, limit / len(values)))


@dataclass(frozen=True, slots=True)
class Column:
    """The places in a unit of time: the names of messages, the ends of lines, and the received chunks."""

    left: float
    start: float
    stop: float
    head: float
    right: float

    @property
    def knees(self) -> tuple[float, float]:
        """The point at which a line leaves the row of its sender, and that at which it reaches the row of its receiver."""
        return self.start + _STUB, self.stop - _STUB / 2


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of everything.

    Attributes
    ----------
    rows
        The height of each rank.
    pitch
        From one row to the next on the same host.
    labels, inputs, outputs
        The left edges of these.
    local
        The place of local steps, for each time from 0 on.
    columns
        Each unit of time.
    begin, end
        The edges of time.
    right, bottom
        The edges of the drawing; a legend may follow below.
    """

    rows: tuple[float, ...]
    pitch: float
    labels: float
    inputs: float
    outputs: float
    local: tuple[float, ...]
    columns: tuple[Column, ...]
    begin: float
    end: float
    right: float
    bottom: float


def layout_of(timeline: Timeline, before: Sequence[Bundle], after: Sequence[Bundle], ranks_per_host: int) -> Layout:
    """Give everything its place."""
    size = timeline.contract.size
    pitch = 46.0 if size <= 8 else 40.0
    rows = tuple(_TOP + pitch / 2 + rank * pitch + rank // ranks_per_host * _gap(ranks_per_host) for rank in range(size))
    labels = MARGIN + (_HOST_WIDTH if ranks_per_host > 1 else 0.0)
    inputs = labels + _LABEL_WIDTH
    begin = inputs + _width(before, _CAPTION if timeline.contract.input_chunks else 0.0) + 12
    cursor, local, columns = begin, list[float](), list[Column]()
    busy = {done.time for done in timeline.locals}
    for time in range(timeline.slots + 1):
        room = 20.0 if time in busy else 6.0
        local.append(cursor + room / 2)
        cursor += room
        if time == timeline.slots:
            break
        column = _column(timeline, time, cursor)
        columns.append(column)
        cursor = column.right
    end = cursor + 6
    outputs = end + 12
    return Layout(
        rows=rows,
        pitch=pitch,
        labels=labels,
        inputs=inputs,
        outputs=outputs,
        local=tuple(local),
        columns=tuple(columns),
        begin=begin,
        end=end,
        right=outputs + _width(after, _CAPTION if timeline.contract.output_chunks else 0.0) + MARGIN,
        bottom=rows[-1] + pitch / 2,
    )


def _gap(ranks_per_host: int) -> float:
    return _HOST_GAP if ranks_per_host > 1 else 0.0


def _width(bundles: Sequence[Bundle], least: float = 0.0) -> float:
    return max([least, *(bundle.width for bundle in bundles)])


def _column(timeline: Timeline, time: int, left: float) -> Column:
    messages = [message for message in timeline.messages if message.start == time]
    pills = [message_bundle(timeline, message.values) for message in messages]
    start = left + 4 + max(12.0, _width(pills))
    # The more lines run between the same two rows, the more room they need to stay apart.
    ends = [sorted((message.sender, message.receiver)) for message in messages]
    load = max((sum(low <= row < high for low, high in ends) for row in range(timeline.contract.size)), default=0)
    stop = start + 2 * _STUB + 30 + 7 * load
    return Column(left, start, stop, stop + _HEAD / 2, stop + _HEAD)


def message_bundle(timeline: Timeline, values: Sequence[Value]) -> Bundle:
    """Return the name at the start of a message."""
    return bundle_of(values, timeline.contract, 110.0)

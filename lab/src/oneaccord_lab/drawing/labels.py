"""Names and colours of chunks, alike in every kind of picture.

The chunks of a vector are letters, the block of a rank is that rank's number, and a block from one rank for another is both
numbers with an arrow. A colour means a chunk of a vector, the owner of a block, or the receiver of a block of
all_to_all; there are eight, which then begin again.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from oneaccord.schedule.contracts import Contract, Piece
from oneaccord.schedule.steps import Collective
from oneaccord_lab.drawing.timeline import Timeline, Value

__all__ = ["PALETTE", "colour_of", "cost_line", "many", "name_of", "reading", "title_of"]

PALETTE: tuple[str, ...] = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d1f", "#6f5fc0")
"""The colours of Okabe and Ito (2008), which people with any kind of colour vision can distinguish; an olive and a violet replace black and
yellow, which do not serve as lines on white."""

_DASH = "–"
_ARROW = "→"
_MOST_PARTS = 2


def colour_of(value: Value) -> str:
    """Return the colour of a chunk as ``#rrggbb``."""
    return PALETTE[value.piece[1 if len(value.piece) == 3 else 0] % len(PALETTE)]


def name_of(piece: Piece, contract: Contract) -> str:
    """Return the name of a chunk."""
    if len(piece) == 1:
        return _letters(piece[0])
    segment = _letters(piece[-1]) if contract.segments > 1 else ""
    return _ARROW.join(str(rank) for rank in piece[:-1]) + segment


def many(values: Sequence[Value], contract: Contract) -> str:
    """Return the names of several chunks in few letters: runs as ``a–d``, and the first and a dot if there are too many."""
    pieces = [value.piece for value in values]
    if len(pieces) > 1 and len(pieces[0]) == 3:
        senders, receivers = {piece[0] for piece in pieces}, {piece[1] for piece in pieces}
        # All from one rank, or all for one rank: the common number is shown once.
        if len(senders) == 1:
            return f"{pieces[0][0]}{_ARROW}{_runs([piece[1:] for piece in pieces], contract)}"
        if len(receivers) == 1:
            return f"{_runs([(piece[0], piece[2]) for piece in pieces], contract)}{_ARROW}{pieces[0][1]}"
    return _runs(pieces, contract)


def title_of(timeline: Timeline) -> str:
    """Return the title of the drawing: the collective and the world."""
    contract = timeline.contract
    rooted = contract.promise.input_on_root or contract.promise.output_on_root
    root = f", root {contract.root}" if rooted else ""
    return f"{timeline.algorithm} {contract.collective.value}: {_count(contract.size, 'rank')}{root}"


def cost_line(timeline: Timeline) -> str:
    """Return the cost, in words."""
    report, contract = timeline.report, timeline.contract
    parts = [_count(timeline.slots, "step"), _count(sum(report.messages), "message")]
    if contract.size > 1:
        parts[-1] += f", at most {max(report.messages)} from one rank"
    chunks = max(contract.input_chunks, contract.output_chunks)
    if chunks:
        share = Fraction(max(report.chunks), chunks)
        amount = f"{float(share):.3g} n" if share != 1 else "n"
        parts.append(f"a rank sends at most {amount if share else 0} bytes")
    return " · ".join(parts)


def reading(timeline: Timeline) -> str:
    """Return the meaning of names and of the letter n in a picture; empty if there are no chunks."""
    match timeline.contract.collective:
        case Collective.BARRIER:
            return ""
        case Collective.ALL_TO_ALL:
            return f"0{_ARROW}1: the block from rank 0 for rank 1, in the colour of the receiver; n: all blocks that one rank gives"
        case Collective.ALL_REDUCE | Collective.REDUCE | Collective.BROADCAST | Collective.SCAN | Collective.EXSCAN:
            return "a, b, ...: the chunks of the vector; n: the vector"
        case Collective.ALL_GATHER | Collective.GATHER:
            return "0, 1, ...: the block of each rank; n: all blocks together"
        case Collective.SCATTER | Collective.REDUCE_SCATTER:
            return "0, 1, ...: the block for each rank; n: all blocks together"


def _letters(number: int) -> str:
    """Return a, b, ..., z, aa, ab, ..."""
    text = ""
    while number >= 0:
        number, letter = divmod(number, 26)
        text = chr(ord("a") + letter) + text
        number -= 1
    return text


def _runs(pieces: Sequence[Piece], contract: Contract) -> str:
    """Return names, with runs of neighbours as the first and the last of them."""
    segments = contract.segments
    places = [piece[0] if len(piece) == 1 else piece[-2] * segments + piece[-1] for piece in pieces]
    runs: list[tuple[int, int]] = []
    for position, place in enumerate(places):
        follows = position and place == places[position - 1] + 1 and pieces[position][:-2] == pieces[position - 1][:-2]
        if follows:
            runs[-1] = (runs[-1][0], position)
        else:
            runs.append((position, position))
    parts = []
    for first, last in runs:
        names = [name_of(pieces[end], contract) for end in (first, last)]
        whole = len(pieces[0]) > 1 and places[first] % segments == 0 and (places[last] + 1) % segments == 0
        if whole and segments > 1:
            names = [name.rstrip("abcdefghijklmnopqrstuvwxyz") for name in names]
        parts.append(names[0] if names[0] == names[1] else _DASH.join(names))
    return ",".join(parts) if len(parts) <= _MOST_PARTS else f"{parts[0]},…"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

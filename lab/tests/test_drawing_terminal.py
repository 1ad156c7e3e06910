"""The drawing of a collective with characters."""

from __future__ import annotations

import pytest

from oneaccord.schedule.algorithms import doubling, ring, tree
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord_lab.drawing.labels import PALETTE
from oneaccord_lab.drawing.terminal import Line, in_ascii, text_of
from oneaccord_lab.drawing.timeline import timeline_of

RING = """\
ring all_reduce: 3 ranks
4 steps · 12 messages, at most 4 from one rank · a rank sends at most 1.33 n bytes

        input   1      2      3      4       output
rank 0  a–c   ──a─⊕────c─⊕────b─▲────a─▲──── a–c
                │ │    │ │    │ │    │ │
rank 1  a–c   ──⊕─┼─b──⊕─┼─a──▼─┼─c──▼─┼─b── a–c
                  │ │    │ │    │ │    │ │
rank 2  a–c   ────c─⊕────b─⊕────a─▼────c─▼── a–c

⊕ received and reduced · ▼ ▲ received
a, b, ...: the chunks of the vector; n: the vector"""

SCATTER = """\
binomial scatter: 3 ranks, root 1
down a tree
2 steps ; 2 messages, at most 2 from one rank ; a rank sends at most 0.667 n bytes

               input      1  2   output
rank 0               --------^-- 0
                             |
rank 1 (root)  0-2   --=--2--0-- 1
                          |
rank 2               -----v----- 2

v ^ received ; = copied locally
0, 1, ...: the block for each rank; n: all blocks together"""


def plain(lines: tuple[Line, ...]) -> str:
    return "\n".join("".join(piece for piece, _ in line) for line in lines)


def test_a_ring_of_three() -> None:
    assert plain(text_of(timeline_of([ring.all_reduce(rank, 3) for rank in range(3)]))) == RING


def test_ascii_is_enough() -> None:
    text = plain(text_of(timeline_of([tree.scatter(rank, 3, 1) for rank in range(3)]), summary="down a tree"))
    assert in_ascii(text).isascii()
    assert in_ascii(text) == SCATTER


def test_what_is_too_wide_goes_on_below() -> None:
    timeline = timeline_of([ring.all_reduce(rank, 3) for rank in range(3)])
    lines = plain(text_of(timeline, width=35)).splitlines()

    assert [line for line in lines if line.startswith("rank 0")] == [
        "rank 0  a–c   ──a─⊕────c─⊕────",
        "rank 0 ──b─▲────a─▲──── a–c",
    ]


def test_each_chunk_has_its_colour_and_rows_have_none() -> None:
    lines = text_of(timeline_of([ring.all_gather(rank, 2) for rank in range(2)]))
    row = next(line for line in lines if line and line[0][0].startswith("rank 0"))
    assert [piece for piece in row if piece[1] is not None] == [("□", PALETTE[0]), ("0", PALETTE[0]), ("▲", PALETTE[1])]


def test_a_barrier_has_messages_and_nothing_in_them() -> None:
    text = plain(text_of(timeline_of([doubling.barrier(rank, 2) for rank in range(2)])))
    assert text.splitlines()[4:7] == ["rank 0 ──o─▲──", "         │ │", "rank 1 ──▼─o──"]


@pytest.mark.parametrize("algorithm", BUILTIN, ids=lambda each: f"{each.name}_{each.collective.value}")
@pytest.mark.parametrize("size", [1, 2, 7, pytest.param(16, marks=pytest.mark.long)])
def test_every_message_begins_and_ends_once(algorithm: Algorithm, size: int) -> None:
    timeline = timeline_of([algorithm.schedule(rank, size, 0, 1, size) for rank in range(size)])
    drawing = [line for line in text_of(timeline) if line and line[0][0].startswith("rank")]
    text = plain(tuple(drawing))
    assert sum(text.count(head) for head in "▼▲⊕") == len(timeline.messages)
    assert sum(text.count(head) for head in "⊕") == sum(message.reduces for message in timeline.messages)

"""The picture of a collective, read as XML."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from oneaccord.schedule.algorithms import doubling, pairwise, ring, tree
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord_lab.drawing.labels import PALETTE
from oneaccord_lab.drawing.svg import svg_of
from oneaccord_lab.drawing.timeline import Timeline, timeline_of

SVG = "{http://www.w3.org/2000/svg}"


def timeline(build: object, size: int, root: int = 0, segments: int = 1) -> Timeline:
    assert callable(build)
    return timeline_of([build(rank, size, root, segments) for rank in range(size)])


def groups(root: ET.Element, kind: str) -> list[ET.Element]:
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == kind]


def texts(element: ET.Element) -> list[str | None]:
    return [text.text for text in element.iter(f"{SVG}text")]


def row_heights(root: ET.Element) -> dict[int, float]:
    found = {}
    for row in groups(root, "rank"):
        line = row.find(f"{SVG}line")
        assert line is not None
        found[int(row.get("data-rank", ""))] = float(line.get("y1", ""))
    return found


def points_of(message: ET.Element) -> list[tuple[float, float]]:
    lines = message.findall(f"{SVG}polyline")
    assert len({line.get("points") for line in lines}) == 1
    return [tuple(map(float, point.split(",", 1))) for point in lines[0].get("points", "").split()]  # type: ignore[misc]


def test_a_ring_of_four_has_four_rows_and_an_arrow_for_every_message() -> None:
    root = ET.fromstring(svg_of(timeline(ring.all_reduce, 4), summary="around a ring"))

    assert [row.get("data-rank") for row in groups(root, "rank")] == ["0", "1", "2", "3"]
    messages = groups(root, "message")
    assert len(messages) == 24
    for message in messages:
        assert (int(message.get("data-to", "")) - int(message.get("data-from", ""))) % 4 == 1
    assert [message.get("data-kind") for message in messages] == ["reduce"] * 12 + ["copy"] * 12
    assert [message.get("data-time") for message in messages] == [str(time) for time in range(1, 7) for _ in range(4)]
    assert [message.get("data-chunks") for message in messages[:8]] == ["a", "b", "c", "d", "d", "a", "b", "c"]
    assert texts(root)[:3] == [
        "ring all_reduce: 4 ranks",
        "around a ring",
        "6 steps · 24 messages, at most 6 from one rank · a rank sends at most 1.5 n bytes",
    ]


def test_each_chunk_has_a_colour_of_its_own() -> None:
    root = ET.fromstring(svg_of(timeline(ring.all_reduce, 8)))

    row = groups(root, "rank")[0]
    before, after = groups(row, "chunk")[:8], groups(row, "chunk")[8:]
    assert [chunk.get("fill") for chunk in before] == list(PALETTE)
    assert [chunk.get("fill") for chunk in after] == list(PALETTE)
    assert texts(row)[1:] == list("abcdefgh") * 2
    by_chunk = {message.get("data-chunks"): message for message in groups(root, "message")}
    for position, name in enumerate("abcdefgh"):
        drawn = by_chunk[name].findall(f"{SVG}polyline")[-1]
        assert drawn.get("stroke") == PALETTE[position]


@pytest.mark.parametrize("algorithm", BUILTIN, ids=lambda each: f"{each.name}_{each.collective.value}")
@pytest.mark.parametrize("size", [1, 2, 6, pytest.param(16, marks=pytest.mark.long)])
def test_arrows_connect_the_rows_that_they_name_and_run_through_no_label(algorithm: Algorithm, size: int) -> None:
    per_host = size // 2 if algorithm.by_host and size > 1 else 1
    drawn = timeline_of([algorithm.schedule(rank, size, 0, 2 if algorithm.pipelined else 1, per_host) for rank in range(size)])
    root = ET.fromstring(svg_of(drawn, ranks_per_host=per_host))

    heights = row_heights(root)
    assert sorted(heights) == list(range(size))
    assert len(set(heights.values())) == size
    messages = groups(root, "message")
    assert len(messages) == len(drawn.messages)
    zones: dict[str, tuple[set[float], set[float]]] = {}
    spans: dict[int, list[float]] = {}
    for message in messages:
        (x1, y1), (knee1, y2), (knee2, y3), (x2, y4) = points_of(message)
        assert y1 == y2 == heights[int(message.get("data-from", ""))]
        assert y3 == y4 == heights[int(message.get("data-to", ""))]
        assert x1 < knee1 < knee2 < x2
        # Labels end where lines begin, and nobody's line leaves its row outside the two knees that all of a time share.
        for chunk in groups(message, "chunk"):
            box = chunk.find(f"{SVG}rect")
            assert box is not None
            assert float(box.get("x", "")) + float(box.get("width", "")) <= x1 + 0.11
            spans.setdefault(int(message.get("data-time", "")), []).append(float(box.get("x", "")))
        starts, knees = zones.setdefault(message.get("data-time", ""), (set(), set()))
        starts.add(x1)
        knees.add((knee1, knee2))  # type: ignore[arg-type]
        spans.setdefault(int(message.get("data-time", "")), []).append(x2)
    for starts, knees in zones.values():
        assert len(starts) == len(knees) == 1
    # What belongs to one time is beside what belongs to the next one.
    for time in range(1, drawn.slots):
        assert max(spans[time]) < min(spans[time + 1])


def test_labels_fit_their_boxes_and_columns_are_numbered() -> None:
    root = ET.fromstring(svg_of(timeline(pairwise.all_to_all, 12)))

    boxes = [(chunk.find(f"{SVG}rect"), chunk.find(f"{SVG}text")) for chunk in groups(root, "chunk")]
    labelled = [(box, label) for box, label in boxes if box is not None and label is not None and label.text]
    assert len(labelled) == 12 * 11
    for box, label in labelled:
        assert float(box.get("width", "")) >= 6 * len(label.text or "") + 4
    numbers = [text.text for text in root.findall(f"{SVG}text") if text.get("text-anchor") == "middle"]
    assert numbers == [str(time) for time in range(1, 12)]


def test_the_picture_is_as_large_as_what_is_in_it() -> None:
    for build, size in ((ring.all_reduce, 4), (pairwise.all_to_all, 5), (doubling.barrier, 2), (tree.scatter, 16)):
        root = ET.fromstring(svg_of(timeline(build, size)))
        left, top, width, height = map(float, root.get("viewBox", "").split())
        assert (left, top) == (0, 0)
        assert (float(root.get("width", "")), float(root.get("height", ""))) == (width, height)
        for element in root.iter():
            assert 0 <= float(element.get("x", "0")) <= width
            assert 0 <= float(element.get("y", "0")) <= height
            for point in element.get("points", "").split():
                x, y = map(float, point.split(","))
                assert 0 < x < width
                assert 0 < y < height


def test_several_chunks_in_one_message_make_a_striped_arrow_and_many_get_one_label() -> None:
    root = ET.fromstring(svg_of(timeline(tree.scatter, 16)))

    first = groups(root, "message")[0]
    assert first.get("data-chunks") == "8–15"
    assert texts(first) == ["8–15"]
    assert len(groups(first, "chunk")) == 8
    stripes = [line for line in first.findall(f"{SVG}polyline") if line.get("stroke-dasharray")]
    assert [line.get("stroke") for line in stripes] == list(PALETTE)
    assert len({line.get("stroke-dashoffset") for line in stripes}) == 8


def test_what_is_not_complete_is_pale_with_a_bar_for_its_share() -> None:
    root = ET.fromstring(svg_of(timeline(ring.all_reduce, 4)))

    def bars(element: ET.Element) -> list[float]:
        return [
            float(rects[1].get("width", ""))
            for chunk in groups(element, "chunk")
            if len(rects := chunk.findall(f"{SVG}rect")) > 1
        ]

    own = bars(groups(root, "rank")[0])
    assert len(own) == 4
    shares = [bars(message) for message in groups(root, "message") if message.get("data-from") == "0"]
    assert [len(share) for share in shares] == [1, 1, 1, 0, 0, 0]
    assert [round(share[0] / own[0], 1) for share in shares[:3]] == [1, 2, 3]


def test_local_copies_root_and_hosts_are_marked() -> None:
    root = ET.fromstring(svg_of(timeline(tree.gather, 4, 2), ranks_per_host=2))

    assert texts(groups(root, "rank")[2])[:2] == ["rank 2", "root"]
    assert [text for host in groups(root, "host") for text in texts(host)] == ["host 0", "host 1"]
    assert [(local.get("data-rank"), local.get("data-kind")) for local in groups(root, "local")] == [
        ("0", "copy"),
        ("2", "copy"),
    ]


def test_text_is_escaped_and_nothing_is_fetched() -> None:
    text = svg_of(timeline(ring.all_gather, 3), summary='<b> & "quotes"')

    assert "&lt;b&gt; &amp;" in text
    assert ET.fromstring(text).find(f"{SVG}desc") is not None
    assert re.findall(r"(?:href|src|url\(|@import|<script|<style)", text) == []
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


def test_the_same_schedule_gives_the_same_bytes() -> None:
    assert svg_of(timeline(doubling.all_gather, 7)) == svg_of(timeline(doubling.all_gather, 7))

"""What the site bakes for its moving pictures: replayed as a player does it, each run ends with exactly what the collective promises."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oneaccord.config.select import Selector
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm
from oneaccord.schedule.contracts import PROMISES, Contract
from oneaccord.schedule.steps import Collective
from oneaccord_lab.commands.plots import SIZES
from oneaccord_lab.commands.predictions import Question, weigh

ROOT = Path(__file__).resolve().parents[2]


def module_of(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"oneaccord_site_{name}", ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


curves = module_of("docs/_site", "curves")
players = module_of("docs/_site", "players")
timelines = module_of("tools", "make_timeline")


def title(algorithm: Algorithm) -> str:
    return f"{algorithm.name}_{algorithm.collective.value}"


@functools.cache
def baked(algorithm: Algorithm) -> dict[str, Any]:
    """What a page gets, through JSON and back."""
    found: dict[str, Any] = json.loads(json.dumps(players.bake(algorithm)))
    return found


def replay(run: dict[str, Any], size: int, *, signals: bool = False) -> list[dict[int, int]]:
    """Return the last contents of each rank's cells, and check on the way that nothing comes from nowhere.

    A signal may tell a rank what it has heard before.
    """
    held: list[dict[int, int]] = [{} for _ in range(size)]
    for rank, cell, value in run["start"]:
        held[rank][cell] = value
    for messages, writes in run["steps"]:
        known = [set(cells.values()) for cells in held]
        arrived: list[set[int]] = [set() for _ in range(size)]
        for sender, receiver, _, _, values in messages:
            assert set(values) <= known[sender]
            arrived[receiver] |= set(values)
        assert {receiver for _, receiver, *_ in messages} <= {rank for rank, *_ in writes}
        for rank, cell, value in writes:
            available = known[rank] | arrived[rank]
            if value not in available:  # then it is a sum of what is there, each part of it once
                piece, ranks = divmod(value, 2**size)
                parts = {each % 2**size for each in available if each >> size == piece}
                assert any(one | other == ranks and (not one & other or signals) for one in parts for other in parts)
            known[rank].add(value)
            held[rank][cell] = value
    return held


@pytest.mark.parametrize("algorithm", BUILTIN, ids=title)
def test_each_baked_run_ends_with_the_promised_contents(algorithm: Algorithm) -> None:
    found = baked(algorithm)
    rooted = PROMISES[algorithm.collective].input_on_root or PROMISES[algorithm.collective].output_on_root
    segments = 4 if algorithm.pipelined else 1 if algorithm.collective is not Collective.BARRIER else 0
    for words, runs in found["worlds"].items():
        size = int(words)
        assert len(runs) == (size if rooted else 1)
        for root, run in enumerate(runs):
            held = replay(run, size, signals=algorithm.collective is Collective.BARRIER)
            if algorithm.collective is Collective.BARRIER:
                assert held == [{0: 2**size - 1}] * size
                continue
            schedule = algorithm.schedule(0, size, root, segments, run["hosts"])
            contract = Contract.of(schedule)
            pieces = sorted({p for rank in range(size) for p in contract.input_pieces(rank) + contract.output_pieces(rank)})
            for rank in range(size):
                first = sum(run["cells"][rank][:2])
                result = [held[rank].get(first + place) for place in range(run["cells"][rank][2])]
                expected = [
                    pieces.index(piece) * 2**size + sum(1 << other for other in contract.contributors(piece, rank))
                    for piece in (contract.output_pieces(rank) if contract.holds_output(rank) else ())
                ]
                assert result == expected, (size, root, rank)


def test_every_algorithm_has_a_world_of_four_ranks_and_more() -> None:
    for algorithm in BUILTIN:
        worlds = sorted(map(int, baked(algorithm)["worlds"]))
        assert worlds == ([4, 6, 8, 9] if algorithm.by_host else list(range(2, 10)))


def test_the_names_of_a_run_are_different_and_short() -> None:
    for algorithm in BUILTIN:
        for runs in baked(algorithm)["worlds"].values():
            assert all(len(set(run["names"])) == len(run["names"]) for run in runs)
            assert max(len(name) for run in runs for name in run["names"]) <= 3


def test_a_picture_is_described_by_its_own_title_and_cost() -> None:
    words = players.described(ROOT / "docs" / "pictures" / "ring_all_reduce.svg")
    assert words.startswith("ring all_reduce: 4 ranks. ")
    assert "6 steps" in words


@pytest.mark.parametrize("size", [3, 8])
def test_the_curves_are_what_show_predicts(size: int) -> None:
    found = curves.bake(size)
    assert list(found) == [each.value for each in Collective if each is not Collective.BARRIER]
    selector = Selector()
    for collective, drawn in found.items():
        for place, nbytes in list(enumerate(SIZES))[::4]:
            question = Question.of(Collective(collective), str(nbytes), size, None)
            choice, candidates = weigh(question, BUILTIN, selector)
            expected = {each.algorithm.name: each.outcome.time_s for each in candidates if each.outcome}
            assert {name: row[place] for name, row in drawn["times"].items()} == pytest.approx(expected, rel=6e-3)
            assert drawn["chosen"][place] == choice.algorithm.name


def test_baked_times_are_kept_until_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "WORLDS", (2,))
    monkeypatch.setattr(curves, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    first = curves.bake_all(tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text('{"from": "the file"}', encoding="utf-8")
    assert curves.bake_all(tmp_path) == {"from": "the file"}
    monkeypatch.setattr(curves, "SOURCES", curves.SOURCES[:1])
    assert curves.bake_all(tmp_path) == first
    assert first["hosts"] == ["2 ranks on one host"]


def test_without_a_script_the_curves_are_a_table_of_the_largest_world() -> None:
    baked = {"sizes": ["64 B"], "hosts": ["2 ranks on one host"], "worlds": [[2, curves.bake(2)]]}
    html = curves.figure(baked)
    assert "<caption>Predicted time of all_reduce, 2 ranks on one host" in html
    assert html.count("●</td>") == 1
    assert "\n\n" not in html  # it would end there


def trace_of(*calls: tuple[int, float, float]) -> dict[str, Any]:
    """A trace of calls: the rank, and begin and end in milliseconds."""
    return {
        "traceEvents": [{"ph": "M", "name": "thread_name"}]
        + [
            {"ph": "X", "name": "all_reduce", "tid": rank + 1, "ts": begin * 1000, "dur": (end - begin) * 1000}
            for rank, begin, end in calls
        ]
    }


def test_a_drawn_timeline_says_which_rank_waits(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    trace.write_text(json.dumps(trace_of((0, 0, 9), (1, 6, 8), (0, 10, 19), (1, 15, 20))), encoding="utf-8")
    assert timelines.main([str(trace), "--first", "0", "--to", str(picture)]) == 0
    words = players.described(picture)
    assert words == (
        "2 calls of all_reduce on 2 ranks, as recorded. Rank 1 begins each call last. Rank 0 waits 11 ms for it, of 20 ms in all."
    )
    bars = [line for line in picture.read_text(encoding="utf-8").splitlines() if "<rect" in line and 'height="26"' in line]
    assert [timelines.WAIT in line for line in bars] == [True, False, True, False, False, False]


def test_a_timeline_of_calls_that_some_ranks_lack_is_refused() -> None:
    with pytest.raises(ValueError, match=r"all_reduce: the ranks have \[2, 1\] calls"):
        timelines.calls_of(trace_of((0, 0, 1), (0, 2, 3), (1, 0, 1)), "all_reduce")


def test_the_page_describes_its_timeline_as_the_picture_does() -> None:
    page = (ROOT / "docs" / "guides" / "profiling.md").read_text(encoding="utf-8")
    shown = re.search(r"!\[([^\]]+)\]\(\.\./pictures/explanation/timeline\.svg\)", page)
    assert shown is not None
    assert " ".join(shown[1].split()) == players.described(ROOT / "docs" / "pictures" / "explanation" / "timeline.svg")

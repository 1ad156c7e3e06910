"""``oneaccord bench`` with real ranks: what it measures, writes and prints, and what it does with backends that fail or lie."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support import preloaded
from support.worlds import must, on_threads

import oneaccord as oa
from oneaccord.api import ThreadWorld, UnsupportedError
from oneaccord_lab.bench.measure import measure
from oneaccord_lab.bench.overlap import measure_overlap
from oneaccord_lab.bench.plan import (
    BENCHMARKS,
    Done,
    Opened,
    Overlap,
    Plan,
    Point,
    Problem,
    Record,
    Row,
    Skipped,
    Target,
    decode_record,
)
from oneaccord_lab.bench.statistics import overlapped

Bench = Callable[..., "subprocess.CompletedProcess[str]"]

KEYS = [
    *("backend", "collective", "dtype", "world_size", "bytes", "iterations"),
    *("median_us", "min_us", "p95_us", "algbw_GBps", "busbw_GBps"),
]

CROOKED = """
import dataclasses, os, signal, time
import numpy as np
from oneaccord_tcp import plugin
from oneaccord.api import hookimpl
from oneaccord_lab.bench import probes
from oneaccord_lab.bench.cases import Case

probes._FLAG_BATCHES = probes._PING_BATCHES = 2  # ranks that share a processor take a time slice for each
probes._BATCH_BYTES = probes._STREAM_BYTES = 1 << 16

SPEC = plugin.oneaccord_register_backends()
calls = 0

@hookimpl
def oneaccord_register_backends():
    names = ("twin", "wrong", "tiring", "failing", "dying", "early", "stuck")
    return [dataclasses.replace(SPEC, name=name, auto_priority=None, install="pip install luck") for name in names] + [
        dataclasses.replace(SPEC, name="absent", auto_priority=None, probe=lambda: "it is not here", install="pip install it")]

def wrong(backend, source, target, root, deadline, on_stall):
    target[...] = 7

def tiring(backend, source, target, root, deadline, on_stall):
    global calls
    calls += 1
    if calls < 4:
        inputs = [Case("all_reduce", rank, 2, source.nbytes, source.dtype).arrays(np.empty).given for rank in (0, 1)]
        target[...] = inputs[0] + inputs[1]

def failing(backend, source, target, root, deadline, on_stall):
    raise RuntimeError("enough is enough")

def dying(backend, source, target, root, deadline, on_stall):
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)

def before():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)  # so that the call, as a rule, begins when that is known

def stuck(backend, source, target, root, deadline, on_stall):
    time.sleep(60)

@hookimpl
def oneaccord_collective(request):
    if request.collective.value == "all_reduce" and (request.backend in ("wrong", "tiring") or request.nbytes == 1024):
        if request.backend == "early":
            before()
        return globals().get(request.backend)
    return None
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Run ``oneaccord bench`` in an empty folder, with backends of every kind of misbehaviour at hand."""
    (tmp_path / "crooked.py").write_text(CROOKED)

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ONEACCORD_")}
        path = os.pathsep.join([str(tmp_path), *environ.get("PYTHONPATH", "").split(os.pathsep)])
        environ |= {"PYTHONPATH": path, "ONEACCORD_PLUGINS": "crooked", **variables}
        return preloaded.run(["-m", "oneaccord", "bench", *words], environ=environ, cwd=tmp_path)

    return run


def cells(output: str, backend: str) -> list[list[str]]:
    """Return the lines of a backend, each as its words."""
    lines = [line.split() for line in output.splitlines() if not line.startswith("#")]
    return [words for words in lines if backend in words]


def on_rank_threads(
    plan: Plan, world_size: int, backend: str, tmp_path: Path, run: Callable[[Plan], None] = measure
) -> list[Record]:
    """Measure with ranks that are threads; return the records."""
    (tmp_path / "stream").touch()
    plan = msgspec.structs.replace(plan, stream=str(tmp_path / "stream"), state=str(tmp_path / "state"))
    world = ThreadWorld(world_size, backend)

    def body(rank: int) -> None:
        with world.rank(rank):
            run(plan)

    must(on_threads(body, world_size))
    return [decode_record(line) for line in (tmp_path / "stream").read_bytes().splitlines()]


def plan_of(targets: list[Target], points: list[Point], **changes: Any) -> Plan:
    plan = Plan(targets, points, "float32", "sum", 3, None, 40.0, 20.0, "", "")
    return msgspec.structs.replace(plan, **changes)


def test_every_benchmark_gives_a_row_of_json_for_each_size_with_consistent_numbers(bench: Bench, tmp_path: Path) -> None:
    answer = bench("all", "--backends", "tcp", "-n", "2", "--sizes", "8,1KiB", "--iterations", "5", "--json", "rows.json")
    assert answer.returncode == 0, answer.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["collective"], row["bytes"]) for row in rows] == [
        (name, size) for name in BENCHMARKS for size in ((0,) if name == "barrier" else (8, 1024))
    ]
    halves = {"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"}
    for row in rows:
        assert list(row) == KEYS
        assert (row["backend"], row["dtype"], row["world_size"], row["iterations"]) == ("tcp", "float32", 2, 5)
        assert 0 < row["min_us"] <= row["median_us"] <= row["p95_us"]
        assert row["algbw_GBps"] == pytest.approx(row["bytes"] / row["median_us"] / 1000, rel=1e-9)
        # Of two ranks, 2 (n - 1) / n is 1, and (n - 1) / n a half.
        assert row["busbw_GBps"] == row["algbw_GBps"] * (0.5 if row["collective"] in halves else 1)


def test_the_last_column_compares_with_the_first_backend_and_each_row_is_printed_once(bench: Bench, tmp_path: Path) -> None:
    answer = bench("all_reduce", "--backends", "twin,tcp", "-n", "2", "--sizes", "1KiB,8", "--iterations", "4", "--json", "f")
    assert answer.returncode == 0, answer.stderr
    assert " / twin\n" in answer.stdout
    rows = {(row["backend"], row["bytes"]): row["median_us"] for row in json.loads((tmp_path / "f").read_text())}
    for backend in ("twin", "tcp"):
        printed = cells(answer.stdout, backend)
        assert [words[:3] for words in printed] == [["8", "B", backend], ["1", "KiB", backend]]
        assert [words[-1] for words in printed] == [f"{rows[backend, n] / rows['twin', n]:.3f}" for n in (8, 1024)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_limits_are_measured_in_the_same_run(bench: Bench, tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("oneaccord_native", reason="there was no C compiler", exc_type=ImportError)
    words = (
        "--backends",
        "tcp,shm",
        "-n",
        str(ranks),
        "--sizes",
        "8",
        "--iterations",
        "2",
        "--limits",
        "--timeout",
        "45",
        "--json",
        "f",
    )
    answer = bench("all_gather,barrier", *words)
    assert answer.returncode == 0, answer.stderr
    assert "# executor of tcp and shm: compiled (oneaccord-native)\n" in answer.stdout
    assert answer.stdout.count("# the machine: ") == (2 if ranks > 1 else 1)  # a barrier of one takes no machine
    two_at_least = {"copy_2_us", "both_ways_us", "one_way_us", "flag_us", "ping_us"}
    for row in json.loads((tmp_path / "f").read_text()):
        measured = {name for name, value in row["limits"].items() if value is not None}
        expected = set(row["limits"]) - (two_at_least if ranks == 1 else set())
        if not row["bytes"]:
            expected &= {"flag_us", "ping_us"}
        assert measured == expected
        assert all(row["limits"][name] > 0 for name in measured)
        if ranks == 1:
            assert row["share"] is None
        else:
            assert row["share"] == pytest.approx(row["limit_us"] / row["median_us"])


def test_json_is_alone_on_standard_output_and_the_configured_backend_is_measured(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "oneaccord.toml").write_text('backend = "twin"\n')
    words = ("all_reduce,barrier", "-n", "2", "--sizes", "4000", "--iterations", "2", "--dtype", "bfloat16", "--json", "-")
    answer = bench(*words, ONEACCORD_NATIVE="false")
    assert answer.returncode == 0, answer.stderr
    sums, row = json.loads(answer.stdout)
    assert (sums["collective"], sums["backend"], sums["dtype"], sums["bytes"]) == ("all_reduce", "twin", "bfloat16", 4000)
    assert (row["collective"], row["algbw_GBps"], row["busbw_GBps"]) == ("barrier", 0.0, 0.0)
    assert "# all_reduce sum, bfloat16\n" in answer.stderr
    assert "# barrier" in answer.stderr
    assert "# executor of tcp and shm: Python (native = false)\n" in answer.stderr


def test_a_wrong_result_is_no_measurement_even_after_many_calls(bench: Bench, tmp_path: Path) -> None:
    words = ("-n", "2", "--sizes", "8", "--iterations", "20", "--json", "f")
    answer = bench("all_reduce", "--backends", "tiring,wrong,tcp", *words)
    assert answer.returncode == 1
    for kind in ("wrong", "tiring"):
        line = next(line for line in cells(answer.stdout, kind) if "WRONG:" in line)
        assert line[3:7] == ["WRONG:", "rank", "0:", "element"]
    assert "2 of 2 elements are wrong" in " ".join(answer.stdout.split())
    # What the first one took for that is no measure for others.
    assert cells(answer.stdout, "tcp")[0][-1] == "-"
    assert [row["backend"] for row in json.loads((tmp_path / "f").read_text())] == ["tcp"]


@pytest.mark.parametrize("kinds", [["failing", "dying", "early"], pytest.param(["stuck"], marks=pytest.mark.long)])
def test_a_backend_that_fails_is_left_out_and_the_others_go_on(bench: Bench, tmp_path: Path, kinds: list[str]) -> None:
    words = ("--sizes", "8,1KiB,2KiB", "--iterations", "2", "--timeout", "1" if kinds == ["stuck"] else "20", "--json", "f")
    answer = bench("all_reduce", "--backends", ",".join([*kinds, "tcp"]), "-n", "2", *words)
    assert answer.returncode == 1, answer.stderr
    for kind in kinds:
        fine, failed, afterwards = cells(answer.stdout, kind)
        assert float(fine[-1]) > 0
        assert failed[3] == "failed:"
        assert afterwards[3:] == ["failed:", "as", "above"]
    said = " ".join(answer.stdout.split())
    assert said.count("enough is enough") == kinds.count("failing")
    assert said.count("its ranks ended") == len(kinds) - kinds.count("failing")
    rows = json.loads((tmp_path / "f").read_text())
    assert [(row["backend"], row["bytes"]) for row in rows] == [
        *((kind, 8) for kind in [*kinds, "tcp"]),
        *(("tcp", 1024), ("tcp", 2048)),
    ]


def test_a_backend_that_cannot_run_here_is_an_error_with_the_remedy_before_anything_starts(bench: Bench) -> None:
    answer = bench("all_reduce", "--backends", "tcp,absent", "-n", "2")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert "the backend 'absent' of this process cannot run here: it is not here; try: pip install it" in answer.stderr


@pytest.mark.peers
def test_mpi_starts_the_ranks_of_all_and_its_library_is_called_on_the_same_arrays(bench: Bench, tmp_path: Path) -> None:
    words = ("-n", "2", "--sizes", "1KiB", "--iterations", "4", "--json", "f")
    answer = bench("all", "--backends", "tcp,mpi,mpi+raw", *words)
    assert answer.returncode == 0, answer.stderr + answer.stdout
    rows = json.loads((tmp_path / "f").read_text())
    assert [(row["collective"], row["backend"]) for row in rows] == [
        (benchmark, backend) for benchmark in BENCHMARKS for backend in ("tcp", "mpi", "mpi+raw")
    ]
    assert '# [backends.mpi] check = false, native = "blocking"\n' in answer.stdout
    assert "mpi4py" in answer.stdout


@pytest.mark.peers
def test_gloo_is_measured_beside_the_others(bench: Bench) -> None:
    answer = bench("all", "--backends", "gloo,tcp", "-n", "2", "--sizes", "1KiB", "--iterations", "4")
    assert answer.returncode == 0, answer.stderr + answer.stdout
    assert len(cells(answer.stdout, "gloo")) == len(BENCHMARKS)


def test_overlap_is_measured_behind_both_kinds_of_work(bench: Bench, tmp_path: Path) -> None:
    words = ("-n", "2", "--bytes", "8KiB", "--iterations", "2", "--json", "f")
    answer = bench("overlap", "--backends", "tcp,shm+symmetric,tiring", *words)
    assert answer.returncode == 1, answer.stderr  # because of the one that lies
    rows = json.loads((tmp_path / "f").read_text())
    assert [(row["work"], row["backend"]) for row in rows] == [
        (work, backend) for work in ("numpy", "python") for backend in ("tcp", "shm+symmetric")
    ]
    for row in rows:
        assert (row["bytes"], row["dtype"], row["world_size"], row["iterations"]) == (8192, "float32", 2, 2)
        assert min(row["comm_ms"], row["work_ms"], row["both_ms"]) > 0
        hidden = overlapped(row["comm_ms"], row["work_ms"], row["both_ms"])
        assert row["overlap"] == pytest.approx(hidden, abs=1e-9)
    assert [words[2] for words in cells(answer.stdout, "tiring")] == ["WRONG:"] * 2  # only the last results are


@pytest.mark.peers
def test_overlap_stands_beside_that_of_mpi_and_gloo(bench: Bench, tmp_path: Path) -> None:
    answer = bench("overlap", "-n", "2", "--bytes", "64KiB", "--iterations", "2", "--json", "f")
    assert answer.returncode == 0, answer.stderr + answer.stdout
    rows = json.loads((tmp_path / "f").read_text())
    assert [row["backend"] for row in rows] == ["shm", "gloo+raw", "mpi+raw"] * 2


def test_a_backend_whose_time_is_virtual_is_refused(bench: Bench) -> None:
    answer = bench("all_reduce", "--backends", "simulated,tcp", "-n", "2", "--sizes", "8", "--iterations", "2")
    assert answer.returncode == 2
    assert "the backend 'simulated' runs on its own clock, so it cannot be measured" in answer.stderr


def test_rank_0_writes_down_all_records_of_a_point_and_then_that_it_is_done(tmp_path: Path) -> None:
    points = [Point("all_reduce", 8), Point("barrier", 0)]
    opened, *records = on_rank_threads(plan_of([Target("tcp"), Target("shm")], points), 2, "tcp", tmp_path)
    assert isinstance(opened, Opened)
    assert [type(record) for record in records] == [Row, Row, Done, Row, Row, Done]
    assert [record.backend for record in records if isinstance(record, Row)] == ["tcp", "shm"] * 2


def test_what_the_budget_does_not_reach_is_skipped(tmp_path: Path) -> None:
    plan = plan_of([Target("tcp")], [Point("all_reduce", 8)], budget_s=1e-9)
    assert on_rank_threads(plan, 2, "tcp", tmp_path)[1:] == [Skipped("all_reduce", 8), Done()]


def test_symmetric_memory_comes_from_the_group_and_where_it_is_used_up_only_that_point_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def empty(group: oa.Group, shape: int, dtype: Any) -> Any:
        if shape > 2:
            raise UnsupportedError("there is no more of it")
        made.append(shape)
        return np.empty(shape, dtype)

    monkeypatch.setattr(oa.Group, "empty", empty, raising=False)
    targets = [Target("tcp"), Target("tcp", "symmetric")]
    points = [Point("all_reduce", 8), Point("all_reduce", 16), Point("all_reduce", 8)]
    records = on_rank_threads(plan_of(targets, points), 2, "tcp", tmp_path)
    assert [record.backend for record in records if isinstance(record, Row)] == [
        *("tcp", "tcp+symmetric", "tcp", "tcp", "tcp+symmetric"),
    ]
    assert [record for record in records if isinstance(record, Problem)] == [
        Problem("tcp+symmetric", "all_reduce", 16, "rank 0: UnsupportedError: there is no more of it")
    ]
    assert made == [2] * 8  # input and result, of two ranks, at two points


def test_overlap_on_symmetric_memory_takes_its_arrays_from_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def empty(group: oa.Group, shape: int, dtype: Any) -> Any:
        made.append(shape)
        return np.empty(shape, dtype)

    monkeypatch.setattr(oa.Group, "empty", empty, raising=False)
    plan = plan_of([Target("tcp", "symmetric")], [Point("python", 16)], iterations=1)
    records = on_rank_threads(plan, 2, "tcp", tmp_path, measure_overlap)
    assert [record.backend for record in records if isinstance(record, Overlap)] == ["tcp+symmetric"]
    assert made == [4] * 4  # input and result, of two ranks


def test_a_backend_that_breaks_takes_its_symmetric_half_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(group: oa.Group, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("enough is enough")

    monkeypatch.setattr(oa.Group, "all_reduce", broken)
    plan = plan_of([Target("tcp"), Target("tcp", "symmetric")], [Point("all_reduce", 8), Point("barrier", 0)])
    records = on_rank_threads(plan, 2, "tcp", tmp_path)[1:]
    text = "rank 0: RuntimeError: enough is enough"
    expected = [
        [Problem(name, benchmark, size, text) for name in ("tcp", "tcp+symmetric")]
        for benchmark, size in (("all_reduce", 8), ("barrier", 0))
    ]
    assert records == [*expected[0], Done(), *expected[1], Done()]


def test_measuring_leaves_no_group_behind(tmp_path: Path) -> None:
    on_rank_threads(plan_of([Target("tcp")], [Point("barrier", 0)]), 2, "tcp", tmp_path)
    with oa.init(config={}) as group:
        assert group.world_size == 1

"""``oneaccord bench``: what it asks the ranks to measure, what it prints and writes, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import typer

from oneaccord.config import load
from oneaccord.config.selection import make_selector
from oneaccord.contract.backend import BackendSpec, LaunchRequest
from oneaccord.contract.hookspecs import hookimpl
from oneaccord.errors import (
    BackendUnavailableError,
    CommError,
    ConfigError,
    DTypeError,
    InvalidWorldSizeError,
    UnknownBackendError,
    UnsupportedError,
    UsageError,
)
from oneaccord.local import processes, resolve
from oneaccord.local.launching import Launch
from oneaccord.schedule.steps import Collective
from oneaccord_lab.bench.limits import WIRE
from oneaccord_lab.bench.plan import BENCHMARKS, Done, Limits, Opened, Problem, Record, Row, Skipped, Target
from oneaccord_lab.bench.plan import DEFAULT_SIZES as SIZES
from oneaccord_lab.bench.plan import Plan as Comparison
from oneaccord_lab.bench.plan import Point as Call
from oneaccord_lab.commands import bench_table
from oneaccord_lab.commands.bench import bench
from oneaccord_lab.commands.bench_table import Printer
from oneaccord_lab.tuning.plan import DEFAULT_SIZES, Plan, Point

if TYPE_CHECKING:
    from oneaccord.config.plugins import PluginManager

TIMES = {
    "ring": 45e-6,
    "recursive_doubling": 31e-6,
}
plans: list[tuple[Plan, int, str]] = []
comparisons: list[tuple[Comparison, int, str]] = []
story: list[Record | int | str] = []
"""What the ranks that compare backends write down; a word says who has its turn, and a number ends them with that exit code."""


def measure(plan: Plan) -> int:
    """Stand in for the ranks: everything takes as long, but for two algorithms; the last size is not reached."""
    points = [
        Point(name, size, {each: TIMES.get(each, 1e-3) for each in some} if size < 1 << 20 else {}, 3)
        for name, some in plan.candidates.items()
        for size in plan.sizes
    ]
    Path(plan.output).write_bytes(msgspec.json.encode(points))
    return 0


def perform(module: str, text: str, ranks: int, chosen: dict[str, str]) -> int:
    """Stand in for whoever starts ranks."""
    if module == "oneaccord_lab.tuning.measure":
        plans.append((Plan.load(text), ranks, str(chosen)))
        return measure(plans[-1][0])
    assert module == "oneaccord_lab.bench.measure"
    plan = Comparison.load(text)
    comparisons.append((plan, ranks, str(chosen)))
    left = len(plan.points)
    with Path(plan.stream).open("wb", buffering=0) as stream:
        while story:
            record = story.pop(0)
            if isinstance(record, int):
                return record
            if isinstance(record, str):
                Path(plan.state).write_text(record.ljust(20))
            else:
                stream.write(msgspec.json.encode(record) + b"\n")
                left -= isinstance(record, Done)
        stream.write(b'{"type":"Done"}\n' * left)
    return 0


def thread_launcher(request: LaunchRequest) -> int:
    assert request.is_module
    return perform(request.target, request.args[0], request.ranks, {"backend": request.backend})


def other_launcher(request: LaunchRequest) -> int:
    raise AssertionError


class Plugin:
    @hookimpl
    def oneaccord_register_backends(self) -> list[BackendSpec]:
        return [
            BackendSpec("wires", "processes", factory="os:getcwd", auto_priority=1),
            BackendSpec("ropes", "other processes", factory="os:getcwd"),
            BackendSpec("threads", "threads", factory="os:getcwd", launcher=f"{__name__}:thread_launcher"),
            BackendSpec("fibers", "other threads", factory="os:getcwd", launcher=f"{__name__}:other_launcher"),
            BackendSpec("absent", "none", factory="os:getcwd", probe=lambda: "it is not here", install="pip install it"),
        ]


@pytest.fixture(autouse=True)
def _surroundings(manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.register(Plugin(), "for tests")
    monkeypatch.setattr(resolve, "get_plugin_manager", lambda: manager)
    monkeypatch.setattr("oneaccord.config.plugins.get_plugin_manager", lambda: manager)
    monkeypatch.setattr("oneaccord.config.resolve.get_plugin_manager", lambda: manager)
    monkeypatch.chdir(tmp_path)
    for name in ("ONEACCORD_BACKEND", "ONEACCORD_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    plans.clear()
    comparisons.clear()
    story.clear()

    def run_job(job: Launch, environ: dict[str, str]) -> int:
        assert job.is_module
        return perform(job.target, job.args[0], job.ranks, dict(job.environ))

    monkeypatch.setattr(processes, "run_job", run_job)


def call(*words: str, code: int = 0) -> str:
    app = typer.Typer()
    app.command("bench")(bench)
    app.callback()(lambda: None)
    out, error = io.StringIO(), io.StringIO()
    # The runner of older versions of click would make one text of both.
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), pytest.raises(SystemExit) as ended:
        typer.main.get_command(app).main(["bench", *words])
    assert ended.value.code == code, out.getvalue() + error.getvalue()
    return out.getvalue()


def test_the_ranks_are_asked_for_every_algorithm_of_the_collective() -> None:
    call("all_reduce", "--algorithms", "-n", "3", "--sizes", "1KiB, 8", "--budget", "7")
    [(plan, ranks, _)] = plans
    assert (ranks, plan.sizes, plan.budget_s, plan.backend) == (3, [8, 1024], 7.0, "wires")
    assert list(plan.candidates) == ["all_reduce"]
    names = plan.candidates["all_reduce"]
    assert {"ring", "recursive_doubling"} <= set(names)
    assert "hierarchical" not in names


def test_the_algorithms_of_all_collectives_are_measured_at_all_sizes_unless_some_are_named() -> None:
    call("--algorithms")
    [(plan, ranks, _)] = plans
    assert list(plan.candidates) == [collective.value for collective in Collective]
    assert (ranks, tuple(plan.sizes)) == (4, DEFAULT_SIZES)


def test_algorithms_by_host_are_measured_where_the_config_says_that_there_are_hosts() -> None:
    Path("oneaccord.toml").write_text("ranks_per_host = 2\n")
    call("all_reduce", "--tune", "--sizes", "8")
    assert "hierarchical" in plans[0][0].candidates["all_reduce"]
    assert "min_hosts = 2\nmax_hosts = 2\n" in Path("tuned.toml").read_text()


def test_algorithms_on_ranks_that_are_threads_are_started_by_their_backend() -> None:
    call("barrier", "--algorithms", "-n", "2", "--backend", "threads")
    assert [(ranks, chosen) for _, ranks, chosen in plans] == [(2, "{'backend': 'threads'}")]


def test_the_ranks_get_the_config_file_that_was_named(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('backend = "wires"\n')
    call("barrier", "--algorithms", "--config", "own.toml")
    assert str(tmp_path / "own.toml") in plans[0][2]


def test_times_are_printed_from_the_fastest_on() -> None:
    lines = call("all_reduce", "--algorithms", "--sizes", "8,1MiB").splitlines()
    assert lines[0].split() == ["collective", "size", "algorithm", "time"]
    assert lines[1].split() == ["all_reduce", "8", "B", "recursive_doubling", "31", "us", "fastest"]
    assert lines[2].split() == ["all_reduce", "8", "B", "ring", "45", "us", "+45%"]
    assert " ".join(" ".join(lines).split()).endswith("all_reduce 1 MiB not measured: the budget is used up")
    assert not Path("tuned.toml").exists()


def test_json_is_for_programs() -> None:
    told: dict[str, Any] = json.loads(call("all_reduce", "--algorithms", "--sizes", "8", "--json", "-"))
    assert (told["backend"], told["ranks"], told["table"]) == ("wires", 4, None)
    [point] = told["points"]
    assert (point["collective"], point["bytes"], point["rounds"]) == ("all_reduce", 8, 3)
    assert point["times_s"]["ring"] == 45e-6


def test_the_table_that_is_written_makes_oneaccord_take_the_fastest(manager: PluginManager) -> None:
    said = call("all_reduce", "--tune", "--sizes", "8,64KiB", "--output", "mine.toml")
    assert said.endswith('wrote mine.toml; to use it, add this line to oneaccord.toml:\n\nselection = "mine.toml"\n')
    assert "measured here at 8 B: 31 us against 45 us of ring" in " ".join(said.split())
    text = Path("mine.toml").read_text()
    assert text.startswith("# Measured by `oneaccord bench --tune` with 4 ranks on one host over wires.\n")
    selector = make_selector(load({"selection": "mine.toml"}, environ={}, manager=manager), manager)
    choice = selector.choose(Collective.ALL_REDUCE, 64 * 1024, 4, ranks_per_host=4)
    assert (choice.algorithm.name, choice.reason[:8]) == ("recursive_doubling", "measured")


def test_no_table_is_written_where_nothing_was_measured() -> None:
    said = call("all_reduce", "--tune", "--sizes", "1MiB")
    assert "no table is written: nothing was measured; give more time with --budget" in said
    assert not Path("tuned.toml").exists()


def test_ranks_that_fail_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "run_job", lambda job, environ: 7)
    with pytest.raises(CommError, match=r"nothing was measured: a rank failed, as shown above \(exit code 7\)"):
        call("barrier", "--algorithms")


def row(backend: str, nbytes: int = 8, median_us: float = 10.0, collective: str = "all_reduce", **changes: Any) -> Row:
    values = {"iterations": 5, "min_us": 5.0, "p95_us": 20.0, "algbw_GBps": 1.5, "busbw_GBps": 2.25, **changes}
    return Row(backend, collective, "float32", 2, nbytes, median_us=median_us, **values)


def lines(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if not line.startswith("#")]


def test_all_backends_are_measured_in_one_world_of_ranks_at_all_points() -> None:
    call("--backends", "wires, ropes,ropes+symmetric", "--iterations", "7", "--warmup", "0", "--timeout", "3")
    [(plan, ranks, _)] = comparisons
    assert plan.targets == [Target("wires"), Target("ropes"), Target("ropes", "symmetric")]
    assert [point.benchmark for point in plan.points if point.nbytes == 1024] == [
        name for name in BENCHMARKS if name != "barrier"
    ]
    assert plan.points[-1] == Call("barrier", 0)
    assert [point.nbytes for point in plan.points[: len(SIZES)]] == list(SIZES)
    assert (ranks, plan.dtype, plan.op, plan.iterations, plan.warmup, plan.timeout_s) == (4, "float32", "sum", 7, 0, 3.0)


def test_the_configured_backend_alone_is_measured_where_none_is_named() -> None:
    Path("oneaccord.toml").write_text('backend = "ropes"\n')
    call("all_reduce,barrier", "-n", "2", "--sizes", "1KiB,8", "--dtype", "bfloat16", "--op", "max")
    [(plan, ranks, _)] = comparisons
    assert plan.targets == [Target("ropes")]
    assert plan.points == [Call("all_reduce", 8), Call("all_reduce", 1024), Call("barrier", 0)]
    assert (ranks, plan.dtype, plan.op) == (2, "bfloat16", "max")
    assert 59 < plan.budget_s <= 60


def test_the_budget_grows_with_the_number_of_points_and_may_be_given() -> None:
    call("all", "--sizes", "16,32,64")
    assert 147 < comparisons[0][0].budget_s <= 4 * 37
    call("all", "--sizes", "16,32,64", "--budget", "5")
    assert 4 < comparisons[1][0].budget_s <= 5


def test_a_backend_that_starts_its_ranks_itself_starts_those_of_all(tmp_path: Path) -> None:
    call("barrier", "--backends", "wires,threads", "-n", "2")
    assert [(ranks, chosen) for _, ranks, chosen in comparisons] == [(2, "{'backend': 'threads'}")]
    (tmp_path / "own.toml").write_text("")
    call("barrier", "--backends", "wires", "-n", "2", "--config", "own.toml")
    assert str(tmp_path / "own.toml") in comparisons[1][2]


def test_rows_are_printed_in_the_order_that_was_asked_for_and_compared_with_the_first() -> None:
    story[:] = [row("ropes", 8, 5.0), row("wires", 8, 10.0), Done(), row("wires", 1024, 10.0), row("ropes", 1024, 12.5), Done()]
    said = call("all_reduce", "--backends", "wires,ropes", "-n", "2", "--sizes", "8,1KiB")
    assert lines(said) == [
        ["8", "B", "wires", "10.00", "5.00", "20.00", "1.50", "2.25", "1.000"],
        ["8", "B", "ropes", "5.00", "5.00", "20.00", "1.50", "2.25", "0.500"],
        ["1", "KiB", "wires", "10.00", "5.00", "20.00", "1.50", "2.25", "1.000"],
        ["1", "KiB", "ropes", "12.50", "5.00", "20.00", "1.50", "2.25", "1.250"],
    ]
    assert "/ wires\n" in said


def test_the_heading_tells_machine_versions_variables_and_the_settings_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    monkeypatch.setenv("ONEACCORD_SECRET", "hush")
    story[:] = [Opened(["torch 9.9", "Open MPI v9"], {"ropes": {"check": False, "native": "blocking"}}), row("ropes"), Done()]
    said = call("all_reduce", "--backends", "ropes", "-n", "2", "--sizes", "8")
    assert said.startswith("# oneaccord bench: ropes; 2 ranks on this host\n")
    assert "# torch 9.9, Open MPI v9\n" in said
    assert '# [backends.ropes] check = false, native = "blocking"\n' in said
    assert "# OMPI_MCA_btl=tcp,self\n" in said
    assert "hush" not in said
    assert "NumPy" in said
    assert "cores of" in said


def test_on_a_terminal_the_same_lines_stand_in_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plan = Comparison(
        [Target("wires"), Target("ropes")], [Call("all_reduce", 8)], "float32", "sum", None, None, 9.0, 9.0, "", ""
    )
    plain, coloured = io.StringIO(), Terminal()
    for stream in (plain, coloured):
        printer = Printer(plan, 2, stream)
        printer.heading({})
        printer.take(row("wires"))
        printer.take(Problem("ropes", "all_reduce", 8, "rank 0: [it] broke " + "at length " * 20))
    assert "\x1b[" in coloured.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured.getvalue()) == plain.getvalue()


def test_no_line_of_the_table_is_longer_than_80_characters() -> None:
    names = ["wires", "ropes+symmetric", "wires+symmetric"]
    sizes = [8, 128 << 20]
    story[:] = [
        record
        for size in sizes
        for record in (*(row(name, size, 123456.7, min_us=99999.9, p95_us=1234567.0) for name in names[:2]),
                       Problem(names[2], "all_reduce", size, "rank 1: " + "it broke " * 20), Done())
    ]  # fmt: skip
    said = call("all_reduce", "--backends", ",".join(names), "--world", "2", "--sizes", "8,128MiB", code=1)
    assert max(map(len, said.splitlines())) <= 80
    assert [words[:3] for words in lines(said) if words[1] in ("B", "MiB")] == [
        [number, unit, name] for number, unit in (("8", "B"), ("128", "MiB")) for name in names
    ]


def test_sizes_that_do_not_divide_are_said_to_be_others() -> None:
    story[:] = [row("wires", 12, collective="all_gather"), Done()]
    said = call("all_gather", "--backends", "wires", "-n", "3", "--sizes", "8")
    assert comparisons[0][0].points == [Call("all_gather", 12)]
    assert "# 8 B measured as 12 B: equal blocks of whole elements, at least one for each\n#   rank\n" in said
    assert lines(said)[0][:3] == ["12", "B", "wires"]


def test_json_is_a_list_of_rows_with_these_keys() -> None:
    story[:] = [row("wires", 8), Problem("ropes", "all_reduce", 8, "rank 1: element 0", wrong=True), Done()]
    said = call("all_reduce", "--backends", "wires,ropes", "-n", "2", "--sizes", "8", "--json", "-", code=1)
    assert json.loads(said) == [
        {
            "backend": "wires",
            "collective": "all_reduce",
            "dtype": "float32",
            "world_size": 2,
            "bytes": 8,
            "iterations": 5,
            "median_us": 10.0,
            "min_us": 5.0,
            "p95_us": 20.0,
            "algbw_GBps": 1.5,
            "busbw_GBps": 2.25,
        }
    ]


@pytest.fixture
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled part is here, whether it is or not, for nothing of it is called; and wires are wires."""
    monkeypatch.setattr("oneaccord_lab.bench.probes.native", lambda: re)
    monkeypatch.setattr(bench_table, "link_of", lambda target, environ: WIRE if target == Target("wires") else None)


LIMITS = Limits("all_reduce", 1 << 20, 100.0, 125.0, 200.0, 400.0, 500.0, 250.0, 0.25, 4.0)


@pytest.mark.usefixtures("_compiled")
def test_with_limits_each_row_has_its_limit_and_its_share() -> None:
    story[:] = [Opened([], {}, "compiled"), LIMITS, row("wires", 1 << 20, 1008.0), row("ropes", 1 << 20), Done()]
    said = call("all_reduce", "--backends", "wires,ropes", "-n", "2", "--sizes", "1MiB", "--limits")
    assert comparisons[0][0].limits
    assert "# executor of tcp and shm: compiled\n" in said
    head = next(line.split() for line in said.splitlines() if "backend " in line)
    assert head == ["#", "size", "backend", "median", "min", "p95", "limit", "share", "/", "wires"]
    speeds = (
        "the machine: copy alone 10.49 GB/s, by two 8.39 GB/s, by all 5.24 GB/s, add 2.62 GB/s, TCP both ways 2.10 GB/s, one way "
        "4.19 GB/s, flag 0.25 us, TCP ping 4.00 us"
    )
    assert speeds in said.replace("\n#  ", "")
    assert lines(said) == [
        # One ping, and all bytes both ways.
        ["1", "MiB", "wires", "1008.0", "5.00", "20.00", "504.00", "50.0%", "1.000"],
        ["1", "MiB", "ropes", "10.00", "5.00", "20.00", "-", "-", "0.010"],
    ]
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.usefixtures("_compiled")
def test_with_limits_json_has_them_too() -> None:
    story[:] = [LIMITS, row("wires", 1 << 20, 1008.0), row("ropes", 1 << 20), Done()]
    said = call("all_reduce", "--backends", "wires,ropes", "-n", "2", "--sizes", "1MiB", "--limits", "--json", "-")
    wires, ropes = json.loads(said)
    assert (wires["limit_us"], wires["share"]) == (504.0, 0.5)
    assert (ropes["limit_us"], ropes["share"]) == (None, None)
    assert wires["limits"] == ropes["limits"] == {
        "copy_1_us": 100.0,
        "copy_2_us": 125.0,
        "copy_all_us": 200.0,
        "add_all_us": 400.0,
        "both_ways_us": 500.0,
        "one_way_us": 250.0,
        "flag_us": 0.25,
        "ping_us": 4.0,
    }  # fmt: skip


def test_without_the_compiled_part_limits_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneaccord_lab.bench.probes.native", lambda: None)
    monkeypatch.setattr("oneaccord_lab.bench.probes.why_not_native", lambda: "not installed")
    message = (
        r"--limits measures the machine in C, and the compiled part of oneaccord is missing \(not installed\); try: pip install"
    )
    with pytest.raises(UnsupportedError, match=message):
        call("all_reduce", "--backends", "wires", "-n", "2", "--limits")
    assert not comparisons


def test_what_failed_or_is_wrong_stands_in_the_table_and_in_the_exit_code() -> None:
    story[:] = [
        *(Problem("wires", "all_reduce", 8, "rank 1: it broke"), row("ropes"), Done()),
        *(Problem("wires", "all_reduce", 16, "rank 1: it broke"), row("ropes", 16), Done()),
    ]
    first, second, third, _ = lines(call("all_reduce", "--backends", "wires,ropes", "-n", "2", "--sizes", "8,16", code=1))
    assert first == ["8", "B", "wires", "failed:", "rank", "1:", "it", "broke"]
    assert second[-1] == "-"
    assert third[3:] == ["failed:", "as", "above"]
    story[:] = [Problem("wires", "all_reduce", 8, "rank 1: element 0 is 1; expected 2", wrong=True), Done()]
    [words] = lines(call("all_reduce", "--backends", "wires", "-n", "2", "--sizes", "8", code=1))
    assert words[3:7] == ["WRONG:", "rank", "1:", "element"]


def test_what_the_budget_did_not_reach_is_said_and_is_no_failure() -> None:
    story[:] = [Skipped("all_reduce", 8), Done()]
    said = call("all_reduce", "--backends", "wires,ropes", "-n", "2", "--sizes", "8")
    assert said.count("not measured: the budget is used up; give more with --budget\n") == 2


def test_where_a_backend_ends_its_ranks_others_measure_the_rest_without_it() -> None:
    story[:] = [row("wires"), row("ropes"), Done(), "wires", 9, row("ropes", 16), Done(), row("ropes", 32), Done()]
    said = lines(call("all_reduce", "--backends", "wires,ropes", "-n", "2", "--sizes", "8,16,32", code=1))
    assert [words[2] for words in said if words[1] == "B"] == ["wires", "ropes"] * 3
    assert said[2][3:6] == ["failed:", "its", "ranks"]
    assert "(exit" in said[3]
    assert said[-2][3:] == ["failed:", "as", "above"]
    (_, _, _), (plan, ranks, _) = comparisons
    assert (plan.targets, ranks) == ([Target("ropes")], 2)
    assert plan.points == [Call("all_reduce", 16), Call("all_reduce", 32)]


def test_ranks_that_fail_when_no_backend_has_its_turn_are_an_error() -> None:
    story[:] = [row("wires"), Done(), "wires", "", 3]
    with pytest.raises(CommError, match=r"measuring ended early, and not by a backend: .* \(exit code 3\)"):
        call("all_reduce", "--backends", "wires", "-n", "2", "--sizes", "8,16")


def test_ranks_that_were_interrupted_are_not_started_again() -> None:
    story[:] = ["wires", 130]
    call("all_reduce", "--backends", "wires,ropes", "-n", "2", code=130)
    assert len(comparisons) == 1


def test_a_plot_has_a_line_for_each_backend() -> None:
    pytest.importorskip("matplotlib")
    sizes = (8, 1024)
    names = ("all_reduce", "broadcast")
    story[:] = [
        record
        for name in names
        for size in sizes
        for record in (row("wires", size, collective=name), row("ropes", size, 20.0, name), Done())
    ]
    call("all_reduce,broadcast,barrier", "--backends", "wires,ropes", "-n", "2", "--sizes", "8,1KiB", "--plot", "p.svg")
    text = Path("p.svg").read_text()
    assert all(text.count(f">{word}<") == 2 for word in ("wires", "ropes", "1 KiB"))
    assert ">all_reduce: 2 ranks, float32<" in text


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (
            ["all_redcue"],
            UsageError,
            r"no collective 'all_redcue'; did you mean 'all_reduce'\? Valid here: .*pingpong, barrier, all",
        ),
        (["all_reduce", "--backends", "wires,wires"], UsageError, "wires is there twice; name each once"),
        (
            ["all_reduce", "--backends", "wires+fast"],
            UsageError,
            r"'wires\+fast': a backend has the variants symmetric and raw",
        ),
        (
            ["all_reduce", "--backends", "wires+raw"],
            UsageError,
            r"wires\+raw: there is no other library behind wires; \+raw is for mpi",
        ),
        (["all_reduce", "--backends", "wires,wyres"], UnknownBackendError, "wyres"),
        (["all_reduce", "--backends", "wires,absent"], BackendUnavailableError, "it is not here; try: pip install it"),
        (
            ["all_reduce", "--backends", "threads,fibers"],
            UsageError,
            "'threads' and 'fibers' each start their ranks in a way of",
        ),
        (["all_reduce", "--dtype", "float12"], DTypeError, "there is no dtype 'float12'"),
        (["all_reduce", "--dtype", "M8[s]"], DTypeError, "cannot travel"),
        (["all_reduce", "--op", "avg"], DTypeError, "op='avg' is not a reduction"),
        (["reduce", "--op", "mean", "--dtype", "int32"], DTypeError, "convert first"),
        (["pingpong", "-n", "1"], UsageError, "-n 1: pingpong need at least two ranks; give -n 2 or more"),
        (["--iterations", "0"], UsageError, "--iterations 0: expected at least 1"),
        (["--warmup", "-1"], UsageError, "--warmup -1: expected at least 0"),
        (["--timeout", "0"], UsageError, "--timeout 0: expected a positive number"),
        (["--json", "no/folder.json"], UsageError, "--json no/folder.json cannot be written: there is no folder no"),
        (["--plot", "p.gif"], UsageError, "--plot p.gif: the name ends with '.gif'"),
        (["--plot", "no/p.svg"], UsageError, "--plot no/p.svg cannot be written: there is no folder no"),
        (["--tune", "--dtype", "float64"], UsageError, "--dtype is for comparing backends"),
        (["--algorithms", "--limits"], UsageError, "--limits is for comparing backends"),
        (["--algorithms", "--backends", "wires,ropes"], UsageError, "algorithms are compared on one backend"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words(words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(*words)
    assert not comparisons


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["pingpong", "--tune"], UsageError, r"no collective 'pingpong'.* Valid here: .*barrier, all"),
        (["-n", "0"], InvalidWorldSizeError, "-n 0: a job has at least one rank"),
        (["--budget", "0"], UsageError, "--budget 0: expected a positive number"),
        (["--budget", "inf"], UsageError, "--budget inf: expected a positive number"),
        (["--output", "x.toml"], UsageError, "--tune was not given"),
        (["--sizes", "8,12q"], UsageError, "'12q'"),
        (["--config", "none.toml"], ConfigError, "none.toml: there is no such file"),
        (["barrier", "--tune", "--output", "no/folder.toml"], UsageError, "--output no/folder.toml cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_in_words(words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(*words)

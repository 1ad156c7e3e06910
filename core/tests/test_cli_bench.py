"""``manyhands bench``: what it asks the ranks to measure, what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

from manyhands.backend import BackendSpec, LaunchRequest
from manyhands.cli.bench import bench
from manyhands.config import load, make_selector
from manyhands.errors import CommError, ConfigError, InvalidWorldSizeError, ManyHandsError, UsageError
from manyhands.hookspecs import hookimpl
from manyhands.launch import processes, resolve
from manyhands.launch.launching import Launch
from manyhands.schedule.steps import Collective
from manyhands.tuning.plan import DEFAULT_SIZES, Plan, Point

if TYPE_CHECKING:
    from manyhands.plugins import PluginManager

TIMES = {
    "ring": 45e-6,
    "recursive_doubling": 31e-6,
}
plans: list[tuple[Plan, int, str]] = []


def measure(plan: Plan) -> int:
    """Stand in for the ranks: everything takes as long, but for two algorithms; the last size is not reached."""
    points = [
        Point(name, size, {each: TIMES.get(each, 1e-3) for each in some} if size < 1 << 20 else {}, 3)
        for name, some in plan.candidates.items()
        for size in plan.sizes
    ]
    Path(plan.output).write_text(json.dumps([asdict(point) for point in points]))
    return 0


def thread_launcher(request: LaunchRequest) -> int:
    assert (request.target, request.is_module) == ("manyhands.tuning.worker", True)
    plans.append((Plan.load(request.args[0]), request.ranks, request.backend))
    return measure(plans[-1][0])


class Plugin:
    @hookimpl
    def manyhands_register_backends(self) -> list[BackendSpec]:
        return [
            BackendSpec("wires", "processes", factory="os:getcwd", auto_priority=1),
            BackendSpec("threads", "threads", factory="os:getcwd", launcher=f"{__name__}:thread_launcher"),
        ]


@pytest.fixture(autouse=True)
def _surroundings(manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.register(Plugin(), "for tests")
    monkeypatch.setattr(resolve, "get_plugin_manager", lambda: manager)
    monkeypatch.setattr("manyhands.plugins.get_plugin_manager", lambda: manager)
    monkeypatch.setattr("manyhands.config.resolve.get_plugin_manager", lambda: manager)
    monkeypatch.chdir(tmp_path)
    for name in ("MANYHANDS_BACKEND", "MANYHANDS_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    plans.clear()

    def run_job(job: Launch, environ: dict[str, str]) -> int:
        assert (job.target, job.is_module) == ("manyhands.tuning.worker", True)
        plans.append((Plan.load(job.args[0]), job.ranks, str(dict(job.environ))))
        return measure(plans[-1][0])

    monkeypatch.setattr(processes, "run_job", run_job)


def call(*words: str) -> str:
    app = typer.Typer()
    app.command("bench")(bench)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["bench", *words])
    if isinstance(result.exception, ManyHandsError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_ranks_are_asked_for_every_algorithm_of_the_collective() -> None:
    call("all_reduce", "-n", "3", "--sizes", "1KiB, 8", "--budget", "7")
    [(plan, ranks, _)] = plans
    assert (ranks, plan.sizes, plan.budget_s, plan.backend) == (3, [8, 1024], 7.0, "wires")
    assert list(plan.candidates) == ["all_reduce"]
    names = plan.candidates["all_reduce"]
    assert {"ring", "recursive_doubling"} <= set(names)
    assert "hierarchical" not in names


def test_all_collectives_and_sizes_are_measured_unless_some_are_named() -> None:
    call()
    [(plan, ranks, _)] = plans
    assert list(plan.candidates) == [collective.value for collective in Collective]
    assert (ranks, tuple(plan.sizes)) == (4, DEFAULT_SIZES)


def test_algorithms_by_host_are_measured_where_the_config_says_that_there_are_hosts() -> None:
    Path("manyhands.toml").write_text("ranks_per_host = 2\n")
    call("all_reduce", "--tune", "--sizes", "8")
    assert "hierarchical" in plans[0][0].candidates["all_reduce"]
    assert "min_hosts = 2\nmax_hosts = 2\n" in Path("tuned.toml").read_text()


def test_ranks_that_are_threads_are_started_by_their_backend() -> None:
    call("barrier", "-n", "2", "--backend", "threads")
    assert [(ranks, backend) for _, ranks, backend in plans] == [(2, "threads")]


def test_the_ranks_get_the_config_file_that_was_named(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('backend = "wires"\n')
    call("barrier", "--config", "own.toml")
    assert str(tmp_path / "own.toml") in plans[0][2]


def test_times_are_printed_from_the_fastest_on() -> None:
    lines = call("all_reduce", "--sizes", "8,1MiB").splitlines()
    assert lines[0].split() == ["collective", "bytes", "algorithm", "time"]
    assert lines[1].split() == ["all_reduce", "8", "recursive_doubling", "31", "us", "fastest"]
    assert lines[2].split() == ["all_reduce", "8", "ring", "45", "us", "+45%"]
    assert "1048576" in lines[-1]
    assert "not measured: the budget is used up" in lines[-1]
    assert not Path("tuned.toml").exists()


def test_json_is_for_programs() -> None:
    told: dict[str, Any] = json.loads(call("all_reduce", "--sizes", "8", "--json"))
    assert (told["backend"], told["ranks"], told["table"]) == ("wires", 4, None)
    [point] = told["points"]
    assert (point["collective"], point["bytes"], point["rounds"]) == ("all_reduce", 8, 3)
    assert point["times_s"]["ring"] == 45e-6


def test_the_table_that_is_written_makes_manyhands_take_the_fastest(manager: PluginManager) -> None:
    said = call("all_reduce", "--tune", "--sizes", "8,64KiB", "--output", "mine.toml")
    assert said.endswith('wrote mine.toml; to use it, add this line to manyhands.toml:\n\nselection = "mine.toml"\n')
    assert "measured here at 8 bytes: 31 us against 45 us of ring" in said
    text = Path("mine.toml").read_text()
    assert text.startswith("# Measured by `manyhands bench --tune` with 4 ranks on one host over wires.\n")
    selector = make_selector(load({"selection": "mine.toml"}, environ={}, manager=manager), manager)
    choice = selector.choose(Collective.ALL_REDUCE, 64 * 1024, 4, ranks_per_host=4)
    assert (choice.algorithm.name, choice.reason[:8]) == ("recursive_doubling", "measured")


def test_no_table_is_written_where_nothing_was_measured() -> None:
    said = call("all_reduce", "--tune", "--sizes", "1MiB")
    assert "no table is written: nothing was measured; give more time with --budget" in said
    assert not Path("tuned.toml").exists()


def test_ranks_that_fail_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "run_job", lambda job, environ: 7)
    with pytest.raises(CommError, match=r"nothing was measured: a rank failed, as is said above \(exit code 7\)"):
        call("barrier")


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["all_redcue"], UsageError, r"no collective 'all_redcue'; did you mean 'all_reduce'\? Valid here: .*barrier, all"),
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

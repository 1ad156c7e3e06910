"""What the words of `oneaccord run` mean, and what is said of those that mean nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from oneaccord.cli.main import main
from oneaccord.config.plugins.installed import COMMAND_GROUP
from oneaccord.errors import UsageError
from oneaccord.local import counting, starting
from oneaccord.local.launching import Launch

Started = list[tuple[Launch, dict[str, str | list[str] | None]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The jobs that would have been started, each with the options that are for the ranks."""
    jobs: Started = []

    def start(job: Launch, **choices: str | list[str] | None) -> int:
        jobs.append((job, {name: value for name, value in choices.items() if value not in (None, [])}))
        return 7

    monkeypatch.setattr(starting, "start", start)
    return jobs


@pytest.mark.parametrize(
    ("given", "job", "choices"),
    [
        (["script.py"], Launch("script.py"), {}),
        (["-n", "2", "script.py", "--help", "-n", "x"], Launch("script.py", args=("--help", "-n", "x"), ranks=2), {}),
        (["-n2", "s.py", "--", "a", "--", "b"], Launch("s.py", args=("--", "a", "--", "b"), ranks=2), {}),
        (["-n", "2", "--", "s.py", "--np", "3"], Launch("s.py", args=("--np", "3"), ranks=2), {}),
        (["--", "--odd.py", "-n", "auto"], Launch("--odd.py", args=("-n", "auto")), {}),
        (["-n2", "s.py", "-p", "3"], Launch("s.py", args=("-p", "3"), ranks=2), {}),
        (["-vm", "pkg", "-f", "x"], Launch("pkg", is_module=True, args=("-f", "x"), verbose=True), {}),
        (["--ranks=3", "--no-prefix", "-m", "a.b", ""], Launch("a.b", True, ("",), ranks=3, prefix=False), {}),
        (
            ["--nnodes", "2", "--node-rank", "1", "--rendezvous", "h:1", "--run-id", "a b", "s.py"],
            Launch("s.py", nodes=2, node_rank=1, rendezvous="h:1"),
            {"run_id": "a b"},
        ),
        (
            ["--keep-going", "--max-restarts", "4", "--min-ranks=1", "--max-ranks", "5", "--grace", "0.5", "s.py"],
            Launch("s.py", keep_going=True, max_restarts=4, min_ranks=1, max_ranks=5, grace_s=0.5),
            {},
        ),
        (
            ["--backend", "tcp", "--config", "f.toml", "--record=-d", "--no-fork", "s.py"],
            Launch("s.py", fork=False),
            {"backend": "tcp", "config": "f.toml", "record": "-d"},
        ),
        (["-n", "auto", "s.py"], Launch("s.py"), {"is_auto": True}),
        (["--env", "A=1", "--env=B", "s.py"], Launch("s.py"), {"variables": ["A=1", "B"]}),
        (["--stdin", "all", "--log-dir", "d", "s.py"], Launch("s.py", stdin="all", log_dir="d"), {}),
    ],
)
def test_words_of_run_describe_this_job(started: Started, given: list[str], job: Launch, choices: dict[str, object]):
    assert main(["run", *given]) == 7
    assert started == [(job, choices)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "the following arguments are required: SCRIPT; see: oneaccord run --help"),
        (["-n"], "argument -n/--ranks: expected one argument"),
        (["-n", "two", "s.py"], "'two' is no number of ranks; this host has"),
        (["--grace", "x", "s.py"], "argument --grace: invalid float value: 'x'"),
        (["--rank", "2", "s.py"], "has no option --rank; write --ranks"),
        (["--bakend=tcp", "s.py"], "has no option --bakend; write --backend"),
        (["--zebra", "s.py"], "has no option --zebra; see: oneaccord run --help"),
        (["-x", "s.py"], "has no option -x; "),
    ],
)
def test_words_that_mean_nothing_are_refused(capsys, started: Started, given: list[str], said: str):
    assert main(["run", *given]) == 2
    assert said in capsys.readouterr().err
    assert started == []


def test_the_help_of_run_groups_its_options(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["run", "-n", "2", "--help"])
    page = capsys.readouterr().out
    assert ended.value.code == 0
    titles = [line for line in page.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["basic:", "several hosts:", "elastic jobs:", "input and output:"]
    assert page.index("basic:") < page.index("--config") < page.index("several hosts:") < page.index("--nnodes N")
    assert "--nproc" not in page


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["-np", "4", "h.py"], "has no option -np; write -n NUMBER"),
        (["-mca", "btl", "tcp", "h.py"], "has no option -mca; it is mpirun's"),
        (["-x", "A", "h.py"], "has no option -x; write --env NAME=VALUE"),
        (["--backend", "tcp", "--nproc-per-node=4", "h.py"], "has no option --nproc-per-node; write -n NUMBER"),
        (["--nproc_per_node", "4", "h.py"], "has no option --nproc_per_node; write -n NUMBER"),
        (["--node_rank", "1", "h.py"], "has no option --node_rank; write --node-rank"),
        (["-m", "--standalone", "h"], "has no option --standalone; leave it out"),
        (["-H", "node1:2", "h.py"], "has no option -H; write --on ssh --hosts node1:4,node2:4"),
    ],
)
def test_options_of_other_launchers_get_an_answer(capsys, given, said):
    assert main(["run", *given]) == 2
    assert said in capsys.readouterr().err


def test_auto_starts_a_rank_for_each_processor(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h.py").write_text("")
    monkeypatch.setattr("oneaccord.local.counting.processors", lambda: 3)
    jobs: list[Launch] = []
    monkeypatch.setattr("oneaccord.local.processes.run_job", lambda job, *_: len(jobs.append(job) or jobs))
    assert main(["run", "-n", "auto", "--backend", "tcp", "h.py"]) == 1
    assert jobs[0].ranks == 3
    assert capsys.readouterr().err == "oneaccord run: -n auto: 3 ranks, one for each processor that this process may use\n"
    assert main(["run", "-n", "auto", "--nnodes", "2", "--rendezvous", "h:1", "--run-id", "a", "--backend", "tcp", "h.py"]) == 2
    assert "-n auto counts for one host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("print(0)", "-n auto: the backend 'nccl' needs GPUs, and this process sees none; give the number"),
        (
            "raise OSError('libcuda.so.1: no')",
            "-n auto: the GPUs of this host cannot be counted: OSError: libcuda.so.1: no; give",
        ),
    ],
)
def test_auto_without_gpus_is_refused_for_nccl(monkeypatch, driver, said):
    monkeypatch.setattr(counting, "_COUNT_GPUS", driver)
    with pytest.raises(UsageError, match=re.escape(said)):
        counting.count_ranks("nccl", os.environ)


def test_auto_counts_the_gpus_for_nccl(monkeypatch):
    monkeypatch.setattr(counting, "_COUNT_GPUS", "print(4)")
    assert counting.count_ranks("nccl", os.environ) == (4, "one for each GPU that this process sees")


@pytest.mark.parametrize("option", [["--stdin", "1"], ["--log-dir", "d"]])
def test_a_backend_that_starts_ranks_itself_refuses(capsys, monkeypatch, tmp_path, option):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h.py").write_text("")
    assert main(["run", "-n", "2", "--backend", "simulated", *option, "h.py"]) == 2
    assert f"the backend 'simulated' starts the ranks itself, and has no option {option[0]}" in capsys.readouterr().err


def test_a_number_of_ranks_behind_the_script_is_told_of(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h.py").write_text("")
    monkeypatch.setattr("oneaccord.local.processes.run_job", lambda *_: 0)
    assert main(["run", "--backend", "tcp", "h.py", "-n", "4"]) == 0
    assert "and only one rank runs; to run 4 ranks: oneaccord run -n 4 h.py" in capsys.readouterr().err
    assert main(["run", "-n", "1", "--backend", "tcp", "h.py", "-n", "4"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("option", "variables", "name"),
    [
        ([], {}, None),
        ([], {"SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0"}, None),
        ([], {"SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0"}, "slurm 3.0"),
        ([], {"ONEACCORD_RUN_ID": "job 6"}, "job 6"),
        (["--run-id", "job 7"], {"ONEACCORD_RUN_ID": "job 6"}, "job 7"),
    ],
)
def test_a_run_of_several_hosts_gets_its_name_or_a_warning(capsys, monkeypatch, tmp_path, option, variables, name):
    monkeypatch.chdir(tmp_path)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("ONEACCORD_SECRET", "x" * 32)
    (tmp_path / "h.py").write_text("")
    jobs = []
    monkeypatch.setattr("oneaccord.local.processes.run_job", lambda job, *_: jobs.append(job) or 0)
    words = ["--nnodes", "2", "--rendezvous", "127.0.0.1:29500", "--backend", "tcp"]
    assert main(["run", *words, *option, "h.py"]) == 0
    assert jobs[0].environ.get("ONEACCORD_RUN_ID") == name
    assert ("without --run-id, a launcher left over" in capsys.readouterr().err) == (name is None)


def test_a_folder_that_was_removed_is_no_obstacle(run_python: Callable[..., CompletedProcess[str]]):
    script = """
import os, sys, tempfile
folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
from oneaccord.cli.main import main
sys.argv = ["oneaccord", "run", "--help"]
main()
"""
    done = run_python("-c", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plugin_beside_the_script_is_found(run_python: Callable[..., CompletedProcess[str]], tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "h.py").write_text("import oneaccord as oa\nwith oa.init() as group: print(group.world_size)")
    (tmp_path / "sub" / "beside_the_script.py").write_text("")
    done = run_python("-m", "oneaccord", "run", "--backend", "tcp", "sub/h.py", ONEACCORD_PLUGINS="beside_the_script")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] 1\n", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_end_no_job(tmp_path, closed):
    (tmp_path / "h.py").write_text(
        "import sys, os\nprint('x', file=sys.stderr)\nprint('y')\nopen(os.environ['RANK'], 'w').close()"
    )
    command = f'"$@" {closed}'
    job = [sys.executable, "-m", "oneaccord", "run", "-n", "2", "--backend", "tcp", "h.py"]
    assert subprocess.run(["sh", "-c", command, "-", *job], cwd=tmp_path, timeout=120, check=False).returncode == 0
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.isdigit()) == ["0", "1"]


def test_a_mistake_is_reported_as_it_always_is(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--config", "none.toml", "script.py"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: --config none.toml: there is no such file in")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("oneaccord.cli.main.run", "oneaccord: ended by SIGINT, while it started"),
        (
            "oneaccord.local.resolve.resolve_launcher",
            "oneaccord run: ended by SIGINT, while it was reading the configuration and looking for the backend",
        ),
        ("oneaccord.local.processes.run_job", "oneaccord run: ended by SIGINT, while it was getting ready to start the ranks"),
    ],
)
def test_an_interrupt_before_the_ranks_are_there_says_what_was_going_on(capsys, monkeypatch, tmp_path, where, said):
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr(where, interrupted)
    assert main(["run", "--backend", "tcp", "script.py"]) == 130
    assert capsys.readouterr().err.strip() == said


def test_a_launcher_loads_neither_typer_nor_numpy_nor_commands_before_the_ranks_start(
    run_python: Callable[..., CompletedProcess[str]], plugins, tmp_path
):
    (tmp_path / "script.py").write_text("")
    command = plugins("greet", "def greet() -> None: ...", group=COMMAND_GROUP, thing="greet")
    done = run_python(
        "-c",
        "import sys\n"
        "from oneaccord.local import processes\n"
        "processes.run_job = lambda *_: 0\n"
        "from oneaccord.cli.main import main\n"
        f"assert main(['run', '-n', '2', '--backend', 'tcp', {str(tmp_path / 'script.py')!r}]) == 0\n"
        f"print(*sorted({{'typer', 'rich', 'numpy', 'asyncio', 'msgspec', 'oneaccord_lab', {command!r}}} & set(sys.modules)))",
    )
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "")

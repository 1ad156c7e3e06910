"""``oneaccord run --on``: one job on several hosts, which are addresses of this one here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import host_launcher_here, preloaded
from support.on_hosts import ADDS, ELASTIC, LOOPS, WAIT_S, Runner, await_gone, holders

A, B = "127.0.0.5", "127.0.0.6"


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The variables by which a driver finds the launcher."""
    return {"PYTHONPATH": os.pathsep.join([host_launcher_here.install(tmp_path / "plugin"), *filter(None, sys.path)])}


@pytest.fixture
def here(tmp_path: Path, variables: dict[str, str]) -> Iterator[Runner]:
    """Start jobs whose processes have imported all."""
    python = preloaded.stand_in(tmp_path / "python")
    with contextlib.closing(Runner(tmp_path, ["--on", "here"], variables | {"HERE_PYTHON": str(python)})) as runner:
        yield runner


@pytest.fixture
def fresh(tmp_path: Path, variables: dict[str, str]) -> Iterator[Runner]:
    """Start jobs whose processes begin as those of a user: their words and variables are what others see."""
    with contextlib.closing(Runner(tmp_path, ["--on", "here"], variables, subprocess.Popen)) as runner:
        yield runner


def test_hosts_share_out_ranks_and_print_once(fresh: Runner) -> None:
    code, out, err = fresh.run(ADDS, "word", words=["-n", "3"])
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[0] rank 0 of 3 is 0 on 0: 6 ['word']",
        "[1] rank 1 of 3 is 1 on 0: 6 ['word']",
        "[2] rank 2 of 3 is 0 on 1: 6 ['word']",
    ]


def test_hosts_file_and_per_host_say_who_gets_what(here: Runner) -> None:
    file = here.folder / "hosts"
    file.write_text(f"# two of them\n{A} slots=4\n{B}:4  # the second\n")
    code, out, _ = here.run(ADDS, "x", words=["-n", "2", "--hostfile", str(file), "--per-host", "1"])
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] rank 0 of 2 is 0 on 0: 3 ['x']", "[1] rank 1 of 2 is 0 on 1: 3 ['x']"]


def test_hosts_one_host_alone_needs_no_address(here: Runner) -> None:
    code, out, err = here.run(ADDS, "x", words=["-n", "1", "--no-prefix", "--hosts", f"{A}:1"])
    assert (code, out, err) == (0, "rank 0 of 1 is 0 on 0: 1 ['x']\n", "")


def test_hosts_greeting_of_a_login_shell_is_ignored(here: Runner) -> None:
    shell = 'shell=echo "Welcome to $0"; echo motd >&2; exec "$@"'
    code, out, err = here.run(ADDS, "x", words=["-n", "3", "--option", shell])
    assert (code, len(out.splitlines()), "Welcome" in out + err) == (0, 3, False)


def test_hosts_module_where_a_login_begins_shadows_nothing(here: Runner) -> None:
    home = here.folder / "home"
    home.mkdir()
    (home / "json.py").write_text('raise SystemExit("not this one")')
    code, out, err = here.run(ADDS, "x", words=["-n", "3", "--option", f'shell=cd {home}; exec "$@"'])
    assert (code, len(out.splitlines())) == (0, 3), err


def test_hosts_long_output_arrives_whole_and_in_order(here: Runner) -> None:
    program = """
    import sys
    for number in range(20000): print("x" * 90, number)
    print("words", file=sys.stderr)
    """
    code, out, err = here.run(program, words=["-n", "2", "--per-host", "1"])
    assert (code, sorted(err.splitlines())) == (0, ["[0] words", "[1] words"])
    for rank in (0, 1):
        own = [line for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert own == [f"[{rank}] {'x' * 90} {number}" for number in range(20000)]


def test_hosts_output_that_nothing_reads_ends_all(here: Runner) -> None:
    program = """
    import os, pathlib, sys
    pathlib.Path(sys.argv[1], "rank-" + os.environ["RANK"]).write_text(f"{os.getpid()} -")
    while True: print("more")
    """
    job = here.start(program, words=["-n", "2", "--per-host", "1"])
    pids = job.ranks(2)
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.wait(WAIT_S) == 128 + signal.SIGPIPE
    await_gone(pids)


def test_hosts_exception_has_one_report_with_its_host(here: Runner) -> None:
    job = here.start(LOOPS, words=["-n", "4", "--per-host", "1", "--hosts", f"{A}:1,{B}:1,127.0.0.7:1,127.0.0.8:1"])
    pids = job.ranks(4)
    job.fail()
    code, _, err = job.finish()
    assert code == 1
    assert err.count("failed first") == 1
    assert f"oneaccord run: rank 1 failed first: exit code 1 on {B}\n" in err
    assert "oneaccord run: ranks 0, 2-3 failed after it" in err
    assert err.endswith("ValueError: asked to fail\n")
    await_gone(pids)


def test_hosts_exit_code_is_that_of_the_rank(here: Runner) -> None:
    code, _, err = here.run("import os, sys; sys.exit(7 if os.environ['RANK'] == '2' else 0)", words=["-n", "3"])
    assert (code, f"rank 2 failed first: exit code 7 on {B}" in err) == (7, True)


def test_hosts_rank_that_computes_is_ended_after_a_failure(here: Runner) -> None:
    program = """
    import os, signal, time
    if os.environ["RANK"] == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)
    """
    code, _, err = here.run(program, words=["-n", "4"])
    assert code == 137
    assert f"rank 3 failed first: killed by SIGKILL on {B}" in err
    assert "ranks 0-2 were ended because of it" in err


def test_hosts_keep_going_lets_other_hosts_be(here: Runner) -> None:
    program = "import os, sys; sys.exit(os.environ['RANK'] == '0')"
    code, _, err = here.run(program, words=["-n", "3", "--keep-going"])
    assert (code, "1 rank failed, and all others ended well" in err) == (0, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_hosts_signal_to_the_driver_ends_all(here: Runner, number: signal.Signals) -> None:
    job = here.start(LOOPS, words=["-n", "4"])
    pids = job.ranks(4)
    os.kill(job.pid, number)
    code, _, err = job.finish()
    assert (code, f"ended by {number.name}" in err) == (128 + number, True)
    await_gone(pids)


def test_hosts_signal_ends_a_driver_whose_host_reads_nothing(here: Runner) -> None:
    # The order is longer than a pipe holds.
    shell = f'if [ $0 = {B} ]; then touch "{here.folder}/hangs"; exec sleep 600; fi; exec "$@"'
    job = here.start(ADDS, *["x" * 100_000] * 3, words=["-n", "4", "--option", f"shell={shell}"])
    until = time.monotonic() + WAIT_S
    while not (here.folder / "hangs").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGINT)
    code, _, err = job.finish()
    assert (code, "ended by SIGINT, while the hosts were getting ready" in err) == (130, True)


def test_hosts_killed_driver_leaves_nothing(here: Runner) -> None:
    job = here.start(LOOPS, words=["-n", "4"])
    pids = [*job.ranks(4), *job.children()]
    os.kill(job.pid, signal.SIGKILL)
    assert job.finish()[0] == -signal.SIGKILL
    await_gone(pids)


def test_hosts_lost_host_is_named(here: Runner) -> None:
    job = here.start(LOOPS, words=["-n", "4"])
    pids = job.ranks(4)
    os.kill(job.children()[1], signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 137
    assert f"rank 2 failed first: its host {B} was lost: sh ended (killed by SIGKILL)" in err
    await_gone(pids)


def test_hosts_secret_is_with_the_ranks_alone(fresh: Runner) -> None:
    job = fresh.start(LOOPS, words=["-n", "4"], ONEACCORD_SECRET="5e" * 32)
    pids = job.ranks(4)
    assert job.secret() != "5e" * 32
    assert holders(job.secret()) <= set(pids)
    job.stop()
    assert job.finish()[0] == 0


SHOWS = """
import os
names = ("NCCL_DEBUG", "OMP_NUM_THREADS", "ONEACCORD_TIMEOUT_S", "MY_FLAG", "MY_TOKEN", "LEFT", "PATH", "ONEACCORD_RANK")
print({name: os.environ.get(name) for name in names})
try:
    import beside
    print(beside.WORD)
except ImportError:
    print("no module")
"""


def test_hosts_get_variables_that_tune_ranks_and_those_of_env(here: Runner) -> None:
    modules = here.folder / "modules"
    modules.mkdir()
    (modules / "beside.py").write_text("WORD = 'found beside'")
    path = os.pathsep.join([str(modules), here.variables["PYTHONPATH"]])
    # What the hosts have of their own: this command's variables would be there too, because its hosts are here.
    there = 'exec env -u NCCL_DEBUG -u OMP_NUM_THREADS -u MY_TOKEN -u LEFT -u ONEACCORD_TIMEOUT_S PATH=/theirs PYTHONPATH="$THEIRS" "$@"'
    given = {
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "3",
        "ONEACCORD_TIMEOUT_S": "77",
        "MY_TOKEN": "t0ken",
        "LEFT": "here",
        "ONEACCORD_RANK": "9",
    }
    words = [
        "-n",
        "2",
        "--per-host",
        "1",
        "--env",
        "MY_FLAG=a=b c",
        "--env",
        "MY_TOKEN",
        "--option",
        f"shell={there}",
        "--no-prefix",
    ]
    theirs, here.variables["PYTHONPATH"] = here.variables["PYTHONPATH"], path
    job = here.start(SHOWS, words=words, **given, THEIRS=theirs)
    code, out, err = job.finish()
    assert (code, err) == (0, "")
    found = {
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "3",
        "ONEACCORD_TIMEOUT_S": "77",
        "MY_FLAG": "a=b c",
        "MY_TOKEN": "t0ken",
        "LEFT": None,
        "PATH": "/theirs",
        "ONEACCORD_RANK": None,
    }
    assert sorted(out.splitlines()) == sorted([str(found), "found beside"] * 2)


def test_run_env_holds_for_ranks_of_this_host(here: Runner) -> None:
    here.words = ["-n", "2", "--env", "MY_FLAG=1", "--env", "OMP_NUM_THREADS=5", "--env", "LEFT"]
    code, out, err = here.start(SHOWS, LEFT="here").finish()
    assert (code, err) == (0, "")
    assert out.count("'OMP_NUM_THREADS': '5'") == 2
    assert out.count("'MY_FLAG': '1'") == out.count("'LEFT': 'here'") == 2


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("NOT_SET", "--env NOT_SET: the variable is not set here; set it, or write --env NOT_SET=VALUE"),
        ("ONEACCORD_SECRET=x", "each job has a secret of its own"),
        ("RANK=0", "--env RANK: the launcher sets this variable for each rank"),
        ("=x", "write NAME=VALUE"),
    ],
    ids=["not set", "secret", "rank", "no name"],
)
@pytest.mark.parametrize("words", [["--on", "here"], []], ids=["hosts", "one host"])
def test_run_env_that_cannot_be_is_refused(here: Runner, words: list[str], word: str, message: str) -> None:
    here.words = words
    code, out, err = here.run(SHOWS, words=["-n", "2", "--env", word])
    assert (code, out, message in err) == (2, "", True), err


def test_hosts_two_jobs_at_once(here: Runner) -> None:
    jobs = [here.start(LOOPS, words=["-n", "3"], name=name) for name in ("one", "two")]
    for job in jobs:
        job.ranks(3)
        job.stop()
    for job in jobs:
        code, out, _ = job.finish()
        assert (code, sorted(out.splitlines())) == (0, [f"[{rank}] rank {rank} is done" for rank in range(3)])


def test_hosts_killed_rank_is_replaced(here: Runner) -> None:
    code, out, err = here.run(ELASTIC, words=["-n", "4", "--max-restarts", "1"])
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] 1 4" for rank in range(4)]
    assert "rank 3 failed (killed by SIGKILL), and another one comes in its place: restart 1 of 1" in err


LOSES_A_HOST = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import oneaccord as oa

folder = Path(sys.argv[1])

@oa.elastic(state=lambda: {"step": 0})
def train(group, generation, state):
    while state["step"] < 200:
        if group.all_reduce(np.array(float(folder.joinpath("refilled").exists()))) == group.world_size:
            break
        state["step"] += 0 if generation else 1
        state.commit()
        if state["step"] == 20 and generation == 0 and os.environ["RANK"] == os.environ["KILLS"]:
            os.kill(int(folder.joinpath("agent").read_text()), signal.SIGKILL)
        if generation and group.world_size == int(os.environ["FULL"]):
            folder.joinpath("refilled").touch()
        time.sleep(0.01)
    return generation > 0, group.world_size

print(*train())
"""


def lose(here: Runner, host: str, rank: int, *words: str, full: int = 4, start: str = "") -> tuple[int, str, str]:
    """Run a job that loses a host when it has come together; ``start`` is run before the agent of that host."""
    shell = f'if [ $0 = {host} ]; then {start} echo $$ > "{here.folder}/job/agent"; fi; exec "$@"'
    words = ("-n", "4", "--option", f"shell={shell}", *words)
    return here.start(LOSES_A_HOST, words=words, KILLS=str(rank), FULL=str(full)).finish()


def test_hosts_lost_host_is_started_again(here: Runner) -> None:
    code, out, err = lose(here, B, 3, "--max-restarts", "2")
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] True 4" for rank in range(4)]
    assert f"host {B} was lost (sh ended (killed by SIGKILL)), and its ranks are started again: restart 1 of 2" in err
    assert f"its host {B} was lost" in err.rpartition("-" * 80)[2]


def test_hosts_lost_host_that_does_not_come_back_is_left(here: Runner) -> None:
    start = f'if [ -e "{here.folder}/job/agent" ]; then echo no such host >&2; exit 7; fi;'
    code, out, err = lose(here, B, 3, "--max-restarts", "2", full=2, start=start)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] True 2" for rank in range(2)]
    assert "started again: restart 1 of 2" in err


def test_hosts_lost_first_host_is_not_replaced(here: Runner) -> None:
    code, out, err = lose(here, A, 0, "--max-restarts", "2", full=2)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] True 2" for rank in (2, 3)]
    assert f"host {A} was lost (sh ended (killed by SIGKILL)), and its ranks are not replaced: it is the first host" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "sssh"], "there is no launcher 'sssh'"),
        (["--on", "broken"], "the launcher 'broken' cannot be used here: the moon is full; try: pip install moon"),
        (["-n", "5"], f"5 ranks do not fit on these hosts ({A}: 2, {B}: 2)"),
        (["--nnodes", "2"], "with --on here leave them out"),
        (["--max-ranks", "6"], "spares are for one host"),
        (["--option", "nope=1"], "takes KEY=VALUE with one of these keys: hosts, shell"),
        (["--hosts", "a:0"], "'a:0' is no host"),
        (["--hosts", "a:1", "--hostfile", "f"], "give one of them"),
        (["--hostfile", "/nowhere"], "the hosts file /nowhere cannot be read"),
        (["--option", "folder=/nowhere"], ": the working directory /nowhere cannot be entered there"),
        (
            ["--option", "shell=echo locked >&2; exit 5"],
            "cannot be reached, or has no oneaccord: sh ended (exit code 5): locked",
        ),
        (["--backend", "simulated"], ": the backend 'simulated' starts the ranks itself"),
    ],
)
def test_hosts_what_cannot_be_is_refused(here: Runner, words: list[str], message: str) -> None:
    code, out, err = here.run(ADDS, words=["-n", "4", *words])
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2", "--per-host", "2"], "--per-host is for a launcher on other hosts: name it by --on"),
        (["-n", "2", "--hosts", "a:2", "--option", "nope=1"], "the launcher 'ssh' takes KEY=VALUE"),
    ],
    ids=["needs --on", "ssh without --on"],
)
def test_hosts_options_without_on_are_for_ssh(here: Runner, words: list[str], message: str) -> None:
    here.words = []
    code, _, err = here.run(ADDS, words=words)
    assert (code, message in err) == (2, True), err

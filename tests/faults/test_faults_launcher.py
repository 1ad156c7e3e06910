"""Failures of jobs that `oneaccord run` started: what the user reads last, the exit code, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.preloaded import BEARING, Started
from support.waiting import until

PREAMBLE = """
import os, signal, sys, time
alive = os.open(os.environ["ALIVE"], os.O_WRONLY)
import numpy as np
import oneaccord as oa
rank = int(os.environ["RANK"])
def ready():
    os.write(alive, b"%d\\n" % os.getpid())
"""

Start = Callable[..., "Launch"]


class Launch:
    """A launcher and its ranks, all of which hold the write end of one named pipe while they live."""

    def __init__(self, directory: Path, program: str, ranks: int, *options: str, **variables: str) -> None:
        script = directory / "program.py"
        script.write_text(PREAMBLE + textwrap.dedent(program))
        alive = directory / "alive"
        os.mkfifo(alive)
        self._alive = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ONEACCORD_", "SLURM_", "PMI")) or name == "ONEACCORD_TRACEBACK"
        }
        words = ["-m", "oneaccord", "run", "-n", str(ranks), "--backend", "tcp", *options, script]
        self._out = directory / "output"
        environ = clean | BEARING | {"ALIVE": str(alive), "COLUMNS": "200", "NO_COLOR": "1"} | variables
        self.job = Started(words, cwd=directory, environ=environ, out=self._out)

    def until_ready(self, ranks: int) -> list[int]:
        """Wait until that many ranks are ready; return their process ids."""
        text = b""
        while text.count(b"\n") < ranks:
            assert select.select([self._alive], [], [], 45)[0], "the ranks do not come"
            text += os.read(self._alive, 4096)
        return [int(line) for line in text.split()]

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end; check that nothing of the job lives; return the exit code and both outputs."""
        code = self.job.finish()
        while data := (os.read(self._alive, 4096) if select.select([self._alive], [], [], 30)[0] else b"somebody lives"):
            assert data != b"somebody lives", "a process of the job is still there"
        return code, self._out.read_text(), self.job.said

    def close(self) -> None:
        """End what is left."""
        self.job.close()
        os.close(self._alive)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    launches: list[Launch] = []

    def begin(program: str, ranks: int = 3, *options: str, **variables: str) -> Launch:
        launches.append(Launch(tmp_path, program, ranks, *options, **variables))
        return launches[-1]

    yield begin
    for launch in launches:
        launch.close()


def test_the_traceback_of_the_rank_that_raised_is_shown_last(start: Start) -> None:
    launch = start("""
        with oa.init() as group:
            group.barrier()
            if rank == 1:
                raise ValueError("no such digit: 11")
            try:
                group.recv(1)
            except oa.AbortedError as error:
                print(f"peer={error.peer}: {error}", flush=True)
                raise
    """)
    code, out, err = launch.finish()
    assert code == 1
    told = "peer=1: rank 1 ended with ValueError: no such digit: 11"
    lines = [line for line in out.splitlines() if "peer=" in line]
    assert all(line.endswith(told) for line in lines)
    assert err.rstrip().splitlines()[-1] == "ValueError: no such digit: 11"
    last = err[err.rindex("oneaccord run: rank 1 failed first: exit code 1") :]
    assert "oneaccord run: the error of rank 1:\nTraceback (most recent call last):" in last
    assert 'raise ValueError("no such digit: 11")' in last


@pytest.mark.parametrize(
    ("number", "whom"), [(signal.SIGINT, "group"), (signal.SIGINT, "launcher"), (signal.SIGTERM, "launcher")]
)
def test_a_signal_ends_all(start: Start, number: signal.Signals, whom: str) -> None:
    launch = start("""
        with oa.init() as group:
            group.barrier()
            ready()
            x = np.zeros(1 << 16)
            while True:
                group.all_reduce(x, out=x)
    """)
    launch.until_ready(3)
    if whom == "group":
        os.killpg(launch.job.pid, number)
    else:
        os.kill(launch.job.pid, number)
    code, _, err = launch.finish()
    assert code == 128 + number
    summary = err[err.index("-" * 80) :].splitlines()
    assert summary[1] == f"oneaccord run: ended by {number.name}, when the ranks were here:"
    # One may still be on its way from saying that it is ready.
    assert all(re.fullmatch(r"  ranks? [012, -]+: (in all_reduce )?at program\.py:\d+", line) for line in summary[2:]), summary
    named = (
        " ".join(line.partition(":")[0] for line in summary[2:])
        .replace("0-1", "0 1")
        .replace("1-2", "1 2")
        .replace("0-2", "0 1 2")
    )
    assert sorted(re.findall(r"\d", named)) == ["0", "1", "2"]
    assert "Traceback" not in err


def test_after_sigterm_ranks_have_the_time_that_was_given_and_the_launcher_says_so(start: Start, tmp_path: Path) -> None:
    launch = start(
        """
        import signal, time
        from pathlib import Path
        with oa.init() as group:
            told = []
            signal.signal(signal.SIGTERM, lambda *_: told.append(1))
            group.barrier()
            ready()
            while not group.all_reduce(len(told), "max"):
                pass
            while not Path("go").exists():
                time.sleep(0.05)
            print("saved", flush=True)
        """,
        3,
        "--grace",
        "600",
        PRELOADED_FIRST="",  # the launcher speaks after its own time for others to fail, in which here none does
    )
    launch.until_ready(3)
    os.kill(launch.job.pid, signal.SIGTERM)
    launch.job.await_words("SIGTERM was passed on at once, and ranks 0-2 may take 600 s in all to end (--grace)")
    (tmp_path / "go").touch()
    code, out, err = launch.finish()
    assert code == 128 + signal.SIGTERM
    assert sorted(out.splitlines()) == [f"[{rank}] saved" for rank in range(3)]
    assert err.endswith("oneaccord run: ended by SIGTERM\n")


@pytest.mark.parametrize("ended", [0, 1])
def test_a_rank_that_ends_before_init_is_not_waited_for(start: Start, ended: int) -> None:
    launch = start(f"""
        if rank != {ended}:
            began = time.monotonic()
            try:
                oa.init(timeout_s=600)
            except oa.PeerLostError as error:
                print(error.peer, error)
            assert time.monotonic() - began < 300
    """)
    code, out, err = launch.finish()
    told = (
        f"{ended} rank {ended} was lost before the ranks had met: its process ended (exit code 0) before it came into the job"
    )
    assert (code, sorted(out.splitlines())) == (0, [f"[{rank}] {told}" for rank in range(3) if rank != ended]), err


def test_sigusr1_to_the_launcher_reaches_the_ranks_that_handle_it(start: Start, tmp_path: Path) -> None:
    records = tmp_path / "records"
    launch = start(
        """
        heard = []
        if rank == 2:
            signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        with oa.init() as group:
            if rank == 1:
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the signal would end it
            group.barrier()
            ready()
            while rank == 2 and not (heard and os.path.exists("go")):
                time.sleep(0.005)
            group.barrier()
            print(f"rank {rank} heard {len(heard)}")
        """,
        3,
        "--record",
        str(records),
    )
    launch.until_ready(3)
    os.kill(launch.job.pid, signal.SIGUSR1)
    launch.job.await_words("oneaccord run: SIGUSR1 was passed on to 2 of 3 running ranks")
    until(lambda: list(records.glob("*.json")))
    # The others have written nothing: their program has its own use for the signal.
    assert [json.loads(path.read_bytes())["rank"] for path in records.glob("*.json")] == [0]
    (tmp_path / "go").touch()
    code, out, _ = launch.finish()
    assert code == 0
    assert sorted(re.findall(r"rank (\d) heard (\d)", out)) == [("0", "0"), ("1", "0"), ("2", "1")]


def test_records_after_sigterm_without_any_are_not_promised(start: Start, tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    (records / "former-rank-0.json").write_text("{}")  # of another job
    program = """
        with oa.init() as group:
            group.barrier()
            ready()
            time.sleep(600)
    """
    launch = start(program, 2, "--record", str(records))
    launch.until_ready(2)
    os.kill(launch.job.pid, signal.SIGTERM)
    _, _, err = launch.finish()
    assert f"the ranks have recorded nothing in {records}: " in err
    assert "oneaccord explain" not in err


def test_records_of_a_failed_job_are_shown_with_the_command(start: Start, tmp_path: Path) -> None:
    records = tmp_path / "records"
    launch = start("with oa.init() as group: group.all_reduce(np.zeros(3 + rank))", 2, "--record", str(records))
    _, _, err = launch.finish()
    assert err.endswith(f"oneaccord run: what the ranks recorded: oneaccord explain {records}\n")


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "dmesg"), (signal.SIGSEGV, "PYTHONFAULTHANDLER=1")])
def test_a_kill_without_a_traceback_says_where_to_look(start: Start, number: signal.Signals, words: str) -> None:
    launch = start(
        """
        with oa.init() as group:
            if rank == 1:
                os.kill(os.getpid(), signal.NAME)
            group.barrier()
    """.replace("NAME", number.name)
    )
    code, _, err = launch.finish()
    assert code == 128 + number
    assert "PeerLostError: rank 1 was lost" in err
    assert re.search(rf"rank 1 left no traceback, and wrote nothing to its standard error; .*{words}", err)


def test_a_rank_that_leaves_by_os_exit_zero_is_named(start: Start) -> None:
    launch = start("""
        with oa.init() as group:
            if rank == 1:
                os._exit(0)
            group.barrier()
    """)
    code, _, err = launch.finish()
    assert code == 1
    assert err.endswith("oneaccord run: rank 1 ended with exit code 0\n")


def test_a_mismatch_is_read_by_the_user_in_words(start: Start) -> None:
    launch = start("""
        with oa.init() as group:
            group.all_reduce(np.zeros(3 if rank else 4))
    """)
    code, out, err = launch.finish()
    assert code == 1
    assert "CollectiveMismatchError: the ranks did not make the same call" in err
    assert (out + err).count("the ranks did not make the same call") == 1, "once is enough"
    # A rank that has not come to the call is told as such; the two that found the mismatch are there.
    assert re.search(r"  rank 0: all_reduce\(float64\[4\]", err)
    assert re.search(r"  ranks? (1|2|1-2): all_reduce\(float64\[3\]", err)


def test_what_several_ranks_would_say_alike_is_said_once(start: Start) -> None:
    launch = start("""
        def step(group):
            group.all_reduce(np.ones(2), op='no such')
        with oa.init() as group:
            group.barrier()
            step(group)
    """)
    _, out, err = launch.finish()
    assert (out + err).count("is not a reduction") == 1, err
    assert re.search(r"^\[\d\] .*program\.py\D*\d+", err, re.MULTILINE), "each rank says where it was"


MISTAKEN = """
        def step(group):
            group.all_reduce(np.zeros(3 if rank else 4))
        with oa.init() as group:
            step(group)
"""


def test_tracebacks_hold_the_users_frames(start: Start) -> None:
    _, _, err = start(MISTAKEN).finish()
    last = err[err.index("oneaccord run: the error of rank") :]
    assert re.findall(r"File .*/(.*)\", line \d+, in (.*)", last) == [("program.py", "<module>"), ("program.py", "step")]
    assert ", without the frames inside oneaccord (ONEACCORD_TRACEBACK=full shows them):" in last
    assert "collectives.py" not in err


@pytest.mark.parametrize("backend", ["tcp", "simulated"])
def test_tracebacks_are_whole_where_that_is_asked_for(start: Start, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setenv("ONEACCORD_TRACEBACK", "full")
    _, _, err = start(MISTAKEN, 3, "--backend", backend).finish()
    last = err[err.index("-" * 80) :]
    assert "in step\n" in last
    assert "collectives.py" in last
    assert "ONEACCORD_TRACEBACK" not in last


def test_two_groups_one_after_the_other_meet_at_the_launchers_socket(start: Start) -> None:
    launch = start("""
        for _ in range(3):
            with oa.init() as group:
                print(group.all_reduce(np.ones(1))[0], flush=True)
    """)
    code, out, err = launch.finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == sorted(f"[{rank}] 3.0" for rank in range(3) for _ in range(3))


GOING_ON = """
    group = oa.init(timeout_s=30)
    try:
        group.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()
    except oa.PeerLostError:
        group = group.shrink()
    time.sleep(1.5)  # longer than ranks have that are to end
    print(f"one of {group.all_gather_object(rank)}", flush=True)
    group.barrier()
"""


def test_with_keep_going_the_survivors_of_a_kill_end_well(start: Start) -> None:
    launch = start(GOING_ON + "    group.close()\n", 3, "--keep-going")
    code, out, err = launch.finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0] one of [0, 2]", "[2] one of [0, 2]"]
    assert err.splitlines()[-2:] == [
        "oneaccord run: 1 rank failed, and all others ended well",
        "oneaccord run: rank 1: killed by SIGKILL",
    ]


def test_with_keep_going_a_rank_that_fails_because_of_another_is_a_failure(start: Start) -> None:
    launch = start(
        GOING_ON.replace(
            "group = group.shrink()", "raise SystemExit(0) if rank == 2 else oa.PeerLostError('lost', rank=0, peer=1)"
        ),
        3,
        "--keep-going",
    )
    code, _, err = launch.finish()
    assert code == 137
    assert "failed first: killed by SIGKILL" in err


def test_with_keep_going_all_ranks_that_raise_are_told_of(start: Start) -> None:
    launch = start(
        """
        group = oa.init(timeout_s=30)
        try:
            group.barrier()  # rank 1 may have left it, and failed, while others are still in it
            if rank == 1:
                raise ValueError("no such digit: 11")
            group.barrier()
        except oa.CommError:
            group = group.shrink()
        group.barrier()
        group.close()
        """,
        3,
        "--keep-going",
    )
    code, _, err = launch.finish()
    assert code == 0, err
    assert "oneaccord run: rank 1: exit code 1\nTraceback (most recent call last):" in err
    assert err.rstrip().endswith("ValueError: no such digit: 11")


def test_with_keep_going_a_job_of_which_nobody_is_left_has_failed(start: Start) -> None:
    launch = start("oa.init(timeout_s=30).barrier(); sys.exit(5)", 2, "--keep-going")
    code, _, err = launch.finish()
    assert code == 5
    assert "failed first: exit code 5" in err


def test_with_keep_going_what_ended_the_job_is_told_last_and_what_it_had_survived_before(start: Start) -> None:
    launch = start(
        GOING_ON
        + """
    if rank == 2:
        raise ValueError("no such digit: 11")
    group.barrier()
""",
        3,
        "--keep-going",
    )
    code, _, err = launch.finish()
    assert code == 1
    lines = err.splitlines()
    assert "oneaccord run: rank 1 failed, and the others continued: killed by SIGKILL" in lines
    assert "oneaccord run: rank 2 failed then: exit code 1" in lines
    assert "[0] shrink() has renumbered the ranks: rank 1 is the one that began as rank 2" in lines
    assert lines[-1] == "ValueError: no such digit: 11"


def test_with_keep_going_a_last_rank_that_is_stopped_is_told_of_and_waited_for(start: Start) -> None:
    launch = start(
        """
        import signal
        group = oa.init(timeout_s=30)
        group.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            sys.exit()
        group.barrier(timeout_s=1)
        """,
        2,
        "--keep-going",
    )
    said = launch.job.await_words("oneaccord run: rank 1 is stopped, and no other one runs: kill -CONT ")
    os.kill(int(said.partition("kill -CONT ")[2].partition(",")[0]), signal.SIGCONT)
    code, _, err = launch.finish()
    assert code == 1
    assert "DeadlineError: barrier #1 did not finish within 1 s" in err

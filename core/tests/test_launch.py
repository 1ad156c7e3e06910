"""The launcher, with real processes: what ranks get, what the user sees, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from waiting import until
from worlds import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

DRIVER = """
import json, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test run under nohup ignores it, and programs inherit that
from manyhands.launch import processes
from manyhands.launch.launching import Launch
given = json.loads(sys.argv[1])
processes._END_S = processes._STOP_S = given.pop("end_s")
given["args"] = tuple(given.get("args", ()))
sys.exit(processes.run_job(Launch(**given)))
"""

WATCHED = """
import os, signal, subprocess, sys, time
def report(fifo):
    pipe = os.open(fifo, os.O_WRONLY)
    os.write(pipe, b"%d\\n" % os.getpid())
"""


started: list[subprocess.Popen[str]] = []
forking: list[bool] = [False]


@pytest.fixture(autouse=True, params=[pytest.param(False, id="exec"), pytest.param(True, id="fork", marks=pytest.mark.long)])
def _in_both_forms(request: pytest.FixtureRequest) -> None:
    """Start ranks as processes of their own, and forked from one; what begins otherwise then is tested by test_launch_fork.py."""
    forking[-1] = request.param


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """End the launchers of a test that failed; their guards end the rest."""
    yield
    while started:
        with started.pop() as process:
            process.kill()


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MANYHANDS_", "SLURM_", "PMI"))}
    return clean | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | variables


def start(
    directory: Path,
    script: str,
    *,
    end_s: float = 30.0,
    environ: dict[str, str] | None = None,
    process_group: int | None = None,
    **job: Any,
) -> subprocess.Popen[str]:
    """Start a launcher for ``script``; ``job`` is what `Launch` takes."""
    path = directory / "program.py"
    path.write_text(textwrap.dedent(script))
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps({"target": str(path), "end_s": end_s, "fork": forking[-1], **job})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=directory,
        env=environment(**(environ or {})),
        process_group=process_group,
        text=True,
        errors="surrogateescape",
        # The bytes as they are: no newline is translated.
        encoding="ascii",
    )
    started.append(process)
    return process


def launch(directory: Path, script: str, *, typed: str = "", **job: Any) -> subprocess.CompletedProcess[str]:
    process = start(directory, script, **job)
    out, err = process.communicate(typed, timeout=50)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def state_of(process: int) -> str:
    """Return the letter of a process' state, such as T for one that is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


class Watch:
    """A named pipe that every process of a job opens and holds: its end means that all of them are gone."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "alive"
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_for(self, processes: int) -> list[int]:
        """Return the ids of that many processes once all of them run."""
        text = b""
        while text.count(b"\n") < processes:
            more = self._read()
            assert more, f"all have ended, and {text!r} is all that they said"
            text += more
        return [int(word) for word in text.split()]

    def assert_all_gone(self) -> None:
        assert self._read() == b""

    def close(self) -> None:
        os.close(self._fd)

    def _read(self) -> bytes:
        assert select.select([self._fd], [], [], 30)[0], "a process is still there after 30 s"
        return os.read(self._fd, 4096)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    watched = Watch(tmp_path)
    yield watched
    watched.close()


# ------------------------------------------------------------------ what ranks get


def test_each_rank_gets_torchruns_variables(tmp_path: Path) -> None:
    script = """
        import json, os, sys
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MY_OWN"]
        others = ["MASTER_PORT", "MANYHANDS_LAUNCHED", "MANYHANDS_SECRET", "TORCHELASTIC_RUN_ID"]
        print(json.dumps([{n: os.environ[n] for n in names}, [os.environ[n] for n in others] + [hash("text")],
                          "MANYHANDS_RENDEZVOUS_FD" in os.environ, "MANYHANDS_RANK" in os.environ]))
    """
    done = launch(tmp_path, script, ranks=3, environ={"MANYHANDS_RANK": "7", "MY_OWN": "x"}, prefix=False)
    assert done.stderr == ""
    assert done.returncode == 0
    seen = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda one: str(one[0]["RANK"]))
    for rank, (variables, _, has_socket, misled) in enumerate(seen):
        assert variables == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MY_OWN": "x",
        }
        assert has_socket == (rank == 0)
        assert not misled
    shared = {tuple(others) for _, others, _, _ in seen}
    assert len(shared) == 1
    port, place, secret, _, _ = shared.pop()
    host, _, met = place.rpartition(":")
    assert host == "127.0.0.1"
    assert 0 < int(met) < 65536
    assert 0 < int(port) < 65536
    assert port != met  # which is taken, and what else meets at MASTER_PORT needs it
    assert len(bytes.fromhex(secret)) == 32


MEET = """
    import os, socket
    host, _, port = os.environ["MANYHANDS_LAUNCHED"].rpartition(":")
    address = host, int(port)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        listener = socket.socket(fileno=int(os.environ["MANYHANDS_RENDEZVOUS_FD"]))
        assert listener.getsockname()[1] == address[1]
        heard = []
        for _ in range(size - 1):
            peer, _ = listener.accept()
            with peer:
                heard.append(int.from_bytes(peer.recv(1)))
        print("heard", sorted(heard))
    else:
        for _ in range(600):  # on another host, rank 0 may not be there yet
            try:
                with socket.create_connection(address, timeout=10) as link:
                    link.send(bytes([rank]))
                break
            except ConnectionRefusedError:
                __import__("time").sleep(0.05)
"""


def test_rank_0_gets_the_socket_to_which_the_others_connect(tmp_path: Path) -> None:
    done = launch(tmp_path, MEET, ranks=4)
    assert done.stderr == ""
    assert (done.returncode, done.stdout) == (0, "[0] heard [1, 2, 3]\n")


def test_two_hosts_make_one_world(tmp_path: Path) -> None:
    shared: dict[str, Any] = {
        "ranks": 2,
        "nodes": 2,
        "rendezvous": f"127.0.0.1:{free_port()}",
        "environ": {"MANYHANDS_SECRET": "s"},
    }
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    script = (
        MEET
        + """
    print(os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], os.environ["TORCHELASTIC_RUN_ID"], hash("text"))
    """
    )
    hosts = [start(directory, script, node_rank=number, **shared) for number, directory in enumerate(directories)]
    outputs = [host.communicate(timeout=50) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    job = f"manyhands-{shared['rendezvous']} {outputs[0][0].split()[-1]}"  # one order of sets on all hosts
    assert sorted(outputs[0][0].splitlines()) == [f"[0] 0 0 {job}", "[0] heard [1, 2, 3]", f"[1] 1 0 {job}"]
    assert sorted(outputs[1][0].splitlines()) == [f"[2] 0 1 {job}", f"[3] 1 1 {job}"]


@pytest.mark.parametrize(("given", "seed"), [("17", 17), ("", 327496389)])
def test_a_seed_of_hashes_comes_from_the_user_or_the_secret(tmp_path: Path, given: str, seed: int) -> None:
    script = "import os; print(os.environ['PYTHONHASHSEED'], hash('text'))"
    environ = {"PYTHONHASHSEED": given, "MANYHANDS_SECRET": "s"}
    seen = set(launch(tmp_path, script, ranks=2, prefix=False, environ=environ).stdout.splitlines())
    expected = subprocess.run(
        [sys.executable, "-c", script], env=environment(PYTHONHASHSEED=str(seed)), capture_output=True, text=True, check=True
    )
    assert seen == {expected.stdout.strip()}


def test_arguments_and_a_secret_reach_the_script_untouched_and_its_last_line_is_ended(tmp_path: Path) -> None:
    args = ["-n", "3", "--help", "", "a b", "--", "*"]
    script = "import os, sys; print(sys.argv[1:]); print(os.environ['MANYHANDS_SECRET'], end='')"
    done = launch(tmp_path, script, args=args, environ={"MANYHANDS_SECRET": "mine"})
    assert done.stdout == f"[0] {args}\n[0] mine\n"


def test_a_module_runs_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "inside.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    done = launch(tmp_path, "", target="package.inside", is_module=True, args=["x"])
    assert (done.returncode, done.stdout) == (0, "[0] __main__ package.inside ['x']\n")


def test_rank_0_reads_what_is_typed(tmp_path: Path) -> None:
    script = "import sys; print(repr(sys.stdin.read()))"
    assert sorted(launch(tmp_path, script, ranks=2, typed="you").stdout.splitlines()) == ["[0] 'you'", "[1] ''"]
    assert launch(tmp_path, script, ranks=1, typed="you").stdout == "[0] 'you'\n"


# ------------------------------------------------------------------ output


def test_lines_of_ranks_never_mix(tmp_path: Path) -> None:
    script = """
        import os, sys
        rank = os.environ["RANK"]
        for number in range(2000):
            sys.stdout.write(f"{rank} {number} "); sys.stdout.write("x" * 50); sys.stdout.write("\\n")
    """
    done = launch(tmp_path, script, ranks=3)
    lines = done.stdout.splitlines()
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[{rank}]")]
        assert own == [f"[{rank}] {rank} {number} " + "x" * 50 for number in range(2000)]
    assert len(lines) == 6000


def test_prefixes_are_as_wide_as_the_largest_rank(tmp_path: Path) -> None:
    several: dict[str, Any] = {"nodes": 4, "node_rank": 3, "rendezvous": "127.0.0.1:1"}
    done = launch(tmp_path, "print('x')", ranks=3, environ={"MANYHANDS_SECRET": "s"}, **several)
    assert sorted(done.stdout.splitlines()) == ["[ 9] x", "[10] x", "[11] x"]


def test_ten_mebibytes_from_each_rank_and_each_stream_pass(tmp_path: Path) -> None:
    script = """
        import os, sys
        block = (b"y" * 1023 + b"\\n") * 1024
        for _ in range(5):
            sys.stdout.buffer.write(block); sys.stderr.buffer.write(block)
    """
    done = launch(tmp_path, script, ranks=2)
    for text in (done.stdout, done.stderr):
        assert len(text) == 2 * 5 * 1024 * (1024 + len("[0] "))
        assert set(text.splitlines()) == {f"[{rank}] " + "y" * 1023 for rank in range(2)}


def test_without_prefix_bytes_pass_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import sys; sys.stdout.buffer.write(bytes(range(256)) * 300)")
    given = json.dumps({"target": str(path), "end_s": 30.0, "fork": forking[-1], "prefix": False})
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, given], env=environment(), capture_output=True, timeout=30, check=False
    )
    assert done.stdout == bytes(range(256)) * 300


def test_output_appears_while_the_rank_still_runs(tmp_path: Path) -> None:
    process = start(tmp_path, "print('first'); import signal; signal.pause()", ranks=2)
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {"[0] first\n", "[1] first\n"}
    process.terminate()
    process.communicate(timeout=50)


def test_when_nobody_reads_any_more_the_job_ends(tmp_path: Path, watch: Watch) -> None:
    script = WATCHED + "report(sys.argv[1])\nwhile True: print('y' * 1000)"
    process = start(tmp_path, script, ranks=2, args=[str(watch.path)])
    watch.wait_for(2)
    assert process.stdout is not None
    process.stdout.close()
    with process:
        assert process.wait(timeout=50) == 128 + signal.SIGPIPE
    watch.assert_all_gone()


# ------------------------------------------------------------------ failure


def test_the_first_failing_rank_gives_the_exit_code_and_the_last_words(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        if os.environ["RANK"] == "1":
            print(os.environ["MANYHANDS_ERROR_FILE"])
            def deep():
                raise KeyError("the cause")
            try:
                deep()
            except KeyError as error:
                raise ValueError("bad shard") from error
        signal.pause()
    """
    done = launch(tmp_path, script, ranks=3)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("-" * 80) :]
    assert report.splitlines()[1:4] == [
        "manyhands run: rank 1 failed first: exit code 1",
        "manyhands run: ranks 0 and 2 were ended because of it",
        "manyhands run: the error of rank 1:",
    ]
    assert report.count("Traceback (most recent call last):") == 2
    assert report.splitlines()[4] == "Traceback (most recent call last):"
    assert "KeyError: 'the cause'" in report
    assert done.stderr.endswith("\nValueError: bad shard\n")
    folder = Path(done.stdout.removeprefix("[1] ").strip()).parent
    assert (folder.exists(), folder.parent.exists()) == (False, True)


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV"),
    ],
)
def test_how_a_rank_ended_is_told(tmp_path: Path, end: str, code: int, how: str) -> None:
    script = f"""
        import os, signal, sys
        if os.environ["RANK"] == "0":
            print("last words", file=sys.stderr)
            {end}
    """
    done = launch(tmp_path, script, ranks=2)
    assert done.returncode == code
    assert f"manyhands run: rank 0 failed first: {how}\n" in done.stderr
    assert done.stderr.endswith("last that it wrote to its standard error:\nlast words\n")


def test_a_rank_that_only_heard_of_a_failure_is_not_blamed(tmp_path: Path) -> None:
    # Rank 0 hears that rank 1 is lost, and is gone before rank 1 has ended itself.
    script = """
        import os, sys
        from manyhands.errors import PeerLostError
        from manyhands.launch.error_file import install
        install(int(os.environ["RANK"]))
        rank, fifo = int(os.environ["RANK"]), sys.argv[1]
        if rank == 0:
            writer = open(fifo, "w")
            raise PeerLostError("rank 1 died", rank=0, peer=1)
        open(fifo).read()  # until rank 0's process has ended
        raise RuntimeError("the cause")
    """
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    done = launch(tmp_path, script, ranks=2, args=[str(fifo)])
    assert done.returncode == 1
    assert "manyhands run: rank 1 failed first: exit code 1\nmanyhands run: rank 0 failed after it\n" in done.stderr
    assert done.stderr.endswith("RuntimeError: the cause\n")


def test_one_ranks_end_without_error_does_not_end_the_others(tmp_path: Path) -> None:
    script = """
        import os, sys
        if os.environ["RANK"] == "0":
            held = open(sys.argv[1], "w")
            raise SystemExit(0)
        open(sys.argv[1]).read()
        print("still here")
    """
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    done = launch(tmp_path, script, ranks=2, args=[str(fifo)])
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1] still here\n", "")


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path, watch: Watch) -> None:
    script = WATCHED + textwrap.dedent("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report(sys.argv[1])
        if os.environ["RANK"] == "1":
            open(sys.argv[2]).read(1)  # until rank 0 ignores it
            sys.exit(5)
        ready = open(sys.argv[2], "w")
        ready.write("x")
        ready.flush()
        while True:
            signal.pause()
    """)
    os.mkfifo(tmp_path / "ready")
    done = launch(tmp_path, script, ranks=2, args=[str(watch.path), str(tmp_path / "ready")], end_s=0.2)
    assert done.returncode == 5
    assert "manyhands run: rank 0 was ended because of it" in done.stderr
    watch.wait_for(2)
    watch.assert_all_gone()


# ------------------------------------------------------------------ signals

WITH_CHILDREN = WATCHED + textwrap.dedent("""
    code = "import os, sys, signal; p = os.open(sys.argv[1], os.O_WRONLY); os.write(p, b'%d\\\\n' % os.getpid()); signal.pause()"
    # Its traceback would run into that of the rank.
    subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], stderr=subprocess.DEVNULL)
    report(sys.argv[1])
    while True:
        signal.pause()
""")

STUBBORN = WATCHED + textwrap.dedent("""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: print(signal.Signals(number).name))
    report(sys.argv[1])
    while True:
        signal.pause()
""")


@pytest.mark.parametrize("module", ["manyhands.group.init", "numpy.linalg"])
def test_a_ctrl_c_while_a_rank_starts_is_told_without_the_frames_of_what_it_imports(tmp_path: Path, module: str) -> None:
    result = launch(
        tmp_path,
        f"""
        import sys
        import manyhands as mh
        class Interrupted:
            def find_spec(self, name, *_):
                if name == {module!r}:
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupted())
        mh.init()
        """,
        ranks=1,
        fork=False,
    )
    shown = re.findall(r'File "(.*)", line', result.stderr)
    assert {Path(each).name for each in shown} == {"program.py"}  # its second frame is the finder's
    assert len(re.findall(r"KeyboardInterrupt$", result.stderr, re.MULTILINE)) == 2  # raised above, and told once


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_no_process_and_no_folder(tmp_path: Path, watch: Watch, number: signal.Signals) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start(tmp_path, WITH_CHILDREN, ranks=2, args=[str(watch.path)], environ={"TMPDIR": str(temporary)})
    watch.wait_for(4)
    assert len(list(temporary.iterdir())) == 1, "a folder that is not there cannot be left behind"
    process.send_signal(number)
    _, err = process.communicate(timeout=50)
    watch.assert_all_gone()
    until(lambda: not list(temporary.iterdir()))
    if number == signal.SIGKILL:
        return
    assert process.returncode == 128 + number
    said = err[err.rindex("manyhands run: ") :]
    if number == signal.SIGINT:  # which Python turns into a traceback that tells where it was
        assert re.fullmatch(r"manyhands run: ended by SIGINT, when the ranks were here:\n(  ranks? [01].*: at .*:\d+\n)+", said)
    else:
        assert said == f"manyhands run: ended by {number.name}\n"


def test_a_signal_is_passed_on_once_and_then_the_ranks_are_killed(tmp_path: Path, watch: Watch) -> None:
    process = start(tmp_path, STUBBORN, ranks=2, args=[str(watch.path)], end_s=0.5)
    watch.wait_for(2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=50)
    assert process.returncode == 143
    assert len(out.splitlines()) <= 2  # on a busy machine a rank may be killed before it has said anything
    assert {*out.splitlines()} <= {"[0] SIGTERM", "[1] SIGTERM"}
    watch.assert_all_gone()


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path, watch: Watch) -> None:
    process = start(tmp_path, STUBBORN, ranks=2, args=[str(watch.path)], end_s=3600.0)
    watch.wait_for(2)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert sorted([process.stdout.readline(), process.stdout.readline()]) == ["[0] SIGINT\n", "[1] SIGINT\n"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=50)
    assert process.returncode == 130
    watch.assert_all_gone()


def test_a_signal_that_was_ignored_before_stays_ignored_here_and_in_the_ranks(tmp_path: Path, watch: Watch) -> None:
    script = WATCHED + textwrap.dedent("""
        report(sys.argv[1])
        assert sys.stdin.readline() == "go on\\n"
        print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)
    """)
    job = {"target": str(tmp_path / "program.py"), "end_s": 30.0, "fork": forking[-1], "args": [str(watch.path)]}
    (tmp_path / "program.py").write_text(script)
    command = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", DRIVER, json.dumps(job)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(),
        text=True,
    )
    started.append(process)
    (rank,) = watch.wait_for(1)
    process.send_signal(signal.SIGINT)
    os.kill(rank, signal.SIGINT)
    out, err = process.communicate("go on\n", timeout=50)
    assert (process.returncode, out, err) == (0, "[0] True\n", "")


def test_a_signal_does_not_put_off_the_end_of_ranks_that_hang_after_a_failure(tmp_path: Path, watch: Watch) -> None:
    script = WATCHED + textwrap.dedent("""
        signal.signal(signal.SIGTERM, lambda *_: report(sys.argv[1]))
        report(sys.argv[1])
        if os.environ["RANK"] == "1":
            while not os.path.exists("rank 0 reports"):
                time.sleep(0.01)
            sys.exit("the cause")
        open("rank 0 reports", "w").close()
        while True:
            signal.pause()
    """)
    launcher = start(tmp_path, script, ranks=2, args=[str(watch.path)], end_s=2, grace_s=600)
    watch.wait_for(3)  # the last time for the launcher's own SIGTERM
    launcher.terminate()
    assert launcher.wait(timeout=60) == 128 + signal.SIGTERM


def test_the_line_of_the_last_signal_is_told(tmp_path: Path) -> None:
    script = """
        import os, signal
        from manyhands.launch.error_file import install
        seen = []
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1) if seen else seen.append(1))
        install(int(os.environ["RANK"]))
        os.kill(os.getpid(), signal.SIGTERM)
        print("ready", flush=True)
        while True:
            signal.pause()
    """
    launcher = start(tmp_path, script, ranks=2)
    assert launcher.stdout is not None
    assert {launcher.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    launcher.terminate()
    assert launcher.stderr is not None
    assert re.search(r"  ranks 0 and 1: at program\.py:(9|10|11)\n", launcher.stderr.read())


def test_programs_keep_their_own_handlers_of_signals(tmp_path: Path) -> None:
    script = """
        import faulthandler, os, signal, sys
        from manyhands.launch.error_file import install
        if os.environ["RANK"] == "0":
            own = open("own", "w")
            faulthandler.register(signal.SIGTERM, own, chain=False)
            install(0)
            os.kill(os.getpid(), signal.SIGTERM)
            print("most recent call first" in open("own").read())
        else:
            install(1)
            signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
            if not (child := os.fork()):
                os.kill(os.getpid(), signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert sorted(launch(tmp_path, script, ranks=2).stdout.splitlines()) == ["[0] True", "[1] 7"]


def test_ctrl_z_stops_the_ranks_too(tmp_path: Path, watch: Watch) -> None:
    script = WATCHED + textwrap.dedent("""
        report(sys.argv[1])
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
    """)
    gate = tmp_path / "gate"
    # A process group of its own in a session that has others: elsewhere SIGTSTP does nothing.
    launcher = start(tmp_path, script, ranks=2, args=[str(watch.path), str(gate)], process_group=0)
    ranks = watch.wait_for(2)
    os.kill(launcher.pid, signal.SIGTSTP)
    _, status = os.waitpid(launcher.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    for rank in ranks:  # which have the signal, and may still be on their way to a stop
        until(lambda rank=rank: state_of(rank) == "T", "the rank is stopped")
    os.kill(launcher.pid, signal.SIGCONT)
    gate.touch()
    assert launcher.wait(timeout=60) == 0


def test_what_a_rank_leaves_running_may_end_by_itself(tmp_path: Path) -> None:
    script = """
        import os, subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5); open('result', 'w').write('all'); print('written')"])
    """
    done = launch(tmp_path, script, ranks=2)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] written", "[1] written"])
    assert re.fullmatch(
        r"manyhands run: ranks 0 and 1 ended and left processes running, which may take 30 s to end \(--grace\): python\S* \d+, python\S* \d+\n",
        done.stderr,
    )
    assert (tmp_path / "result").read_text() == "all"


def test_what_a_rank_leaves_running_for_too_long_is_ended_and_named(tmp_path: Path, watch: Watch) -> None:
    script = WATCHED + textwrap.dedent("""
        if sys.argv[2:]:
            report(sys.argv[1])
            print("ready", flush=True)
            signal.pause()
        child = subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"], stdout=subprocess.PIPE)
        child.stdout.readline()
    """)
    done = launch(tmp_path, script, args=[str(watch.path)], grace_s=0.2)
    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(r"manyhands run: ended what ranks had left running: python\S* \d+\n", done.stderr)
    watch.wait_for(1)
    watch.assert_all_gone()


def test_signals_are_served_while_nobody_reads_the_output(tmp_path: Path) -> None:
    with start(tmp_path, "while True: print('x' * 100)", ranks=2) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.read(1)  # the ranks run; from now on the pipe only fills
        launcher.terminate()
        assert launcher.wait(50) == 128 + signal.SIGTERM

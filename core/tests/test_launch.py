"""The launcher, with real processes: what ranks get, what the user sees, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.launch_tools import DRIVER, WATCHED, Watch, environment, forking, launch, start
from support.worlds import free_port

pytestmark = pytest.mark.usefixtures("ranks_in_both_forms", "no_launcher_stays")


# ------------------------------------------------------------------ what ranks get


def test_each_rank_gets_torchruns_variables(tmp_path: Path) -> None:
    script = """
        import json, os, sys
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MY_OWN"]
        others = ["MASTER_PORT", "ONEACCORD_LAUNCHED", "ONEACCORD_SECRET", "TORCHELASTIC_RUN_ID"]
        print(json.dumps([{n: os.environ[n] for n in names}, [os.environ[n] for n in others] + [hash("text")],
                          "ONEACCORD_RENDEZVOUS_FD" in os.environ, "ONEACCORD_RANK" in os.environ]))
    """
    done = launch(tmp_path, script, ranks=3, environ={"ONEACCORD_RANK": "7", "MY_OWN": "x"}, prefix=False)
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
    host, _, port = os.environ["ONEACCORD_LAUNCHED"].rpartition(":")
    address = host, int(port)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        listener = socket.socket(fileno=int(os.environ["ONEACCORD_RENDEZVOUS_FD"]))
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
        "environ": {"ONEACCORD_SECRET": "s"},
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
    job = f"oneaccord-{shared['rendezvous']} {outputs[0][0].split()[-1]}"  # one order of sets on all hosts
    assert sorted(outputs[0][0].splitlines()) == [f"[0] 0 0 {job}", "[0] heard [1, 2, 3]", f"[1] 1 0 {job}"]
    assert sorted(outputs[1][0].splitlines()) == [f"[2] 0 1 {job}", f"[3] 1 1 {job}"]


@pytest.mark.parametrize(("given", "seed"), [("17", 17), ("", 2391332020)])
def test_a_seed_of_hashes_comes_from_the_user_or_the_secret(tmp_path: Path, given: str, seed: int) -> None:
    script = "import os; print(os.environ['PYTHONHASHSEED'], hash('text'))"
    environ = {"PYTHONHASHSEED": given, "ONEACCORD_SECRET": "s"}
    seen = set(launch(tmp_path, script, ranks=2, prefix=False, environ=environ).stdout.splitlines())
    expected = subprocess.run(
        [sys.executable, "-c", script], env=environment(PYTHONHASHSEED=str(seed)), capture_output=True, text=True, check=True
    )
    assert seen == {expected.stdout.strip()}


def test_arguments_and_a_secret_reach_the_script_untouched_and_its_last_line_is_ended(tmp_path: Path) -> None:
    args = ["-n", "3", "--help", "", "a b", "--", "*"]
    script = "import os, sys; print(sys.argv[1:]); print(os.environ['ONEACCORD_SECRET'], end='')"
    done = launch(tmp_path, script, args=args, environ={"ONEACCORD_SECRET": "mine"})
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
    done = launch(tmp_path, script, ranks=3, patience_s=60)  # a rank may have no processor in the midst of a line
    lines = done.stdout.splitlines()
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[{rank}]")]
        assert own == [f"[{rank}] {rank} {number} " + "x" * 50 for number in range(2000)]
    assert len(lines) == 6000


def test_prefixes_are_as_wide_as_the_largest_rank(tmp_path: Path) -> None:
    several: dict[str, Any] = {"nodes": 4, "node_rank": 3, "rendezvous": "127.0.0.1:1"}
    done = launch(tmp_path, "print('x')", ranks=3, environ={"ONEACCORD_SECRET": "s"}, **several)
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
            print(os.environ["ONEACCORD_ERROR_FILE"])
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
        "oneaccord run: rank 1 failed first: exit code 1",
        "oneaccord run: ranks 0, 2 were ended because of it",
        "oneaccord run: the error of rank 1:",
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
    assert f"oneaccord run: rank 0 failed first: {how}\n" in done.stderr
    assert done.stderr.endswith("the end of its standard error:\nlast words\n")


def test_a_rank_that_only_heard_of_a_failure_is_not_blamed(tmp_path: Path) -> None:
    # Rank 0 hears that rank 1 is lost, and is gone before rank 1 has ended itself.
    script = """
        import os, sys
        from oneaccord.errors import PeerLostError
        from oneaccord.job.error_file import install
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
    assert "oneaccord run: rank 1 failed first: exit code 1\noneaccord run: rank 0 failed after it\n" in done.stderr
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
    assert "oneaccord run: rank 0 was ended because of it" in done.stderr
    watch.wait_for(2)
    watch.assert_all_gone()

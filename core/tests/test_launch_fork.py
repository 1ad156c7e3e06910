"""Ranks that are forked from a process that has imported all: each begins and ends as a Python of its own does."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oneaccord.local.forked import ForkedRank, ForkServer, fork_server
from oneaccord.local.launching import Launch
from oneaccord.local.processes import run_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SURROUNDINGS = """
import faulthandler, gc, json, logging, os, signal, sys, threading, warnings
main = sys.modules["__main__"]
found = {
    "main": {name: str(getattr(value, "path", value)) for name, value in vars(main).items() if name.startswith("__") and name != "__spec__"},
    "spec": main.__spec__ and (main.__spec__.name, main.__spec__.origin),
    **{name: str(getattr(sys, name)) for name in "argv orig_argv flags warnoptions executable excepthook path".split()},
    "streams": [
        (str(each), type(each.buffer).__name__, each.line_buffering, each.write_through, each.errors, each.fileno(), each.seekable(),
         each.buffer.mode, each is standard)
        for each, standard in [(sys.stdin, sys.__stdin__), (sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)]
    ],
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "wakeup": signal.set_wakeup_fd(-1),
    "files": [(each, os.get_inheritable(int(each))) for each in sorted(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd/" + each)],
    "environ": {name: value for name, value in os.environ.items() if name != "_"},
    "threads": [str(threading.active_count()), len(os.listdir("/proc/self/task"))],
    "session": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()),
    "rest": (gc.isenabled(), faulthandler.is_enabled(), logging.getLogger().handlers, os.getcwd(), sys.getrecursionlimit()),
}
import numpy
found["filters"] = list(map(str, warnings.filters))
print(json.dumps(found))
"""
"""What a program can see of how it was started."""

ENDINGS = {
    "well": "import atexit; atexit.register(print, 'at the end'); print('x')",
    "by a code": "raise SystemExit(3)",
    "with a word": "import sys; sys.exit('a word')",
    "by an error": "def inner():\n    raise KeyError('first')\ntry:\n    inner()\nexcept KeyError as e:\n    raise ValueError('second') from e",
    "in a syntax error": "def broken(:",
    "with a hook": "import sys; sys.excepthook = lambda kind, error, trace: print('hooked', trace.tb_frame.f_code.co_filename)\n1 / 0",
    "interrupted": "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nfinally:\n    print('finally')",
    "by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "at once": "import os; print('told', end=''); os._exit(5)",
    "in a crash": "import faulthandler, os; faulthandler.enable(); print('crash'); os.abort()",
    "after its threads": "import threading; threading.Thread(target=lambda: (threading.main_thread().join(), print('thread'))).start(); print('main')",
    "with its own class": "import pickle\nclass Own: pass\nprint(type(pickle.loads(pickle.dumps(Own()))) is Own, Own.__module__, Own)",
    "with processes": """
        import multiprocessing, sys
        def work(x):
            return x * 2
        if __name__ == "__main__":
            for way in ("fork", "spawn"):
                with multiprocessing.get_context(way).Pool(1) as pool:
                    print(way, pool.map(work, [1, 2]))
    """,
    "reading": "print(repr(input()), repr(__import__('sys').stdin.buffer.read()))",
    "bytes first": "import sys; sys.stdout.write('a'); sys.stdout.buffer.write(b'b'); sys.stderr.write('c\\n'); print('\\udc80')",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forked")


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ONEACCORD_")}


@pytest.fixture(scope="module")
def server(folder: Path, environ: dict[str, str]) -> Iterator[ForkServer]:
    before = Path.cwd()
    os.chdir(folder)
    made = ForkServer(environ, str(folder))
    os.chdir(before)
    with contextlib.closing(made):
        assert made.prepare(["oneaccord_tcp.plugin", "numpy.random"]) == ""
        yield made


def end(rank: ForkedRank | None) -> tuple[int, bytes, bytes]:
    assert rank is not None
    assert rank.stdout is not None
    assert rank.stderr is not None
    with rank.stdout, rank.stderr:
        out, err = rank.stdout.read(), rank.stderr.read()
    return rank.wait(), out, err


def forked(server: ForkServer, words: Sequence[str], environ: dict[str, str], typed: bytes = b"") -> tuple[int, bytes, bytes]:
    read, write = os.pipe()
    os.write(write, typed)
    os.close(write)
    try:
        return end(server.fork(words, environ, read, ()))
    finally:
        os.close(read)


def alone(words: Sequence[str], environ: dict[str, str], folder: Path, typed: bytes = b"") -> tuple[int, bytes, bytes]:
    command = [sys.executable, "-u", *words]
    done = subprocess.run(
        command, env=environ, cwd=folder, input=typed, capture_output=True, start_new_session=True, check=False, timeout=50
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [["surroundings.py", "-x", "a b"], ["./surroundings.py"], ["-m", "surroundings", "-x"]],
    ids=["script", "path", "module"],
)
def test_a_program_sees_what_it_sees_in_a_python_of_its_own(
    server: ForkServer, folder: Path, environ: dict[str, str], words: list[str]
) -> None:
    (folder / "surroundings.py").write_text(SURROUNDINGS)
    given = environ | {"RANK": "1", "ONEACCORD_SECRET": "\udc80"}
    assert forked(server, words, given) == alone(words, given, folder)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_as_it_does_in_a_python_of_its_own(
    server: ForkServer, folder: Path, environ: dict[str, str], ending: str
) -> None:
    name = f"{ending.replace(' ', '_')}.py"
    (folder / name).write_text(textwrap.dedent(ENDINGS[ending]))
    code, out, err = forked(server, [name], environ, b"one\ntwo")
    expected = alone([name], environ, folder, b"one\ntwo")
    if ending == "in a crash":  # which shows all frames that there are
        assert (code, out) == expected[:2]
        assert [err.splitlines()[line] for line in (0, 3)] == [expected[2].splitlines()[line] for line in (0, 3)]
    else:
        assert (code, out, err) == expected


def test_ranks_share_no_random_numbers_and_what_they_have_imported(
    server: ForkServer, folder: Path, environ: dict[str, str]
) -> None:
    (folder / "numbers_.py").write_text(
        "import sys; print('numpy' in sys.modules); import numpy, random, uuid; print(random.random(), numpy.random.rand(), uuid.uuid4())"
    )
    told = [forked(server, ["numbers_.py"], environ)[1].split() for _ in range(2)]
    assert [words[0] for words in told] == [b"True", b"True"]
    assert not set(told[0][1:]) & set(told[1][1:])


def test_a_look_at_the_server_waits_for_nothing_that_was_taken_in_before(
    server: ForkServer, folder: Path, environ: dict[str, str]
) -> None:
    """As when both the end of a rank's output and that of the rank are told at once, and the former is looked into first."""
    (folder / "nothing.py").write_text("")
    assert forked(server, ["nothing.py"], environ) == (0, b"", b"")
    server.read()


def test_a_socket_is_handed_over_alone(server: ForkServer, folder: Path, environ: dict[str, str]) -> None:
    (folder / "meet.py").write_text(
        "import os, socket; print(socket.socket(fileno=int(os.environ['ONEACCORD_RENDEZVOUS_FD'])).getsockname()[1])"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, Path(os.devnull).open("rb") as nothing:
        rank = server.fork(["meet.py"], environ, nothing.fileno(), [listener.fileno()])
        assert end(rank) == (0, b"%d\n" % listener.getsockname()[1], b"")


def test_a_rank_that_has_ended_by_the_time_that_it_is_known_is_known_to_have_ended(
    server: ForkServer, folder: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "quick.py").touch()
    send = ForkServer._send

    def and_wait_for_its_end(self: ForkServer, *request: Any) -> None:
        send(self, *request)
        while self._link.recv(4096, socket.MSG_PEEK).count(b"\n") < 2:  # started, ended
            pass

    monkeypatch.setattr(ForkServer, "_send", and_wait_for_its_end)
    with Path(os.devnull).open("rb") as nothing:
        rank = server.fork(["quick.py"], environ, nothing.fileno(), ())
    assert rank is not None
    assert rank.poll() == 0  # nothing more comes that would tell
    assert end(rank) == (0, b"", b"")


def test_variables_that_something_reads_at_its_start_need_a_python_of_their_own(
    server: ForkServer, environ: dict[str, str]
) -> None:
    for changed in ({"OMP_NUM_THREADS": "77"}, {"PYTHONHASHSEED": "4294967295"}, {"LD_PRELOAD": "x"}):
        assert server.fork(["x.py"], environ | changed, 0, ()) is None
    assert server.fork(["x.py"], {name: value for name, value in environ.items() if name != "PATH"}, 0, ()) is None


@pytest.mark.parametrize("variable", ["PYTHONVERBOSE", "PYTHONINSPECT", "COVERAGE_PROCESS_START"])
def test_what_each_python_says_or_does_at_its_start_needs_one(tmp_path: Path, variable: str) -> None:
    (tmp_path / "program.py").touch()
    assert fork_server(str(tmp_path / "program.py"), False, {variable: "1"}) is None


def test_what_is_no_python_script_needs_a_python_that_finds_out(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").touch()
    assert fork_server(str(tmp_path), False, os.environ) is None
    assert fork_server(str(tmp_path / "missing.py"), False, os.environ) is None


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("json.py", "", "the program has a module json of its own"),  # stands before that of the standard library
        ("beside.py", "", ""),
        (
            "starter.py",
            "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "an import has started a thread",
        ),
        ("opener.py", "import os; file = open(os.devnull)", "an import has opened a file"),
        ("raiser.py", "raise SystemExit('no')", "an import raised SystemExit: no"),
    ],
)
def test_what_a_fork_would_not_have_needs_a_python_of_its_own(tmp_path: Path, name: str, source: str, reason: str) -> None:
    (tmp_path / name).write_text(source)
    module = name.removesuffix(".py")
    variables = os.environ | ({"PYTHONPATH": str(tmp_path)} if source else {})
    folder = tmp_path / "elsewhere" if source else tmp_path
    with contextlib.closing(ForkServer(variables, str(folder))) as server:
        assert server.prepare([module] if source else []) == reason


JOB = """
import os, sys, time
print(os.getppid(), "numpy" in sys.modules, flush=True)
time.sleep({seconds})
"""


def test_a_job_does_without_a_server_that_cannot_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text(JOB.format(seconds=0))
    (tmp_path / "json.py").write_text("")
    job = Launch(str(tmp_path / "program.py"), prefix=False)
    assert run_job(job) == 0
    assert capfd.readouterr() == (f"{os.getpid()} False\n", "")
    assert run_job(replace(job, verbose=True)) == 0
    told = "oneaccord run: each rank begins as a Python of its own: the program has a module json of its own\n"
    assert capfd.readouterr() == (f"{os.getpid()} False\n", told)


def test_why_ranks_are_not_forked_is_said_where_it_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program").write_text("")
    job = Launch(str(tmp_path / "program"), verbose=True)
    told = f"oneaccord run: each rank begins as a Python of its own: '{tmp_path / 'program'}' is not a .py file\n"
    assert (run_job(job), capfd.readouterr()) == (0, ("", told))
    assert (run_job(replace(job, fork=False)), capfd.readouterr()) == (0, ("", ""))
    assert (run_job(job, os.environ | {"PYTHONVERBOSE": "1"}), "PYTHONVERBOSE is set" in capfd.readouterr().err) == (0, True)


def test_ranks_end_with_their_server_and_nothing_hangs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(JOB.format(seconds=60))
    launcher = "import sys; from oneaccord.local.processes import *; from oneaccord.local.launching import Launch; sys.exit(run_job(Launch(sys.argv[1], ranks=2)))"
    with subprocess.Popen(
        [sys.executable, "-c", launcher, str(tmp_path / "program.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        lines = [job.stdout.readline().split() for _ in range(2)]
        assert lines[0][1] == lines[1][1]
        assert lines[0][2] == "True"
        os.kill(int(lines[0][1]), signal.SIGKILL)
        try:
            _, told = job.communicate(timeout=50)
        finally:
            job.kill()
    assert job.returncode == 128 + signal.SIGKILL
    assert "killed by SIGKILL" in told

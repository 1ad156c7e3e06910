"""Processes that are forked from one that has imported all: they begin and end as those that are not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import preloaded

SCRIPT = """
import atexit, os, sys, threading, time
import beside
assert os.getpgrp() == os.getpid() and not sys.stdin.read()
print(__name__, __file__, sys.argv, sys.path[0] == os.getcwd(), os.environ.get("ONE"), "HOME" in os.environ, beside.WORD)
print("to the error", file=sys.stderr)
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
assert "numpy" in sys.modules, "it was imported before"
"""


def test_a_script_finds_what_it_finds_elsewhere_and_what_was_imported(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("WORD = 'a word'")
    done = preloaded.run(["script.py", "--two"], cwd=tmp_path, environ={"ONE": "1"})
    assert (done.returncode, done.stderr) == (0, "to the error\n")
    assert done.stdout == "__main__ script.py ['script.py', '--two'] True 1 False a word\nthread\natexit\n"


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(3)",
        "raise SystemExit('told')",
        "print('said')\nraise ValueError('raised')",
        "import os; os.kill(os.getpid(), 9)",
        "import signal; signal.raise_signal(signal.SIGINT)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os; os._exit(5)",
        "import sys; print(sys.argv)",
    ],
)
def test_a_program_ends_as_it_does_in_a_python_of_its_own(tmp_path: Path, program: str) -> None:
    words = ["-c", program, "a", "b"]
    alone = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    forked = preloaded.run(words, cwd=tmp_path)
    assert (forked.returncode, forked.stdout) == (alone.returncode, alone.stdout)
    assert forked.stderr.splitlines()[-1:] == alone.stderr.splitlines()[-1:]


def test_what_does_not_end_in_time_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    program = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        preloaded.run(["-c", program], cwd=tmp_path, timeout_s=1)
    with contextlib.suppress(ProcessLookupError):  # it is gone; or nothing was started so soon
        assert not caught.value.output or preloaded.ended(int(caught.value.output), 30)


def test_processes_are_one_anothers_strangers(tmp_path: Path) -> None:
    """What one does with its modules, variables and files, the next one does not see."""
    spoil = "import numpy, os, signal; del numpy.array; os.environ['X'] = '1'; os.close(1); signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert preloaded.run(["-c", spoil], cwd=tmp_path).returncode in (
        0,
        120,
    )  # Python's word for an output that cannot be flushed
    look = "import numpy, os, signal; print(numpy.array([1]), os.environ.get('X'), signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert preloaded.run(["-c", look], cwd=tmp_path, environ=dict(os.environ)).stdout == "[1] None True\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ranks_are_forked_as_well_and_are_children_of_their_launcher(tmp_path: Path) -> None:
    program = "import os, sys; print('numpy' in sys.modules, os.getppid(), os.getsid(0) == os.getpid(), sys.argv); os._exit(0)"
    (tmp_path / "program.py").write_text(program)
    words = ["-m", "oneaccord", "run", "--no-fork", "--no-prefix", "-n", "2", "--backend", "tcp", "program.py", "a b"]
    parent = preloaded.preloaded(*preloaded.OF_COMMANDS)
    with (tmp_path / "output").open("wb") as output, Path(os.devnull).open() as nothing:
        files = [nothing.fileno(), output.fileno(), output.fileno()]
        pid = parent.start(words, files=files, environ=os.environ, cwd=tmp_path)
    assert parent.reap(pid) == 0
    # They write at once, and so lose nothing by their end.
    assert (tmp_path / "output").read_text() == f"True {pid} True ['program.py', 'a b']\n" * 2


def test_popen_has_its_pipes_folder_and_variables_and_is_a_child_of_this_process(tmp_path: Path) -> None:
    program = (
        "import os, sys; print(os.getppid(), os.getcwd(), os.environ['ONE'], 'numpy' in sys.modules, input()); sys.exit(3)"
    )
    words = [sys.executable, "-c", program]
    with preloaded.Popen(
        words, cwd=tmp_path, env={"ONE": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        out, _ = process.communicate("typed\n", timeout=50)
    assert (out, process.returncode) == (f"{os.getpid()} {tmp_path} 1 True typed\n", 3)


def test_popen_can_be_killed(tmp_path: Path) -> None:
    with preloaded.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=tmp_path) as process:
        assert process.poll() is None
        process.kill()
        assert process.wait(50) == -signal.SIGKILL


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise SystemExit", "os.kill(os.getpid(), 15)", "os._exit(5)"])
def test_a_stand_in_is_started_by_its_path_and_ends_as_a_python_does(tmp_path: Path, end: str) -> None:
    program = (
        f"import os, sys; print('numpy' in sys.modules, sys.argv, os.environ['ONE'], os.getcwd(), input(), flush=True); {end}"
    )
    stand_in = preloaded.stand_in(tmp_path / "python", "-c", program)
    ended = [
        subprocess.run(
            [each, "a b"], cwd=tmp_path, env={"ONE": "1"}, input="typed\n", capture_output=True, text=True, check=False
        )
        for each in (stand_in, write_script(tmp_path / "alone", f'exec {sys.executable} -c "{program}" "$@"'))
    ]
    assert ended[0].stdout == f"True ['-c', 'a b'] 1 {tmp_path} typed\n"
    assert ended[1].stdout == ended[0].stdout.replace("True", "False")
    assert ended[0].returncode == ended[1].returncode


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


def test_a_stand_in_that_is_killed_takes_its_program_along(tmp_path: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([preloaded.stand_in(tmp_path / "python", "-c", program)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.kill()
        with contextlib.suppress(ProcessLookupError):  # it is gone
            assert preloaded.ended(pid, 30)


def test_a_module_of_a_safe_path_does_not_find_what_lies_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("print('found')")
    codes = [preloaded.run([*words, "-m", "beside"], cwd=tmp_path).returncode for words in ([], ["-P"])]
    assert codes == [0, 1]

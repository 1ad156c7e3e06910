"""Which ranks read the launcher's standard input: pipes, files and terminals."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.launch_tools import DRIVER, environment, forking, launch

from oneaccord.errors import UsageError
from oneaccord.local.launching import Launch

pytestmark = pytest.mark.usefixtures("ranks_in_both_forms", "no_launcher_stays")

READS = "import sys; print(repr(sys.stdin.read()))"


@pytest.mark.parametrize(
    ("stdin", "readers"), [(None, {0}), ("0", {0}), ("2", {2}), ("02", {2}), ("all", {0, 1, 2}), ("none", set[int]())]
)
def test_stdin_goes_to_the_ranks_that_it_names(tmp_path: Path, stdin: str | None, readers: set[int]) -> None:
    done = launch(tmp_path, READS, ranks=3, typed="you", stdin=stdin)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {'you' if rank in readers else ''!r}" for rank in range(3)]
    assert (done.returncode, done.stderr) == (0, "")


def test_all_gives_each_rank_the_whole_of_a_long_input(tmp_path: Path) -> None:
    script = """
        import hashlib, os, sys
        if os.environ["RANK"] == "1":  # begins to read only when rank 0 has read all
            open("read").read()
        text = sys.stdin.buffer.read()
        if os.environ["RANK"] == "0":
            open("read", "w").close()
        print(len(text), hashlib.sha256(text).hexdigest())
    """
    os.mkfifo(tmp_path / "read")
    typed = "".join(f"{number}\n" for number in range(500_000))
    done = launch(tmp_path, script, ranks=2, typed=typed, stdin="all")
    shown = {line.partition(" ")[2] for line in done.stdout.splitlines()}
    assert (done.returncode, len(done.stdout.splitlines()), len(shown)) == (0, 2, 1)
    assert shown.pop().split()[0] == str(len(typed))


def test_all_copies_a_regular_file_and_outlives_a_rank_that_does_not_read(tmp_path: Path) -> None:
    script = """
        import os, sys
        if os.environ["RANK"] != "1":
            print(len(sys.stdin.read()))
    """
    (tmp_path / "program.py").write_text("\n".join(line[8:] for line in script.splitlines()))
    (tmp_path / "input").write_text("x" * 3_000_000)
    job = {"target": "program.py", "end_s": 30, "ranks": 3, "stdin": "all", "fork": forking[-1]}
    with (tmp_path / "input").open("rb") as file:
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, json.dumps(job)],
            stdin=file,
            capture_output=True,
            cwd=tmp_path,
            env=environment(),
            timeout=50,
            check=False,
        )
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, [b"[0] 3000000", b"[2] 3000000"])


@pytest.mark.parametrize(
    ("stdin", "said"),
    [("2", "the number of a rank, 0 to 1, or all, or none"), ("-1", "0 to 1"), ("first", "0 to 1"), ("", "0 to 1")],
)
def test_stdin_of_no_rank_is_refused(stdin: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"^--stdin {stdin}: give .*{said}"):
        Launch("program.py", ranks=2, stdin=stdin).validate({})


class Terminal:
    """A launcher whose terminal this is, in a session of its own as below a shell."""

    def __init__(self, directory: Path, script: str, **job: object) -> None:
        (directory / "program.py").write_text(script)
        words = [sys.executable, "-c", DRIVER, json.dumps({"target": "program.py", "end_s": 30, "fork": forking[-1], **job})]
        self.shown = ""
        self.pid, self._file = pty.fork()
        if not self.pid:
            os.chdir(directory)
            os.execve(sys.executable, words, environment())

    def await_words(self, words: str) -> None:
        """Read until the words are shown."""
        until = time.monotonic() + 30
        while words not in self.shown:
            assert select.select([self._file], [], [], max(0.0, until - time.monotonic()))[0], (
                f"only this was shown: {self.shown!r}"
            )
            self.shown += self._read()

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def end(self) -> int:
        """Read to the end, and return the exit code."""
        while data := self._read():
            self.shown += data
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self._file)  # the launcher gets SIGHUP

    def _read(self) -> str:
        with suppress(OSError):  # EIO, when nobody has the terminal open
            return os.read(self._file, 4096).decode()
        return ""


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("reader", [0, 1])
def test_breakpoint_works_at_a_terminal(tmp_path: Path, terminals: list[Terminal], reader: int) -> None:
    script = f"import os\nx = 41\nif os.environ['RANK'] == '{reader}':\n    breakpoint()\n    print('x is', x)\n"
    terminals.append(terminal := Terminal(tmp_path, script, ranks=2, stdin=str(reader)))
    terminal.await_words(f"[{reader}] (Pdb) ")
    terminal.type("x = x + 1\n")
    terminal.await_words("(Pdb) x = x + 1")
    terminal.type("continue\n")
    terminal.await_words("x is 42")
    assert terminal.end() == 0


def test_all_copies_what_is_typed_at_a_terminal(tmp_path: Path, terminals: list[Terminal]) -> None:
    script = "word = input('word? ')\nprint('got', word)\n"
    terminals.append(terminal := Terminal(tmp_path, script, ranks=2, stdin="all"))
    terminal.await_words("[0] word? ")
    terminal.await_words("[1] word? ")
    terminal.type("hello\n")
    terminal.await_words("got hello")
    assert terminal.end() == 0
    assert terminal.shown.count("got hello") == 2

"""``oneaccord run --on ... --stdin``: what the command reads reaches ranks of other hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import host_launcher_here, preloaded
from support.launch_tools import environment

WAIT_S = 60.0

READS = """
import os, sys
data = sys.stdin.buffer.read()
print(len(data), sum(data) % 251)
"""


def start(folder: Path, program: str, *words: str, **options: object) -> subprocess.Popen[bytes]:
    (folder / "program.py").write_text(textwrap.dedent(program))
    path = os.pathsep.join([host_launcher_here.install(folder / "plugin"), *filter(None, sys.path)])
    return preloaded.Popen(
        [sys.executable, "-m", "oneaccord", "run", "--on", "here", *words, "program.py"],
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        cwd=folder,
        env=environment(PYTHONPATH=path, ONEACCORD_BACKEND="tcp", HERE_PYTHON=str(preloaded.stand_in(folder / "python"))),
    )


def run(folder: Path, program: str, *words: str, given: bytes = b"") -> tuple[int, list[str], str]:
    process = start(folder, program, *words)
    out, err = process.communicate(given, timeout=WAIT_S)
    return process.returncode, sorted(out.decode().splitlines()), err.decode()


@pytest.mark.parametrize("reader", [0, 2, 3])
def test_stdin_goes_to_one_rank_and_ends(tmp_path: Path, reader: int) -> None:
    words = [] if reader == 0 else ["--stdin", str(reader)]
    code, out, err = run(tmp_path, READS, "-n", "4", *words, given=b"three words here\n")
    assert code == 0, err
    assert out == [
        f"[{rank}] " + (f"17 {sum(b'three words here' + bytes([10])) % 251}" if rank == reader else "0 0") for rank in range(4)
    ]


def test_stdin_all_gets_a_copy_longer_than_any_pipe(tmp_path: Path) -> None:
    given = bytes(range(256)) * 16000
    code, out, err = run(tmp_path, READS, "-n", "4", "--stdin", "all", given=given)
    assert code == 0, err
    assert out == [f"[{rank}] {len(given)} {sum(given) % 251}" for rank in range(4)]


def test_stdin_from_a_file_and_for_no_rank(tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_bytes(b"x" * 3_000_000)
    for words, lengths in ((["--stdin", "3"], [0, 0, 0, 3_000_000]), (["--stdin", "none"], [0] * 4)):
        (folder := tmp_path / words[1]).mkdir()
        with file.open("rb") as source:
            process = start(folder, READS, "-n", "4", *words, stdin=source)
            out, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, err
        assert [int(line.split()[1]) for line in sorted(out.decode().splitlines())] == lengths


def test_stdin_prompt_is_shown_and_answered(tmp_path: Path) -> None:
    program = """
    import os
    if os.environ["RANK"] == "2":
        print("hello", input("name? "))
    """
    process = start(tmp_path, program, "-n", "4", "--stdin", "2", bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    shown = b""
    while not shown.endswith(b"name? "):  # it is shown although no line has ended, and nothing was typed
        piece = process.stdout.read(100)
        assert piece, process.communicate()
        shown += piece
    process.stdin.write(b"ada\n")
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, shown + out) == (0, b"[2] name? hello ada\n"), err


def test_stdin_that_no_rank_reads_ends_with_the_job(tmp_path: Path) -> None:
    process = start(tmp_path, "print('done')", "-n", "4", "--stdin", "all", stdin=subprocess.DEVNULL)
    assert process.communicate(timeout=WAIT_S)[1] == b""
    endless = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    (folder := tmp_path / "endless").mkdir()
    process = start(folder, "print('done')", "-n", "4", stdin=endless.stdout)
    assert endless.stdout is not None
    endless.stdout.close()
    out, err = process.communicate(timeout=WAIT_S)
    endless.kill()
    endless.wait()
    assert (process.returncode, out.count(b"done")) == (0, 4), err


def test_stdin_of_a_rank_that_is_not_there_is_refused(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, READS, "-n", "4", "--stdin", "4")
    assert (code, out) == (2, [])
    assert "--stdin 4: give the number of a rank, 0 to 3, or all, or none" in err

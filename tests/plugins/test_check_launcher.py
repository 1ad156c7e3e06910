"""``oneaccord check launcher``, on a launcher that keeps the contract and on those that do not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support import host_launcher_here, preloaded
from support.launch_tools import environment


def check(folder: Path, *words: str) -> tuple[int, str]:
    path = os.pathsep.join([host_launcher_here.install(folder / "plugin"), *filter(None, sys.path)])
    python = preloaded.stand_in(folder / "python")
    environ = environment(PYTHONPATH=path, ONEACCORD_BACKEND="tcp", HERE_PYTHON=str(python))
    done = preloaded.run(["-m", "oneaccord", "check", "launcher", *words], environ=environ, cwd=folder, timeout_s=120)
    return done.returncode, done.stdout + done.stderr


def test_check_launcher_that_keeps_the_contract_passes(tmp_path: Path) -> None:
    code, text = check(tmp_path, "here", "-n", "3")
    assert (code, text.count("passed  ")) == (0, 8), text
    assert text.endswith("the launcher 'here': keeps the contract\n")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("broken",), "its probe says that it cannot be used here: the moon is full"),
        (("here", "-n", "9"), "the hosts take 4 ranks, and 9 were asked for"),
        (("here", "--option", 'shell=exec "$@" </dev/null'), "262144 bytes of standard input came back as 0 other ones"),
        (("here", "--option", "shell=exec $*"), "exit code 1"),
        (("here", "--hosts", "a:1,a:1"), "two hosts have one name: ['a', 'a']"),
    ],
)
def test_check_launcher_that_does_not_says_what_is_wrong(tmp_path: Path, words: tuple[str, ...], fault: str) -> None:
    code, text = check(tmp_path, *words, "--timeout", "20")
    assert code == 1
    assert fault in text
    assert "checks failed" in text

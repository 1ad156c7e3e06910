"""What oneaccord logs: who meets whom, which backend and algorithm and why, and failures; nothing for a call that was made before."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
from support.worlds import must, thread_world

import oneaccord as oa
from oneaccord.api import Group

PROGRAM = """
import logging, sys
import numpy as np, oneaccord as oa
logging.basicConfig(level=sys.argv[1], format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
with oa.init(timeout_s=20) as group:
    for _ in range(5):
        group.all_reduce(np.ones(1000, np.float32))
    if len(sys.argv) > 2:
        group.all_reduce(np.ones(1 + group.rank))
"""


def logged(run_python, tmp_path, *arguments: str) -> list[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_python("-m", "oneaccord", "run", "-n", "2", "--backend", "tcp", "--no-prefix", "program.py", *arguments)
    return sorted(line for line in done.stdout.splitlines() if " oneaccord." in line)


def test_at_info_the_meeting_the_backend_and_failures_are_logged(run_python, tmp_path):
    lines = logged(run_python, tmp_path, "INFO", "fail")
    kinds = [re.sub(r"127.0.0.1:\d+", "HOST", line) for line in lines]
    assert [line for line in kinds if "failed" not in line] == sorted(
        f"INFO oneaccord.job rank {rank}{words}"
        for rank in range(2)
        for words in (" met the others, 2 in all, at HOST", " of 2, by oneaccord", ": backend tcp, from ONEACCORD_BACKEND")
    )
    failed = [line for line in kinds if "failed" in line]
    assert [line[:60] for line in failed] == [
        f"INFO oneaccord.job rank {rank}: the job has failed, mismatch: the" for rank in range(2)
    ]


def test_at_debug_each_new_kind_of_call_tells_its_algorithm_and_why(run_python, tmp_path):
    calls = [line for line in logged(run_python, tmp_path, "DEBUG") if " oneaccord.calls " in line]
    assert len(calls) == 2, "a call that was made before logs nothing"
    for rank, line in enumerate(calls):
        assert re.match(
            rf'DEBUG oneaccord.calls rank {rank} of the group of all ranks: all_reduce\(float32\[1000\], op="sum"\) by \w+: \w+',
            line,
        )


def test_what_auto_takes_and_passes_over_is_logged(run_python, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_python("-m", "oneaccord", "run", "-n", "2", "program.py", "INFO")
    assert len(re.findall(r"oneaccord.job rank [01]: 'auto' takes \w+", done.stdout)) == 2, done.stdout


@pytest.mark.parametrize("backend", ["simulated", "tcp"])
def test_nothing_is_logged_where_nobody_asks(backend, caplog: pytest.LogCaptureFixture):
    def program(group: Group) -> None:
        group.all_reduce(np.ones(3))

    with caplog.at_level(logging.WARNING):
        must(thread_world(program, 2, backend))
        with oa.init():
            pass
    assert caplog.records == []

"""Real ranks over UCX: results, groups, and what holds when a rank fails. `make test-peers` runs them."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest
from support import peer_worlds
from support.peer_worlds import mismatched, well
from support.worlds import must, thread_world

from oneaccord.api import Group

pytestmark = pytest.mark.peers

MODES = {"network": {}, "shared memory": {"ONEACCORD_BACKENDS__UCX__TRANSPORTS": '["shm", "tcp"]'}}
"""In the first, UCX itself notices a lost peer; in the second, the job does."""


def run_ranks(tmp_path: Path, program: str, ranks: int, **variables: str) -> subprocess.CompletedProcess[str]:
    done = peer_worlds.run_ranks(tmp_path, "ucx", textwrap.dedent(program), ranks, PYTHONFAULTHANDLER="1", **variables)
    assert "Fatal Python error" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert "UCX " not in done.stdout, "UCX writes nothing of its own"
    return done


@pytest.mark.parametrize("mode", MODES)
def test_every_collective_equals_numpy(tmp_path: Path, mode: str):
    well(run_ranks(tmp_path, peer_worlds.COLLECTIVES, 3, **MODES[mode]), 3)


def test_groups_come_and_go_and_a_process_may_init_again(tmp_path: Path):
    well(run_ranks(tmp_path, peer_worlds.GROUPS, 4), 4)


def test_ranks_may_be_threads_of_one_process():
    def program(group: Group) -> None:
        for count in (1, 1000, 300_000):
            assert (group.all_reduce(np.ones(count)) == group.world_size).all()

    must(thread_world(program, 3, backend="ucx"))


@pytest.mark.parametrize(
    ("case", "call"),
    [
        ("shape", "attempt(group.all_reduce, np.zeros(4 if rank else 8, np.float32))"),
        ("long on one rank", "attempt(group.all_reduce, np.zeros(2_000_000 if rank == 1 else 2))"),
    ],
)
def test_a_mismatch_is_an_error_on_every_rank(tmp_path: Path, case: str, call: str):
    done = run_ranks(tmp_path, peer_worlds.FAILING + call, 3)
    mismatched(done)


def test_a_rank_that_does_not_come_is_named_when_the_deadline_passes(tmp_path: Path):
    program = "attempt(group.all_reduce, np.ones(9), timeout_s=1) if rank != 1 else time.sleep(20)"
    done = run_ranks(tmp_path, peer_worlds.FAILING + program, 3)
    assert re.findall(
        r"DeadlineError after [0-9.]+ s: all_reduce #2 did not finish within 1 s: rank 1 did not come", done.stdout
    ), done.stdout + done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["before a call", "in a call", "in a long call", "between two ranks"])
def test_a_killed_rank_is_named_on_every_survivor(tmp_path: Path, where: str, mode: str):
    program = {
        "before a call": "os.kill(os.getpid(), 9) if rank == 1 else attempt(group.all_reduce, np.ones(9))",
        "in a call": """
if rank == 1:
    threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()
big = np.ones(1 << 18)
attempt(lambda: [group.all_reduce(big, out=big, op="mean") for _ in range(10**9)])
""",
        "in a long call": """
if rank == 1:
    threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()
big = np.ones(1 << 21)
attempt(lambda: [group.all_reduce(big, out=big, op="mean") for _ in range(10**9)])
""",
        "between two ranks": """
if rank == 1:
    os.kill(os.getpid(), 9)
attempt(group.recv, 1)
""",
    }[where]
    done = run_ranks(tmp_path, peer_worlds.FAILING + program, 3, **MODES[mode])
    assert len(re.findall(r"PeerLostError after [0-9.]+ s: rank 1 was lost", done.stdout)) == 2, done.stdout + done.stderr
    assert "oneaccord run: rank 1 failed first: killed by SIGKILL" in done.stderr, done.stderr
    assert done.returncode == 137


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_raises_ends_the_others(tmp_path: Path, mode: str):
    program = """
if rank == 1:
    raise ValueError("too much")
attempt(lambda: [group.all_reduce(np.ones(1 << 18)) for _ in range(10**9)])
"""
    done = run_ranks(tmp_path, peer_worlds.FAILING + program, 3, **MODES[mode])
    assert len(re.findall(r"AbortedError after [0-9.]+ s: rank 1 ended with ValueError: too much", done.stdout)) == 2, (
        done.stdout + done.stderr
    )


def test_ranks_with_different_settings_are_told(tmp_path: Path):
    program = "oa.init(config={'backends': {'ucx': {'transports': ['tcp'] if os.environ['RANK'] == '0' else ['shm', 'tcp']}}})"
    done = run_ranks(tmp_path, program, 2)
    assert "backends.ucx.transports is tcp on rank 0 and shm,tcp on rank 1" in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("{'library': '/nowhere/libucp.so'}", "UCX cannot be loaded: /nowhere/libucp.so"),
        ("{'transports': ['pigeon']}", "backends.ucx.transports is ['pigeon']"),
        ("{'variables': {'RNDV_THRESH': 'many'}}", "UCX does not accept 'many' for UCX_RNDV_THRESH"),
    ],
)
def test_what_cannot_be_is_told_in_words(tmp_path: Path, table: str, words: str):
    done = run_ranks(tmp_path, f"oa.init(config={{'backends': {{'ucx': {table}}}}})", 2)
    assert words in done.stderr, done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize("program", [peer_worlds.QUIET, peer_worlds.LISTENING], ids=["quiet", "listening"])
def test_a_wait_burns_no_core_closing_leaves_nothing_and_nobody_else_is_let_in(tmp_path: Path, program: str):
    well(run_ranks(tmp_path, program, 2), 2)

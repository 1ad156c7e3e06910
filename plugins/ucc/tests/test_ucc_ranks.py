"""Real ranks over a real UCC: what `oneaccord check` does not know of. `make test-peers` runs them, where there is a UCC."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import peer_worlds

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with peer_worlds.real_ucc():
        yield


def run_ranks(tmp_path: Path, program: str, ranks: int, **variables: str) -> subprocess.CompletedProcess[str]:
    done = peer_worlds.run_ranks(tmp_path, "ucc", textwrap.dedent(program), ranks, PYTHONFAULTHANDLER="1", **variables)
    assert "Fatal Python error" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done


def well(done: subprocess.CompletedProcess[str], ranks: int) -> None:
    peer_worlds.well(done, ranks)
    assert len(done.stdout.splitlines()) == ranks, f"UCX and UCC write nothing of their own: {done.stdout}"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_collective_equals_numpy(tmp_path: Path, ranks: int):
    well(run_ranks(tmp_path, peer_worlds.COLLECTIVES, ranks), ranks)


def test_groups_come_and_go_and_a_process_may_init_again(tmp_path: Path):
    well(run_ranks(tmp_path, peer_worlds.GROUPS, 4), 4)


@pytest.mark.parametrize("ranks", [3, 4, 6])
def test_sums_have_the_same_bits_on_all_ranks_and_integers_wrap_round(tmp_path: Path, ranks: int):
    program = """
    with oa.init(timeout_s=30) as group:
        rank, size = group.rank, group.world_size
        for count in (1, 7, 100, 1023, 5000, 70_001):
            random = np.random.default_rng([rank, count])
            mine = random.standard_normal(count) * 10.0 ** random.integers(-6, 6, count)
            for dtype in (np.float32, np.float64):
                for op in ("sum", "mean", "product"):
                    for out in (None, mine.astype(dtype)):
                        got = group.all_reduce(mine.astype(dtype) if out is None else out, op, out=out)
                        bits = group.all_gather(got.view(np.uint8)).reshape(size, -1)
                        assert (bits == bits[0]).all(), (count, dtype, op)
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint64"):
            most = np.iinfo(name).max
            every = [np.full(9, most - peer, name) for peer in range(size)]
            assert (group.all_reduce(every[rank]) == np.add.reduce(every, dtype=name)).all(), name
        print("all is well")
    """
    well(run_ranks(tmp_path, program, ranks), ranks)


def test_ucc_performs_what_it_is_asked_to(tmp_path: Path):
    program = """
    import oneaccord_ucc.library as library
    with oa.init() as group:
        init, calls = library.load().collective_init, []
        library.load().collective_init = lambda *args: calls.append(1) or init(*args)
        group.all_reduce(np.ones(3)), group.broadcast(np.ones(3)), group.all_to_all(np.ones(4))
        group.barrier(), group.all_reduce(np.ones(3, np.float16))
        assert len(calls) == 3, calls
        print("all is well")
    """
    well(run_ranks(tmp_path, program, 2), 2)


@pytest.mark.parametrize(
    ("case", "call"),
    [
        ("shape", "attempt(group.all_reduce, np.zeros(4 if rank else 8, np.float32))"),
        ("op", "attempt(group.all_reduce, np.zeros(4), 'sum' if rank else 'product')"),
        ("order", "attempt(*[group.broadcast, group.all_reduce][:: -1 if rank == 1 else 1][:1], np.ones(4))"),
    ],
)
def test_a_mismatch_is_an_error_on_every_rank(tmp_path: Path, case: str, call: str):
    done = run_ranks(tmp_path, peer_worlds.FAILING + call, 3)
    peer_worlds.mismatched(done)


@pytest.mark.parametrize("count", [1, 1 << 12, 1 << 20])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_is_named_on_every_survivor_and_nobody_gets_wrong_numbers(tmp_path: Path, ranks: int, count: int):
    program = f"""
if rank == 1:
    threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()

def on_and_on():
    for turn in range(10**9):
        total = group.all_reduce(np.full({count}, turn + rank))
        assert (total == turn * size + size * (size - 1) // 2).all(), "wrong numbers"
        every = group.all_gather(np.full({count}, turn + rank)).reshape(size, -1)
        assert (every == turn + np.arange(size)[:, None]).all(), "wrong numbers"

attempt(on_and_on)
"""
    done = run_ranks(tmp_path, peer_worlds.FAILING + program, ranks)
    said = re.findall(r"PeerLostError after ([0-9.]+) s: rank 1 was lost", done.stdout)
    assert len(said) == ranks - 1, done.stdout + done.stderr
    assert max(map(float, said)) < 20
    assert "oneaccord run: rank 1 failed first: killed by SIGKILL" in done.stderr, done.stderr
    assert done.returncode == 137


def test_a_rank_that_stands_still_inside_ucc_is_named_when_the_deadline_passes(tmp_path: Path):
    program = """
if rank == 1:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
big = np.ones(1 << 18)
attempt(lambda: [group.all_reduce(big, out=big, op="mean", timeout_s=2) for _ in range(10**9)])
"""
    done = run_ranks(tmp_path, peer_worlds.FAILING + program, 3)
    said = re.findall(
        r"DeadlineError after ([0-9.]+) s: all_reduce #\d+ did not finish within 2 s.*rank 1 did not answer", done.stdout
    )
    assert len(said) == 2, done.stdout + done.stderr
    assert max(map(float, said)) < 20


def test_a_rank_that_raises_ends_the_others(tmp_path: Path):
    program = """
if rank == 1:
    raise ValueError("too much")
attempt(lambda: [group.all_reduce(np.ones(1 << 18)) for _ in range(10**9)])
"""
    done = run_ranks(tmp_path, peer_worlds.FAILING + program, 3)
    assert len(re.findall(r"AbortedError after [0-9.]+ s: rank 1 ended with ValueError: too much", done.stdout)) == 2, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize("idle_s", [0, 1])
def test_the_survivors_go_on_in_a_smaller_world(tmp_path: Path, idle_s: int):
    program = f"""
if rank == 1:
    threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()
time.sleep({idle_s})
try:
    for _ in range(10**9):
        group.all_reduce(np.ones(1 << 18))
except oa.PeerLostError:
    pass
with group.shrink() as smaller:
    assert smaller.world_size == 2
    assert (smaller.all_reduce(np.ones(1 << 18)) == 2).all()
assert "oneaccord-ucc" not in [thread.name for thread in threading.enumerate()]
print("all is well")
"""
    script = peer_worlds.FAILING + program
    done = peer_worlds.run_ranks(tmp_path, "ucc", script, 3, options=("--keep-going",), PYTHONFAULTHANDLER="1")
    assert done.stdout.count("all is well") == 2, done.stdout + done.stderr


@pytest.mark.parametrize("program", [peer_worlds.QUIET, peer_worlds.LISTENING], ids=["quiet", "listening"])
def test_a_wait_burns_no_core_closing_leaves_nothing_and_nobody_else_is_let_in(tmp_path: Path, program: str):
    well(run_ranks(tmp_path, program, 2), 2)

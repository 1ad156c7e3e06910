"""Real ranks over a real MPI: what `oneaccord check` does not know of. `make test-peers` runs them, and that, with each MPI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support import peer_worlds
from support.peer_worlds import mismatched, names_both_calls, run_ranks, well
from support.worlds import free_port

from oneaccord_mpi.command import family_of, is_root
from oneaccord_mpi.finding import find_mpiexec

pytestmark = pytest.mark.peers

MODES = {
    "polled": {},
    "unchecked": {"ONEACCORD_BACKENDS__MPI__CHECK": "false"},
    "blocking": {"ONEACCORD_BACKENDS__MPI__NATIVE": "blocking"},
    "off": {"ONEACCORD_BACKENDS__MPI__NATIVE": "off"},
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["unchecked", "blocking", "off"])
def test_every_collective_equals_numpy(tmp_path: Path, mode: str, ranks: int):
    well(run_ranks(tmp_path, "mpi", peer_worlds.COLLECTIVES, ranks, **MODES[mode]), ranks)


@pytest.fixture
def mpiexec() -> tuple[list[str], dict[str, str]]:
    """The command by which users start ranks themselves, and the variables that it needs here."""
    found = find_mpiexec()
    assert found is not None
    family = family_of([found])
    command = [found, *(["--oversubscribe"] if family.name == "Open MPI" else []), "-n", "3"]
    return command, dict(family.as_root) if is_root() else {}


def test_the_users_own_mpiexec_needs_no_variable_on_one_host(tmp_path: Path, mpiexec):
    command, variables = mpiexec
    well(run_ranks(tmp_path, "mpi", peer_worlds.GROUPS, 3, command=command, **variables), 3)


ENDS = {
    "any rank": "group.send(np.arange(5), 1, tag=1) if rank == 0 else group.recv(oa.ANY, tag=1) if rank == 1 else None",
    "nobody": "receive = group.recv_async(oa.ANY, tag=1)\nassert receive.cancel()",
    "a probe": "group.iprobe()",
}


@pytest.mark.parametrize("how", ENDS)
def test_messages_with_tags_do_not_keep_a_world_from_ending(tmp_path: Path, mpiexec, how: str):
    command, variables = mpiexec
    program = f"""
with oa.init() as group:
    rank = group.rank
    {ENDS[how].replace(chr(10), chr(10) + 4 * " ")}
print("all is well")
"""
    done = run_ranks(tmp_path, "mpi", program, 3, command=command, **variables, ONEACCORD_BACKENDS__MPI__FINALIZE_S="20")
    well(done, 3)
    assert "oneaccord: " not in done.stderr, done.stderr


def test_a_rank_that_cannot_finalize_does_not_keep_the_others_waiting(tmp_path: Path):
    program = """
with oa.init() as group:
    from oneaccord_mpi.backend import current
    backend = current()
    if group.rank == 0:  # a message that oneaccord waits for no more, and that nobody receives
        never = bytes(1 << 22)
        backend.hold((never, backend.comm.Isend(never, 1, 7)))
print("all is well")
"""
    done = run_ranks(tmp_path, "mpi", program, 3, ONEACCORD_BACKENDS__MPI__FINALIZE_S="20")
    well(done, 3)
    assert "oneaccord: MPI has messages of this rank that are not finished" in done.stderr, done.stderr
    assert "not all ranks ended" not in done.stderr, done.stderr


def test_a_rank_that_leaves_without_its_end_does_not_keep_the_others_waiting(tmp_path: Path):
    program = """
    with oa.init() as group:
        group.barrier()
    print("all is well", flush=True)
    if group.rank == 1:
        os._exit(0)
    """
    done = run_ranks(tmp_path, "mpi", program, 3, ONEACCORD_BACKENDS__MPI__FINALIZE_S="20")
    well(done, 3)
    assert "not all ranks ended" not in done.stderr, done.stderr


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "raise RuntimeError('on its own')", "sys.exit(3)"])
def test_a_world_of_the_users_own_mpiexec_ends_when_a_rank_does(tmp_path: Path, mpiexec, how: str):
    command, variables = mpiexec
    program = f"if rank == 1:\n    {how}\nattempt(group.all_reduce, np.ones(9))"
    done = run_ranks(tmp_path, "mpi", peer_worlds.FAILING + program, 3, command=command, **variables)
    assert done.returncode != 0
    assert "DeadlineError" not in done.stdout
    if "kill" not in how:  # there mpiexec kills the others as well, at once
        assert len(re.findall(r"Error after [0-9.]+ s: rank 1 (?:ended with|has closed)", done.stdout)) == 2, (
            done.stdout + done.stderr
        )


def test_mpi_performs_what_it_has_and_leaves_the_rest(tmp_path: Path):
    program = """
    from oneaccord.api import Collective, CollectiveRequest
    from oneaccord_mpi.natives import offer
    import ml_dtypes

    def offered(collective, dtype, op=None, even=True, nbytes=800):
        return offer(CollectiveRequest("mpi", collective, "cpu", np.dtype(dtype), op, nbytes, 2, even, bytes(8))) is not None

    with oa.init() as group:
        for op in ("sum", "product"):
            for name in "int32 uint64 float32 float64 longdouble".split():
                assert offered(Collective.ALL_REDUCE, name, op), (op, name)
        assert offered(Collective.ALL_REDUCE, "complex64", "sum") and offered(Collective.ALL_REDUCE, "bool", "xor")
        assert offered(Collective.REDUCE, "int16", "max") and offered(Collective.ALL_REDUCE, "float64", "mean")
        assert offered(Collective.BROADCAST, ml_dtypes.bfloat16) and offered(Collective.BARRIER, "uint8", nbytes=0)
        assert not offered(Collective.ALL_REDUCE, "int8", "sum") and not offered(Collective.REDUCE, "uint16", "sum")
        assert not offered(Collective.ALL_REDUCE, "float16", "sum") and not offered(Collective.ALL_REDUCE, ml_dtypes.bfloat16, "sum")
        assert not offered(Collective.ALL_REDUCE, "float64", "max") and not offered(Collective.ALL_REDUCE, "complex128", "product")
        assert not offered(Collective.ALL_GATHER, "float64", even=False) and not offered(Collective.BROADCAST, "int8", nbytes=1 << 31)
        assert not offered(Collective.SCAN, "float64", "sum") and not offered(Collective.EXSCAN, "int64", "max")
        assert not offered(Collective.ALL_REDUCE, "float64", "Op(f)") and offered(Collective.BROADCAST, "f8,i8")
        print("all is well")
    """
    well(run_ranks(tmp_path, "mpi", textwrap.dedent(program), 2), 2)


MISMATCHES = {
    "shape": "attempt(group.all_reduce, np.zeros(4 if rank else 8, np.float32))",
    "of what only oneaccord has": "attempt(group.all_reduce, np.zeros(4, np.float16 if rank == 1 else np.float32))",
}


@pytest.mark.parametrize("mode", ["polled", "blocking", "off"])
def test_a_mismatch_is_an_error_on_every_rank_that_says_who_did_what(tmp_path: Path, mode: str):
    for call in list(MISMATCHES.values())[: None if mode == "polled" else 1]:
        done = run_ranks(tmp_path, "mpi", peer_worlds.FAILING + call, 3, **MODES[mode])
        mismatched(done)
        names_both_calls(done)


@pytest.mark.parametrize("where", ["before a call", "in a call", "idle"])
def test_a_killed_rank_is_named_on_every_survivor(tmp_path: Path, where: str):
    program = {
        "before a call": "os.kill(os.getpid(), 9) if rank == 1 else attempt(group.all_reduce, np.ones(9))",
        "in a call": """
if rank == 1:
    threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()
big = np.ones(1 << 18)
attempt(lambda: [group.all_reduce(big, out=big, op="mean") for _ in range(10**9)])
""",
        "idle": """
if rank == 1:
    os.kill(os.getpid(), 9)
while not repr(group).endswith("failed>"):
    time.sleep(0.01)
attempt(group.barrier)
""",
    }[where]
    done = run_ranks(tmp_path, "mpi", peer_worlds.FAILING + program, 3)
    assert len(re.findall(r"PeerLostError after [0-9.]+ s: rank 1 was lost", done.stdout)) == 2, done.stdout + done.stderr
    assert "oneaccord run: rank 1 failed first: killed by SIGKILL" in done.stderr, done.stderr
    assert re.search(r"oneaccord run: ranks? [02].* failed after it", done.stderr), "they came to their end by themselves"
    assert done.returncode == 137


def test_an_exception_is_shown_last_and_its_rank_is_named(tmp_path: Path):
    program = "if rank == 2:\n    raise RuntimeError('on its own')\nattempt(group.barrier)"
    done = run_ranks(tmp_path, "mpi", peer_worlds.FAILING + program, 3)
    assert len(re.findall(r"AbortedError after [0-9.]+ s: rank 2 ended with RuntimeError: on its own", done.stdout)) == 2
    assert "oneaccord run: rank 2 failed first: exit code 1" in done.stderr
    assert done.stderr.rstrip().endswith("RuntimeError: on its own")
    assert done.returncode == 1


def test_an_exit_code_is_passed_on(tmp_path: Path):
    done = run_ranks(tmp_path, "mpi", "group = oa.init()\ngroup.barrier()\nsys.exit(5 if group.rank == 1 else 0)", 2)
    assert done.returncode == 5, done.stderr


def test_a_world_whose_ranks_are_stuck_inside_mpi_ends_in_words(tmp_path: Path):
    program = """
if rank == 1:
    signal.raise_signal(signal.SIGSTOP)
attempt(group.all_reduce, np.ones(1 << 20), timeout_s=2)
"""
    variables = {"ONEACCORD_BACKENDS__MPI__CHECK": "false", "ONEACCORD_BACKENDS__MPI__NATIVE": "blocking"}
    began = time.monotonic()
    done = run_ranks(tmp_path, "mpi", peer_worlds.FAILING + program, 3, **variables)
    assert done.returncode != 0
    assert re.search(r"oneaccord: rank [02] is stuck in allreduce of MPI, which cannot be interrupted", done.stderr), (
        done.stderr
    )
    assert time.monotonic() - began < 40


def test_ranks_with_different_settings_are_told(tmp_path: Path):
    program = """
    import os
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK"))
    oa.init(config={"backends": {"mpi": {"check": rank == 0}}})
    """
    done = run_ranks(tmp_path, "mpi", textwrap.dedent(program), 2)
    assert "backends.mpi.check is True on rank 0 and False on rank 1" in done.stderr
    assert done.returncode == 1


def test_ranks_that_mpiexec_did_not_start_are_told_how_to_start(tmp_path: Path):
    program = "oa.init(rank=0 if os.environ['WHO'] == '0' else 1, world_size=2)"
    script = tmp_path / "alone.py"
    script.write_text("import os\nimport oneaccord as oa\n" + program, encoding="utf-8")
    environ = os.environ | {"ONEACCORD_BACKEND": "mpi", "ONEACCORD_RENDEZVOUS": f"127.0.0.1:{free_port()}"}
    both = [
        subprocess.Popen([sys.executable, str(script)], env=environ | {"WHO": str(who)}, stderr=subprocess.PIPE, text=True)
        for who in range(2)
    ]
    for process in both:
        _, err = process.communicate(timeout=50)
        assert process.returncode == 1
        assert (
            "rank 0 is in an MPI world of 1, and the job has 2 ranks: start all ranks with one `oneaccord run --backend mpi -n 2`"
            in err
        )

"""Real ranks over the Gloo of torch: what `manyhands check` does not know of. `make test-peers` runs them, and that."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

import peer_worlds
import pytest
from peer_worlds import run_ranks

pytestmark = pytest.mark.peers

MODES = {
    "checked": {},
    "unchecked": {"MANYHANDS_BACKENDS__GLOO__CHECK": "false"},
    "messages alone": {"MANYHANDS_BACKENDS__GLOO__NATIVE": "false"},
}


def well(done: subprocess.CompletedProcess[str], ranks: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == ranks, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", ["unchecked", "messages alone"])
def test_every_collective_equals_numpy(tmp_path: Path, mode: str, ranks: int):
    well(run_ranks(tmp_path, "gloo", peer_worlds.COLLECTIVES, ranks, **MODES[mode]), ranks)


def test_gloo_performs_what_it_has_and_leaves_the_rest(tmp_path: Path):
    program = """
    from manyhands.api import Collective, CollectiveRequest
    from manyhands_gloo.natives import offer
    import ml_dtypes

    def offered(collective, dtype, op=None, even=True, nbytes=800):
        return offer(CollectiveRequest("gloo", collective, "cpu", np.dtype(dtype), op, nbytes, 2, even, bytes(8))) is not None

    with mh.init() as group:
        for name in ("int8", "uint8", "int32", "uint64", "float16", "float32", "float64", ml_dtypes.bfloat16):
            assert offered(Collective.ALL_REDUCE, name, "sum") and offered(Collective.REDUCE, name, "product"), name
        assert offered(Collective.ALL_REDUCE, "bool", "or") and offered(Collective.REDUCE_SCATTER, "int64", "max")
        assert offered(Collective.BROADCAST, "complex128") and offered(Collective.BARRIER, "uint8", nbytes=0)
        for name in ("int16", "uint16", "longdouble", "complex64"):
            assert not offered(Collective.ALL_REDUCE, name, "sum"), name
        assert not offered(Collective.ALL_REDUCE, "float64", "max") and not offered(Collective.ALL_REDUCE, "uint32", "max")
        assert not offered(Collective.ALL_GATHER, "float64", even=False) and not offered(Collective.BROADCAST, "int8", nbytes=0)
        assert not offered(Collective.SCAN, "float64", "sum") and not offered(Collective.EXSCAN, "int64", "max")
        assert not offered(Collective.ALL_REDUCE, "float64", "Op(f)") and offered(Collective.BROADCAST, "f8,i8")
        print("all is well")
    """
    well(run_ranks(tmp_path, "gloo", textwrap.dedent(program), 2), 2)


MISMATCHES = {
    "shape": "attempt(group.all_reduce, np.zeros(4 if rank else 8, np.float32))",
    "of what only manyhands has": "attempt(group.all_reduce, np.zeros(4, np.int16 if rank == 1 else np.float32))",
}


@pytest.mark.parametrize("mode", ["checked", "messages alone"])
def test_a_mismatch_is_an_error_on_every_rank_that_says_who_did_what(tmp_path: Path, mode: str):
    for name, call in MISMATCHES.items() if mode == "checked" else list(MISMATCHES.items())[:1]:
        done = run_ranks(tmp_path, "gloo", peer_worlds.FAILING + call, 3, **MODES[mode])
        assert done.returncode == 1, (name, done.stdout, done.stderr)
        said = re.findall(r"CollectiveMismatchError after ([0-9.]+) s", done.stdout)
        assert len(said) == 3, (name, done.stdout, done.stderr)
        assert max(map(float, said)) < 20, "found, and not come upon by the deadline"
        # The first line says what both did, as on every other backend.
        who = r"rank [012] is in \w+\(.*\) #2, and rank [012] (?:is in|in|sent it a message of) \w+\(.*\) #2"
        assert len(re.findall(rf"CollectiveMismatchError after .*{who}", done.stdout)) == 3, (name, done.stdout)
        assert len(set(re.findall(r"^\[.\]   ranks? [0-9, -]+: .*\(.*\) #2", done.stdout, re.MULTILINE))) >= 2, (
            name,
            done.stdout,
        )


def test_ranks_with_different_settings_are_told(tmp_path: Path):
    program = "mh.init(config={'backends': {'gloo': {'check': os.environ['RANK'] == '0'}}})"
    done = run_ranks(tmp_path, "gloo", program, 2)
    assert "backends.gloo.check is True on rank 0 and False on rank 1" in done.stderr
    assert done.returncode == 1


def test_gloo_listens_where_the_ranks_reach_each_other_and_nowhere_else(tmp_path: Path):
    program = """
    import socket
    group = mh.init()
    table = open("/proc/net/tcp").read().splitlines()[1:] + open("/proc/net/tcp6").read().splitlines()[1:]
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    listening = [line.split()[1].split(":")[0] for line in table if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in mine]
    assert listening and set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F"}, listening
    group.close()
    print("all is well")
    """
    well(run_ranks(tmp_path, "gloo", textwrap.dedent(program), 2), 2)

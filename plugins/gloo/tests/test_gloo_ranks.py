"""Real ranks over the Gloo of torch: what `oneaccord check` does not know of. `make test-peers` runs them, and that."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support import peer_worlds
from support.peer_worlds import LISTENING, mismatched, names_both_calls, run_ranks, well

pytestmark = pytest.mark.peers

MODES = {
    "checked": {},
    "unchecked": {"ONEACCORD_BACKENDS__GLOO__CHECK": "false"},
    "messages alone": {"ONEACCORD_BACKENDS__GLOO__NATIVE": "false"},
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", ["unchecked", "messages alone"])
def test_every_collective_equals_numpy(tmp_path: Path, mode: str, ranks: int):
    well(run_ranks(tmp_path, "gloo", peer_worlds.COLLECTIVES, ranks, **MODES[mode]), ranks)


def test_gloo_performs_what_it_has_and_leaves_the_rest(tmp_path: Path):
    program = """
    from oneaccord.api import Collective, CollectiveRequest
    from oneaccord_gloo.natives import offer
    import ml_dtypes

    def offered(collective, dtype, op=None, even=True, nbytes=800):
        return offer(CollectiveRequest("gloo", collective, "cpu", np.dtype(dtype), op, nbytes, 2, even, bytes(8))) is not None

    with oa.init() as group:
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
    "of what only oneaccord has": "attempt(group.all_reduce, np.zeros(4, np.int16 if rank == 1 else np.float32))",
}


@pytest.mark.parametrize("mode", ["checked", "messages alone"])
def test_a_mismatch_is_an_error_on_every_rank_that_says_who_did_what(tmp_path: Path, mode: str):
    for call in list(MISMATCHES.values())[: None if mode == "checked" else 1]:
        done = run_ranks(tmp_path, "gloo", peer_worlds.FAILING + call, 3, **MODES[mode])
        mismatched(done)
        names_both_calls(done)


def test_ranks_with_different_settings_are_told(tmp_path: Path):
    program = "oa.init(config={'backends': {'gloo': {'check': os.environ['RANK'] == '0'}}})"
    done = run_ranks(tmp_path, "gloo", program, 2)
    assert "backends.gloo.check is True on rank 0 and False on rank 1" in done.stderr
    assert done.returncode == 1


def test_gloo_listens_where_the_ranks_reach_each_other_and_nowhere_else(tmp_path: Path):
    well(run_ranks(tmp_path, "gloo", LISTENING, 2), 2)

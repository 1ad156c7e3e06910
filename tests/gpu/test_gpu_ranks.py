"""Ranks that are processes on real GPUs, over NCCL: `make test-gpu`. On one GPU at most 2 share it; worlds of 4 need 4 GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.gpu_ranks import Outcome, environment

# Each test starts processes that load CUDA, CuPy's kernels and NCCL; they are bounded in time themselves.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

Ranks = Callable[..., list[Outcome]]

NCCL: dict[str, Any] = {"backend": "nccl"}
HYBRID: dict[str, Any] = {"backend": "hybrid", "backends": {"hybrid": {"routes": {"cpu": "tcp", "cuda": "nccl"}}}}
OVER_BOTH = pytest.mark.parametrize("config", [NCCL, HYBRID], ids=["nccl", "hybrid"])
PROMISE_S = 5.0
"""Within what time a rank that was killed is named on every survivor, the end of what runs on its GPU included."""


def well(outcomes: list[Outcome]) -> list[Any]:
    """Return what the programs returned; all must have ended well."""
    for rank, outcome in enumerate(outcomes):
        assert (outcome.code, outcome.error) == (0, None), f"rank {rank}: {outcome.text}\n{outcome.output}"
    return [outcome.result for outcome in outcomes]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_of_every_dtype(ranks: Ranks, size: int) -> None:
    left_out = well(ranks("collectives", size, NCCL))
    assert left_out in ([[]] * size, [["bfloat16"]] * size)  # CuPy has it from 14 on, with ml_dtypes


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", "layouts refusals messages splits batches stream_order works capture registered".split())
def test_programs(ranks: Ranks, name: str, size: int) -> None:
    well(ranks(name, size, NCCL))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_of_16_bits_in_float32(ranks: Ranks, size: int) -> None:
    well(ranks("accumulation", size, NCCL | {"backends": {"nccl": {"accumulate": "float32"}}}))


@pytest.mark.parametrize("size", [1, 2])
def test_arrays_of_the_host_go_over_tcp_and_those_of_gpus_over_nccl(ranks: Ranks, size: int) -> None:
    well(ranks("routes", size, HYBRID))


@OVER_BOTH
@pytest.mark.parametrize("size", [1, 2, 4])
def test_training_ends_with_the_same_bits_on_all_ranks(ranks: Ranks, size: int, config: Any) -> None:
    bits = well(ranks("training", size, config))
    assert bits == [bits[0]] * size


@pytest.mark.parametrize("size", [1, 2])
def test_tensors_of_torch(ranks: Ranks, machine: Any, size: int) -> None:
    if not machine.has_torch:
        pytest.skip("torch with CUDA is not installed")
    assert well(ranks("tensors", size, NCCL, arrays="torch")) == [True] * size


def test_arrays_go_through_the_host_over_tcp(ranks: Ranks) -> None:
    outcomes = ranks("through_the_host", 2, {"backend": "tcp", "gpu_fallback": "host"})
    well(outcomes)
    assert all("GpuFallbackWarning: all_reduce: 4000 bytes" in outcome.output for outcome in outcomes)


@pytest.mark.parametrize("size", [1, 2])
def test_memory_comes_back_when_a_group_is_closed(ranks: Ranks, size: int) -> None:
    for found in well(ranks("memory", size, NCCL)):
        # The first time, CUDA and NCCL load what stays with the process.
        assert max(found[1:]) - min(found[1:]) <= 8 << 20, found


@OVER_BOTH
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_is_killed_is_named_in_time(ranks: Ranks, tmp_path: Path, size: int, config: Any) -> None:
    *survivors, victim = ranks("killed", size, config)
    assert victim.code == -9
    killed_at = float((tmp_path / "killed").read_text())
    for outcome in survivors:
        assert (outcome.code, outcome.error, outcome.peer) == (0, "PeerLostError", size - 1), outcome
        assert outcome.ended - killed_at < PROMISE_S


@OVER_BOTH
@pytest.mark.parametrize("size", [2, 4])
def test_those_that_are_left_go_on_with_their_gpus(ranks: Ranks, size: int, config: Any) -> None:
    *left, victim = ranks("going_on", size, config)
    assert victim.code == -9
    assert well(left) == [[rank, size - 1] for rank in range(size - 1)]


@OVER_BOTH
@pytest.mark.parametrize(
    ("program", "error"), [("mismatch", "CollectiveMismatchError"), ("deadline", "DeadlineError")], ids=["mismatch", "deadline"]
)
def test_failures_are_told_alike_on_all_ranks(ranks: Ranks, program: str, error: str, config: Any) -> None:
    outcomes = ranks(program, 2, config)
    assert [(outcome.code, outcome.error) for outcome in outcomes] == [(0, error)] * 2, outcomes
    assert len({outcome.text for outcome in outcomes}) == 1


def test_doctor_finds_nothing_that_speaks_against_nccl(machine: Any) -> None:
    command = [sys.executable, "-m", "oneaccord", "doctor", "--json"]
    answer = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    report = json.loads(answer.stdout)
    assert [each["reason"] for each in report["backends"] if each["name"] == "nccl"] == [None]
    found = {fact["what"]: fact["value"] for fact in report["diagnoses"]["nccl"]}
    assert found["GPUs"] == str(machine.gpus)
    assert not [value for value in found.values() if "unknown" in value]

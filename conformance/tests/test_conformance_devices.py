"""The chapter on GPUs, with the real nccl plugin on GPUs that are made of threads and NumPy memory; and one that it must find wrong."""

from __future__ import annotations

import pytest
from support.device_worlds import HYBRID, gpus
from support.fake_gpu import fake_communicator
from support.fake_gpu.fake_nccl import FakeNccl

from oneaccord_conformance import Check, WorldMaker, all_checks, run_check

__all__ = ["gpus"]

DEVICE = [each for each in all_checks() if each.chapter == "device"]


@pytest.mark.parametrize("backend", ["nccl", "hybrid"])
@pytest.mark.parametrize("check", DEVICE, ids=[each.name for each in DEVICE])
def test_nccl_conforms_on_gpus(gpus: FakeNccl, check: Check, backend: str) -> None:
    worlds = WorldMaker(backend, HYBRID if backend == "hybrid" else None, 3, quick=True)
    result = run_check(check, worlds)
    assert not worlds.rest()
    assert result.status == "passed", result.text


def test_a_wrong_sum_on_a_gpu_is_found(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    right = fake_communicator._reduced
    monkeypatch.setattr(fake_communicator, "_reduced", lambda parts, op: right(parts[:1], op))
    worlds = WorldMaker("nccl", ranks=2, quick=True)
    result = run_check(next(each for each in DEVICE if each.name == "collectives"), worlds)
    worlds.rest()
    assert result.status == "failed"
    assert "elements are wrong, the first is element" in result.text


def test_checks_of_host_memory_are_skipped_where_a_backend_moves_none(gpus: FakeNccl) -> None:
    worlds = WorldMaker("nccl", ranks=2)
    first = next(each for each in all_checks() if each.title == "bytes.barriers")
    result = run_check(first, worlds)
    assert (result.status, result.text) == (
        "skipped",
        "nccl declares so: it does not move the memory of the host: Backend.memory",
    )
    worlds.rest()

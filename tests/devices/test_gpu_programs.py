"""The programs that real GPUs are tested with, on fakes of CUDA, CuPy and NCCL; and on the host, what starts them as processes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import gpu_programs
from support.device_worlds import HYBRID, gpu_world, gpus
from support.fake_gpu import fake_cupy as cupy
from support.fake_gpu.fake_nccl import FakeNccl
from support.gpu_ranks import _run as run_here
from support.gpu_ranks import run_ranks
from support.worlds import must

import oneaccord as oa
from oneaccord.api import Group
from oneaccord_nccl.communicator import wait_for_ends

__all__ = ["gpus"]

NCCL = {"backend": "nccl"}
TCP = {"backend": "tcp"}


def ranks(program: Any, size: int, *words: str, config: Any = NCCL) -> list[Any]:
    return gpu_world(lambda group: program(group, cupy, *words), size, config=config)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 1), ("float32", 4), ("bfloat16", 2), ("uint8", 2), ("bool", 2), ("complex64", 2), ("int16", 2)],
)
def test_collectives(gpus: FakeNccl, dtype: str, size: int) -> None:
    config = HYBRID if dtype == "uint8" else NCCL
    assert must(ranks(gpu_programs.collectives, size, dtype, config=config)) == [[]] * size


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", "layouts refusals messages splits batches stream_order works capture registered".split())
def test_programs(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    monkeypatch.setattr(gpu_programs, "MANY", 1 << 10)  # here streams are late whatever they do
    must(ranks(getattr(gpu_programs, name), size))


@pytest.mark.parametrize("size", [1, 4])
def test_accumulation(gpus: FakeNccl, size: int) -> None:
    must(ranks(gpu_programs.accumulation, size, config={**NCCL, "backends": {"nccl": {"accumulate": "float32"}}}))


def test_routes(gpus: FakeNccl) -> None:
    must(ranks(gpu_programs.routes, 2, config=HYBRID))


@pytest.mark.parametrize("config", [NCCL, HYBRID], ids=["nccl", "hybrid"])
def test_training_ends_with_the_same_bits_on_all_ranks(gpus: FakeNccl, config: Any) -> None:
    bits = must(ranks(gpu_programs.training, 4, config=config))
    assert bits == [bits[0]] * 4


@pytest.mark.filterwarnings("ignore::oneaccord.errors.GpuFallbackWarning")
def test_arrays_go_through_the_host(gpus: FakeNccl) -> None:
    must(ranks(gpu_programs.through_the_host, 2, config={**TCP, "gpu_fallback": "host"}))


@pytest.mark.parametrize(
    ("program", "error"),
    [(gpu_programs.mismatch, oa.CollectiveMismatchError), (gpu_programs.deadline, oa.DeadlineError)],
    ids=["mismatch", "deadline"],
)
@pytest.mark.parametrize("config", [NCCL, HYBRID], ids=["nccl", "hybrid"])
def test_failures(gpus: FakeNccl, config: Any, program: Any, error: type[BaseException]) -> None:
    outcomes = ranks(program, 2, config=config)
    assert [type(outcome) for outcome in outcomes] == [error] * 2, outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1


def test_memory(gpus: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """What communicators hold is what is not free, here."""

    def free_and_all() -> tuple[int, int]:
        wait_for_ends()
        return (80 - gpus.open_communicators()) << 30, 80 << 30

    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", free_and_all, raising=False)
    cupy.cuda.Device(0).use()
    found = gpu_programs.memory(lambda: oa.init(config=NCCL, rank=0, world_size=1), cupy, settle_s=0.0)
    assert found == [80 << 30] * 4


# What starts ranks as processes, where no GPU is needed.


def test_ranks_that_are_processes_tell_what_came_of_them(tmp_path: Path) -> None:
    """One of them kills itself, and the others go on."""
    *left, victim = run_ranks("going_on", 3, tmp_path, config=TCP, arrays="numpy", timeout_s=40.0)
    assert victim.code == -9
    told = [(outcome.code, outcome.error, outcome.result, outcome.output) for outcome in left]
    assert told == [(0, None, [0, 2], ""), (0, None, [1, 2], "")]
    killed = float((tmp_path / "killed").read_text())
    assert all(0 < outcome.ended - killed < 20 for outcome in left), "it took the whole timeout"


def test_what_a_program_raises_comes_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    request = {
        "program": "lost",
        "module": "test_gpu_programs",
        "words": ["2"],
        "arrays": "numpy",
        "config": {},
        "timeout_s": 20,
    }
    monkeypatch.setitem(sys.modules, "test_gpu_programs", sys.modules[__name__])
    outcome = run_here(request)
    assert (outcome.error, outcome.text, outcome.peer) == ("PeerLostError", "rank 2 is gone", 2)
    assert "PeerLostError: rank 2 is gone" in capsys.readouterr().err


def lost(group: Group, xp: ModuleType, peer: str) -> None:
    raise oa.PeerLostError(f"rank {peer} is gone", peer=int(peer))

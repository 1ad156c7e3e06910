"""`benchmarks/gpu.py`: the benchmark of GPUs, on fakes, whose times mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.device_worlds import gpu_world, gpus
from support.fake_gpu import fake_cupy as cupy
from support.fake_gpu.fake_nccl import FakeNccl
from support.scripts import module_of
from support.worlds import must

__all__ = ["gpus"]


@pytest.fixture
def bench(repository: Path) -> Any:
    """The benchmark, as a module."""
    return module_of(repository / "benchmarks" / "gpu.py")


def test_it_measures_prints_and_writes(
    gpus: FakeNccl, bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda start, end: 0.5, raising=False)

    def on_fakes(world_size: int, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
        folder = tmp_path / str(world_size)
        folder.mkdir()
        return must(
            gpu_world(lambda group: bench.measure(group, folder, sizes, rounds, None), world_size, config={"backend": "nccl"})
        )

    file = tmp_path / "gpu.json"
    bench.main(["--sizes", "1KiB", "--rounds", "2", "--ranks", "1", "2", "--json", str(file)], on_fakes)

    report = json.loads(file.read_text())
    assert {"date", "gpu", "driver", "cuda", "nccl", "cupy", "oneaccord"} <= set(report["circumstances"])
    assert [world["ranks"] for world in report["worlds"]] == [1, 2]
    for world in report["worlds"]:
        assert set(world["left_out"]) == {"cupyx", "torch"}, world
        rows = {(row["nbytes"], row["case"]): row for row in world["rows"]}
        assert set(rows) == {(1024, case) for case in ("in place", "out", "8 as one", "beside")}
        for (_, case), row in rows.items():
            assert set(row["host_us"]) == ({"oneaccord"} if case == "beside" else {"oneaccord", "raw"})
            assert all(value > 0 for value in row["host_us"].values())
            assert set(row["device_us"].values()) == {500 / 50}
            if "raw" in row["host_us"]:
                assert row["over_raw_us"] == row["host_us"]["oneaccord"] - row["host_us"]["raw"]
                assert row["device_ratio_to_raw"] == 1
    said = capsys.readouterr().out
    assert "all_reduce, float32 sum, 2 ranks" in said
    assert "left out: torch: ModuleNotFoundError" in said
    assert [line.split()[:2] for line in said.splitlines() if line.strip().startswith("1KiB")] == [
        *(["1KiB", word] for word in ("in", "out", "8", "beside")),
    ] * 2
    assert said.splitlines()[-1].startswith("targets, ")


def test_a_world_that_does_not_come_up_is_said_and_the_next_goes_on(
    gpus: FakeNccl, bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(world_size: int, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
        if world_size == 2:
            raise RuntimeError("no room for two")
        sample = {"nbytes": 8, "case": "in place"}
        ours = {**sample, "name": "oneaccord", "host_us": 6.0, "device_us": 4.0}
        raw = {**sample, "name": "raw", "host_us": 4.0, "device_us": 4.0}
        torch = {**sample, "name": "torch", "host_us": 24.0, "device_us": 5.0}
        return [{"samples": [ours, raw, torch], "left_out": {}}]

    file = tmp_path / "gpu.json"
    bench.main(["--ranks", "2", "1", "--sizes", "8", "--json", str(file)], start)

    failed, fine = json.loads(file.read_text())["worlds"]
    assert failed == {"ranks": 2, "problem": "no room for two"}
    (row,) = fine["rows"]
    assert (row["over_raw_us"], row["host_ratio_to_torch"], row["device_ratio_to_raw"]) == (2, 0.25, 1)
    assert "2 ranks could not be measured: no room for two" in capsys.readouterr().out

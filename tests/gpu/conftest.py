"""The GPUs of this machine, and worlds of processes on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.gpu_ranks import Outcome, environment, run_ranks

_SHARING_VERSION = 23003
_SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    # The kernels of all ranks must fit on the GPU at once, and multicast is not for ranks that share one.
    "NCCL_MAX_CTAS": "2",
    "NCCL_NVLS_ENABLE": "0",
}
_MOST_ON_ONE = 2
"""So many ranks on one GPU NCCL promises to serve; with more, their kernels may not all fit on it at once, and wait for each other for ever."""
_PATIENCE_S = 100.0
_PROBE = """
import json
import cupy
import nccl.bindings.nccl as nccl
count = cupy.cuda.runtime.getDeviceCount()
capability = cupy.cuda.Device(0).compute_capability
try:
    import torch
    has_torch = torch.cuda.is_available()
except ImportError:
    has_torch = False
print(json.dumps({"gpus": count, "nccl": nccl.get_version(), "capability": capability, "has_torch": has_torch}))
"""


@dataclass(frozen=True)
class Machine:
    """What there is: so many GPUs, NCCL's version as it numbers itself, the GPUs' compute capability, and torch with CUDA."""

    gpus: int
    nccl: int
    capability: str
    has_torch: bool


@pytest.fixture(scope="session")
def machine() -> Machine:
    """The machine; without a GPU that CuPy and NCCL can use, the tests are skipped."""
    # In a process of its own: this one needs no place on the GPU.
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE], env=environment(), capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    if probe.returncode:
        pytest.skip(f"no GPU that CuPy and NCCL can use: {(probe.stderr.strip().splitlines() or ['?'])[-1]}")
    return Machine(**json.loads(probe.stdout))


Ranks = Callable[..., list[Outcome]]


@pytest.fixture
def ranks(machine: Machine, tmp_path: Path) -> Ranks:
    """Run a program of `gpu_programs`, ``ranks(name, world_size, config)``; each rank has a GPU, or two of them share one."""

    def run(program: str, world_size: int, config: dict[str, Any], **options: Any) -> list[Outcome]:
        variables = {}
        if world_size > machine.gpus:
            if world_size > _MOST_ON_ONE:
                pytest.skip(
                    f"{world_size} ranks need {world_size} GPUs, and {machine.gpus} are here: no more than 2 ranks share one"
                )
            if machine.nccl < _SHARING_VERSION:
                pytest.skip(f"{world_size} ranks on {machine.gpus} GPUs need NCCL 2.30.3, and this is {machine.nccl}")
            variables = {name: os.environ.get(name, value) for name, value in _SHARING.items()}
        return run_ranks(program, world_size, tmp_path, config=config, variables=variables, patience_s=_PATIENCE_S, **options)

    return run

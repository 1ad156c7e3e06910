"""What ``oneaccord doctor`` tells of GPUs: every step that fails is a line in words, and the next one is made all the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from oneaccord_nccl import _cuda, _nccl, plugin
from oneaccord_nccl.dtypes import named

__all__ = ["diagnose"]

_DRIVER = Path("/proc/driver/nvidia/version")

Fact = tuple[str, str]


def diagnose() -> list[Fact]:
    """Return facts about the driver, CUDA, CuPy, NCCL and the GPUs, as (what, value) pairs; of what is not installed, only that."""
    facts = [("driver", _driver())]
    facts.append(("CuPy", _installed("cupy-cuda12x", "cupy-cuda13x", "cupy")))
    facts.append(("nccl4py", _installed("nccl4py")))
    if not plugin.is_missing("nccl"):
        facts += _guarded("NCCL", _nccl_facts)
    if not plugin.is_missing("cupy"):
        cuda, gpus = _guarded("CUDA", _cuda_facts), _guarded("GPUs", _gpu_facts)
        # Without a GPU both fail, and for one reason.
        facts += [("CUDA, GPUs", cuda[0][1])] if cuda[0][1] == gpus[0][1] else [*cuda, *gpus]
    return facts


def _guarded(what: str, facts: Callable[[], list[Fact]]) -> list[Fact]:
    try:
        return facts()
    except Exception as error:  # noqa: BLE001 - whatever fails here is what people want to know
        return [(what, f"unknown: {error}")]


def _installed(*names: str) -> str:
    for name in names:
        try:
            return f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return "not installed"


def _driver() -> str:
    try:
        first = _DRIVER.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:  # also in containers that have the driver and do not show this
        return f"there is no {_DRIVER}"
    number = re.search(r"\d+(\.\d+)+", first)
    return number[0] if number else first


def _nccl_facts() -> list[Fact]:
    library = _nccl.load()
    path = library.raw.get_library_path()
    return [("NCCL", f"{named(library.version)}, {path or 'path unknown to its binding'}")]


def _cuda_facts() -> list[Fact]:
    runtime = _cuda.load().runtime
    driver = runtime.driverGetVersion()
    return [
        ("CUDA of the driver", f"{driver // 1000}.{driver % 1000 // 10}" if driver else "no driver is loaded"),
        ("CUDA runtime", f"{runtime.runtimeGetVersion() // 1000}.{runtime.runtimeGetVersion() % 1000 // 10}"),
    ]


def _gpu_facts() -> list[Fact]:
    cuda = _cuda.load()
    count = cuda.count()
    facts = [("GPUs", str(count))]
    for device in range(count):
        facts += _guarded(f"GPU {device}", lambda device=device: _one_gpu(cuda, device))  # type: ignore[misc]
    if count > 1:
        facts += _guarded("GPU links", lambda: _links(cuda, count))
    return facts


def _one_gpu(cuda: _cuda.Cuda, device: int) -> list[Fact]:
    found = cuda.describe(device)
    major, minor = found.capability
    return [
        (
            f"GPU {device}",
            f"{found.name}, {found.memory / 2**30:.0f} GiB, compute capability {major}.{minor}, PCI bus id {found.bus_id}",
        )
    ]


def _links(cuda: _cuda.Cuda, count: int) -> list[Fact]:
    reach = cuda.runtime.deviceCanAccessPeer
    facts = []
    for device in range(count):
        peers = [str(peer) for peer in range(count) if peer != device and reach(device, peer)]
        facts.append((f"GPU {device} reaches", ", ".join(peers) if peers else "no other GPU directly"))
    facts.append(("GPU links", "whether they are NVLink is not known here: nvidia-smi topo -m shows it"))
    return facts

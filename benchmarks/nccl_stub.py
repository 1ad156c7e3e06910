"""What a launch costs on the host, without a GPU: nccl4py and the nccl backend above libraries in C that do nothing.

- raw: nccl4py's ``all_reduce``, with all arguments at hand
- launch: the backend's, of a kind of call that it has prepared, by a group of two ranks
- launch alone: likewise, by a group of one rank, which sets the device itself

They take turns, in an order that turns round. What is measured is the processor's time, so that other programs do not count. The libraries are those of the tests (``tests/support/fake_gpu/shim``): a C compiler and nccl4py must be here.

Usage: python benchmarks/nccl_stub.py [-h] [--rounds N] [--calls N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from oneaccord.api import Collective, Deadline, DeviceCall, Launch
from oneaccord_nccl import _driver, _nccl
from oneaccord_nccl._cuda import Cuda
from oneaccord_nccl.channel import NcclChannel
from oneaccord_nccl.communicator import Communicator
from oneaccord_nccl.dtypes import Abilities

SOURCE, TARGET, STREAM, COUNT = 1 << 20, 2 << 20, 16, 1024  # addresses that nobody looks at
FLOAT32, SUM = 7, 0  # NCCL's numbers
VERSION = 23203


def libraries() -> Any:
    """Return how the tests compile and load the libraries in C."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    return import_module("support.fake_gpu.compiled")


def channel(library: _nccl.Library, cuda: Cuda, size: int) -> NcclChannel:
    """Return an open channel of a rank of a group."""
    communicator = Communicator(library, cuda, 0, 30.0)
    communicator.connect(bytes(128), size, 0, Deadline(30.0), None)
    return NcclChannel(communicator, cuda, 0, 0, Abilities(VERSION, (9, 0)))


def contenders() -> dict[str, Callable[[], object]]:
    """Return what is measured, by its name; each has been called once."""
    compiled = libraries()
    compiled.load("nccl")
    cuda_library = compiled.load("cuda")
    library = _nccl.load()
    runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeError, streamNonBlocking=1, streamCreateWithFlags=lambda _: STREAM, streamDestroy=int
    )
    cuda = Cuda(runtime, _driver.Driver(cuda_library))
    cuda.driver.make_current(cuda.driver.context(0))
    call = DeviceCall(Collective.ALL_REDUCE, np.dtype(np.float32), COUNT, op="sum")
    pair, alone = channel(library, cuda, 2), channel(library, cuda, 1)
    handle, raw = pair._communicator.handle, library.all_reduce

    def of(launch: Launch) -> Callable[[], object]:
        launch(SOURCE, TARGET, STREAM)
        return lambda: launch(SOURCE, TARGET, STREAM)

    return {
        "raw": lambda: raw(SOURCE, TARGET, COUNT, FLOAT32, SUM, handle, STREAM),
        "launch": of(pair.prepare(call)),
        "launch alone": of(alone.prepare(call)),
    }


def measure(found: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Return the median time of a call of each, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds):
        for name in list(found)[:: 1 if number % 2 else -1]:
            times[name].append(timeit.timeit(found[name], number=calls, timer=time.thread_time) / calls * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="how many turns each has; by default 100")
    parser.add_argument("--calls", type=int, default=2000, help="how many calls a turn has; by default 2000")
    options = parser.parse_args(words)
    medians = measure(contenders(), options.rounds, options.calls)
    print(f"medians of {options.rounds} turns of {options.calls} calls:")
    for name, median in medians.items():
        print(f"{name:>14} {median:8.3f} us {median / medians['raw']:8.2f} of raw")


if __name__ == "__main__":
    main()

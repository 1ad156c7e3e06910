"""How fast floats of 16 and 8 bits are reduced, as a ratio to NumPy's own ufuncs.

Both ways take turns in one process, in the cache and from memory; medians are compared. GB/s counts the bytes of one operand.

Usage: python benchmarks/low_precision.py [RUNS]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from oneaccord.arrays.low_precision import divide, fast_combine

Array = npt.NDArray[Any]

DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
UFUNCS = (np.add, np.multiply, np.minimum, np.maximum)
SIZES = {"8 KiB": 1 << 13, "32 KiB": 1 << 15, "256 KiB": 1 << 18, "16 MiB": 1 << 24}


def take_turns(first: Callable[[], object], second: Callable[[], object], runs: int) -> tuple[float, float]:
    """Return the median seconds of both."""
    times: tuple[list[float], list[float]] = [], []
    for _ in range(runs + 1):
        for call, found in zip((first, second), times, strict=True):
            start = perf_counter()
            call()
            found.append(perf_counter() - start)
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def row(what: str, size: str, nbytes: int, plain: float, fast: float) -> None:
    """Print a line of the table."""
    print(f"{what:<26}{size:>8}{nbytes / plain / 1e9:>9.2f}{nbytes / fast / 1e9:>9.2f}{plain / fast:>9.2f}", flush=True)


def plain_quotients(out: Array) -> None:
    """Divide by 3 as one writes it."""
    out[...] = (out.astype(np.float32) / np.float32(3)).astype(out.dtype)


def main(runs: int) -> None:
    """Measure and print a table."""
    generator = np.random.default_rng(0)
    print(f"{'':<26}{'':>8}{'NumPy':>9}{'here':>9}{'ratio':>9}   (GB/s; medians, {runs} runs each, taking turns)")
    for name in DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        for size, nbytes in SIZES.items():
            count = nbytes // dtype.itemsize
            left, right = (generator.standard_normal(count, np.float32).astype(dtype) for _ in range(2))
            out = np.empty_like(left)
            turns = max(3, min(runs, (1 << 24) // count))
            for ufunc in UFUNCS:
                fast = fast_combine(ufunc, dtype)
                plain, ours = (partial(call, left, right, out=out) for call in (ufunc, fast))
                row(f"{name} {ufunc.__name__}", size, nbytes, *take_turns(plain, ours, turns))
            row(f"{name} / 3", size, nbytes, *take_turns(partial(plain_quotients, out), partial(divide, out, 3), turns))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 31)

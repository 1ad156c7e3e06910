"""Sort numbers that no single process holds: a sample sort.

Each rank sorts its part and offers a sample of it. From the samples of all, every rank finds the same splitters, one fewer than there
are ranks. Then each rank sends to each other the numbers between two splitters. What it receives is its part of the sorted whole.

    oneaccord run -n 4 examples/gallery/sample_sort.py
"""

from typing import Any

import numpy as np
import numpy.typing as npt

import oneaccord as oa

Array = npt.NDArray[Any]


def main(group: oa.Group, mine: Array, oversampling: int = 32) -> Array:
    """Return this rank's part of the sorted numbers: all of a rank's are at most those of the next."""
    ranks = group.world_size
    mine = np.sort(mine)
    sample = mine[np.linspace(0, len(mine) - 1, min(len(mine), ranks * oversampling)).astype(int)]
    samples = np.sort(group.all_gather(sample, uneven=True))
    splitters = samples[len(samples) * np.arange(1, ranks) // ranks]
    ends = np.searchsorted(mine, splitters)
    send_counts = np.diff(ends, prepend=0, append=len(mine))
    return np.sort(group.all_to_all(mine, send_counts=send_counts.tolist()))


def numbers(group: oa.Group, count: int = 100_000) -> Array:
    """Return this rank's numbers: most are small, and a few are large."""
    return np.random.default_rng(group.rank).lognormal(0.0, 1.0, count)


if __name__ == "__main__":
    with oa.init() as group:
        mine = numbers(group)
        part = main(group, mine)
        lengths = group.all_gather(len(part))
        ends = group.all_gather(np.array([part[0], part[-1]])).round(2).tolist()
        sums = group.all_reduce(np.array([mine.sum(), part.sum()]))
        if group.rank == 0:
            for rank, length in enumerate(lengths.tolist()):
                print(f"rank {rank} has {length} numbers from {ends[2 * rank]} to {ends[2 * rank + 1]}")
            print(f"in order: {ends == sorted(ends)}; nothing is lost: {bool(np.isclose(*sums))}")

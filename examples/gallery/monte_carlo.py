"""Estimate pi by throwing darts at a square and counting those that hit the quarter circle in it.

The darts come in blocks. The number of a block seeds its random generator, and the ranks take the blocks in turn. One all_reduce
gives every rank the hits of all blocks. Hits are whole numbers, so any number of ranks finds the same estimate, bit for bit.

    oneaccord run -n 4 examples/gallery/monte_carlo.py
"""

import numpy as np
import numpy.typing as npt

import oneaccord as oa


def hits(block: int, darts: int) -> int:
    """Count the darts of a block that hit the circle."""
    x, y = np.random.default_rng(block).random((2, darts))
    return int(np.count_nonzero(x * x + y * y < 1.0))


def main(group: oa.Group, blocks: int = 400, darts: int = 20_000) -> npt.NDArray[np.float64]:
    """Return the estimate of each block, on all ranks."""
    counts = np.zeros(blocks, np.int64)
    for block in range(group.rank, blocks, group.world_size):
        counts[block] = hits(block, darts)
    return 4.0 * group.all_reduce(counts) / darts


if __name__ == "__main__":
    with oa.init() as group:
        estimates = main(group)
        if group.rank == 0:
            error = estimates.std(ddof=1) / np.sqrt(len(estimates))
            print(f"pi is about {estimates.mean():.5f}, with a standard error of {error:.5f}")
            print(f"it is off by {abs(estimates.mean() - np.pi) / error:.2f} standard errors")

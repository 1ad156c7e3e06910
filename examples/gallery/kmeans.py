"""Find clusters among the points of a file that does not fit into memory: k-means by Lloyd's algorithm.

Every rank maps the file into memory and reads its own part of it, one chunk at a time. For each centre it adds up the points that are
nearest to it, and counts them. One small all_reduce in each round gives all ranks the sums, and so the same new centres.

    oneaccord run -n 4 examples/gallery/kmeans.py
"""

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

import oneaccord as oa

Floats = npt.NDArray[np.float64]


def write(path: Path, points: int = 20_000) -> str:
    """Write a file of points around five places; return its name."""
    rng = np.random.default_rng(0)
    places = np.array([(-4.0, -3.0), (-3.5, 3.0), (0.0, 0.0), (3.5, 3.5), (4.0, -2.5)])
    np.save(path, places[rng.integers(0, len(places), points)] + rng.normal(0.0, 0.9, (points, 2)))
    return str(path)


def main(group: oa.Group, path: str, clusters: int = 5, chunk: int = 4096) -> tuple[Floats, Floats]:
    """Return the centres and the number of points of each, on all ranks."""
    points = np.load(path, mmap_mode="r")  # nothing is read yet
    first, last = (len(points) * rank // group.world_size for rank in (group.rank, group.rank + 1))
    centres = np.array(points[:: len(points) // clusters][:clusters])
    while True:
        totals = np.zeros((clusters, points.shape[1] + 1))  # the sum of the coordinates, and the count
        for start in range(first, last, chunk):
            part = points[start : min(start + chunk, last)]
            nearest = ((part[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
            np.add.at(totals, nearest, np.column_stack([part, np.ones(len(part))]))
        totals = group.all_reduce(totals)
        sums, counts = totals[:, :-1], totals[:, -1]
        before, centres = centres, sums / np.maximum(counts, 1.0)[:, None]
        if np.abs(centres - before).max() < 1e-9:
            return centres, counts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, oa.init() as group:
        path = group.broadcast_object(write(Path(folder) / "points.npy") if group.rank == 0 else None)
        centres, counts = main(group, path)
        if group.rank == 0:
            for (x, y), count in sorted(zip(centres.tolist(), counts.tolist(), strict=True)):
                print(f"{count:.0f} points around ({x:.2f}, {y:.2f})")

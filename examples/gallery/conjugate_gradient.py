"""Solve A x = b for a large sparse matrix by conjugate gradients, in NumPy alone.

Each rank has some rows of A in CSR form, and the same part of every vector. A product A p needs some entries of p from other ranks.
Which ones never changes, so the ranks agree on that once; each product then costs one all_to_all, and each dot product one all_reduce.

    oneaccord run -n 4 examples/gallery/conjugate_gradient.py
"""

from typing import Any

import numpy as np
import numpy.typing as npt

import oneaccord as oa

Array = npt.NDArray[Any]


def laplacian(side: int, first: int, last: int) -> tuple[Array, Array, Array]:
    """Return some rows of the five-point Laplacian of a square grid: where each row begins, columns, values."""
    rows = np.arange(first, last)
    y, x = np.divmod(rows, side)
    there = np.column_stack([y > 0, x > 0, rows >= 0, x < side - 1, y < side - 1])
    columns = rows[:, None] + np.array([-side, -1, 0, 1, side])
    values = np.broadcast_to([-1.0, -1.0, 4.0, -1.0, -1.0], there.shape)
    return np.append(0, there.sum(axis=1).cumsum()), columns[there], values[there]


class Matrix:
    """Rows of a sparse matrix, the ranks' one after the other; ``matrix @ x`` multiplies parts of vectors."""

    def __init__(self, group: oa.Group, begins: Array, columns: Array, values: Array) -> None:
        self.group, self.begins, self.values = group, begins, values
        ends = group.all_gather(len(begins) - 1).cumsum()
        last, first = ends[group.rank], ends[group.rank] - (len(begins) - 1)
        is_mine = (columns >= first) & (columns < last)
        needed = np.unique(columns[~is_mine])
        self.receive_counts = np.diff(np.searchsorted(needed, ends), prepend=0)  # from each rank
        self.send_counts = group.all_to_all(self.receive_counts)
        self.wanted = group.all_to_all(needed, send_counts=self.receive_counts.tolist()) - first  # by each rank
        self.places = np.where(is_mine, columns - first, last - first + np.searchsorted(needed, columns))

    def __matmul__(self, x: Array) -> Array:
        others = self.group.all_to_all(
            x[self.wanted], send_counts=self.send_counts.tolist(), receive_counts=self.receive_counts.tolist()
        )
        return np.add.reduceat(self.values * np.concatenate([x, others])[self.places], self.begins[:-1])


def main(group: oa.Group, matrix: Matrix, b: Array, tolerance: float = 1e-10) -> tuple[Array, list[float]]:
    """Return this rank's part of the solution, and the norm of the residual after each iteration."""
    x, r, p = np.zeros_like(b), b.copy(), b.copy()
    rr = float(group.all_reduce(r @ r))
    norms = [rr**0.5]
    while norms[-1] > tolerance * norms[0]:
        product = matrix @ p
        alpha = rr / float(group.all_reduce(p @ product))
        x, r = x + alpha * p, r - alpha * product
        rr, before = float(group.all_reduce(r @ r)), rr
        p = r + rr / before * p
        norms.append(rr**0.5)
    return x, norms


if __name__ == "__main__":
    with oa.init() as group:
        side = 120
        first, last = (side * side * rank // group.world_size for rank in (group.rank, group.rank + 1))
        matrix = Matrix(group, *laplacian(side, first, last))
        exact = np.sin(np.arange(first, last))
        x, norms = main(group, matrix, matrix @ exact)
        error = group.all_reduce(np.abs(x - exact).max(), "max")
        if group.rank == 0:
            print(f"{side * side} unknowns, {len(norms) - 1} iterations, residual {norms[-1] / norms[0]:.0e}")
            print(f"the largest error is below 1e-8: {error < 1e-8}")

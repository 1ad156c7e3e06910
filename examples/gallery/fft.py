"""Solve Poisson's equation, the Laplacian of u = f, on a periodic square by a two-dimensional FFT.

Each rank has some rows of the square, and transforms along them. A transposition, one all_to_all, then gives it some columns,
and it transforms along those. In the transposed layout it divides by the eigenvalues of the Laplacian, and goes the same way back.
So the four passes over a square that no single process holds need two transpositions.

    oneaccord run -n 4 examples/gallery/fft.py
"""

from typing import Any

import numpy as np
import numpy.typing as npt

import oneaccord as oa

Array = npt.NDArray[Any]


def transpose(rows: Array, group: oa.Group) -> Array:
    """Give away this rank's rows of a square matrix for its rows of the transposed matrix."""
    pieces = [piece.ravel() for piece in np.array_split(rows, group.world_size, axis=1)]
    received = group.all_to_all(np.concatenate(pieces), send_counts=[len(piece) for piece in pieces])
    return received.reshape(rows.shape[1], -1).T  # the pieces of all ranks, one below the other


def main(group: oa.Group, f: Array) -> Array:
    """Return this rank's rows of the solution, of mean zero, for its rows of ``f``."""
    size = f.shape[1]
    waves = np.fft.fftfreq(size, 1.0 / size)  # 0, 1, 2, ..., -2, -1
    mine = np.array_split(waves, group.world_size)[group.rank]
    eigenvalues = -(mine[:, None] ** 2 + waves**2)
    eigenvalues[eigenvalues == 0.0] = np.inf  # of the constant, which the equation leaves open
    spectrum = np.fft.fft(transpose(np.fft.fft(f, axis=1), group), axis=1) / eigenvalues
    return np.fft.ifft(transpose(np.fft.ifft(spectrum, axis=1), group), axis=1).real


def example(group: oa.Group, size: int) -> tuple[Array, Array]:
    """Return this rank's rows of a solution and of its Laplacian."""
    x = np.arange(size) * 2.0 * np.pi / size
    y = np.array_split(x, group.world_size)[group.rank][:, None]
    u = np.exp(np.sin(x)) * np.sin(3.0 * y)
    return u, (np.cos(x) ** 2 - np.sin(x) - 9.0) * u


if __name__ == "__main__":
    with oa.init() as group:
        exact, f = example(group, size=256)
        solution = main(group, f)
        error = group.all_reduce(np.abs(solution - exact).max(), "max")
        if group.rank == 0:
            print(f"rank 0 has {len(solution)} of {f.shape[1]} rows")
            print(f"the largest error is below 1e-12: {error < 1e-12}")

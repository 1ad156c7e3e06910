"""Try many parameters of a model of an epidemic, each on a rank that is free.

`oa.Ranks` starts processes that stay, and is an Executor of concurrent.futures: `map` hands out the tasks and returns the results in
their order. The tasks need no group. `main` would take a ProcessPoolExecutor as well; ranks may also run on a cluster, with `on=`.

    python examples/gallery/sweep.py
"""

from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

import oneaccord as oa

Floats = npt.NDArray[np.float64]


def epidemic(infection: float, recovery: float, dt: float = 0.05) -> tuple[float, float]:
    """Return the largest share of people ill at a time, and the share that fell ill in the end (Kermack, McKendrick 1927)."""
    healthy, ill, peak = 1.0 - 1e-6, 1e-6, 0.0

    def slope(s: float, i: float) -> tuple[float, float]:
        return -infection * s * i, infection * s * i - recovery * i

    while ill > 1e-9 and peak < 1.0:
        ds, di = slope(healthy, ill)
        ds, di = slope(healthy + 0.5 * dt * ds, ill + 0.5 * dt * di)  # the midpoint method
        healthy, ill = healthy + dt * ds, ill + dt * di
        peak = max(peak, ill)
    return peak, 1.0 - healthy


def main(pool: Executor, infections: Floats, recoveries: Floats) -> Floats:
    """Return the peak and the final size for every pair of rates, as an array of shape (infections, recoveries, 2)."""
    grid = [(float(infection), float(recovery)) for infection in infections for recovery in recoveries]
    results = list(pool.map(epidemic, *zip(*grid, strict=True)))
    return np.array(results).reshape(len(infections), len(recoveries), 2)


if __name__ == "__main__":
    with oa.Ranks(4) as ranks:
        table = main(ranks, np.linspace(0.3, 1.2, 10), np.linspace(0.1, 0.25, 4))
    peak, size = table[4, 1]
    print(f"{table[..., 0].size} epidemics; with rates of 0.7 and 0.15, {peak:.1%} are ill at the peak, {size:.1%} in the end")
    print(f"theory says of the end: 1 - exp(-0.7 / 0.15 * {size:.4f}) = {1.0 - np.exp(-0.7 / 0.15 * size):.4f}")

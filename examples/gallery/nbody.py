"""Follow bodies that attract each other, every pair of them, with the leapfrog method.

Each rank moves its own bodies. To find the forces on them, the bodies of all ranks travel around a ring as visitors: a rank computes
the pull of the visitors that it has, while they are sent on to the right and the next ones come from the left. After as many hops as
there are ranks, every body has met every other one, and no rank has held more than two parts at a time.

    oneaccord run -n 4 examples/gallery/nbody.py
"""

from typing import Any

import numpy as np
import numpy.typing as npt

import oneaccord as oa

Floats = npt.NDArray[np.float64]
SOFTENING = 0.05  # bodies that come very close do not fly apart


def disc(bodies: int) -> tuple[Floats, Floats, Floats]:
    """Return the positions, velocities and masses of a heavy body and light ones that circle it."""
    rng = np.random.default_rng(0)
    radius, angle = rng.uniform(0.5, 2.0, bodies), rng.uniform(0.0, 2.0 * np.pi, bodies)
    radius[0] = 0.0
    outward = np.column_stack([np.cos(angle), np.sin(angle)])
    speed = np.sqrt(radius**2 / (radius**2 + SOFTENING**2) ** 1.5)
    masses = np.where(radius == 0.0, 1.0, 0.2 / bodies)
    return radius[:, None] * outward, speed[:, None] * outward[:, ::-1] * [-1.0, 1.0], masses


def attract(group: oa.Group, positions: Floats, masses: Floats) -> tuple[Floats, float]:
    """Return the acceleration of each body of this rank, and their part of the potential energy."""
    left, right = (group.rank - 1) % group.world_size, (group.rank + 1) % group.world_size
    acceleration = np.zeros_like(positions)
    potential = 0.5 * float((masses**2).sum()) / SOFTENING  # no body attracts itself
    visitors = np.column_stack([positions, masses])
    for hop in range(group.world_size):
        works: list[oa.Work[Any]] = (
            [group.recv_async(left), group.send_async(visitors, right)] if hop < group.world_size - 1 else []
        )
        apart = visitors[:, :2] - positions[:, None]
        distance = np.sqrt((apart**2).sum(axis=2) + SOFTENING**2)
        acceleration += (visitors[:, 2, None] * apart / distance[..., None] ** 3).sum(axis=1)
        potential -= 0.5 * float((masses[:, None] * visitors[:, 2] / distance).sum())
        if works:
            visitors, _ = oa.wait_all(works)
    return acceleration, potential


def main(group: oa.Group, bodies: int = 200, steps: int = 100, dt: float = 0.01) -> tuple[list[Any], list[float]]:
    """Return the positions of all bodies at each step, on rank 0, and the total energy at each step, on all ranks."""
    x, v, masses = (np.array_split(each, group.world_size)[group.rank] for each in disc(bodies))
    a, potential = attract(group, x, masses)
    path, energies = [], []
    for _ in range(steps):
        path.append(group.gather(x, uneven=True))
        energies.append(float(group.all_reduce(potential + 0.5 * float((masses * (v**2).sum(axis=1)).sum()))))
        v = v + 0.5 * dt * a
        x = x + dt * v
        a, potential = attract(group, x, masses)
        v = v + 0.5 * dt * a
    return path, energies


if __name__ == "__main__":
    with oa.init() as group:
        path, energies = main(group)
        if group.rank == 0:
            print(f"energy {energies[0]:.6f}, after {len(energies)} steps {energies[-1]:.6f}")
            print(f"the largest drift is {max(abs(e / energies[0] - 1.0) for e in energies):.1e}")

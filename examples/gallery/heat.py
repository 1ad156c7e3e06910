"""Let heat spread on a square plate whose edges are insulated: two dimensions, explicit steps in time.

The ranks lie on a mesh of two axes, and each has a block of the plate. In each step it needs one row or column of cells from each
neighbour, its halo. `mesh.shift` finds the neighbours. At an edge of the plate there is none, and `sendrecv` leaves the halo as it is.
Every cell is computed in the same way wherever it lies, so any number of ranks finds the same bits.

    oneaccord run -n 4 examples/gallery/heat.py
"""

import math

import numpy as np
import numpy.typing as npt

import oneaccord as oa
import oneaccord_parallel as mp


def start(cells: int) -> npt.NDArray[np.float64]:
    """Return a cold plate with a hot bar and a hot corner."""
    plate = np.zeros((cells, cells))
    plate[cells // 4 : cells // 3, cells // 8 : -cells // 4] = 1.0
    plate[-cells // 5 :, -cells // 5 :] = 0.7
    return plate


def main(group: oa.Group, plate: npt.NDArray[np.float64], steps: int = 400) -> npt.NDArray[np.float64]:
    """Return the whole plate after some steps, on all ranks."""
    rows = max(extent for extent in range(1, math.isqrt(group.world_size) + 1) if group.world_size % extent == 0)
    with oa.DeviceMesh(group, (rows, -1), ("y", "x")) as mesh:
        blocks = mp.distribute(plate, mesh, [mp.Shard(0), mp.Shard(1)])
        u = blocks.local
        along_y, along_x = mesh.group("y"), mesh.group("x")
        (north, south), (west, east) = mesh.shift("y"), mesh.shift("x")
        for _ in range(steps):
            u = np.pad(u, 1, mode="edge")  # at an insulated edge, the cell beyond it is as warm as the cell itself
            along_y.sendrecv(u[-2], south, north, out=u[0])
            along_y.sendrecv(u[1], north, south, out=u[-1])
            along_x.sendrecv(u[:, -2], east, west, out=u[:, 0])
            along_x.sendrecv(u[:, 1], west, east, out=u[:, -1])
            around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
            u = u[1:-1, 1:-1] + 0.2 * (around - 4.0 * u[1:-1, 1:-1])
        whole: npt.NDArray[np.float64] = blocks.with_local(u).full()
        return whole


if __name__ == "__main__":
    with oa.init() as group:
        before = start(cells=96)
        after = main(group, before)
        if group.rank == 0:
            y, x = np.unravel_index(after.argmax(), after.shape)
            print(f"heat in the plate: {before.sum():.6f} before, {after.sum():.6f} after 400 steps")
            print(f"the hottest cell is ({y}, {x}), at {after.max():.6f}")

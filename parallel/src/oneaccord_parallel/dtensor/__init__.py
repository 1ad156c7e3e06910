"""Arrays that are distributed on a mesh, and the moves from one distribution to another."""

from oneaccord_parallel.dtensor.dtensor import DTensor, distribute, from_local
from oneaccord_parallel.dtensor.placements import Partial, Placement, Replicate, Shard
from oneaccord_parallel.dtensor.plan import Step

__all__ = ["DTensor", "Partial", "Placement", "Replicate", "Shard", "Step", "distribute", "from_local"]

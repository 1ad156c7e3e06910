"""Arrays that are distributed on a mesh, and the moves from one distribution to another."""

from manyhands_parallel.dtensor.dtensor import DTensor, distribute, from_local
from manyhands_parallel.dtensor.placements import Partial, Placement, Replicate, Shard
from manyhands_parallel.dtensor.plan import Step

__all__ = ["DTensor", "Partial", "Placement", "Replicate", "Shard", "Step", "distribute", "from_local"]

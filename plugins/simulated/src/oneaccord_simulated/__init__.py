"""Ranks that are threads of one process, on a clock of their own: distributed programs in a test, a debugger or a notebook.

`run` calls a function on every rank. Everything follows from a seed, so that a failure can be repeated:

>>> import oneaccord_simulated as simulated
>>> run = simulated.run(lambda group: group.all_reduce(group.rank).item(), 4)
>>> run.results
[6, 6, 6, 6]
>>> run.trace.count("all_reduce")
1

`explore` tries many seeds, and stops at the first that fails:

>>> order = []
>>> def fetch(group):
...     order.append(group.rank)
...     group.barrier()
...     return order[-3:]
>>> exploration = simulated.explore(fetch, 3, alike=True)
>>> exploration.failed
True

A `FaultPlan` describes the faults. `Run.errors` has the errors of the ranks:

>>> def train(group):
...     for _ in range(3):
...         group.all_reduce(1.0)
>>> run = simulated.run(train, 3, faults=simulated.Kill(rank=1, operation="all_reduce", nth=2), check=False)
>>> {rank: type(error).__name__ for rank, error in sorted(run.errors.items())}
{0: 'PeerLostError', 2: 'PeerLostError'}

For pytest there is a fixture: ``world(4).run(train)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oneaccord.api import DeadlockError, Network
    from oneaccord_simulated.chance import random_faults
    from oneaccord_simulated.exploring import Exploration, explore
    from oneaccord_simulated.faults import Corrupt, Cut, Delay, Drop, FaultPlan, Kill, Partition, Pause, Slow
    from oneaccord_simulated.running import Run, run
    from oneaccord_simulated.trace import Trace

__all__ = [
    "Corrupt",
    "Cut",
    "DeadlockError",
    "Delay",
    "Drop",
    "Exploration",
    "FaultPlan",
    "Kill",
    "Network",
    "Partition",
    "Pause",
    "Run",
    "Slow",
    "Trace",
    "explore",
    "random_faults",
    "run",
]

_ROOMS = {
    "oneaccord.api": "DeadlockError Network",
    "oneaccord_simulated.exploring": "Exploration explore",
    "oneaccord_simulated.chance": "random_faults",
    "oneaccord_simulated.faults": "Corrupt Cut Delay Drop FaultPlan Kill Partition Pause Slow",
    "oneaccord_simulated.running": "Run run",
    "oneaccord_simulated.trace": "Trace",
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Load the value of a name at its first use: describing the backend must not cost as much."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_ROOM_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

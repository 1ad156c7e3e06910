"""Ranks that are threads of one process: distributed programs in a test, a debugger or a notebook.

>>> import manyhands_simulated
>>> run = manyhands_simulated.run(lambda group: group.all_reduce(group.rank).item(), 4)
>>> run.results
[6, 6, 6, 6]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands_simulated.running import Run, run

__all__ = ["Run", "run"]


def __getattr__(name: str) -> Any:
    """Load what runs ranks when it is first named: describing the backend must not cost as much."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from manyhands_simulated import running

    return getattr(running, name)

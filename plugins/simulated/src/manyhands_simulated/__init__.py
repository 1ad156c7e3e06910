"""Ranks that are threads of one process: distributed programs in a test, a debugger or a notebook.

>>> import manyhands_simulated
>>> run = manyhands_simulated.run(lambda group: group.all_reduce(group.rank).item(), 4)
>>> run.results
[6, 6, 6, 6]
"""

from __future__ import annotations

from manyhands_simulated.running import Run, run

__all__ = ["Run", "run"]

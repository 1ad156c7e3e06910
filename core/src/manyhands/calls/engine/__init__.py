"""The engine: runs a schedule over a transport.

A schedule is compiled once for a kind of call (`compile_plan`): chunks become ranges of elements, and messages are cut into
pieces, so that a long one is reduced piece by piece while the kernel moves the next. A plan is then run any number of
times (`Engine.run`), each time on other memory.

Most plans are carried out in another way, which keeps no books: see `manyhands.calls.engine.express`. `Engine.run` is for algorithms that are
not `in_order`, and for long messages over transports that do not stream.

What a run needs beyond its plan is made when a step first needs it and kept, so that a run on memory that was used before allocates
nothing for each step: see `manyhands.calls.engine.running`. All that is kept has a bound:

- the views of a plan on memory: those of the `KEPT_RUNS` places used last, fewer where messages have many pieces. They keep no
  array alive: see `manyhands.calls.engine.memory`;
- scratch memory: `KEPT_BYTES` in the whole process, for all its engines together.
"""

from __future__ import annotations

from manyhands.calls.engine.express import Express, Patience
from manyhands.calls.engine.memory import KEPT_BYTES
from manyhands.calls.engine.plan import KEPT_RUNS, Plan, compile_plan
from manyhands.calls.engine.running import Engine
from manyhands.calls.engine.steps import MAX_MESSAGES, has_long

__all__ = ["KEPT_BYTES", "KEPT_RUNS", "MAX_MESSAGES", "Engine", "Express", "Patience", "Plan", "compile_plan", "has_long"]

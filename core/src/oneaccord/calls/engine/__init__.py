"""The engine: carries out a schedule over a transport.

A schedule is compiled once for a kind of call, to a flat program (`compile_program`). A program is made ready once for a transport
(`Executable`), and then carried out any number of times, each time on other arrays. Between runs, no array of the user is kept alive.
"""

from __future__ import annotations

from oneaccord.calls.engine.adapter import Links
from oneaccord.calls.engine.execute import Executable, Patience
from oneaccord.calls.engine.program import CompiledSchedule, compile_program, peers_of

__all__ = ["CompiledSchedule", "Executable", "Links", "Patience", "compile_program", "peers_of"]

"""What communication costs on a network that need not exist, without moving a byte.

Schedules run on a virtual clock (`simulate`); for programs that run message by message there are the ways of single messages
(`Paths`) and what makes them late by chance (`Jitter`).
"""

from __future__ import annotations

from manyhands.schedule.simulation.jitter import Jitter, JitterSource
from manyhands.schedule.simulation.network import Level, Network
from manyhands.schedule.simulation.outcome import MAX_RANKS, Outcome, Prepared, simulate
from manyhands.schedule.simulation.paths import Path, Paths
from manyhands.schedule.simulation.presets import PRESETS

__all__ = [
    "MAX_RANKS",
    "PRESETS",
    "Jitter",
    "JitterSource",
    "Level",
    "Network",
    "Outcome",
    "Path",
    "Paths",
    "Prepared",
    "simulate",
]

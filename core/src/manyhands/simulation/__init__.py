"""What a collective costs on a network that need not exist: schedules run on a virtual clock, without moving a byte."""

from __future__ import annotations

from manyhands.simulation.network import Level, Network
from manyhands.simulation.outcome import MAX_RANKS, Outcome, simulate
from manyhands.simulation.presets import PRESETS

__all__ = ["MAX_RANKS", "PRESETS", "Level", "Network", "Outcome", "simulate"]

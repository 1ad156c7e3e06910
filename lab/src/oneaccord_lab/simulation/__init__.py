"""Schedules on a virtual clock: how long a collective would take on a network that need not exist, without moving a byte.

Networks, and the ways of single messages on them, are core's (`oneaccord.schedule.simulation`), since the backend `simulated` needs them, too.
"""

from __future__ import annotations

from oneaccord_lab.simulation.outcome import MAX_RANKS, Outcome, Prepared, simulate

__all__ = ["MAX_RANKS", "Outcome", "Prepared", "simulate"]

"""Imagined networks: their parts, the paths of single messages on them (`Paths`), and the causes of late messages (`Jitter`)."""

from __future__ import annotations

from manyhands.schedule.simulation.jitter import Jitter, JitterSource
from manyhands.schedule.simulation.network import PRESETS, Level, Network
from manyhands.schedule.simulation.paths import Path, Paths

__all__ = ["PRESETS", "Jitter", "JitterSource", "Level", "Network", "Path", "Paths"]

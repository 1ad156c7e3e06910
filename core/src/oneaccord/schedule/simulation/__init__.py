"""Imagined networks: their parts, the paths of single messages on them (`Paths`), and the causes of late messages (`Jitter`)."""

from __future__ import annotations

from oneaccord.schedule.simulation.jitter import Jitter, JitterSource
from oneaccord.schedule.simulation.network import PRESETS, Level, Network
from oneaccord.schedule.simulation.paths import Path, Paths

__all__ = ["PRESETS", "Jitter", "JitterSource", "Level", "Network", "Path", "Paths"]

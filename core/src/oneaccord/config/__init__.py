"""Configuration: the settings, the sources of their values, and the errors in them.

Arguments > command line > environment > file > defaults. The command line hands its choices to the ranks as environment
variables, so these appear as environment here.
"""

from __future__ import annotations

from oneaccord.config.resolve import Resolved, load
from oneaccord.config.schema import json_schema
from oneaccord.config.settings import RendezvousSettings, Settings
from oneaccord.config.sources import RESERVED

__all__ = ["RESERVED", "RendezvousSettings", "Resolved", "Settings", "json_schema", "load"]

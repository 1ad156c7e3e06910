"""The choice of the algorithm for a call: a table that is read from the top, and the settings that override it."""

from __future__ import annotations

from oneaccord.config.select.rules import MAX_SEGMENTS, Rule
from oneaccord.config.select.selector import Choice, Selector, candidates, default_segments, lacks, reproduces
from oneaccord.config.select.table import default_rules, plugin_rules, read_table, write_table

__all__ = [
    "MAX_SEGMENTS",
    "Choice",
    "Rule",
    "Selector",
    "candidates",
    "default_rules",
    "default_segments",
    "lacks",
    "plugin_rules",
    "read_table",
    "reproduces",
    "write_table",
]

"""The conformance suite of oneaccord: whether a backend keeps the contract.

``oneaccord check NAME`` runs it, and `oneaccord_conformance.pytest` has it as tests. A check is a function ``check_NAME(worlds)``, which gets a
`WorldMaker` and raises AssertionError if the promise in its first line is broken.
"""

from __future__ import annotations

from oneaccord_conformance.ranks import Outcome
from oneaccord_conformance.registry import CHAPTERS, Check, all_checks, check, choose
from oneaccord_conformance.running import Report, Result, run_check, run_checks
from oneaccord_conformance.worlds import WorldMaker

__all__ = [
    "CHAPTERS",
    "Check",
    "Outcome",
    "Report",
    "Result",
    "WorldMaker",
    "all_checks",
    "check",
    "choose",
    "run_check",
    "run_checks",
]

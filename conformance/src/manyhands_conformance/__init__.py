"""The conformance suite of manyhands: whether a backend keeps the contract.

``manyhands check NAME`` runs it, and `manyhands_conformance.pytest` has it as tests. A check is a function ``check_NAME(worlds)``, which gets a
`WorldMaker` and raises AssertionError if the promise in its first line is broken.
"""

from __future__ import annotations

from manyhands_conformance.ranks import Outcome
from manyhands_conformance.registry import CHAPTERS, Check, all_checks, check, choose
from manyhands_conformance.running import Report, Result, run_check, run_checks
from manyhands_conformance.worlds import WorldMaker

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

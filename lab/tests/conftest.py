"""Fixtures for the tests of the lab."""

from support.plugin_tools import manager, run_python

__all__ = ["manager", "run_python"]

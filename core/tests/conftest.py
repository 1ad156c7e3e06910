"""Fixtures for the tests of core."""

from plugin_tools import manager, plugins, run_python

__all__ = ["manager", "plugins", "run_python"]

"""Fixtures for the tests of core."""

from launch_tools import no_launcher_stays, ranks_in_both_forms, watch
from plugin_tools import manager, plugins, run_python

__all__ = ["manager", "no_launcher_stays", "plugins", "ranks_in_both_forms", "run_python", "watch"]

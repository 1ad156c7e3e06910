"""Fixtures for the tests of core."""

from support.launch_tools import no_launcher_stays, ranks_in_both_forms, watch
from support.plugin_tools import manager, plugins, run_python

__all__ = ["manager", "no_launcher_stays", "plugins", "ranks_in_both_forms", "run_python", "watch"]

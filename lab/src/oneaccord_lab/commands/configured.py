"""The settings for the choice of algorithms in the configuration that is found here, read once for each command."""

from __future__ import annotations

from dataclasses import dataclass

from oneaccord.config import Resolved, load
from oneaccord.config.plugins import PluginManager, get_plugin_manager
from oneaccord.config.plugins.choice import weigh
from oneaccord.config.select import Selector
from oneaccord.config.selection import make_selector
from oneaccord.contract.backend import BackendSpec
from oneaccord.schedule.algorithms.registry import Algorithm
from oneaccord.schedule.steps import Collective

__all__ = ["Configured", "configured"]


@dataclass(frozen=True, slots=True)
class Configured:
    """The settings of groups with the configuration.

    Attributes
    ----------
    selector
        Chooses among the algorithms of oneaccord and of the plugins that are allowed.
    ranks_per_host
        The number of neighbouring ranks that share a host; None if the configuration does not say.
    """

    selector: Selector
    ranks_per_host: int | None

    @property
    def algorithms(self) -> list[Algorithm]:
        """The algorithms that there are, those of a collective together."""
        return [each for collective in Collective for each in self.selector.algorithms(collective)]


def configured() -> Configured:
    """Read the configuration.

    Raises
    ------
    ConfigError
        Something in it is not allowed, or names an algorithm that is not there.
    PluginError
        A module that it names cannot be loaded, or two algorithms have one name.
    """
    resolved, plugins = load(), get_plugin_manager()
    plugins.switch(resolved.settings.plugins)
    selector = make_selector(resolved, plugins, _backend(resolved, plugins))
    return Configured(selector, resolved.settings.ranks_per_host)


def _backend(resolved: Resolved, plugins: PluginManager) -> BackendSpec | None:
    """Return the backend whose table counts: that of the configuration, or the choice of ``auto`` on one host."""
    name = resolved.settings.backend
    chosen = weigh(plugins, resolved.lacking)[0] if name == "auto" else name
    return None if chosen is None else plugins.describe(chosen)

"""The installed plugins, their contents, and the faults of those that cannot be used.

Three tiers, each paid for only when it is asked for:

1. **list**: names, distributions and versions from the metadata of installed packages; nothing is imported.
2. **describe**: one plugin's light module is imported and gives its `BackendSpec`.
3. **create**: the factory that the spec names is imported, and with it CuPy, mpi4py or other needs of the backend.
"""

from __future__ import annotations

from oneaccord.config.plugins.installed import BACKEND_GROUP, EXTENSION_GROUP, InstalledPlugin, Switches
from oneaccord.config.plugins.loading import checked_kind
from oneaccord.config.plugins.manager import Description, PluginManager, get_plugin_manager
from oneaccord.contract.backend import BackendSpec

__all__ = [
    "BACKEND_GROUP",
    "EXTENSION_GROUP",
    "Description",
    "InstalledPlugin",
    "PluginManager",
    "Switches",
    "checked_kind",
    "describe_backend",
    "get_plugin_manager",
]


def describe_backend(name: str) -> BackendSpec:
    """Return the description of a backend; its plugin's light module is imported, and nothing else.

    Parameters
    ----------
    name
        The backend's name.

    Raises
    ------
    UnknownBackendError
        No plugin has that name, or a switch blocks it.
    PluginError
        The plugin is broken, built for another version of the contract, or one of two that have the name.
    """
    return get_plugin_manager().describe(name)

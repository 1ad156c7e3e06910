"""Which backend a job will use, found out before any of its ranks is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.config import load
from manyhands.config.plugins import get_plugin_manager

if TYPE_CHECKING:
    from collections.abc import Callable

    from manyhands.config import Settings
    from manyhands.contract.backend import BackendConfig, LaunchRequest

__all__ = ["Resolution", "resolve_launcher"]


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the configuration says about a job."""

    backend: str
    launcher: Callable[[LaunchRequest], int] | None
    """Starts the ranks in place of ``manyhands run``; None where ranks are processes."""
    settings: Settings
    config: BackendConfig
    """That of the backend."""


def resolve_launcher(backend: str | None, config: str | None) -> Resolution:
    """Choose the backend as the ranks will if they are on one host, and find out who starts them.

    Parameters
    ----------
    backend
        The name that the command line gives, None to take that of the configuration.
    config
        The configuration file that the command line gives, None for the usual places.

    Raises
    ------
    ConfigError
        The configuration is wrong.
    PluginError
        The backend is not installed, is broken, or cannot run here.
    """
    manager = get_plugin_manager()
    resolved = load(config, arguments={"backend": backend}, manager=manager)
    settings = resolved.settings
    name = settings.backend
    if name == "auto":
        name, _ = manager.auto(resolved.lacking)
    else:
        resolved.runnable(name)
    config_of_backend = resolved.backend_config(name)
    return Resolution(name, manager.load_launcher(manager.describe(name)), settings, config_of_backend)

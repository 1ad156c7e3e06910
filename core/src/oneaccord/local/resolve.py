"""Which backend a job will use, found out before any of its ranks is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneaccord.config import load
from oneaccord.config.plugins import get_plugin_manager
from oneaccord.config.plugins.choice import candidates
from oneaccord.config.plugins.loading import IN_PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oneaccord.config import Settings
    from oneaccord.contract.backend import LaunchRequest

__all__ = ["Resolution", "resolve_launcher"]


@dataclass(frozen=True, slots=True)
class Resolution:
    """The configuration of a job."""

    backend: str
    launcher: Callable[[LaunchRequest], int] | None
    """Starts the ranks in place of ``oneaccord run``; None if ranks are processes."""
    settings: Settings
    config: Any
    """That of the backend."""
    modules: tuple[str, ...] = ()
    """The imports of each rank for it: the descriptions of backends that may be chosen, and the modules that only processes of hosts need."""


def resolve_launcher(backend: str | None, config: str | Mapping[str, Any] | None) -> Resolution:
    """Choose the backend as the ranks will if they are on one host, and find the launcher that starts them.

    Parameters
    ----------
    backend
        The name that the command line gives, None to take that of the configuration.
    config
        The configuration file that the command line gives, or a mapping in place of one; None for the usual places.

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
        name = candidates(manager, resolved.lacking)[0][0].name
    else:
        resolved.runnable(name)
    config_of_backend = resolved.backend_config(name)
    spec = manager.describe(name)
    described = manager.entries() if settings.backend == "auto" else [each for each in manager.entries() if each.name == name]
    modules = [each.value.partition(":")[0] for each in described if each.distribution != IN_PROCESS]
    # MPI, CUDA and the like begin something of their own when they are imported, which no fork would share.
    if spec.auto_priority is not None and spec.devices == ("cpu",):
        modules.append(spec.factory.partition(":")[0])
    return Resolution(name, manager.load_launcher(spec), settings, config_of_backend, tuple(modules))

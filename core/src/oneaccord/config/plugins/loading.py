"""Imports of the objects that plugins name, and checks of their results."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from oneaccord.common.bounded import Stuck, bounded
from oneaccord.common.installing import install_command
from oneaccord.config.plugins.installed import BACKEND_GROUP, EXTENSION_GROUP, InstalledPlugin, find_installed, install_hint
from oneaccord.contract.backend import BackendSpec
from oneaccord.contract.config import is_config
from oneaccord.errors import BackendUnavailableError, PluginError

__all__ = [
    "IN_PROCESS",
    "PROBE_S",
    "Description",
    "absent",
    "checked_kind",
    "config_kind",
    "import_plugin",
    "installed",
    "load",
    "logger",
    "named",
    "owner",
    "probed",
    "whose",
]

T = TypeVar("T")

IN_PROCESS: Final[str] = "(this process)"
"""The distribution of a plugin that has none."""

PROBE_S: Final[float] = 10.0
"""Seconds that a probe may last. A good one takes a moment; one that asks a driver may have to wait for it to come up."""


@functools.cache
def _installed_once(path: tuple[str, ...]) -> dict[str, tuple[InstalledPlugin, ...]]:  # noqa: ARG001 - a key
    groups = (BACKEND_GROUP, EXTENSION_GROUP)
    found = find_installed(*groups)
    return {group: tuple(plugin for plugin in found if plugin.group == group) for group in groups}


@dataclass(frozen=True, slots=True)
class Description:
    """A backend and the result of describing it: exactly one of ``spec`` and ``error`` is set."""

    plugin: InstalledPlugin
    spec: BackendSpec | None = None
    error: PluginError | None = None


def installed(group: str) -> tuple[InstalledPlugin, ...]:
    """Return the entry points of backends or of extensions.

    The metadata is read once for each state of ``sys.path``: reading it again for every question would be slow.
    """
    return _installed_once(tuple(sys.path))[group]


def named(error: BaseException) -> str:
    """Return the type and the words of an exception."""
    return f"{type(error).__name__}: {error}"


def owner(plugin: InstalledPlugin) -> str:
    """Return words for the plugin and its distribution."""
    if plugin.distribution == IN_PROCESS:
        return f"the plugin {plugin.value!r} of this process"
    return f"the plugin {plugin.value!r} of {plugin.distribution} {plugin.version}"


def import_plugin(plugin: InstalledPlugin) -> object:
    """Import the module, or the object in it, that an entry point names; any failure is a chained `PluginError`."""
    module, _, attribute = plugin.value.partition(":")
    try:
        loaded: object = importlib.import_module(module.strip())
        for part in attribute.strip().split(".") if attribute else []:
            loaded = getattr(loaded, part)
    except (Exception, SystemExit) as error:  # a module of a stranger may raise anything while it is imported
        raise PluginError(f"{owner(plugin)} cannot be imported: {named(error)}") from error
    return loaded


def whose(name: str, plugin: InstalledPlugin) -> str:
    """Return words for a backend and its distribution."""
    by = "this process" if plugin.distribution == IN_PROCESS else f"{plugin.distribution} {plugin.version}"
    return f"the backend {name!r} of {by}"


def absent(target: str) -> str | None:
    """Return what is missing of ``"module:function"``, as far as can be seen without imports; None if it seems to exist."""
    module, _, function = target.partition(":")
    package = module.rpartition(".")[0]
    if module in sys.modules or (package and package not in sys.modules):
        return None
    found = importlib.util.find_spec(module)
    if found is None:
        return f"there is no module {module!r}"
    if found.origin is None or not found.origin.endswith(".py"):
        return None
    # Cheaper than the compiled module, and nearly as good: a name that does not occur in the text does not exist.
    text = Path(found.origin).read_bytes()
    if re.search(rb"\b%s\b|\b__getattr__\b|\bimport \*" % re.escape(function).encode(), text):
        return None
    return f"there is no {function!r} in {module}"


def probed(spec: BackendSpec) -> str | None:
    """Return why a backend cannot run here, None if it can; raises `Stuck` if its probe does not return."""
    missing = absent(spec.factory)
    if missing:
        return f"its factory is {spec.factory!r}, and {missing}"
    try:
        reason: object = bounded(spec.probe, PROBE_S, f"probe-{spec.name}")
    except Stuck:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's probe may raise anything, and that too is a reason
        return f"its probe raised {named(error)}"
    if reason is None or isinstance(reason, str):
        return reason
    return f"its probe returned {reason!r} instead of None or a reason"


def load(spec: BackendSpec, what: str, plugin: InstalledPlugin) -> Any:
    """Import ``"module:function"``, which the spec of a plugin names as its ``what``."""
    name, target = whose(spec.name, plugin), getattr(spec, what)
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        help_text = install_command(spec.install) or install_hint(spec.name)
        raise BackendUnavailableError(
            f"{name} cannot be loaded: {named(error)}" + (f"; try: {help_text}" if help_text else "")
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise PluginError(
            f"{name} names its {what} {target!r}, but there is no such {'class' if what == 'config' else 'function'}"
        )
    return function


def config_kind(spec: BackendSpec, plugin: InstalledPlugin) -> type[object]:
    """Return the class of a backend's config; it is imported if the spec names it.

    Raises
    ------
    BackendUnavailableError, PluginError
        As `load`, or it is no class of configs.
    """
    if not isinstance(spec.config, str):
        return spec.config
    kind: type[object] = load(spec, "config", plugin)
    if not is_config(kind):
        raise PluginError(
            f"{whose(spec.name, plugin)} names its config {spec.config!r}, which is neither a subclass of "
            "oneaccord.api.BackendConfig nor a frozen dataclass"
        )
    return kind


def checked_kind(given: T, kind: type[Any], source: str) -> T:
    """Return the result of a backend's ``source``, if it has the right type.

    Raises
    ------
    PluginError
        It is not.
    """
    if not isinstance(given, kind):
        raise PluginError(f"{source} returned {given!r} instead of a oneaccord.api.{kind.__name__}")
    return given


def logger() -> Any:
    """Return the logger of plugins."""
    # Logging rather than warnings: under ``-W error`` a warning would break the very collective that must continue. Imported
    # here because it is needed only at the first failure.
    import logging

    return logging.getLogger("oneaccord.plugins")

"""Importing what plugins name, and checking what they give."""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from manyhands.common.installing import install_command
from manyhands.config.plugins.installed import InstalledPlugin, find_installed, install_hint
from manyhands.contract.backend import API_VERSION, BackendConfig, BackendSpec
from manyhands.errors import ApiVersionError, BackendUnavailableError, PluginError

__all__ = [
    "IN_PROCESS",
    "Description",
    "check_spec",
    "checked_kind",
    "import_plugin",
    "installed",
    "load",
    "logger",
    "named",
    "owner",
    "with_the_others",
]

T = TypeVar("T")

IN_PROCESS: Final[str] = "(this process)"
"""The distribution of a plugin that has none."""


@functools.cache
def _installed_once(group: str, path: tuple[str, ...]) -> tuple[InstalledPlugin, ...]:  # noqa: ARG001 - a key
    return tuple(find_installed(group))


@dataclass(frozen=True, slots=True)
class Description:
    """A backend and what came of describing it: exactly one of ``spec`` and ``error`` is there."""

    plugin: InstalledPlugin
    spec: BackendSpec | None = None
    error: PluginError | None = None


def installed(group: str) -> tuple[InstalledPlugin, ...]:
    """Read the metadata once for each state of ``sys.path``: reading it again for every question would be slow."""
    return _installed_once(group, tuple(sys.path))


def named(error: BaseException) -> str:
    """Return the type and the words of an exception."""
    return f"{type(error).__name__}: {error}"


def owner(plugin: InstalledPlugin) -> str:
    """Say in words which plugin it is and who brings it."""
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


def check_spec(spec: BackendSpec, plugin: InstalledPlugin) -> None:
    """Raise `ApiVersionError` or `PluginError` when a spec cannot be used."""
    version: object = spec.api_version
    if spec.api_version != API_VERSION:
        newer = isinstance(version, int) and version > API_VERSION
        upgrade = "manyhands-core" if newer else plugin.distribution
        raise ApiVersionError(
            f"{owner(plugin)} is built for version {spec.api_version!r} of the plugin contract, and this manyhands-core has "
            f"version {API_VERSION}; try: pip install --upgrade {upgrade}"
        )
    if not spec.name or spec.name == "auto":
        raise PluginError(f"{owner(plugin)} registers a backend named {spec.name!r}; that name is not allowed")
    config: object = spec.config
    if not (isinstance(config, type) and issubclass(config, BackendConfig)):
        raise PluginError(f"{owner(plugin)} has the config {config!r}, which is no subclass of manyhands.api.BackendConfig")


def load(spec: BackendSpec, target: str, what: str) -> Any:
    """Import ``"module:function"``."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise PluginError(f"the backend {spec.name!r} names its {what} {target!r}; it must have the form 'module:function'")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        help_text = install_command(spec.install) or install_hint(spec.name)
        raise BackendUnavailableError(
            f"the backend {spec.name!r} cannot be loaded: {named(error)}" + (f"; try: {help_text}" if help_text else "")
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise PluginError(f"the backend {spec.name!r} names its {what} {target!r}, and there is no such function")
    return function


def checked_kind(given: T, kind: type[Any], source: str, backend: str) -> T:
    """Return what a backend gave, where it is of the kind that it must be of.

    Raises
    ------
    PluginError
        It is not.
    """
    if not isinstance(given, kind):
        raise PluginError(f"{source} of the backend {backend!r} returned {given!r}, and not a manyhands.api.{kind.__name__}")
    return given


def with_the_others(specs: list[BackendSpec], passed_over: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return what was passed over, with all but the first of the candidates."""
    others = [(spec.name, f"it can run, and {specs[0].name} comes before it") for spec in specs[1:]]
    return sorted([*passed_over, *others])


def logger() -> Any:
    """Return the logger of plugins."""
    # Logging rather than warnings: under ``-W error`` a warning would break the very collective that must go on. Imported
    # here because the first mishap is the first time that it is needed.
    import logging

    return logging.getLogger("manyhands.plugins")

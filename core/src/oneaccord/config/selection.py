"""From the configuration to the selector of a job."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from oneaccord.config.select import Rule, Selector, plugin_rules, read_table
from oneaccord.errors import ConfigError
from oneaccord.schedule.algorithms.registry import BUILTIN, Algorithm

if TYPE_CHECKING:
    from oneaccord.config.plugins import PluginManager
    from oneaccord.config.resolve import Resolved
    from oneaccord.contract.backend import BackendSpec

__all__ = ["make_selector"]


def make_selector(resolved: Resolved, plugins: PluginManager, backend: BackendSpec | None = None) -> Selector:
    """Return the selector of algorithms for a configuration: its table file, its overrides, and the algorithms of plugins.

    Parameters
    ----------
    resolved
        The configuration.
    plugins
        The manager of plugins, which may bring further algorithms; extensions are loaded for it.

    backend
        The backend whose table comes before that of oneaccord, and after that of the configuration, if it has one.

    Raises
    ------
    ConfigError
        The table file or ``[algorithms]`` names an algorithm that does not exist, or one that the verifier has refused; the message says
        where, and ``file`` and ``key`` hold it.
    PluginError
        A module that ``plugins`` names cannot be loaded; `DuplicatePluginError` if two algorithms have one name.
    """
    settings = resolved.settings
    rules = plugin_rules(backend.selection) if backend is not None and backend.selection is not None else None
    if settings.selection is not None:
        rules = read_table(settings.selection, rules)
    algorithms = (*BUILTIN, *plugins.algorithms())
    try:
        refused = plugins.refused_algorithms()
        return _selector(
            None if rules is None else tuple(rules), algorithms, tuple(settings.algorithms.items()), tuple(refused.items())
        )
    except ConfigError as error:
        if error.file is not None:  # a row of the table file
            raise
        key = f"algorithms.{error.key}"
        origin = resolved.origin(key)
        raise ConfigError(f"{origin}: {key} = {error.value!r}: {error}", file=origin, key=key, value=error.value) from None


@lru_cache(maxsize=8)
def _selector(
    rules: tuple[Rule, ...] | None,
    algorithms: tuple[Algorithm, ...],
    overrides: tuple[tuple[str, str], ...],
    refused: tuple[tuple[tuple[str, str], str], ...],
) -> Selector:
    """Return a selector; the ranks of one process share it, since they are configured alike."""
    return Selector(rules, algorithms, dict(overrides), dict(refused))

"""The environment variables of oneaccord: the one place that spells their names, and reads those that several rooms need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

__all__ = ["OF_ONE_RANK", "PREFIX", "Variable", "has_whole_tracebacks", "of_setting"]

PREFIX: Final = "ONEACCORD_"
"""The prefix of the names of all environment variables of oneaccord."""


class Variable(StrEnum):
    """The variables that are not keys of the configuration. ``PLUGINS`` is both: a comma-separated list."""

    CONFIG = "ONEACCORD_CONFIG"
    """The configuration file."""
    ELASTIC = "ONEACCORD_ELASTIC"
    """The launcher's folder by which replacements come in; set by ``oneaccord run`` for each rank of an elastic job."""
    ERROR_FILE = "ONEACCORD_ERROR_FILE"
    """The file in which a rank leaves the error that ends it; set by a launcher, for each rank another one."""
    JOINED = "ONEACCORD_JOINED"
    """Left by a rank for the processes that it starts: its process id, its rank and its job."""
    LAUNCHED = "ONEACCORD_LAUNCHED"
    """The address where the ranks of ``oneaccord run`` meet."""
    NEWCOMER = "ONEACCORD_NEWCOMER"
    """That a rank replaces one that has ended."""
    NO_AUTOLOAD = "ONEACCORD_NO_AUTOLOAD"
    """That plugins are loaded by their names alone."""
    PLUGINS = "ONEACCORD_PLUGINS"
    """Plugins to load, and ``no:NAME`` for those to leave alone."""
    RANK = "ONEACCORD_RANK"
    """Which rank this process is; the user's word, before any launcher's."""
    RENDEZVOUS = "ONEACCORD_RENDEZVOUS"
    """The address where the ranks meet, ``host:port``; it overrides the configuration and every launcher."""
    RENDEZVOUS_FD = "ONEACCORD_RENDEZVOUS_FD"
    """The socket on which rank 0 listens, which its launcher has bound."""
    RUN_ID = "ONEACCORD_RUN_ID"
    """Distinguishes two runs with one address and one secret."""
    SECRET = "ONEACCORD_SECRET"  # noqa: S105 - the name, not the secret
    """The secret of the job."""
    TRACEBACK = "ONEACCORD_TRACEBACK"
    """``full`` for tracebacks with the frames of oneaccord."""
    TRACE_HOOKS = "ONEACCORD_TRACE_HOOKS"
    """That each call of a plugin's hook is logged."""
    WORLD_SIZE = "ONEACCORD_WORLD_SIZE"
    """How many ranks there are; goes with ``RANK``."""


OF_ONE_RANK: Final = frozenset(
    {
        Variable.ELASTIC,
        Variable.ERROR_FILE,
        Variable.JOINED,
        Variable.LAUNCHED,
        Variable.NEWCOMER,
        Variable.RANK,
        Variable.RENDEZVOUS,
        Variable.RENDEZVOUS_FD,
        Variable.WORLD_SIZE,
        "TORCHELASTIC_USE_AGENT_STORE",
    }
)
"""The variables that one launcher sets for its ranks. If such a launcher is started by a rank, or by a shell in which they are set, it keeps
them from its own ranks: they would override its own variables, or contradict them."""


def of_setting(*keys: str) -> str:
    """Return the variable that sets a key of the configuration.

    Parameters
    ----------
    keys
        The key and the tables around it, the outermost first: ``"recorder", "directory"``.
    """
    return PREFIX + "__".join(keys).upper()


def has_whole_tracebacks(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether tracebacks keep the frames of oneaccord.

    Parameters
    ----------
    environ
        The variables; by default those of the process.
    """
    return environ.get(Variable.TRACEBACK, "").strip().lower() == "full"

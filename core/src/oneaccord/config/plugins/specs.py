"""The rules for a backend's description, checked before any of it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from oneaccord.common.checks import whole
from oneaccord.contract.backend import API_VERSION, BackendSpec
from oneaccord.contract.config import is_config
from oneaccord.errors import ApiVersionError, PluginError

if TYPE_CHECKING:
    from oneaccord.config.plugins.installed import InstalledPlugin

__all__ = ["CAPABILITIES", "DEVICES", "check_spec", "oldest_api_version"]


CAPABILITIES: Final[frozenset[str]] = frozenset({"calling thread", "native", "transport", "virtual time"})
"""The words that a spec may use for its backend; see `BackendSpec`."""

DEVICES: Final[frozenset[str]] = frozenset({"cpu", "cuda"})
"""The kinds of memory for the arrays of a backend."""


def oldest_api_version(newest: int) -> int:
    """Return the oldest version of the contract that a core of version ``newest`` still takes: the one before, and 1 is the first."""
    return max(1, newest - 1)


def _is_place(value: object) -> bool:
    """Return whether this is ``"module:function"`` or the like."""
    if not isinstance(value, str):
        return False
    module, colon, name = value.partition(":")
    return bool(module and colon and name) and not any(part.isspace() for part in value)


def _is_whole(value: object) -> bool:
    return whole(value) is not None


_PLACE = "a text of the form 'module:function'"
_FIELDS: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "name": (lambda given: isinstance(given, str) and given not in ("", "auto"), "a name other than 'auto'"),
    "summary": (lambda given: isinstance(given, str), "a text"),
    "factory": (_is_place, _PLACE),
    "config": (
        lambda given: is_config(given) or _is_place(given),
        "a subclass of oneaccord.api.BackendConfig or a frozen dataclass, or 'module:class'",
    ),
    "devices": (
        lambda given: isinstance(given, tuple) and bool(given) and DEVICES.issuperset(given),
        f"a tuple of some of {sorted(DEVICES)}",
    ),
    "capabilities": (
        lambda given: isinstance(given, set | frozenset) and CAPABILITIES.issuperset(given),
        f"a frozenset of some of {sorted(CAPABILITIES)}",
    ),
    "probe": (callable, "a function"),
    "install": (lambda given: isinstance(given, str), "a text"),
    "auto_priority": (lambda given: given is None or _is_whole(given), "a whole number or None"),
    "one_host": (lambda given: isinstance(given, bool), "True or False"),
    "selection": (lambda given: given is None or _is_place(given), "a text of the form 'package:file', or None"),
    "diagnose": (lambda given: given is None or _is_place(given), f"{_PLACE}, or None"),
    "parts": (lambda given: given is None or callable(given), "a function or None"),
    "launcher": (lambda given: given is None or _is_place(given), f"{_PLACE}, or None"),
}
"""For each field of a spec: a check, and its words."""


def check_spec(spec: BackendSpec, plugin: InstalledPlugin, owner: str) -> None:
    """Check a spec that ``plugin`` registers; ``owner`` are the words for it.

    Raises
    ------
    ApiVersionError
        It was built for a version of the contract that this core does not take.
    PluginError
        A field has a wrong value.
    """
    version, oldest = whole(spec.api_version), oldest_api_version(API_VERSION)
    if version is None:
        raise PluginError(f"{owner} states api_version={spec.api_version!r}; it must be a whole number")
    if not oldest <= version <= API_VERSION:
        upgrade = "oneaccord-core" if version > API_VERSION else plugin.distribution
        taken = f"version {API_VERSION}" if oldest == API_VERSION else f"versions {oldest} and {API_VERSION}"
        raise ApiVersionError(
            f"{owner} is built for version {version} of the plugin contract, but this oneaccord-core supports {taken}; "
            f"try: pip install --upgrade {upgrade}"
        )
    for field, (holds, words) in _FIELDS.items():
        given: object = getattr(spec, field)
        try:
            is_right = holds(given)
        except TypeError:  # a value that cannot be in a set
            is_right = False
        if not is_right:
            raise PluginError(f"{owner} registers a backend with {field}={given!r}; it must be {words}")

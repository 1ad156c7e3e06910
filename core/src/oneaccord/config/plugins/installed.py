"""The first tier of discovery: the metadata of installed plugins, and the switches that choose among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from oneaccord.common.installing import install_command
from oneaccord.common.variables import Variable
from oneaccord.config.plugins.metadata import InstalledPlugin, find_installed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = [
    "BACKEND_GROUP",
    "COMMAND_GROUP",
    "EXTENSION_GROUP",
    "InstalledPlugin",
    "Switches",
    "did_you_mean",
    "find_installed",
    "install_hint",
    "nearest",
    "switch_against",
    "unknown_backend_text",
    "why_left_out",
]

BACKEND_GROUP: Final[str] = "oneaccord"
"""The entry-point group of backends."""

EXTENSION_GROUP: Final[str] = "oneaccord.extensions"
"""The entry-point group of all other plugins: algorithms, observers, native collectives."""

COMMAND_GROUP: Final[str] = "oneaccord.commands"
"""The entry-point group of commands of ``oneaccord``; the switches of plugins do not count, as each is imported when it is typed."""

_FIRST_PARTY: Final[tuple[str, ...]] = ("gloo", "hybrid", "mpi", "nccl", "shm", "simulated", "tcp", "ucc", "ucx")
"""The backends that the extras of the distribution ``oneaccord`` install."""

_OFF: Final[frozenset[str]] = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Switches:
    """Which plugins to load and which to leave alone.

    Attributes
    ----------
    load
        Names of entry points, or of modules, to load in any case.
    block
        Names of entry points, of modules or of distributions, never to load.
    autoload
        Whether entry points count that ``load`` does not name.
    trace
        Whether each hook call is written to stderr.
    """

    load: tuple[str, ...] = ()
    block: frozenset[str] = field(default_factory=frozenset)
    autoload: bool = True
    trace: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Switches:
        """Read ``ONEACCORD_PLUGINS``, ``ONEACCORD_NO_AUTOLOAD`` and ``ONEACCORD_TRACE_HOOKS``."""
        base = cls(
            autoload=environ.get(Variable.NO_AUTOLOAD, "").strip().lower() in _OFF,
            trace=environ.get(Variable.TRACE_HOOKS, "").strip().lower() not in _OFF,
        )
        return base.with_words(environ.get(Variable.PLUGINS, "").split(","))

    def with_words(self, words: Iterable[str]) -> Switches:
        """Add ``"NAME"`` (load) and ``"no:NAME"`` (block) words; a later word about a name overrides an earlier one."""
        load, block = list(self.load), set(self.block)
        for word in words:
            name = word.strip()
            blocked = name.startswith("no:")
            name = name.removeprefix("no:").strip()
            if not name:
                continue
            if blocked:
                block.add(name)
                load = [other for other in load if other != name]
            else:
                block.discard(name)
                load.extend([name] if name not in load else [])
        return Switches(tuple(load), frozenset(block), self.autoload, self.trace)

    def blocks(self, plugin: InstalledPlugin) -> bool:
        """Return whether a plugin is blocked: by its name, by its distribution, or by its module."""
        if not self.block:
            return False
        known = {plugin.name, plugin.value, plugin.value.partition(":")[0]}
        return not self.block.isdisjoint(known) or _canonical(plugin.distribution) in map(_canonical, self.block)

    def allows(self, plugin: InstalledPlugin) -> bool:
        """Return whether an entry point counts."""
        return not self.blocks(plugin) and (self.autoload or plugin.name in self.load)


def _canonical(distribution: str) -> str:
    """Return the name of a distribution as package indexes compare it (PEP 503)."""
    return distribution.lower().replace("_", "-").replace(".", "-")


def why_left_out(plugins: Iterable[InstalledPlugin], switches: Switches) -> list[tuple[str, str]]:
    """Return the names of plugins that do not count, each with the reason."""
    reasons: dict[str, str] = {}
    for plugin in plugins:
        words = [word for word in sorted(switches.block) if Switches(block=frozenset({word})).blocks(plugin)]
        reasons[plugin.name] = (
            f"it is blocked by the switch 'no:{words[0]}'"
            if words
            else "ONEACCORD_NO_AUTOLOAD is set, and ONEACCORD_PLUGINS does not name it"
        )
    return sorted(reasons.items())


def switch_against(taken: InstalledPlugin, newcomer: InstalledPlugin) -> str:
    """Return the switch that leaves out one of two plugins with one backend, and not the other."""
    own = {newcomer.name, newcomer.value, newcomer.distribution}
    words = [word for word in (taken.distribution, taken.value) if word not in own]
    return f"the switch 'no:{words[0]}'" if words else "uninstalling it"


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the most likely candidate if ``name`` is misspelled, None if there is none."""
    import difflib  # only a mistake needs it

    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.55)
    return by_lower[close[0]] if close else None


def did_you_mean(name: str, valid: Iterable[str], before: str = "") -> str:
    """Return how an error about an unknown name ends: the nearest one, behind what stands before all of them, and the valid ones."""
    known = list(valid)
    close = nearest(name, known)
    return (f"; did you mean {before + close!r}?" if close else ".") + f" Valid here: {', '.join(known) or 'none'}"


def install_hint(name: str) -> str:
    """Return the command that installs the first-party backend ``name``; empty for any other name."""
    return install_command(f"pip install 'oneaccord[{name}]'") if name in _FIRST_PARTY else ""


def unknown_backend_text(
    name: str, installed: Collection[str], switches: Switches, left_out: Mapping[str, str] | None = None
) -> str:
    """Return a message about the backend ``name``: the reason, the installed backends, and the remedy.

    Parameters
    ----------
    name
        The missing name.
    installed
        The backends that count.
    switches
        Why others do not count.
    left_out
        The backends that are installed and do not count, each with the reason.
    """
    listed = ", ".join(sorted(installed)) or "none"
    text = f"there is no backend {name!r} (installed: {listed})"
    if name in switches.block:
        return f"the backend {name!r} is blocked by the switch 'no:{name}'; remove it, or choose another (installed: {listed})"
    if (reason := (left_out or {}).get(name, "")).startswith("it is blocked"):  # by its distribution or module
        return f"the backend {name!r} cannot be chosen: {reason}; remove it, or choose another (installed: {listed})"
    if reason:
        text += f"; ONEACCORD_NO_AUTOLOAD is set, so only backends in ONEACCORD_PLUGINS are used: try ONEACCORD_PLUGINS={name}"
    elif hint := install_hint(name):
        text += f"; install it with: {hint}"
    elif suggestion := nearest(name, [*installed, "auto", *_FIRST_PARTY]):
        text += f"; did you mean {suggestion!r}?"
        if suggestion not in installed and (hint := install_hint(suggestion)):
            text += f" It is installed with: {hint}"
    elif not installed:
        text += f"; install one, for example with: {install_hint('tcp')}"
    return text

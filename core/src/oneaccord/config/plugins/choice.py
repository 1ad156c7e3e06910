"""``backend = "auto"``: the backends that may be taken without being asked for, and why the others may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from oneaccord.config.plugins.installed import install_hint
from oneaccord.errors import BackendUnavailableError

if TYPE_CHECKING:
    from oneaccord.config.plugins.manager import PluginManager
    from oneaccord.contract.backend import BackendSpec

__all__ = ["candidates", "weigh"]

Lacking = Callable[[str], str | None]
"""Names a setting that a backend needs, and that is not set; None if nothing is missing."""


def candidates(manager: PluginManager, lacking: Lacking | None = None) -> tuple[list[BackendSpec], list[tuple[str, str]]]:
    """Return the backends that ``"auto"`` may take, the best first, and each other one with the reason why it may not.

    The highest `BackendSpec.auto_priority` comes first; names decide between equals.

    Parameters
    ----------
    manager
        The plugins that are installed.
    lacking
        Names what is missing in a backend's configuration, None for nothing: `Resolved.lacking`.

    Raises
    ------
    BackendUnavailableError
        There is none; the message says why for each.
    """
    specs, passed_over = _candidates(manager, lacking)
    if not specs:
        passed_over = sorted([*passed_over, *manager.why_left_out()])
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in passed_over) or " none is installed"
        installed = dict(passed_over)
        what = ["name one of them as the backend"] if passed_over else []
        if any("switch 'no:" in reason for reason in installed.values()):
            what.append("remove a switch")
        if lacking_hint := next((name for name in ("tcp", "shm") if name not in installed), None):
            what.append(f"install one, for example with: {install_hint(lacking_hint)}")
        raise BackendUnavailableError(f"'auto' found no backend that can run here:{reasons}\n{', or '.join(what)}")
    return specs, passed_over


def weigh(
    manager: PluginManager, lacking: Lacking | None = None, *, one_host: bool = True
) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the backend that ``"auto"`` takes, None if there is none, and each other one with the reason why it was passed over.

    Parameters
    ----------
    manager, lacking
        As for `candidates`.
    one_host
        Whether all ranks are on one host; ``False`` passes over the backends that need it, and ``True`` those that are composed of others.
    """
    specs, passed_over = _candidates(manager, lacking)
    unfit = {spec.name for spec in specs if (spec.parts is not None if one_host else spec.one_host)}
    reason = "it is for several hosts with several ranks each" if one_host else "it is for ranks of one host"
    passed_over += [(name, reason) for name in sorted(unfit)]
    specs = [spec for spec in specs if spec.name not in unfit]
    return (specs[0].name if specs else None), _with_the_others(specs, passed_over)


def _candidates(manager: PluginManager, lacking: Lacking | None) -> tuple[list[BackendSpec], list[tuple[str, str]]]:
    """Return the backends that ``"auto"`` may take, the best first, and each other one with the reason why it may not."""
    candidates: list[BackendSpec] = []
    passed_over: list[tuple[str, str]] = []
    for description in manager.describe_all():
        name, spec = description.plugin.name, description.spec
        if spec is None:
            passed_over.append((name, str(description.error)))
        elif spec.auto_priority is None:
            passed_over.append((name, "it is used only if it is chosen by name"))
        elif (reason := manager.available(name)) is not None or (lacking and (reason := lacking(name))):
            passed_over.append((name, reason))
        else:
            candidates.append(spec)
    return sorted(candidates, key=lambda spec: (-(spec.auto_priority or 0), spec.name)), sorted(passed_over)


def _with_the_others(specs: list[BackendSpec], passed_over: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the skipped backends, with all but the first of the candidates."""
    others = [(spec.name, f"it can run, but {specs[0].name} comes before it") for spec in specs[1:]]
    return sorted([*passed_over, *others])

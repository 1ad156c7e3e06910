"""The common part of both kinds of ``oneaccord bench``: the meaning of names, and the start of ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from oneaccord.common.variables import Variable
from oneaccord.errors import UsageError
from oneaccord_lab.commands.files import write_text

if TYPE_CHECKING:
    from oneaccord.local.resolve import Resolution
    from oneaccord_lab.bench.plan import Target

__all__ = ["names_of", "start_ranks", "targets_of", "write_json"]

ALL = "all"


def names_of(text: str, known: Sequence[str]) -> list[str]:
    """Return the names that are meant by some of ``known`` with commas between them, or by ``all``; each once, in the order given.

    Raises
    ------
    UsageError
        One of them is not known.
    """
    found: list[str] = []
    for name in (word.strip() for word in text.split(",")):
        if name != ALL and name not in known:
            from oneaccord.config.plugins.installed import nearest

            close = nearest(name, [*known, ALL])
            hint = f"; did you mean {close!r}?" if close else "."
            raise UsageError(f"there is no collective {name!r}{hint} Valid here: {', '.join([*known, ALL])}")
        found += [each for each in (known if name == ALL else [name]) if each not in found]
    return found


def targets_of(
    words: str | None, file: str | None, raw: Collection[str], more: Sequence[str] = ()
) -> tuple[list[Target], list[Resolution]]:
    """Return the targets to compare, and how each backend is started.

    Parameters
    ----------
    words
        The names of the targets, with commas between them; None for the backend of the configuration.
    file
        The configuration file, if one is named.
    raw
        The backends whose libraries can be called by themselves.
    more
        Further targets.

    Raises
    ------
    UsageError
        A target is there twice, or there is no library to call.
    PluginError
        A backend is not installed, or cannot run here.
    """
    from oneaccord.local.resolve import resolve_launcher
    from oneaccord_lab.bench.plan import RAW, Target

    targets: list[Target] = []
    resolutions: dict[str, Resolution] = {}
    for word in [*([None] if words is None else [word.strip() for word in words.split(",")]), *more]:
        asked = Target.parse(word or "auto")
        resolution = resolve_launcher(None if word is None else asked.backend, file)
        target = Target(resolution.backend, asked.variant)
        if target.variant == RAW and target.backend not in raw:
            raise UsageError(f"{target.name}: there is no other library behind {target.backend}; +raw is for {', '.join(raw)}")
        if target in targets:
            raise UsageError(f"--backends {words}: {target.name} is there twice; name each once")
        targets.append(target)
        resolutions[target.backend] = resolution
    return targets, list(resolutions.values())


def start_ranks(module: str, plan: str, ranks: int, resolutions: Sequence[Resolution], file: str | None) -> int:
    """Run a module with a plan on all ranks, started as the backends need it; return the exit code.

    Raises
    ------
    UsageError
        Two backends each start their ranks in a way of their own, or the time of one is not the computer's.
    """
    from oneaccord.config.plugins import get_plugin_manager

    for each in resolutions:
        if "virtual time" in get_plugin_manager().describe(each.backend).capabilities:
            raise UsageError(
                f"the backend {each.backend!r} runs on its own clock, so it cannot be measured: leave it out, or see what a run of "
                "oneaccord_simulated says about its duration"
            )
    chosen: dict[str, str] = {Variable.CONFIG: file} if file else {}
    own = [each for each in resolutions if each.launcher is not None]
    for other in own[1:]:
        if other.launcher is not own[0].launcher:
            raise UsageError(
                f"the backends {own[0].backend!r} and {other.backend!r} each start their ranks in a way of their own, so that they "
                "cannot be measured in the same processes: leave one out"
            )
    if not own or own[0].launcher is None:
        from oneaccord.local.launching import Launch
        from oneaccord.local.processes import run_job

        return run_job(Launch(module, True, (plan,), ranks, environ=chosen), dict(os.environ))
    from oneaccord.contract.backend import LaunchRequest
    from oneaccord.local.variables import shared_variables

    # Each rank gets its share of the processors, as from `oneaccord run`.
    chosen |= {name: value for name, value in shared_variables(ranks, os.environ).items() if name not in os.environ}
    return own[0].launcher(LaunchRequest(module, True, (plan,), ranks, own[0].backend, chosen, config=own[0].config))


def write_json(text: str, file: str) -> None:
    """Write to a file, or to standard output if its name is ``-``.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    if file == "-":
        print(text)
    else:
        write_text("--json", file, f"{text}\n")

"""What both kinds of ``manyhands bench`` share: which names are meant, and how ranks are started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from manyhands.errors import UsageError
from manyhands_lab.commands.files import write_text

if TYPE_CHECKING:
    from manyhands.launch.resolve import Resolution

__all__ = ["names_of", "start_ranks", "write_json"]

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
            from manyhands.config.plugins.installed import nearest

            close = nearest(name, [*known, ALL])
            hint = f"; did you mean {close!r}?" if close else "."
            raise UsageError(f"there is no collective {name!r}{hint} Valid here: {', '.join([*known, ALL])}")
        found += [each for each in (known if name == ALL else [name]) if each not in found]
    return found


def start_ranks(module: str, plan: str, ranks: int, resolutions: Sequence[Resolution], file: str | None) -> int:
    """Run a module with a plan on all ranks, started as the backends need it; return the exit code.

    Raises
    ------
    UsageError
        Two backends each start their ranks in a way of their own, or the time of one is not the computer's.
    """
    from manyhands.config.plugins import get_plugin_manager

    for each in resolutions:
        if "virtual time" in get_plugin_manager().describe(each.backend).capabilities:
            raise UsageError(
                f"the backend {each.backend!r} lives on a clock of its own, and cannot be measured: leave it out, or see what a run of "
                "manyhands_simulated says about its duration"
            )
    chosen = {"MANYHANDS_CONFIG": file} if file else {}
    own = [each for each in resolutions if each.launcher is not None]
    for other in own[1:]:
        if other.launcher is not own[0].launcher:
            raise UsageError(
                f"the backends {own[0].backend!r} and {other.backend!r} each start their ranks in a way of their own, so that they "
                "cannot be measured in the same processes: leave one out"
            )
    if not own or own[0].launcher is None:
        from manyhands.launch.launching import Launch
        from manyhands.launch.processes import run_job

        return run_job(Launch(module, True, (plan,), ranks, environ=chosen), dict(os.environ))
    from manyhands.contract.backend import LaunchRequest

    return own[0].launcher(LaunchRequest(module, True, (plan,), ranks, own[0].backend, chosen, config=own[0].config))


def write_json(text: str, file: str) -> None:
    """Write to a file, or to standard output where its name is ``-``.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    if file == "-":
        print(text)
    else:
        write_text("--json", file, f"{text}\n")

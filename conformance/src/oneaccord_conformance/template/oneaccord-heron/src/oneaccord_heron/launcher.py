"""The launcher: its hosts are names for this computer, and what runs on a host is a process here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from oneaccord.api import Ask, Deadline, Host, UsageError

from oneaccord_heron.plugin import Config

__all__ = ["HostLauncher"]


class HostLauncher:
    """Gives hosts to one job."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def allocate(self, ask: Ask, deadline: Deadline) -> Sequence[Host]:
        """Return the hosts, in the order of their ranks.

        Ask the engine for room for ``ask.ranks`` ranks here. Raise a `DeadlineError` when ``deadline.passed()``, and an error that says what to do if
        there can never be as much room.
        """
        return [self._host(*text.partition(":")[::2]) for text in self._config.hosts]

    def command(self, host: Host, argv: Sequence[str]) -> Sequence[str]:
        """Return the local command whose process runs ``argv`` on the host.

        It passes standard input, output and error through. If it ends, even by SIGKILL, ``argv`` must see the end of its standard input. For ssh it is
        ``["ssh", host.name, f"exec {shlex.join(argv)}"]``; here ``argv`` itself does.
        """
        return list(argv)

    def release(self) -> None:
        """Give the hosts back, as to the engine that has them: called once or more, also after an error."""

    def _host(self, name: str, slots: str) -> Host:
        if not name or not (slots.isdigit() and int(slots)):
            raise UsageError(f"{name}:{slots} is no host: write a name and the number of its ranks, such as box1:4")
        address = "127.0.0.1"  # the one at which the ranks of other hosts reach it
        return Host(name, address, int(slots), python=self._config.python or sys.executable, folder=str(Path.cwd()))

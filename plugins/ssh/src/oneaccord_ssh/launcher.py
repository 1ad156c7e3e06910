"""The launcher: OpenSSH's client, once for each host."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from oneaccord.api import Ask, ConfigError, Deadline, DeadlineError, Host, UsageError
from oneaccord_ssh.config import SshConfig

__all__ = ["SshLauncher"]

_HOST = re.compile(r"(?P<name>\[[^\]\s]+\]|[^\s:,-][^\s:,]*)(?::(?P<slots>[1-9]\d{0,5}))?\Z", re.ASCII)


class SshLauncher:
    """Runs programs on hosts by ssh.

    Parameters
    ----------
    config
        Its options.
    """

    def __init__(self, config: SshConfig) -> None:
        self._config = config

    def allocate(self, ask: Ask, deadline: Deadline) -> Sequence[Host]:
        """Return the hosts of the options; none is connected to yet.

        Raises
        ------
        UsageError
            No host is named, one is named twice, or its text cannot be understood.
        ConfigError
            ssh's own configuration cannot be read, in ssh's words.
        DeadlineError
            ssh did not answer in time.
        """
        config, found = self._config, dict[str, int | None]()
        for text in config.hosts:
            match = _HOST.match(text)
            if match is None:
                raise UsageError(f"{text!r} is no host: write a name and the number of its ranks, such as node1:4")
            name = match["name"].strip("[]")
            if name in found:
                raise UsageError(f"the host {name} is named twice: give it more ranks instead, such as {name}:8")
            found[name] = None if match["slots"] is None else int(match["slots"])
        if not found:
            raise UsageError(
                "no hosts: name them, as in oneaccord run --on ssh --hosts node1:4,node2:4, or launch(..., on='ssh', options={'hosts': ['node1:4']})"
            )
        left, unsaid = ask.ranks - sum(slots or 0 for slots in found.values()), list(found.values()).count(None)
        share = ask.per_host or max(1, -(-left // unsaid)) if unsaid else 0
        python, folder = config.python or sys.executable, config.folder or str(Path.cwd())
        return [
            Host(
                name,
                config.addresses.get(name) or self._address(name, deadline),
                slots or share,
                config.gpus_per_host,
                config.pythons.get(name, python),
                folder,
            )
            for name, slots in found.items()
        ]

    def command(self, host: Host, argv: Sequence[str]) -> Sequence[str]:
        """Return the local command whose process runs ``argv`` on a host.

        It asks for no password. If the host does not answer for 15 s, it ends.
        """
        alive = ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
        timeout = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={self._config.connect_timeout_s}"]
        # exec: the login shell must not stand between the connection and the program.
        return [*self._ssh(), *timeout, *alive, "-T", "-x", "-a", "--", host.name, f"exec {shlex.join(argv)}"]

    def release(self) -> None:
        """Do nothing: the hosts belong to no allocation."""

    def _ssh(self) -> list[str]:
        config, words = self._config, ["ssh"]
        chosen = (
            ("-F", config.config_file),
            ("-l", config.user),
            ("-p", config.port),
            ("-i", config.identity_file),
        )
        for option, value in chosen:
            words += [] if value is None else [option, str(value)]
        return [*words, *config.args]

    def _address(self, name: str, deadline: Deadline) -> str:
        """Return what ssh's configuration says of the address of a host: its name may be one that only this configuration knows."""
        command = [*self._ssh(), "-G", "--", name]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=max(0.1, deadline.remaining()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"{shlex.join(command)} did not answer within {deadline.timeout_s:g} s") from None
        if done.returncode:
            raise ConfigError(f"ssh cannot be asked about the host {name}: {done.stderr.strip()}")
        return next((line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")), name)

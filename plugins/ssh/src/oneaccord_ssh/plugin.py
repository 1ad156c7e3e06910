"""The description of the launcher: light, so that listing it costs nothing."""

from __future__ import annotations

import shutil

from oneaccord.api import LauncherSpec

__all__ = ["register_launchers"]


def _probe() -> str | None:
    if shutil.which("ssh") is None:
        return "there is no ssh on the PATH: install OpenSSH's client, such as Debian's package openssh-client"
    return None


def register_launchers() -> list[LauncherSpec]:
    """Describe the launcher."""
    return [
        LauncherSpec(
            name="ssh",
            summary="hosts that are reached by ssh, without a password",
            kind="hosts",
            factory="oneaccord_ssh.launcher:SshLauncher",
            config="oneaccord_ssh.config:SshConfig",
            probe=_probe,
            install="",
        )
    ]

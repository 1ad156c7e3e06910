"""A launcher of the kind "hosts" whose hosts are addresses of this one; what it runs there is a process of this host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from oneaccord.api import Ask, BackendConfig, Deadline, Host, LauncherSpec

__all__ = ["HereConfig", "HereLauncher", "install", "register_launchers"]


class HereConfig(BackendConfig):
    hosts: tuple[str, ...] = ("127.0.0.5:2", "127.0.0.6:2")
    shell: str = 'exec "$@"'
    python: str = ""
    folder: str | None = None


class HereLauncher:
    def __init__(self, config: HereConfig) -> None:
        self._config = config
        self.releases = 0

    def allocate(self, ask: Ask, deadline: Deadline) -> Sequence[Host]:
        import sys

        assert ask.ranks >= 1
        assert deadline.remaining() > 0
        config = self._config
        pairs = [text.split(":") for text in config.hosts]
        python = config.python or os.environ.get("HERE_PYTHON") or sys.executable
        return [Host(name, name, int(slots), python=python, folder=config.folder or str(Path.cwd())) for name, slots in pairs]

    def command(self, host: Host, argv: Sequence[str]) -> Sequence[str]:
        return ["/bin/sh", "-c", self._config.shell, host.name, *argv]

    def release(self) -> None:
        self.releases += 1


def register_launchers() -> list[LauncherSpec]:
    module = "support.host_launcher_here"
    return [
        LauncherSpec(
            "here", "this host", "hosts", f"{module}:HereLauncher", f"{module}:HereConfig", lambda: None, "pip install here"
        ),
        LauncherSpec(
            "broken",
            "none",
            "hosts",
            f"{module}:HereLauncher",
            f"{module}:HereConfig",
            lambda: "the moon is full",
            "pip install moon",
        ),
    ]


def install(folder: Path) -> str:
    """Make the launcher's entry points in a folder, which belongs on the path of Python; return that."""
    info = folder / "here-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: here\nVersion: 1.0\n")
    lines = [f"{name} = support.host_launcher_here" for name in ("here", "broken")]
    (info / "entry_points.txt").write_text("\n".join(["[oneaccord.launchers]", *lines, ""]))
    return str(folder)

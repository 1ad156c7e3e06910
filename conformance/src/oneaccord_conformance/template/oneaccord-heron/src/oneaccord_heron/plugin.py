"""The description of the launcher. `oneaccord doctor` imports this module: it loads no library of an engine, and not the launcher."""

from pydantic import Field

from oneaccord.api import BackendConfig, LauncherSpec

__all__ = ["Config", "register_launchers"]


class Config(BackendConfig):
    """The options of ``--option KEY=VALUE`` and ``launch(..., options=...)``; unknown ones are errors."""

    hosts: tuple[str, ...] = Field(
        default=("box1:4", "box2:4"), min_length=1
    )  # a field of this name takes --hosts and --hostfile
    """The hosts, each with the number of ranks that it takes."""
    python: str | None = None
    """The Python of the hosts; by default the one that runs here."""


def why_not() -> str | None:
    """Return None when the launcher can be used here, else the reason; quick, and without heavy imports."""
    return None


def register_launchers() -> list[LauncherSpec]:
    """Describe the launcher."""
    return [
        LauncherSpec(
            name="heron",
            summary="names for this computer",
            kind="hosts",
            factory="oneaccord_heron.launcher:HostLauncher",  # imported when the launcher is used, and not before
            config="oneaccord_heron.plugin:Config",
            probe=why_not,
            install="pip install oneaccord-heron",
        )
    ]

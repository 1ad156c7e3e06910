"""The description of the launcher. `oneaccord doctor` imports this module: it loads no library of an engine, and not the launcher."""

from pydantic import Field

from oneaccord.api import BackendConfig, LauncherSpec

__all__ = ["Config", "register_launchers"]


class Config(BackendConfig):
    """The options of ``launch(..., options=...)``; unknown ones are errors."""

    most_workers: int = Field(default=64, ge=1)
    """How many workers a job may have."""
    python: str | None = None
    """The Python of the workers; by default the one that runs here."""


def why_not() -> str | None:
    """Return None when the launcher can be used here, else the reason; quick, and without heavy imports."""
    return None


def register_launchers() -> list[LauncherSpec]:
    """Describe the launcher."""
    return [
        LauncherSpec(
            name="stork",
            summary="processes of this computer",
            kind="workers",
            factory="oneaccord_stork.launcher:ProcessLauncher",  # imported when the launcher is used, and not before
            config="oneaccord_stork.plugin:Config",
            probe=why_not,
            install="pip install oneaccord-stork",
        )
    ]

"""The description of the launcher: light, so that listing it costs nothing."""

from __future__ import annotations

from importlib.util import find_spec

from oneaccord.api import LauncherSpec

__all__ = ["register_launchers"]


def _probe() -> str | None:
    return None if find_spec("distributed") else "the package distributed is not installed"


def register_launchers() -> list[LauncherSpec]:
    """Describe the launcher."""
    return [
        LauncherSpec(
            name="dask",
            summary="the workers of a Dask cluster",
            kind="workers",
            factory="oneaccord_dask.launcher:DaskLauncher",
            config="oneaccord_dask.config:DaskConfig",
            probe=_probe,
            install='pip install "oneaccord[dask]"',
        )
    ]

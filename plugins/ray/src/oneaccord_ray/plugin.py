"""The description of the launcher: light, so that listing launchers costs nothing."""

from __future__ import annotations

from importlib.util import find_spec

from oneaccord.api import LauncherSpec, install_command

__all__ = ["register_launchers"]


def _probe() -> str | None:
    return None if find_spec("ray") is not None else "Ray is not installed"


def register_launchers() -> list[LauncherSpec]:
    """Describe the launcher."""
    return [
        LauncherSpec(
            name="ray",
            summary="actors of a Ray cluster, in a placement group",
            kind="workers",
            factory="oneaccord_ray.workers:RayWorkers",
            config="oneaccord_ray.config:RayConfig",
            probe=_probe,
            install=install_command("pip install 'oneaccord[ray]'"),
        )
    ]

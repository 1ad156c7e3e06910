"""The description of the hybrid backend: light, so that listing backends costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneaccord.api import BackendSpec, hookimpl

if TYPE_CHECKING:
    from oneaccord_hybrid.config import HybridConfig

__all__ = ["oneaccord_register_backends"]


def _parts(config: HybridConfig) -> dict[str, str]:
    return {f"routes.{route}": name for route, name in config.routes.model_dump().items() if name is not None}


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="hybrid",
        summary="several backends as one, by device, by operation, or by place",
        factory="oneaccord_hybrid.backend:HybridBackend",
        checksum=True,
        tls=True,
        api_version=1,
        config="oneaccord_hybrid.config:HybridConfig",
        devices=("cpu", "cuda"),
        parts=_parts,
        auto_priority=60,
        selection="oneaccord_hybrid:selection.toml",
        install="pip install 'oneaccord[hybrid]'",
    )

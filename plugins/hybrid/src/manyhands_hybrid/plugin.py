"""The description of the hybrid backend: light, so that listing backends costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyhands.api import BackendSpec, hookimpl

if TYPE_CHECKING:
    from manyhands_hybrid.config import HybridConfig

__all__ = ["manyhands_register_backends"]


def _parts(config: HybridConfig) -> dict[str, str]:
    return {f"routes.{route}": name for route, name in config.routes.model_dump().items() if name is not None}


@hookimpl
def manyhands_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="hybrid",
        summary="several backends as one, by device, by operation, or by place",
        factory="manyhands_hybrid.backend:HybridBackend",
        checksum=True,
        tls=True,
        api_version=1,
        config="manyhands_hybrid.config:HybridConfig",
        devices=("cpu", "cuda"),
        parts=_parts,
        install="pip install 'manyhands[hybrid]'",
    )

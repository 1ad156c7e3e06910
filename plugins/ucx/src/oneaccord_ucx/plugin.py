"""The description of the ucx backend: light, so that listing backends loads no UCX."""

from __future__ import annotations

from oneaccord.api import BackendSpec, hookimpl
from oneaccord_ucx.finding import missing

__all__ = ["oneaccord_register_backends"]


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="ucx",
        summary="UCX, over InfiniBand, RoCE, TCP or shared memory",
        factory="oneaccord_ucx.backend:UcxBackend",
        config="oneaccord_ucx.config:UcxConfig",
        probe=missing,
        install="pip install 'oneaccord[ucx]'",
        diagnose="oneaccord_ucx.library:diagnose",
    )

"""The description of the ucx backend: light, so that listing backends loads no UCX."""

from __future__ import annotations

from manyhands.api import BackendSpec, hookimpl
from manyhands_ucx.finding import missing

__all__ = ["manyhands_register_backends"]


@hookimpl
def manyhands_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="ucx",
        summary="UCX, over InfiniBand, RoCE, TCP or shared memory",
        factory="manyhands_ucx.backend:UcxBackend",
        config="manyhands_ucx.config:UcxConfig",
        probe=missing,
        install="pip install 'manyhands[ucx]'",
        diagnose="manyhands_ucx.library:diagnose",
    )

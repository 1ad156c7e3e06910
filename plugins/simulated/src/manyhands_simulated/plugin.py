"""The description of the simulated backend: light, so that listing backends costs nothing."""

from __future__ import annotations

from pydantic import Field

from manyhands.api import BackendConfig, BackendSpec, hookimpl

__all__ = ["SimulatedConfig", "manyhands_register_backends"]


class SimulatedConfig(BackendConfig):
    """The table ``[backends.simulated]``."""

    eager_bytes: int = Field(
        default=1 << 16,
        ge=0,
        description="Messages up to this size leave their sender at once; longer ones wait for their receiver.",
    )


@hookimpl
def manyhands_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="simulated",
        summary="ranks are threads of one process, for tests and debugging",
        factory="manyhands_simulated.backend:SimulatedBackend",
        config=SimulatedConfig,
        install="pip install manyhands[simulated]",
        launcher="manyhands_simulated.launcher:launch",
    )

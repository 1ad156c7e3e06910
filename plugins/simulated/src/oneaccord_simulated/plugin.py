"""The description of the simulated backend: light, so that listing backends costs nothing."""

from __future__ import annotations

from pydantic import Field

from oneaccord.api import BackendConfig, BackendSpec, hookimpl

__all__ = ["SimulatedConfig", "oneaccord_register_backends"]


class SimulatedConfig(BackendConfig):
    """The table ``[backends.simulated]``. All but ``eager_bytes`` is for ``oneaccord run``, which makes the world."""

    seed: int = Field(
        default=0,
        ge=0,
        description="Decides which rank runs next if several could: the same program and seed give the same run.",
    )
    network: str = Field(
        default="",
        description='The network, which gives the times of messages: the name of a preset, such as "fat-tree", or a TOML file; without it they take no time.',
    )
    faults: str = Field(default="", description="A TOML file with the faults and their times.")
    trace: str = Field(default="", description="A file to which a trace of the run is written at its end, for ui.perfetto.dev.")
    eager_bytes: int = Field(
        default=0,
        ge=0,
        description="Messages up to this size leave their sender at once; longer ones wait for their receiver.",
    )


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="simulated",
        summary="ranks of a simulated world in one process, for tests",
        factory="oneaccord_simulated.backend:SimulatedBackend",
        checksum=True,
        tls=True,
        api_version=1,
        config=SimulatedConfig,
        capabilities=frozenset({"transport", "virtual time"}),
        install="pip install 'oneaccord[simulated]'",
        launcher="oneaccord_simulated.script.launcher:launch",
    )

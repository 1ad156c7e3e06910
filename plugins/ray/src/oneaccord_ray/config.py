"""The options of the launcher."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from oneaccord.api import BackendConfig

__all__ = ["RayConfig"]


class RayConfig(BackendConfig):
    """The options of ``on="ray"``."""

    address: str | None = Field(
        default=None,
        description="The address of the cluster, as ray.init takes it. By default the one that this program is connected to, otherwise the one that ray.init finds.",
    )
    cpus: float = Field(default=1.0, ge=0.0, description="The processors of each rank, as Ray counts them.")
    resources: dict[str, float] = Field(default={}, description="Other resources of each rank.")
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK",
        description="How the placement group spreads ranks over nodes. With per_host, the ranks of each node are one bundle, and STRICT_SPREAD holds.",
    )
    runtime_env: dict[str, Any] = Field(default={}, description="The runtime_env of the actors: files, packages, variables.")
    namespace: str | None = Field(
        default=None, description="The namespace, as ray.init takes it, if this program is not connected yet."
    )

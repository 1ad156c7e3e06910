"""The settings of the hybrid backend."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from oneaccord.api import BackendConfig

__all__ = ["HybridConfig", "Routes"]

_EXAMPLES = 'such as { cpu = "tcp", cuda = "nccl" } or { intra = "shm", inter = "tcp" }'


class Routes(BackendConfig):
    """The table ``[backends.hybrid.routes]``: the names of backends."""

    cpu: str | None = Field(default=None, description="The backend for arrays in host memory.")
    cuda: str | None = Field(default=None, description="The backend for arrays in the memory of GPUs.")
    barrier: str | None = Field(default=None, description="The backend for barriers; by default as cpu, or intra and inter.")
    p2p: str | None = Field(
        default=None, description="The backend for sends and receives in host memory; by default as cpu, or intra and inter."
    )
    intra: str | None = Field(default=None, description="Instead of cpu, with inter: the backend between ranks of one host.")
    inter: str | None = Field(default=None, description="Instead of cpu, with intra: the backend between hosts.")

    @field_validator("*")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name == "hybrid":
            raise ValueError("hybrid cannot be a part of itself: expected the name of another backend")
        if name in ("", "auto"):
            raise ValueError('expected the name of a backend, such as "tcp"')
        return name

    @model_validator(mode="after")
    def _check_together(self) -> Routes:
        if not any(self.model_dump().values()):
            raise ValueError(f"expected at least one route, {_EXAMPLES}")
        if self.cpu and (self.intra or self.inter):
            raise ValueError("cpu is one route for all ranks, intra and inter are two: give either, not both")
        if bool(self.intra) != bool(self.inter):
            given, missing = ("intra", "inter") if self.intra else ("inter", "intra")
            raise ValueError(f"{given} is given alone: give {missing} as well, or cpu instead of both")
        if (self.barrier or self.p2p) and not (self.cpu or self.intra):
            given = "barrier" if self.barrier else "p2p"
            raise ValueError(
                f"{given} serves only some calls in host memory: give a route for all others too, cpu, or intra and inter"
            )
        return self


class HybridConfig(BackendConfig):
    """The table ``[backends.hybrid]``."""

    routes: Routes = Field(
        default_factory=lambda: Routes(intra="shm", inter="tcp"),
        description=(
            f"The backend for each kind of call, {_EXAMPLES}. By default shm inside hosts and tcp between them, and nccl for arrays on GPUs if "
            "it can run and each rank has a GPU."
        ),
    )

    @property
    def is_default(self) -> bool:
        """Whether no table of routes was given."""
        return "routes" not in self.model_fields_set

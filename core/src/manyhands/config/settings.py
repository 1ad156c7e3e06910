"""The configuration as pydantic models: what can be set, its type and its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

__all__ = ["TABLES", "RendezvousSettings", "Settings"]

TABLES: Final[tuple[str, ...]] = ("algorithms", "backends", "rendezvous")
"""The keys of `Settings` that hold other keys."""

_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):(\d{1,5})")
_MAX_PORT: Final[int] = 65535


def _no_bool(value: Any) -> Any:
    """Refuse true and false, which pydantic would take for 1 and 0 seconds."""
    if isinstance(value, bool):
        raise ValueError("expected a number of seconds")
    return value


Seconds = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]
"""A positive, finite number of seconds."""


def _no_truth(value: Any) -> Any:
    """Refuse true and false, which pydantic would take for the numbers 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a whole number")
    return value


Count = Annotated[int, BeforeValidator(_no_truth), Field(gt=0)]
"""A positive whole number."""


class _Model(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class RendezvousSettings(_Model):
    """``[rendezvous]``: where and how the ranks meet, when no launcher says so."""

    address: str | None = Field(
        default=None, description='Where the ranks meet, as "host:port"; an IPv6 address stands in brackets.'
    )
    timeout_s: Seconds | None = Field(
        default=None, description="Seconds until every rank must be there; by default the timeout_s of all operations."
    )
    secret_file: Path | None = Field(
        default=None,
        description="A file that holds the secret of the job; a relative path is taken from the working directory.",
    )

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        found = _ADDRESS.fullmatch(value)
        if not found or int(found[2]) > _MAX_PORT:
            raise ValueError("expected 'host:port', such as 'node1:29500' or '[::1]:29500', with a port from 0 to 65535")
        return value


class Settings(_Model):
    """Everything that can be configured, except what the chosen backend's plugin adds under ``[backends.NAME]``."""

    backend: str = Field(default="auto", description="The name of an installed backend, or 'auto'.")
    timeout_s: Seconds = Field(default=60.0, description="Seconds that any one operation may last.")
    gpu_fallback: Literal["error", "host"] = Field(
        default="error",
        description="What to do with GPU arrays on a backend without GPU support: refuse, or copy them through host memory, with a warning for each call.",
    )
    gpu_check: Literal["kinds", "always"] = Field(
        default="kinds",
        description="Before which calls on GPUs all ranks compare what they are about to do: the first of each kind, or every one.",
    )
    algorithms: dict[str, str] = Field(
        default_factory=dict, description="The algorithm of each collective, instead of the one that is chosen by size."
    )
    selection: Path | None = Field(
        default=None,
        description="A table file that chooses algorithms before the built-in table does; a relative path is taken from the working directory.",
    )
    reproducible: bool = Field(
        default=False,
        description="Whether reductions give the same bits whatever the algorithm and the size, where a call does not say it itself.",
    )
    check_inputs: bool = Field(
        default=False,
        description="Whether to look if the program writes to an array that a call in the background still reads; always so in a simulated world.",
    )
    native: bool = Field(
        default=True,
        description="Whether to use the compiled executor, where it is installed; results and errors are the same without it.",
    )
    ranks_per_host: Count | None = Field(
        default=None, description="How many neighbouring ranks share a host, instead of what the names of their hosts say."
    )
    plugins: list[str] = Field(
        default_factory=list, description="Plugins or modules to load, and 'no:NAME' for those to leave alone."
    )
    rendezvous: RendezvousSettings = Field(default_factory=RendezvousSettings, description="Where and how the ranks meet.")
    backends: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="One table per backend; its plugin says what it may hold."
    )

    @field_validator("backend", mode="before")
    @classmethod
    def _check_backend(cls, value: Any) -> Any:
        if isinstance(value, dict):
            raise ValueError("expected the name of a backend; what one is told stands in the table [backends.NAME]")
        return value

    @property
    def rendezvous_timeout_s(self) -> float:
        """Seconds until every rank must be there."""
        return self.timeout_s if self.rendezvous.timeout_s is None else self.rendezvous.timeout_s

"""The settings, with their types, defaults and limits, as pydantic models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

__all__ = [
    "TABLES",
    "GpuStagingSettings",
    "LivenessSettings",
    "RecorderSettings",
    "RendezvousSettings",
    "SecuritySettings",
    "Settings",
]

TABLES: Final[tuple[str, ...]] = ("algorithms", "backends", "gpu_staging", "liveness", "recorder", "rendezvous", "security")
"""The keys of `Settings` that hold other keys."""

_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):(\d{1,5})")
_MAX_PORT: Final[int] = 65535
_MOST_HEARTBEATS: Final = 100
"""The most probes that a kernel may wait for: less than 127, which is the most that Linux counts."""


def _seconds(value: Any) -> Any:
    """Refuse true and false, which pydantic would take for 1 and 0 seconds."""
    if isinstance(value, bool):
        raise ValueError("expected a number of seconds")
    return value


def _rate(value: Any) -> Any:
    """Raise an error for true and false, likewise."""
    if isinstance(value, bool):
        raise ValueError("expected a number of bytes")
    return value


def _count(value: Any) -> Any:
    """Refuse true and false, which pydantic would take for the numbers 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a whole number")
    return value


def _address(value: Any) -> Any:
    if isinstance(value, str):
        found = _ADDRESS.fullmatch(value)
        if not found or int(found[2]) > _MAX_PORT:
            raise ValueError("expected 'host:port', such as 'node1:29500' or '[::1]:29500', with a port from 0 to 65535")
    return value


def _backend(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError("expected the name of a backend; its settings belong in the table [backends.NAME]")
    return value


_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_seconds)]
"""A positive, finite number of seconds."""

_BytesPerS = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_rate)]
"""A positive, finite number of bytes in a second."""

_Count = Annotated[int, Field(gt=0), BeforeValidator(_count)]
"""A positive whole number."""


class _Table(BaseModel):
    """The base of all tables: instances are frozen, and unknown keys are errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class RendezvousSettings(_Table):
    """``[rendezvous]``: where and how the ranks meet, if no launcher says so."""

    address: Annotated[str | None, BeforeValidator(_address)] = Field(
        default=None, description='Where the ranks meet, as "host:port"; an IPv6 address stands in brackets.'
    )
    timeout_s: _Seconds | None = Field(
        default=None, description="Seconds until every rank must be there; by default the timeout_s of all operations."
    )
    secret_file: Path | None = Field(
        default=None,
        description="A file that holds the secret of the job; a relative path is taken from the working directory.",
    )


class LivenessSettings(_Table):
    """``[liveness]``: the detection of a silent host."""

    heartbeat_s: _Count = Field(
        default=2,
        le=300,
        description="After how many seconds of silence on a connection, and then how often, the kernel asks whether the other host is there.",
    )
    patience_s: _Count = Field(
        default=10,
        le=600,
        validate_default=True,
        description="After how many seconds without an answer a rank counts as lost; from 2 to 100 heartbeats.",
    )

    @field_validator("patience_s")
    @classmethod
    def _fits_heartbeat(cls, value: int, info: ValidationInfo) -> int:
        heartbeat_s: int | None = info.data.get("heartbeat_s")  # None if it is wrong itself
        if heartbeat_s is not None and not 2 * heartbeat_s <= value <= _MOST_HEARTBEATS * heartbeat_s:
            raise ValueError(f"it should be from 2 to {_MOST_HEARTBEATS} times liveness.heartbeat_s, which is {heartbeat_s}")
        return value


class GpuStagingSettings(_Table):
    """``[gpu_staging]``: the costs of arrays on GPUs that go through the host's memory, which decide their pieces; alike on all ranks."""

    latency_s: _Seconds = Field(
        default=100e-6,
        description="Seconds that a collective takes without the time for its bytes: one of a single element, for example.",
    )
    move_bytes_per_s: _BytesPerS = Field(
        default=2e9, description="The bytes of an array that a collective sends and reduces in a second."
    )
    copy_bytes_per_s: _BytesPerS = Field(
        default=12e9, description="The bytes that are copied between a GPU and pinned memory in a second, in one direction."
    )


class RecorderSettings(_Table):
    """``[recorder]``: the records that the flight recorder keeps, and the folder of its files."""

    directory: str | None = Field(
        default=None,
        description="Where each rank writes its last calls when the job fails, at SIGUSR1, and at its end; for `oneaccord explain`. A relative path is taken from the working directory.",
    )
    calls: _Count = Field(
        default=32,
        description="How many of the last short calls are kept of each group and of the messages in each direction; of those that had to wait, four times as many in all.",
    )


class SecuritySettings(_Table):
    """``[security]``: protection against an attacker on the path between two hosts."""

    checksum: bool = Field(
        default=False,
        description="Whether every message of data has a keyed checksum, so that nobody on the path can change it unnoticed; tcp supports it, and backends that do not are refused.",
    )
    tls: Path | None = Field(
        default=None,
        description="A folder with ca.crt, tls.crt and tls.key, as `oneaccord certs` makes it: connections between ranks are encrypted (TLS 1.3), and ranks without a certificate of that authority refused; so are backends that cannot. A relative path is taken from the working directory.",
    )
    tls_names: Literal["host", "any"] = Field(
        default="host",
        description="Which names a certificate must have: those of the host that is dialled and, later, those with which the rank has come; or any.",
    )


class Settings(_Table):
    """Everything that can be configured, except the settings that the chosen backend's plugin adds under ``[backends.NAME]``."""

    backend: Annotated[str, BeforeValidator(_backend)] = Field(
        default="auto", description="The name of an installed backend, or 'auto'."
    )
    timeout_s: _Seconds = Field(default=60.0, description="Seconds that any one operation may last.")
    gpu_fallback: Literal["error", "host"] = Field(
        default="error",
        description="What to do with GPU arrays on a backend without GPU support: refuse, or copy them through host memory, with a warning for each kind of call.",
    )
    gpu_check: Literal["kinds", "always"] = Field(
        default="kinds",
        description="Before which calls on GPUs all ranks compare what they are about to do: the first of each kind, or every one.",
    )
    gpu_staging: GpuStagingSettings = Field(
        default_factory=GpuStagingSettings,
        description="The costs of the pieces in which arrays on GPUs go through the host's memory.",
    )
    algorithms: dict[str, str] = Field(
        default_factory=dict,
        description="The algorithm of each collective, instead of the one that is chosen by size.",
    )
    selection: Path | None = Field(
        default=None,
        description="A table file that chooses algorithms before the built-in table does; a relative path is taken from the working directory.",
    )
    reproducible: bool = Field(
        default=False,
        description="Whether reductions give the same bits for every algorithm and size, if a call does not choose it itself.",
    )
    check_inputs: bool = Field(
        default=False,
        description="Whether to check that the program does not write to an array that a call in the background still reads; a simulated world always does.",
    )
    native: bool = Field(
        default=True,
        description="Whether to use the compiled executor if it is installed; results and errors are the same without it.",
    )
    ranks_per_host: _Count | None = Field(
        default=None,
        description="The number of neighbouring ranks that share a host, instead of the number by the names of their hosts.",
    )
    plugins: list[str] = Field(
        default_factory=list, description="Plugins or modules to load, and 'no:NAME' for those not to load."
    )
    rendezvous: RendezvousSettings = Field(default_factory=RendezvousSettings, description="Where and how the ranks meet.")
    liveness: LivenessSettings = Field(default_factory=LivenessSettings, description="How a silent host is detected.")
    recorder: RecorderSettings = Field(
        default_factory=RecorderSettings, description="What the flight recorder keeps, and where it writes."
    )
    security: SecuritySettings = Field(default_factory=SecuritySettings, description="The protection of messages on their way.")
    backends: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="One table per backend; its plugin defines the keys."
    )

    @property
    def rendezvous_timeout_s(self) -> float:
        """Seconds until every rank must be there."""
        return self.timeout_s if self.rendezvous.timeout_s is None else self.rendezvous.timeout_s

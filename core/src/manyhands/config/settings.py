"""What can be set, its type, its default and its limits; `manyhands.config.models` makes pydantic models of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

__all__ = ["TABLES", "LivenessSettings", "RecorderSettings", "RendezvousSettings", "SecuritySettings", "Settings"]

TABLES: Final[tuple[str, ...]] = ("algorithms", "backends", "liveness", "recorder", "rendezvous", "security")
"""The keys of `Settings` that hold other keys."""

_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):(\d{1,5})")
_MAX_PORT: Final[int] = 65535


def _seconds(value: Any) -> Any:
    """Refuse true and false, which pydantic would take for 1 and 0 seconds."""
    if isinstance(value, bool):
        raise ValueError("expected a number of seconds")
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
        raise ValueError("expected the name of a backend; what one is told stands in the table [backends.NAME]")
    return value


_SECONDS: Final = {"check": _seconds, "gt": 0, "allow_inf_nan": False}
"""A positive, finite number of seconds."""

_MOST_HEARTBEATS: Final = 100
"""How many a kernel may be told to wait for: less than 127, which is the most that Linux counts."""

_COUNT: Final = {"check": _count, "gt": 0}
"""A positive whole number."""


@dataclass(frozen=True)
class RendezvousSettings:
    """``[rendezvous]``: where and how the ranks meet, when no launcher says so."""

    address: str | None = field(
        default=None,
        metadata={
            "check": _address,
            "description": 'Where the ranks meet, as "host:port"; an IPv6 address stands in brackets.',
        },
    )
    timeout_s: float | None = field(
        default=None,
        metadata={
            **_SECONDS,
            "description": "Seconds until every rank must be there; by default the timeout_s of all operations.",
        },
    )
    secret_file: Path | None = field(
        default=None,
        metadata={
            "description": "A file that holds the secret of the job; a relative path is taken from the working directory."
        },
    )


@dataclass(frozen=True)
class LivenessSettings:
    """``[liveness]``: how a host that says nothing any more is noticed."""

    heartbeat_s: int = field(
        default=2,
        metadata={
            **_COUNT,
            "le": 300,
            "description": "After how many seconds of silence on a connection, and then how often, the kernel asks whether the other host is there.",
        },
    )
    patience_s: int = field(
        default=10,
        metadata={
            **_COUNT,
            "le": 600,
            "description": "After how many seconds without an answer a rank counts as lost; from 2 to 100 heartbeats.",
        },
    )

    def problem(self) -> str:
        """Return what is wrong with the two of them together; nothing where they fit."""
        if 2 * self.heartbeat_s <= self.patience_s <= _MOST_HEARTBEATS * self.heartbeat_s:
            return ""
        return f"it should be from 2 to {_MOST_HEARTBEATS} times liveness.heartbeat_s, which is {self.heartbeat_s}"


@dataclass(frozen=True)
class RecorderSettings:
    """``[recorder]``: what the flight recorder keeps, and where it writes it."""

    directory: str | None = field(
        default=None,
        metadata={
            "description": "Where each rank writes its last calls when the job fails, at SIGUSR1, and at its end; for `manyhands explain`. A relative path is taken from the working directory."
        },
    )
    calls: int = field(
        default=32,
        metadata={
            **_COUNT,
            "description": "How many of the last short calls are kept of each group and of the messages in each direction; of those that had to wait, four times as many in all.",
        },
    )


@dataclass(frozen=True)
class SecuritySettings:
    """``[security]``: what is done against whoever sits on the path between two hosts."""

    checksum: bool = field(
        default=False,
        metadata={
            "description": "Whether every message of data bears a keyed checksum, so that nobody on the path can change it unnoticed; tcp has it, and backends that have not are refused."
        },
    )
    tls: Path | None = field(
        default=None,
        metadata={
            "description": "A folder with ca.crt, tls.crt and tls.key, as `manyhands certs` makes it: connections between ranks are encrypted (TLS 1.3), and ranks without a certificate of that authority refused; so are backends that cannot. A relative path is taken from the working directory."
        },
    )
    tls_names: Literal["host", "any"] = field(
        default="host",
        metadata={
            "description": "Which names a certificate must have: those of the host that is dialled and, later, those with which the rank has come; or any."
        },
    )


@dataclass(frozen=True)
class Settings:
    """Everything that can be configured, except what the chosen backend's plugin adds under ``[backends.NAME]``."""

    backend: str = field(
        default="auto", metadata={"check": _backend, "description": "The name of an installed backend, or 'auto'."}
    )
    timeout_s: float = field(default=60.0, metadata={**_SECONDS, "description": "Seconds that any one operation may last."})
    gpu_fallback: Literal["error", "host"] = field(
        default="error",
        metadata={
            "description": "What to do with GPU arrays on a backend without GPU support: refuse, or copy them through host memory, with a warning for each call."
        },
    )
    gpu_check: Literal["kinds", "always"] = field(
        default="kinds",
        metadata={
            "description": "Before which calls on GPUs all ranks compare what they are about to do: the first of each kind, or every one."
        },
    )
    algorithms: dict[str, str] = field(
        default_factory=dict,
        metadata={"description": "The algorithm of each collective, instead of the one that is chosen by size."},
    )
    selection: Path | None = field(
        default=None,
        metadata={
            "description": "A table file that chooses algorithms before the built-in table does; a relative path is taken from the working directory."
        },
    )
    reproducible: bool = field(
        default=False,
        metadata={
            "description": "Whether reductions give the same bits whatever the algorithm and the size, where a call does not say it itself."
        },
    )
    check_inputs: bool = field(
        default=False,
        metadata={
            "description": "Whether to look if the program writes to an array that a call in the background still reads; always so in a simulated world."
        },
    )
    native: bool = field(
        default=True,
        metadata={
            "description": "Whether to use the compiled executor, where it is installed; results and errors are the same without it."
        },
    )
    ranks_per_host: int | None = field(
        default=None,
        metadata={
            **_COUNT,
            "description": "How many neighbouring ranks share a host, instead of what the names of their hosts say.",
        },
    )
    plugins: list[str] = field(
        default_factory=list, metadata={"description": "Plugins or modules to load, and 'no:NAME' for those to leave alone."}
    )
    rendezvous: RendezvousSettings = field(
        default_factory=RendezvousSettings, metadata={"description": "Where and how the ranks meet."}
    )
    liveness: LivenessSettings = field(
        default_factory=LivenessSettings, metadata={"description": "How a host that says nothing any more is noticed."}
    )
    recorder: RecorderSettings = field(
        default_factory=RecorderSettings, metadata={"description": "What the flight recorder keeps, and where it writes it."}
    )
    security: SecuritySettings = field(
        default_factory=SecuritySettings, metadata={"description": "What protects messages on their way."}
    )
    backends: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata={"description": "One table per backend; its plugin says what it may hold."}
    )

    @property
    def rendezvous_timeout_s(self) -> float:
        """Seconds until every rank must be there."""
        return self.timeout_s if self.rendezvous.timeout_s is None else self.rendezvous.timeout_s

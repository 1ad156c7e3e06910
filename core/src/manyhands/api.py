"""All that a plugin may import.

A backend, an algorithm or an observer that imports this module alone keeps working for as long as `API_VERSION` stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manyhands.backend import (
    API_VERSION,
    HEADER_BYTES,
    Backend,
    BackendConfig,
    BackendSpec,
    Bootstrap,
    CollectiveRequest,
    HeaderMismatch,
    LaunchRequest,
    LinkLost,
    Mailbox,
    NativeCollective,
    Sink,
    Transfer,
    Transport,
)
from manyhands.deadline import Deadline
from manyhands.errors import (
    AbortedError,
    BackendUnavailableError,
    CommError,
    ConfigError,
    InternalError,
    ManyHandsError,
    RendezvousError,
    UnsupportedError,
    UsageError,
)
from manyhands.hookspecs import hookimpl

if TYPE_CHECKING:
    from manyhands.algorithms.registry import Algorithm
    from manyhands.group import Group
    from manyhands.joining import init
    from manyhands.mesh import DeviceMesh
    from manyhands.observe import OperationEvent
    from manyhands.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send
    from manyhands.threads import ThreadWorld, current_rank
    from manyhands.work import Work

__all__ = [
    "API_VERSION",
    "HEADER_BYTES",
    "AbortedError",
    "Algorithm",
    "Backend",
    "BackendConfig",
    "BackendSpec",
    "BackendUnavailableError",
    "Bootstrap",
    "Buffer",
    "Collective",
    "CollectiveRequest",
    "CommError",
    "ConfigError",
    "Copy",
    "Deadline",
    "DeviceMesh",
    "Group",
    "HeaderMismatch",
    "InternalError",
    "LaunchRequest",
    "LinkLost",
    "Mailbox",
    "ManyHandsError",
    "NativeCollective",
    "OperationEvent",
    "Recv",
    "RecvReduce",
    "Reduce",
    "Ref",
    "RendezvousError",
    "Schedule",
    "Send",
    "Sink",
    "ThreadWorld",
    "Transfer",
    "Transport",
    "UnsupportedError",
    "UsageError",
    "Work",
    "current_rank",
    "hookimpl",
    "init",
]

# What describes a plugin needs none of these: a command that only asks which backends there are must not wait for NumPy.
_HOMES = {
    "Algorithm": "manyhands.algorithms.registry",
    "DeviceMesh": "manyhands.mesh",
    "Group": "manyhands.group",
    "OperationEvent": "manyhands.observe",
    "ThreadWorld": "manyhands.threads",
    "Work": "manyhands.work",
    "current_rank": "manyhands.threads",
    "init": "manyhands.joining",
    **dict.fromkeys(
        ("Buffer", "Collective", "Copy", "Recv", "RecvReduce", "Reduce", "Ref", "Schedule", "Send"), "manyhands.schedule.steps"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'manyhands.api' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

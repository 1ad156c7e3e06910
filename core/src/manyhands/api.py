"""All that a plugin may import.

A backend, an algorithm or an observer that imports this module alone keeps working for as long as `API_VERSION` stays.
"""

from __future__ import annotations

from manyhands.algorithms.registry import Algorithm
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
from manyhands.group import Group
from manyhands.hookspecs import hookimpl
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

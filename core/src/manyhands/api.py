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
    Damaged,
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
    ClosedError,
    CommError,
    ConfigError,
    DeadlockError,
    InternalError,
    ManyHandsError,
    OutOfMemoryError,
    RendezvousError,
    UnsupportedError,
    UsageError,
)
from manyhands.hookspecs import hookimpl
from manyhands.installing import install_command

if TYPE_CHECKING:
    from manyhands.algorithms.registry import Algorithm
    from manyhands.cards import read_cards, write_card
    from manyhands.device import DeviceCall, DeviceChannel, DeviceEvent, DeviceFailure, DeviceMeeting, Launch
    from manyhands.group import Group
    from manyhands.guard import Guard, guarded
    from manyhands.joining import init
    from manyhands.mesh import DeviceMesh
    from manyhands.observe import OperationEvent
    from manyhands.rendezvous.bystanders import current_frames
    from manyhands.rendezvous.recorder import FlightRecorder, Record
    from manyhands.runtime import Condition, Place, Runtime
    from manyhands.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send
    from manyhands.simulation.jitter import Jitter, JitterSource
    from manyhands.simulation.network import Level as NetworkLevel
    from manyhands.simulation.network import Network
    from manyhands.simulation.paths import Path, Paths
    from manyhands.simulation.presets import PRESETS as NETWORKS
    from manyhands.threads import ThreadWorld, current_rank
    from manyhands.work import Work

__all__ = [
    "API_VERSION",
    "HEADER_BYTES",
    "NETWORKS",
    "AbortedError",
    "Algorithm",
    "Backend",
    "BackendConfig",
    "BackendSpec",
    "BackendUnavailableError",
    "Bootstrap",
    "Buffer",
    "ClosedError",
    "Collective",
    "CollectiveRequest",
    "CommError",
    "Condition",
    "ConfigError",
    "Copy",
    "Damaged",
    "Deadline",
    "DeadlockError",
    "DeviceCall",
    "DeviceChannel",
    "DeviceEvent",
    "DeviceFailure",
    "DeviceMeeting",
    "DeviceMesh",
    "FlightRecorder",
    "Group",
    "Guard",
    "HeaderMismatch",
    "InternalError",
    "Jitter",
    "JitterSource",
    "Launch",
    "LaunchRequest",
    "LinkLost",
    "Mailbox",
    "ManyHandsError",
    "NativeCollective",
    "Network",
    "NetworkLevel",
    "OperationEvent",
    "OutOfMemoryError",
    "Path",
    "Paths",
    "Place",
    "Record",
    "Recv",
    "RecvReduce",
    "Reduce",
    "Ref",
    "RendezvousError",
    "Runtime",
    "Schedule",
    "Send",
    "Sink",
    "ThreadWorld",
    "Transfer",
    "Transport",
    "UnsupportedError",
    "UsageError",
    "Work",
    "current_frames",
    "current_rank",
    "guarded",
    "hookimpl",
    "init",
    "install_command",
    "read_cards",
    "write_card",
]

# What describes a plugin needs none of these: a command that only asks which backends there are must not wait for NumPy. After a
# colon stands the name at home, where it is another one.
_HOMES = {
    "Algorithm": "manyhands.algorithms.registry",
    **dict.fromkeys(
        ("DeviceCall", "DeviceChannel", "DeviceEvent", "DeviceFailure", "DeviceMeeting", "Launch"), "manyhands.device"
    ),
    "DeviceMesh": "manyhands.mesh",
    "Group": "manyhands.group",
    "Jitter": "manyhands.simulation.jitter",
    "JitterSource": "manyhands.simulation.jitter",
    "NETWORKS": "manyhands.simulation.presets:PRESETS",
    "Network": "manyhands.simulation.network",
    "NetworkLevel": "manyhands.simulation.network:Level",
    "OperationEvent": "manyhands.observe",
    **dict.fromkeys(("FlightRecorder", "Record"), "manyhands.rendezvous.recorder"),
    **dict.fromkeys(("Condition", "Place", "Runtime"), "manyhands.runtime"),
    "Path": "manyhands.simulation.paths",
    "Paths": "manyhands.simulation.paths",
    "ThreadWorld": "manyhands.threads",
    "Work": "manyhands.work",
    "current_frames": "manyhands.rendezvous.bystanders",
    "current_rank": "manyhands.threads",
    **dict.fromkeys(("Guard", "guarded"), "manyhands.guard"),
    "init": "manyhands.joining",
    **dict.fromkeys(("read_cards", "write_card"), "manyhands.cards"),
    **dict.fromkeys(
        ("Buffer", "Collective", "Copy", "Recv", "RecvReduce", "Reduce", "Ref", "Schedule", "Send"), "manyhands.schedule.steps"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'manyhands.api' has no attribute {name!r}")
    from importlib import import_module

    module, _, name_there = _HOMES[name].partition(":")
    value = getattr(import_module(module), name_there or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

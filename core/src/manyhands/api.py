"""All that a plugin may import: the one stable surface of manyhands.

A backend, an algorithm or an observer that imports only this module works with every manyhands-core of its `API_VERSION`, and of the
next one. A name is deprecated in one version, and removed in the next.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from manyhands.common.installing import install_command
from manyhands.common.lines import line_of, program_frame
from manyhands.common.processors import processors
from manyhands.common.ranks import show_ranks
from manyhands.common.threads import Thread, Timer
from manyhands.common.variables import OF_ONE_RANK, Variable, has_whole_tracebacks, of_setting
from manyhands.contract.backend import (
    API_VERSION,
    HEADER_BYTES,
    Backend,
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
from manyhands.contract.deadline import Deadline
from manyhands.contract.hookspecs import hookimpl
from manyhands.contract.seal import Seal
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

if TYPE_CHECKING:
    from manyhands.calls.work import Work
    from manyhands.common.tracebacks import shorten as shorten_traceback
    from manyhands.config.plugins import describe_backend
    from manyhands.contract.cards import read_cards, write_card
    from manyhands.contract.config import BackendConfig
    from manyhands.contract.device import DeviceCall, DeviceChannel, DeviceEvent, DeviceFailure, DeviceMeeting, Launch
    from manyhands.contract.observe import OperationEvent
    from manyhands.contract.runtime import Condition, Place, Runtime
    from manyhands.control.recorder import FlightRecorder, Record
    from manyhands.group.group import Group
    from manyhands.group.init import init
    from manyhands.group.keyvalue import KeyValueStore
    from manyhands.group.mesh import DeviceMesh
    from manyhands.group.sealing import Sealer
    from manyhands.job.threads import ThreadWorld, current_rank, current_runtime, current_world, inherit_rank
    from manyhands.kit.blocking import BlockingCalls
    from manyhands.kit.collectives import REDUCING, agree_on_call, copy_own, divide_sum
    from manyhands.kit.libraries import CLibrary, find_library, load_library, loaded_libraries, loader_folders, python_folders
    from manyhands.kit.messages import LibraryMessage, LibraryTransport, PolledTransport, ThreadedTransport
    from manyhands.kit.usage import LibraryUse, compare_settings, require_processes
    from manyhands.kit.waiting import StallCallback, wait_until
    from manyhands.local.guard import Guard, guarded
    from manyhands.local.output import Screen, screens
    from manyhands.local.output import Stream as OutputStream
    from manyhands.runtime.idle import current_frames
    from manyhands.schedule.algorithms.registry import Algorithm
    from manyhands.schedule.simulation.jitter import Jitter, JitterSource
    from manyhands.schedule.simulation.network import PRESETS as NETWORKS
    from manyhands.schedule.simulation.network import Level as NetworkLevel
    from manyhands.schedule.simulation.network import Network
    from manyhands.schedule.simulation.paths import Path, Paths
    from manyhands.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send
    from manyhands.timeline.events import OPERATIONS, CallEvent, MarkEvent, MessageEvent, Recording, many
    from manyhands.timeline.perfetto import to_perfetto

__all__ = [
    "API_VERSION",
    "HEADER_BYTES",
    "NETWORKS",
    "OF_ONE_RANK",
    "OPERATIONS",
    "REDUCING",
    "AbortedError",
    "Algorithm",
    "Backend",
    "BackendConfig",
    "BackendSpec",
    "BackendUnavailableError",
    "BlockingCalls",
    "Bootstrap",
    "Buffer",
    "CLibrary",
    "CallEvent",
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
    "KeyValueStore",
    "Launch",
    "LaunchRequest",
    "LibraryMessage",
    "LibraryTransport",
    "LibraryUse",
    "LinkLost",
    "Mailbox",
    "ManyHandsError",
    "MarkEvent",
    "MessageEvent",
    "NativeCollective",
    "Network",
    "NetworkLevel",
    "OperationEvent",
    "OutOfMemoryError",
    "OutputStream",
    "Path",
    "Paths",
    "Place",
    "PolledTransport",
    "Record",
    "Recording",
    "Recv",
    "RecvReduce",
    "Reduce",
    "Ref",
    "RendezvousError",
    "Runtime",
    "Schedule",
    "Screen",
    "Seal",
    "Sealer",
    "Send",
    "Sink",
    "StallCallback",
    "Thread",
    "ThreadWorld",
    "ThreadedTransport",
    "Timer",
    "Transfer",
    "Transport",
    "UnsupportedError",
    "UsageError",
    "Variable",
    "Work",
    "agree_on_call",
    "compare_settings",
    "copy_own",
    "current_frames",
    "current_rank",
    "current_runtime",
    "current_world",
    "describe_backend",
    "divide_sum",
    "find_library",
    "guarded",
    "has_whole_tracebacks",
    "hookimpl",
    "inherit_rank",
    "init",
    "install_command",
    "line_of",
    "load_library",
    "loaded_libraries",
    "loader_folders",
    "many",
    "of_setting",
    "processors",
    "program_frame",
    "python_folders",
    "read_cards",
    "require_processes",
    "screens",
    "shorten_traceback",
    "show_ranks",
    "to_perfetto",
    "wait_until",
    "write_card",
]

# The description of a plugin needs none of these but `BackendConfig`: a command that only lists the backends must not wait for
# NumPy. The original name follows a colon if it is a different one.
_HOMES = {
    "BackendConfig": "manyhands.contract.config",
    "Algorithm": "manyhands.schedule.algorithms.registry",
    **dict.fromkeys(
        ("DeviceCall", "DeviceChannel", "DeviceEvent", "DeviceFailure", "DeviceMeeting", "Launch"), "manyhands.contract.device"
    ),
    "DeviceMesh": "manyhands.group.mesh",
    "Group": "manyhands.group.group",
    "Jitter": "manyhands.schedule.simulation.jitter",
    "JitterSource": "manyhands.schedule.simulation.jitter",
    "KeyValueStore": "manyhands.group.keyvalue",
    "NETWORKS": "manyhands.schedule.simulation.network:PRESETS",
    "Network": "manyhands.schedule.simulation.network",
    "NetworkLevel": "manyhands.schedule.simulation.network:Level",
    "OperationEvent": "manyhands.contract.observe",
    **dict.fromkeys(("FlightRecorder", "Record"), "manyhands.control.recorder"),
    **dict.fromkeys(("Condition", "Place", "Runtime"), "manyhands.contract.runtime"),
    "Path": "manyhands.schedule.simulation.paths",
    "Paths": "manyhands.schedule.simulation.paths",
    "Sealer": "manyhands.group.sealing",
    "ThreadWorld": "manyhands.job.threads",
    "Work": "manyhands.calls.work",
    "current_frames": "manyhands.runtime.idle",
    **dict.fromkeys(("current_rank", "current_runtime", "current_world", "inherit_rank"), "manyhands.job.threads"),
    "describe_backend": "manyhands.config.plugins",
    **dict.fromkeys(("BlockingCalls",), "manyhands.kit.blocking"),
    **dict.fromkeys(
        (
            "REDUCING",
            "agree_on_call",
            "copy_own",
            "divide_sum",
        ),
        "manyhands.kit.collectives",
    ),
    **dict.fromkeys(
        (
            "CLibrary",
            "find_library",
            "load_library",
            "loaded_libraries",
            "loader_folders",
            "python_folders",
        ),
        "manyhands.kit.libraries",
    ),
    **dict.fromkeys(
        (
            "LibraryMessage",
            "LibraryTransport",
            "PolledTransport",
            "ThreadedTransport",
        ),
        "manyhands.kit.messages",
    ),
    **dict.fromkeys(
        (
            "LibraryUse",
            "compare_settings",
            "require_processes",
        ),
        "manyhands.kit.usage",
    ),
    **dict.fromkeys(
        (
            "StallCallback",
            "wait_until",
        ),
        "manyhands.kit.waiting",
    ),
    **dict.fromkeys(("Guard", "guarded"), "manyhands.local.guard"),
    "OutputStream": "manyhands.local.output:Stream",
    **dict.fromkeys(("Screen", "screens"), "manyhands.local.output"),
    "shorten_traceback": "manyhands.common.tracebacks:shorten",
    "init": "manyhands.group.init",
    **dict.fromkeys(("OPERATIONS", "CallEvent", "MarkEvent", "MessageEvent", "Recording", "many"), "manyhands.timeline.events"),
    "to_perfetto": "manyhands.timeline.perfetto",
    **dict.fromkeys(("read_cards", "write_card"), "manyhands.contract.cards"),
    **dict.fromkeys(
        ("Buffer", "Collective", "Copy", "Recv", "RecvReduce", "Reduce", "Ref", "Schedule", "Send"), "manyhands.schedule.steps"
    ),
}


_DEPRECATED: dict[str, tuple[str, int]] = {}
"""The names that are to go: for each the one that replaces it, and the `API_VERSION` that deprecated it. They are gone in the next."""


def __getattr__(name: str) -> Any:
    if name in _DEPRECATED:
        import warnings

        replacement, version = _DEPRECATED[name]
        warnings.warn(
            f"manyhands.api.{name} is deprecated in version {version} of the plugin contract and gone in version {version + 1}: use "
            f"manyhands.api.{replacement}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(sys.modules[__name__], replacement)
    if name not in _HOMES:
        raise AttributeError(f"module 'manyhands.api' has no attribute {name!r}")
    from importlib import import_module

    module, _, name_there = _HOMES[name].partition(":")
    value = getattr(import_module(module), name_there or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

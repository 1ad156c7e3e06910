"""All that a plugin may import: the one stable surface of oneaccord.

A backend, an algorithm or an observer that imports only this module works with every oneaccord-core of its `API_VERSION`, and of the
next one. A name is deprecated in one version, and removed in the next.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from oneaccord.common.installing import install_command
from oneaccord.common.lines import line_of, program_frame
from oneaccord.common.processors import processors
from oneaccord.common.ranks import show_ranks
from oneaccord.common.threads import Thread, Timer
from oneaccord.common.variables import OF_ONE_RANK, Variable, has_whole_tracebacks, of_setting
from oneaccord.contract.backend import (
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
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.hookspecs import hookimpl
from oneaccord.contract.seal import Seal
from oneaccord.contract.workers import Worker, WorkerLauncher, WorkerLost
from oneaccord.errors import (
    AbortedError,
    BackendUnavailableError,
    ClosedError,
    CommError,
    ConfigError,
    DeadlineError,
    DeadlockError,
    InternalError,
    OneAccordError,
    OutOfMemoryError,
    RendezvousError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from oneaccord.calls.work import Work
    from oneaccord.common.tracebacks import shorten as shorten_traceback
    from oneaccord.config.plugins import describe_backend
    from oneaccord.contract.cards import read_cards, write_card
    from oneaccord.contract.config import BackendConfig
    from oneaccord.contract.device import DeviceCall, DeviceChannel, DeviceEvent, DeviceFailure, DeviceMeeting, Launch
    from oneaccord.contract.header import POST_CHANNEL
    from oneaccord.contract.launcher import Ask, Host, HostLauncher, JobLauncher, LauncherSpec, WholeJob
    from oneaccord.contract.observe import OperationEvent
    from oneaccord.contract.runtime import Condition, Place, Runtime
    from oneaccord.control.recorder import FlightRecorder, Record
    from oneaccord.engines.launching import launch
    from oneaccord.engines.registry import describe_launcher, make_host_launcher
    from oneaccord.engines.worker_main import Task
    from oneaccord.group.group import Group
    from oneaccord.group.init import init
    from oneaccord.group.keyvalue import KeyValueStore
    from oneaccord.group.mesh import DeviceMesh
    from oneaccord.group.sealing import Sealer
    from oneaccord.job.threads import ThreadWorld, current_rank, current_runtime, current_world, inherit_rank
    from oneaccord.kit.blocking import BlockingCalls
    from oneaccord.kit.collectives import REDUCING, agree_on_call, copy_own, divide_sum
    from oneaccord.kit.libraries import CLibrary, find_library, load_library, loaded_libraries, loader_folders, python_folders
    from oneaccord.kit.messages import LibraryMessage, LibraryTransport, PolledTransport, ThreadedTransport
    from oneaccord.kit.usage import LibraryUse, compare_settings, require_processes
    from oneaccord.kit.waiting import StallCallback, wait_until
    from oneaccord.launchers.seat import Seat
    from oneaccord.local.guard import Guard, guarded
    from oneaccord.local.output import Screen, screens
    from oneaccord.local.output import Stream as OutputStream
    from oneaccord.runtime.host_memory import CannotOpenError, boot_id, map_shared, memory_fence, open_in_process
    from oneaccord.runtime.idle import current_frames
    from oneaccord.schedule.algorithms.registry import Algorithm
    from oneaccord.schedule.simulation.jitter import Jitter, JitterSource
    from oneaccord.schedule.simulation.network import PRESETS as NETWORKS
    from oneaccord.schedule.simulation.network import Level as NetworkLevel
    from oneaccord.schedule.simulation.network import Network
    from oneaccord.schedule.simulation.paths import Path, Paths
    from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send
    from oneaccord.timeline.events import OPERATIONS, CallEvent, MarkEvent, MessageEvent, Recording, many
    from oneaccord.timeline.perfetto import to_perfetto

__all__ = [
    "API_VERSION",
    "HEADER_BYTES",
    "NETWORKS",
    "OF_ONE_RANK",
    "OPERATIONS",
    "POST_CHANNEL",
    "REDUCING",
    "AbortedError",
    "Algorithm",
    "Ask",
    "Backend",
    "BackendConfig",
    "BackendSpec",
    "BackendUnavailableError",
    "BlockingCalls",
    "Bootstrap",
    "Buffer",
    "CLibrary",
    "CallEvent",
    "CannotOpenError",
    "ClosedError",
    "Collective",
    "CollectiveRequest",
    "CommError",
    "Condition",
    "ConfigError",
    "Copy",
    "Damaged",
    "Deadline",
    "DeadlineError",
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
    "Host",
    "HostLauncher",
    "InternalError",
    "Jitter",
    "JitterSource",
    "JobLauncher",
    "KeyValueStore",
    "Launch",
    "LaunchRequest",
    "LauncherSpec",
    "LibraryMessage",
    "LibraryTransport",
    "LibraryUse",
    "LinkLost",
    "Mailbox",
    "MarkEvent",
    "MessageEvent",
    "NativeCollective",
    "Network",
    "NetworkLevel",
    "OneAccordError",
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
    "Seat",
    "Send",
    "Sink",
    "StallCallback",
    "Task",
    "Thread",
    "ThreadWorld",
    "ThreadedTransport",
    "Timer",
    "Transfer",
    "Transport",
    "UnsupportedError",
    "UsageError",
    "Variable",
    "WholeJob",
    "Work",
    "Worker",
    "WorkerLauncher",
    "WorkerLost",
    "agree_on_call",
    "boot_id",
    "compare_settings",
    "copy_own",
    "current_frames",
    "current_rank",
    "current_runtime",
    "current_world",
    "describe_backend",
    "describe_launcher",
    "divide_sum",
    "find_library",
    "guarded",
    "has_whole_tracebacks",
    "hookimpl",
    "inherit_rank",
    "init",
    "install_command",
    "launch",
    "line_of",
    "load_library",
    "loaded_libraries",
    "loader_folders",
    "make_host_launcher",
    "many",
    "map_shared",
    "memory_fence",
    "of_setting",
    "open_in_process",
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
    "BackendConfig": "oneaccord.contract.config",
    "Algorithm": "oneaccord.schedule.algorithms.registry",
    **dict.fromkeys(
        ("DeviceCall", "DeviceChannel", "DeviceEvent", "DeviceFailure", "DeviceMeeting", "Launch"), "oneaccord.contract.device"
    ),
    "DeviceMesh": "oneaccord.group.mesh",
    "Group": "oneaccord.group.group",
    "Jitter": "oneaccord.schedule.simulation.jitter",
    "JitterSource": "oneaccord.schedule.simulation.jitter",
    "KeyValueStore": "oneaccord.group.keyvalue",
    "NETWORKS": "oneaccord.schedule.simulation.network:PRESETS",
    "Network": "oneaccord.schedule.simulation.network",
    "NetworkLevel": "oneaccord.schedule.simulation.network:Level",
    "OperationEvent": "oneaccord.contract.observe",
    **dict.fromkeys(("Ask", "Host", "HostLauncher", "JobLauncher", "LauncherSpec", "WholeJob"), "oneaccord.contract.launcher"),
    **dict.fromkeys(("FlightRecorder", "Record"), "oneaccord.control.recorder"),
    **dict.fromkeys(("Condition", "Place", "Runtime"), "oneaccord.contract.runtime"),
    "POST_CHANNEL": "oneaccord.contract.header",
    "Path": "oneaccord.schedule.simulation.paths",
    "Paths": "oneaccord.schedule.simulation.paths",
    "Sealer": "oneaccord.group.sealing",
    "Task": "oneaccord.engines.worker_main",
    "launch": "oneaccord.engines.launching",
    **dict.fromkeys(
        ("CannotOpenError", "boot_id", "map_shared", "memory_fence", "open_in_process"), "oneaccord.runtime.host_memory"
    ),
    "ThreadWorld": "oneaccord.job.threads",
    "Work": "oneaccord.calls.work",
    "current_frames": "oneaccord.runtime.idle",
    **dict.fromkeys(("current_rank", "current_runtime", "current_world", "inherit_rank"), "oneaccord.job.threads"),
    "describe_backend": "oneaccord.config.plugins",
    **dict.fromkeys(("describe_launcher", "make_host_launcher"), "oneaccord.engines.registry"),
    **dict.fromkeys(("BlockingCalls",), "oneaccord.kit.blocking"),
    **dict.fromkeys(
        (
            "REDUCING",
            "agree_on_call",
            "copy_own",
            "divide_sum",
        ),
        "oneaccord.kit.collectives",
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
        "oneaccord.kit.libraries",
    ),
    **dict.fromkeys(
        (
            "LibraryMessage",
            "LibraryTransport",
            "PolledTransport",
            "ThreadedTransport",
        ),
        "oneaccord.kit.messages",
    ),
    **dict.fromkeys(
        (
            "LibraryUse",
            "compare_settings",
            "require_processes",
        ),
        "oneaccord.kit.usage",
    ),
    **dict.fromkeys(
        (
            "StallCallback",
            "wait_until",
        ),
        "oneaccord.kit.waiting",
    ),
    "Seat": "oneaccord.launchers.seat",
    **dict.fromkeys(("Guard", "guarded"), "oneaccord.local.guard"),
    "OutputStream": "oneaccord.local.output:Stream",
    **dict.fromkeys(("Screen", "screens"), "oneaccord.local.output"),
    "shorten_traceback": "oneaccord.common.tracebacks:shorten",
    "init": "oneaccord.group.init",
    **dict.fromkeys(("OPERATIONS", "CallEvent", "MarkEvent", "MessageEvent", "Recording", "many"), "oneaccord.timeline.events"),
    "to_perfetto": "oneaccord.timeline.perfetto",
    **dict.fromkeys(("read_cards", "write_card"), "oneaccord.contract.cards"),
    **dict.fromkeys(
        ("Buffer", "Collective", "Copy", "Recv", "RecvReduce", "Reduce", "Ref", "Schedule", "Send"), "oneaccord.schedule.steps"
    ),
}


_DEPRECATED: dict[str, tuple[str, int]] = {}
"""The names that are to go: for each the one that replaces it, and the `API_VERSION` that deprecated it. They are gone in the next."""


def __getattr__(name: str) -> Any:
    if name in _DEPRECATED:
        import warnings

        replacement, version = _DEPRECATED[name]
        warnings.warn(
            f"oneaccord.api.{name} is deprecated in version {version} of the plugin contract and gone in version {version + 1}: use "
            f"oneaccord.api.{replacement}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(sys.modules[__name__], replacement)
    if name not in _HOMES:
        raise AttributeError(f"module 'oneaccord.api' has no attribute {name!r}")
    from importlib import import_module

    module, _, name_there = _HOMES[name].partition(":")
    value = getattr(import_module(module), name_there or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
